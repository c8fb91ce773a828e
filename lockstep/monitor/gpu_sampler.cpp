#include "lockstep/monitor/gpu_sampler.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <type_traits>

#include "lockstep/core/deadline.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/monitor/stoppable_thread.h"

namespace lockstep::monitor {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kMaxXids = 64;

double gib(std::uint64_t bytes) {
  return static_cast<double>(bytes) / (1u << 30);
}

template <typename T>
Node number_node(const std::optional<T>& value) {
  if (!value) return Node{};
  if constexpr (std::is_same_v<T, double>) return real_node(*value);
  return integer_node(static_cast<std::int64_t>(*value));
}

Node reading_node(const GpuReading& reading) {
  NodeMembers members = {
      {"utilisation_percent", number_node(reading.utilisation_percent)},
      {"memory_utilisation_percent", number_node(reading.memory_utilisation_percent)},
      {"memory_used_bytes", number_node(reading.memory_used_bytes)},
      {"memory_total_bytes", number_node(reading.memory_total_bytes)},
      {"power_w", number_node(reading.power_w)},
      {"power_limit_w", number_node(reading.power_limit_w)},
      {"temperature_c", number_node(reading.temperature_c)},
      {"sm_clock_mhz", number_node(reading.sm_clock_mhz)},
      {"memory_clock_mhz", number_node(reading.memory_clock_mhz)},
      {"clock_reasons", texts_node(clock_reason_words(reading.clock_reasons.value_or(0)))},
      {"ecc_corrected", number_node(reading.ecc_corrected)},
      {"ecc_uncorrected", number_node(reading.ecc_uncorrected)},
  };
  std::vector<Node> processes;
  for (const GpuProcess& process : reading.processes)
    processes.push_back(map_node(
        {{"pid", integer_node(process.pid)}, {"memory_bytes", number_node(process.memory_bytes)}}));
  members.emplace_back("processes", list_node(std::move(processes)));
  members.emplace_back("problem", text_node(reading.problem));
  return map_node(std::move(members));
}

}  // namespace

struct GpuSampler::State : StoppableState {
  explicit State(const GpuSamplerOptions& chosen) : options(chosen) {}

  const GpuSamplerOptions options;
  DriverCall call;
  GpuSnapshot known;  // `problem`: why the library does not work at all
  std::deque<GpuSamplePtr> history;

  void add(GpuSamplePtr sample, const std::vector<XidEvent>& xids) {
    const std::lock_guard lock(mutex);
    known.newest = sample;
    ++known.samples;
    history.push_back(std::move(sample));
    while (history.size() > std::max<std::size_t>(options.history, 1)) history.pop_front();
    for (const XidEvent& event : xids) ++known.xid_counts[{event.gpu, event.xid}];
    known.xids.insert(known.xids.end(), xids.begin(), xids.end());
    if (known.xids.size() > kMaxXids)
      known.xids.erase(known.xids.begin(), known.xids.end() - kMaxXids);
    changed.notify_all();
  }

  std::string late_call() const {
    const auto call_now = call.pending();
    if (!call_now || call_now->elapsed < options.call_deadline) return "";
    const std::string gpu = call_now->gpu < 0 ? "" : fmt::format(" of GPU {}", call_now->gpu);
    return fmt::format("no answer from the driver for {:.0f} s ({}{})",
                       static_cast<double>(call_now->elapsed.count()) / 1000, call_now->function,
                       gpu);
  }
};

namespace {

GpuSamplePtr take_sample(Nvml& nvml) {
  auto sample = std::make_shared<GpuSample>();
  sample->unix_time_s = unix_time_s();
  for (int gpu = 0; gpu < nvml.count(); ++gpu) sample->gpus.push_back(nvml.read(gpu));
  return sample;
}

// Once when it begins, not once a second.
void report_changes(const GpuSample* before, const GpuSample& now,
                    const std::vector<XidEvent>& xids) {
  for (std::size_t i = 0; i < now.gpus.size(); ++i) {
    const std::string& problem = now.gpus[i].problem;
    const bool same = before != nullptr && before->gpus[i].problem == problem;
    if (!problem.empty() && !same) log::warning("gpu", "GPU {}: {}.", i, problem);
    if (problem.empty() && before != nullptr && !before->gpus[i].problem.empty())
      log::warning("gpu", "GPU {} answers again.", i);
  }
  for (const XidEvent& event : xids)
    log::warning("gpu",
                 "GPU {}: the driver reports Xid {}. The kernel log (dmesg) has its details, "
                 "NVIDIA's documentation its meaning.",
                 event.gpu, event.xid);
}

}  // namespace

void GpuSampler::work(const std::shared_ptr<State>& state) {
  const GpuSamplerOptions& options = state->options;
  try {
    Nvml nvml(options.library.empty() ? nvml_library() : options.library, state->call);
    std::vector<GpuIdentity> gpus;
    for (int gpu = 0; gpu < nvml.count(); ++gpu) gpus.push_back(nvml.identity(gpu));
    {
      const std::lock_guard lock(state->mutex);
      state->known.gpus = std::move(gpus);
      state->known.driver_version = nvml.driver_version();
    }
    Clock::time_point next = Clock::now();
    GpuSamplePtr before;
    do {
      const GpuSamplePtr sample = take_sample(nvml);
      const std::vector<XidEvent> xids = nvml.xid_events();
      state->add(sample, xids);
      report_changes(before.get(), *sample, xids);
      before = sample;
      // After a call that took long, samples are not made up for.
      next = std::max(next + options.interval, Clock::now());
    } while (state->wait_until(next));
  } catch (const std::exception& error) {
    const std::lock_guard lock(state->mutex);
    state->known.problem = error.what();
  }
}

GpuSampler::GpuSampler(const GpuSamplerOptions& options)
    : state_(std::make_shared<State>(options)) {
  thread_ = start_stoppable(state_, [state = state_](State&) { work(state); });
}

GpuSampler::~GpuSampler() {
  stop_or_leave(*state_, thread_, state_->options.call_deadline);
}

GpuSnapshot GpuSampler::snapshot() const {
  GpuSnapshot copy;
  {
    const std::lock_guard lock(state_->mutex);
    copy = state_->known;
  }
  if (copy.problem.empty()) copy.problem = state_->late_call();
  return copy;
}

std::vector<GpuSamplePtr> GpuSampler::history(std::size_t most) const {
  const std::lock_guard lock(state_->mutex);
  const auto& all = state_->history;
  const std::size_t count = std::min(most, all.size());
  return {all.end() - static_cast<std::ptrdiff_t>(count), all.end()};
}

bool GpuSampler::wait_for_samples(std::uint64_t count, std::chrono::milliseconds limit) const {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, limit,
                                  [&] { return state_->known.samples >= count || state_->ended; });
}

std::string memory_text(const GpuReading& reading) {
  if (!reading.memory_used_bytes || !reading.memory_total_bytes) return "";
  return fmt::format("{:.1f} of {:.1f} GiB", gib(*reading.memory_used_bytes),
                     gib(*reading.memory_total_bytes));
}

std::string reading_text(const GpuReading& reading) {
  if (!reading.problem.empty()) return reading.problem;
  std::vector<std::string> parts;
  if (reading.utilisation_percent)
    parts.push_back(fmt::format("{} %", *reading.utilisation_percent));
  if (const std::string memory = memory_text(reading); !memory.empty()) parts.push_back(memory);
  if (reading.power_w)
    parts.push_back(reading.power_limit_w ? fmt::format("{:.0f} of {:.0f} W", *reading.power_w,
                                                        *reading.power_limit_w)
                                          : fmt::format("{:.0f} W", *reading.power_w));
  if (reading.temperature_c) parts.push_back(fmt::format("{} C", *reading.temperature_c));
  if (reading.sm_clock_mhz) parts.push_back(fmt::format("{} MHz", *reading.sm_clock_mhz));
  if (reading.clock_reasons && is_throttled(*reading.clock_reasons))
    parts.push_back(
        fmt::format("throttled ({})", fmt::join(clock_reason_words(*reading.clock_reasons), ", ")));
  return parts.empty() ? "no values" : fmt::format("{}", fmt::join(parts, ", "));
}

std::string gpu_line(const GpuSnapshot& snapshot) {
  if (!snapshot.newest) return snapshot.problem.empty() ? "no sample yet" : snapshot.problem;
  std::vector<std::string> gpus;
  for (std::size_t i = 0; i < snapshot.newest->gpus.size(); ++i)
    gpus.push_back(fmt::format("{}: {}", i, reading_text(snapshot.newest->gpus[i])));
  const std::string text =
      gpus.empty() ? "the driver shows no GPU" : fmt::format("{}", fmt::join(gpus, "; "));
  return snapshot.problem.empty() ? text : fmt::format("{}; {}", snapshot.problem, text);
}

Node gpu_node(const GpuSnapshot& snapshot) {
  std::vector<Node> gpus;
  for (const GpuIdentity& gpu : snapshot.gpus) {
    const auto index = static_cast<std::size_t>(gpu.index);
    Node one = map_node({{"index", integer_node(gpu.index)},
                         {"name", text_node(gpu.name)},
                         {"uuid", text_node(gpu.uuid)},
                         {"pci_bus_id", text_node(gpu.pci_bus_id)}});
    if (snapshot.newest) {
      Node reading = reading_node(snapshot.newest->gpus.at(index));
      one.entries.insert(one.entries.end(), reading.entries.begin(), reading.entries.end());
    }
    gpus.push_back(std::move(one));
  }
  return map_node({{"driver_version", text_node(snapshot.driver_version)},
                   {"problem", text_node(snapshot.problem)},
                   {"devices", list_node(std::move(gpus))}});
}

}  // namespace lockstep::monitor
