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
  return {.index = index < host.gpus.size() ? host.gpus[index].index : static_cast<int>(index),
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

HostGpus gpus_in_use(const HostGpus& host) {
  // A context takes some hundred MiB; a card without one shows a few.
  constexpr double kContextBytes = 256u << 20;
  constexpr unsigned kWorkPercent = 10;
  const auto all = gpu_figures(host);
  const auto in_use = [&](std::size_t place) {
    return all[place].memory_bytes.value_or(0) >= kContextBytes ||
           std::ranges::any_of(host.samples, [&](const GpuSample& sample) {
             return place < sample.gpus.size() &&
                    sample.gpus[place].utilisation_percent.value_or(0) >= kWorkPercent;
           });
  };
  HostGpus used{.host = host.host};
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!in_use(i)) continue;
    places.push_back(i);
    used.gpus.push_back(i < host.gpus.size() ? host.gpus[i] : GpuIdentity{});
    used.gpus.back().index = all[i].index;
  }
  for (const GpuSample& sample : host.samples) {
    GpuSample& own = used.samples.emplace_back(GpuSample{.unix_time_s = sample.unix_time_s});
    for (const std::size_t place : places)
      own.gpus.push_back(place < sample.gpus.size() ? sample.gpus[place] : GpuReading{});
  }
  return used;
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
