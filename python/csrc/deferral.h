// Keeps a program's own callbacks out of the adaptor's locks.
//
// The engine may complete any operation inside any call, even while it starts another one, and the
// completion callbacks (a future with a Python callback) may call back into the adaptor or wait for
// peers. While a Deferral exists on a thread, such callbacks are deferred; the destructor of the
// outermost one runs them. Declare it before the lock, so that it is destroyed after it.
//
//   Deferral deferral;
//   std::lock_guard lock(mutex_);
//   tickets.push_back(engine.send(...));
//
// A Deferral belongs to the thread that made it. Actions must not throw.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace lockstep::python {

class Deferral {
 public:
  Deferral() { ++depth(); }
  Deferral(const Deferral&) = delete;
  Deferral& operator=(const Deferral&) = delete;
  ~Deferral() {
    if (--depth() > 0) return;
    // An action may defer others while it runs; they come after it.
    for (auto actions = std::exchange(waiting(), {}); !actions.empty();
         actions = std::exchange(waiting(), {})) {
      for (const auto& action : actions) action();
    }
  }

  static void run(std::function<void()> action) {
    if (depth() > 0)
      waiting().push_back(std::move(action));
    else
      action();
  }

 private:
  static int& depth() {
    thread_local int value = 0;
    return value;
  }
  static std::vector<std::function<void()>>& waiting() {
    thread_local std::vector<std::function<void()>> value;
    return value;
  }
};

}  // namespace lockstep::python
