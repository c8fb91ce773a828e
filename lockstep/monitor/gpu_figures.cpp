#include "lockstep/monitor/gpu_figures.h"

#include <algorithm>
#include <utility>

#include "lockstep/monitor/median.h"

namespace lockstep::monitor {
namespace {

std::optional<double> median_or_nothing(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  return detail::median(std::move(values));
}

GpuFigures figures_of(const HostGpus& host, std::size_t index) {
  std::vector<double> utilisation, memory, filled, power;
  double throttled = 0, read = 0;
  for (const GpuSample& sample : host.samples) {
    if (index >= sample.gpus.size() || !sample.gpus[index].problem.empty()) continue;
    const GpuReading& gpu = sample.gpus[index];
    ++read;
    if (gpu.utilisation_percent) utilisation.push_back(*gpu.utilisation_percent);
    if (gpu.power_w) power.push_back(*gpu.power_w);
    if (gpu.memory_used_bytes) memory.push_back(static_cast<double>(*gpu.memory_used_bytes));
    if (gpu.memory_used_bytes && gpu.memory_total_bytes.value_or(0) > 0)
      filled.push_back(static_cast<double>(*gpu.memory_used_bytes) /
                       static_cast<double>(*gpu.memory_total_bytes));
    if (gpu.clock_reasons && is_throttled(*gpu.clock_reasons)) ++throttled;
  }
  return {.index = static_cast<int>(index),
          .utilisation_percent = median_or_nothing(std::move(utilisation)),
          .memory_bytes = median_or_nothing(std::move(memory)),
          .memory_share = median_or_nothing(std::move(filled)),
          .power_w = median_or_nothing(std::move(power)),
          .throttled_share = read > 0 ? throttled / read : 0};
}

}  // namespace

std::vector<GpuFigures> gpu_figures(const HostGpus& host) {
  std::size_t gpus = 0;
  for (const GpuSample& sample : host.samples) gpus = std::max(gpus, sample.gpus.size());
  std::vector<GpuFigures> all;
  for (std::size_t i = 0; i < gpus; ++i) all.push_back(figures_of(host, i));
  return all;
}

double busy_together_share(const HostGpus& host) {
  constexpr unsigned kBusyPercent = 85;
  const auto busy = [](const GpuReading& gpu) {
    return gpu.utilisation_percent.value_or(0) >= kBusyPercent;
  };
  const auto together =
      std::count_if(host.samples.begin(), host.samples.end(), [&](const GpuSample& sample) {
        return !sample.gpus.empty() && std::all_of(sample.gpus.begin(), sample.gpus.end(), busy);
      });
  return host.samples.empty()
             ? 0
             : static_cast<double>(together) / static_cast<double>(host.samples.size());
}

}  // namespace lockstep::monitor
