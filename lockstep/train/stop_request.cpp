#include "lockstep/train/stop_request.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

#include "lockstep/core/log.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/train/run_control.h"
#include "lockstep/train/stop_signals.h"

namespace lockstep {
namespace {

constexpr int kStoppedCode = 143;  // 128 + SIGTERM, whichever signal it was

train::StopSignalOptions stop_options(const World& world, std::chrono::milliseconds deadline) {
  train::StopSignalOptions options;
  // A single rank has nobody to agree with: the step's end is waited for, however long it takes.
  options.deadline = world.size() == 1 ? std::chrono::hours(24 * 365) : deadline;
  options.give_up = [world = World(world)](const std::string& why) mutable { world.abort(why); };
  return options;
}

}  // namespace

struct StopRequest::Impl {
  using Clock = std::chrono::steady_clock;

  Impl(const World& ranks, std::chrono::milliseconds deadline)
      : world(ranks), agreement(ranks), signals(stop_options(ranks, deadline)) {}

  World world;
  train::Agreement agreement;
  train::StopSignals signals;
  std::optional<Clock::time_point> asked;  // at the last call
  int agreed = 0;
};

StopRequest::StopRequest(World world, std::chrono::milliseconds deadline)
    : impl_(std::make_unique<Impl>(world, deadline)) {}
StopRequest::~StopRequest() = default;

bool StopRequest::received() {
  Impl& i = *impl_;
  if (i.agreed != 0) return true;
  const int mine = i.signals.requested();
  i.agreed = i.agreement.exchange({.stop_signal = mine}).stop_signal;
  const auto now = Impl::Clock::now();
  if (i.asked)
    i.signals.set_step_time(std::chrono::duration_cast<std::chrono::milliseconds>(now - *i.asked));
  i.asked = now;
  if (i.agreed == 0) return false;
  i.signals.agreed();
  const std::string name = signal_name(i.agreed);
  if (i.world.is_leader()) log::warning("stop", "{} asks the run to stop", name);
  if (mine != 0) train::report_stop(fmt::format("stopped by {}", signal_name(mine)));
  return true;
}

int StopRequest::signal() const {
  return impl_->agreed;
}

int StopRequest::exit_code() const {
  return impl_->agreed != 0 ? kStoppedCode : 0;
}

}  // namespace lockstep
