// Converts stop signals, SIGTERM, SIGUSR1 and SIGUSR2, to a value that the training loop reads at
// its own pace.
//
// A signal reaches one rank, and all must act on it at the same step. So the handler only stores
// it; the step's exchange (run_control.h) notifies the others. Since the others have to take part
// in that, the request has a deadline: if the ranks have not agreed by then, `give_up` is called
// (on its own thread) and ends the rank's waiting.
//
//   StopSignals signals({.give_up = [&](const std::string& why) { world.abort(why); }});
//   if (signals.requested() != 0) ...        // the signal's number
//   signals.agreed();                        // all ranks know; the deadline is off
//
// One at a time per process (UsageError); its destructor restores the earlier handlers. A SIGTERM
// that the launcher sends because another rank failed is not a request: requested() asks the
// control descriptor first.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace lockstep::train {

struct StopSignalOptions {
  bool install = true;  // false: signals end the process as usual
  std::chrono::milliseconds deadline{std::chrono::seconds(10)};
  // Until the first step has ended its duration is unknown, and the first is the longest.
  std::chrono::milliseconds first_deadline{std::chrono::minutes(5)};
  std::function<void(const std::string& why)> give_up{};
};

// Writes `text` to this rank's error file (TORCHELASTIC_ERROR_FILE), if any: all ranks end with the
// same code, and the launcher names the one that was signalled. Never throws.
void report_stop(const std::string& text) noexcept;

class StopSignals {
 public:
  explicit StopSignals(StopSignalOptions options = {});
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The number of the first signal that came, or 0.
  int requested() const;
  void agreed();
  // Reports the duration of a step, from one exchange to the next. A deadline shorter than two of
  // the longest steps would be missed.
  void set_step_time(std::chrono::milliseconds step);

 private:
  struct Watch;
  void watch();
  std::unique_ptr<Watch> watch_;
};

}  // namespace lockstep::train
