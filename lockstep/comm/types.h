// The argument and result types of World, shared with its backends, and Work, the handle of a
// started operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace lockstep {

// kAvg of integers is their sum in 64 bits, divided and rounded toward zero: of -3 and 0 it is -1.
// kSum of booleans is kOr, and they have no kAvg; kAnd, kOr and kXor are for integers and booleans.
enum class ReduceOp { kSum, kAvg, kMin, kMax, kProduct, kAnd, kOr, kXor };

namespace detail {
struct WorkState;
const char* name(ReduceOp op);
bool is_bitwise(ReduceOp op);
}  // namespace detail

struct WorldOptions {
  std::string backend = "auto";         // auto, shm, gloo, nccl (LOCKSTEP_BACKEND overrides auto)
  std::optional<c10::Device> device{};  // default: cuda:LOCAL_RANK where there is one, else cpu
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};  // LOCKSTEP_TIMEOUT_S
  std::chrono::milliseconds startup_timeout{
      std::chrono::seconds(300)};  // LOCKSTEP_STARTUP_TIMEOUT_S
  bool share_device = false;       // several local ranks on one GPU (LOCKSTEP_SHARE_DEVICE)
  std::string options_hash{};      // compared over ranks at start-up; e.g. a config's digest
};

// One message of a batch of point-to-point operations.
struct P2p {
  enum class Kind { kSend, kRecv };
  Kind kind;
  at::Tensor tensor;
  int peer;
};

// Identifies a rank. The launcher knows it; threads and tests give it.
struct Identity {
  int rank = 0;
  int size = 1;
  int local_rank = 0;                 // -1: not known, found by counting hosts at start-up
  int local_size = 1;                 // 0: likewise
  int node = 0;                       // -1: likewise
  std::string host = {};              // names the machine in messages; empty: its host name
  std::string address = "127.0.0.1";  // where the others reach this one
  std::string gpu = {};      // names the physical GPU; empty: the driver is asked where one is used
  std::string program = {};  // must be equal on all ranks; empty: this executable's build
  bool part = false;         // part of another world: the launcher numbers its ranks differently
};

// An operation that was started. It has two waits, because on a GPU they are different things:
//
//   work.wait();          stream-ordered: what the caller enqueues next sees the result; the host
//                         continues. On CPU there is no stream, so this blocks until done.
//   work.synchronize();   host-blocking, against the operation's deadline; throws TimeoutError.
//
// Both throw CommError when the world failed, with the cause that the launcher announced, if any.
//
// A copyable handle. Dropping it does not cancel the operation, which holds its tensors until it is
// done. One thread at a time per handle.
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
