// A backward that runs inside another one (checkpointing) announces itself with this guard.
//
// The engine runs queued callbacks at the end of each backward, nested ones too, so a reducer that
// only asked the engine would believe the pass over when the first checkpointed block is. With the
// guard it learns which task is the outermost and can wait for the end of that one.
#pragma once

#include <functional>
#include <memory>

namespace lockstep::parallel {

class NestedBackward {
 public:
  // Inside the outer backward, on the thread that is about to run the nested one.
  NestedBackward();
  ~NestedBackward();
  NestedBackward(const NestedBackward&) = delete;
  NestedBackward& operator=(const NestedBackward&) = delete;

  static bool active();
  // The outermost backward of this thread, by the engine's task id; -1 outside of any.
  static int outer_task();
  // Runs `callback` when the outermost backward ends. Only while active.
  static void at_outer_end(std::function<void()> callback);
};

}  // namespace lockstep::parallel
