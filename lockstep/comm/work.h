// An operation on its way. Two waits with two names, because on a GPU they are different things:
//
//   work.wait();          stream-ordered: what the caller enqueues next sees the result; the host
//                         continues. On CPU there is no stream, so this blocks until done.
//   work.synchronize();   host-blocking, against the operation's deadline; throws TimeoutError.
//
// Both throw CommError when the world failed, naming the cause the launcher announced if there is
// one.
//
// A copyable handle. Dropping it does not cancel the operation, and it holds its tensors until it
// is done. One thread at a time per handle.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

namespace lockstep {

namespace detail {
struct WorkState;
}

class [[nodiscard]] Work {
 public:
  Work();  // already done
  explicit Work(std::shared_ptr<detail::WorkState> state);

  void wait();
  void synchronize(std::optional<std::chrono::milliseconds> timeout = std::nullopt);
  bool done() const;

  // Called once, when the operation has completed (successfully or not), from whichever thread
  // noticed; at once if it already has. Used to time buckets; must not throw or communicate.
  void on_completion(std::function<void()> callback);

 private:
  std::shared_ptr<detail::WorkState> state_;
};

}  // namespace lockstep
