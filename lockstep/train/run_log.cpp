#include "lockstep/train/run_log.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <exception>
#include <limits>
#include <thread>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/train/folder_owner.h"
#include "lockstep/train/metrics_log.h"
#include "lockstep/train/metrics_reporter.h"

namespace lockstep {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLastValues{60};  // for a device that may no longer answer
constexpr std::chrono::milliseconds kLookAgain{1};

// The program as it was started.
std::string command_text() {
  std::string text = read_file("/proc/self/cmdline");
  while (!text.empty() && text.back() == '\0') text.pop_back();
  std::ranges::replace(text, '\0', ' ');
  return text;
}

void check_values(const LogValues& values) {
  for (const auto& [name, value] : values) {
    if (name.empty() || name == "step")
      throw UsageError("log",
                       "a value is called '{}'. Give it a name, and the step as the second "
                       "argument: log({{{{\"loss\", loss}}}}, step).",
                       name);
    if (value.tensor().defined() && value.tensor().numel() != 1)
      throw UsageError("log", "{} has {} elements, and one number is logged. Take its mean().",
                       name, value.tensor().numel());
  }
}

// A line, and those of its values that are on their way from the device.
struct Line {
  train::LogEntry entry{};
  std::vector<std::size_t> places{};  // where those values go in the entry
  at::Tensor host{};
  std::unique_ptr<c10::Event> arrived{};

  bool complete() const { return !arrived || arrived->query(); }
};

// The copy is enqueued behind the device's pending work, and so is the event.
void fetch(Line& line, const std::vector<at::Tensor>& tensors) {
  const c10::Device device = tensors.front().device();
  std::vector<at::Tensor> scalars;
  for (const at::Tensor& tensor : tensors)
    scalars.push_back(tensor.detach().reshape({}).to(device, at::kDouble));
  line.host = at::empty({static_cast<std::int64_t>(scalars.size())},
                        at::TensorOptions().dtype(at::kDouble).pinned_memory(true));
  line.host.copy_(at::stack(scalars), /*non_blocking=*/true);
  line.arrived = std::make_unique<c10::Event>(device.type());
  line.arrived->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

Line line_of(const LogValues& values, std::int64_t step) {
  Line line{.entry = {.step = step, .epoch = NAN}};
  std::vector<at::Tensor> on_device;
  for (const auto& [name, value] : values) {
    const at::Tensor& tensor = value.tensor();
    double number = value.number();
    if (tensor.defined() && tensor.is_cpu()) number = tensor.item<double>();
    if (tensor.defined() && !tensor.is_cpu()) {
      line.places.push_back(line.entry.values.size());
      on_device.push_back(tensor);
    }
    line.entry.values.emplace_back(name, number);
  }
  if (!on_device.empty()) fetch(line, on_device);
  return line;
}

}  // namespace

struct RunLog::Impl {
  World world;
  std::string directory;
  RunLogOptions options;
  std::unique_ptr<train::MetricsLog> file{};  // on rank 0
  train::Recording recording{};
  std::deque<Line> pending{};
  std::int64_t newest = -1;  // step
  bool warned = false;       // of a value that is not finite
  int exceptions = std::uncaught_exceptions();

  void open(std::int64_t resumed_at) {
    file.reset();  // it may still have lines to write
    file = std::make_unique<train::MetricsLog>(
        directory, train::MetricsLogOptions{.tensorboard = options.tensorboard,
                                            .run_name = options.run_name,
                                            .resumed_at = resumed_at});
  }
  void take_directory();
  void write(Line line);
  void write_complete();
  void end();
};

void RunLog::Impl::take_directory() {
  train::LoopDirectory& own = train::LoopDirectory::hold(directory);
  std::int64_t step = options.resumed_at.value_or(0);  // whoever gives it knows the directory
  if (!options.resumed_at) {
    own.make_way(std::numeric_limits<std::int64_t>::max(), options.overwrite_output_dir);
    step = own.first_step();
  }
  if (step <= 0) train::remove_record(directory);
  open(std::max<std::int64_t>(step, 0));
}

void RunLog::Impl::write(Line line) {
  train::LogEntry& entry = line.entry;
  for (std::size_t i = 0; i < line.places.size(); ++i)
    entry.values[line.places[i]].second =
        line.host.const_data_ptr<double>()[static_cast<std::ptrdiff_t>(i)];
  const auto epoch =
      std::ranges::find(entry.values, "epoch", [](const auto& v) { return v.first; });
  if (epoch != entry.values.end()) {
    entry.epoch = epoch->second;
    entry.values.erase(epoch);
  }
  for (const auto& [name, value] : entry.values)
    if (!std::isfinite(value) && !std::exchange(warned, true))
      log::warning("log",
                   "step {}: {} is not finite. A step with such gradients makes all weights NaN, "
                   "with max_grad_norm too: step({{.skip_non_finite = true}}) leaves it out on all "
                   "ranks. To find the rank, print each one's own loss before it is averaged.",
                   entry.step, name);
  if (entry.step < newest) open(entry.step - 1);
  newest = entry.step;
  file->write(entry);
}

void RunLog::Impl::write_complete() {
  for (; !pending.empty() && pending.front().complete(); pending.pop_front())
    write(std::move(pending.front()));
}

// The loop has returned, or thrown.
void RunLog::Impl::end() {
  for (const auto until = SteadyClock::now() + kLastValues; !pending.empty();) {
    write_complete();
    if (pending.empty()) break;
    if (SteadyClock::now() > until) {
      log::warning("log",
                   "the device has not computed the values of the last {} lines within {} s; they "
                   "are not in {}.",
                   pending.size(), kLastValues.count(), file->path());
      break;
    }
    std::this_thread::sleep_for(kLookAgain);
  }
  file.reset();
  recording.recorder.reset();
  if (!options.record || !world.is_leader()) return;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  // A failed run ends with its process, since a launcher may start it again.
  if (std::uncaught_exceptions() > exceptions)
    recording.facts.failure = "an exception ended the loop of rank 0";
  else
    recording.facts.ended_unix_s = std::chrono::duration<double>(now).count();
  monitor::write_facts(directory, recording.facts);
}

RunLog::RunLog(const std::string& directory, World world, const RunLogOptions& options)
    : impl_(std::make_unique<Impl>(Impl{world, directory, options})) {
  agree(world, [&] {
    if (world.is_leader()) impl_->take_directory();
  });
  monitor::RunFacts facts = train::world_facts(world);
  facts.program = command_text();
  facts.total_steps = options.total_steps;
  impl_->recording = train::start_recording(impl_->world, directory, facts, options.record);
}

RunLog::~RunLog() {
  try {
    impl_->end();
  } catch (const std::exception& error) {
    log::warning("log", "the last lines may not be in {}: {}", impl_->directory, error.what());
  }
}

void RunLog::log(const LogValues& values, std::int64_t step) {
  const ledger::PhaseScope logging(ledger::Phase::kLogging);
  check_values(values);
  if (step < 0) throw UsageError("log", "step is {}, and must not be negative.", step);
  ledger::reach_step(step);
  ledger::add(ledger::Counter::kLogs);
  if (!impl_->file) return;
  impl_->pending.push_back(line_of(values, step));
  impl_->write_complete();
}

void RunLog::log(const LogValues& values) {
  const std::int64_t step = ledger::step();
  if (step < 0)
    throw UsageError("log",
                     "no step was counted yet, as in a loop on one rank that calls "
                     "loss.backward(). Give the step: log({{{{\"loss\", loss}}}}, step).");
  log(values, step);
}

}  // namespace lockstep
