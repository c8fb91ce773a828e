#include "observe/dashboard/rank_gpus.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <sstream>

namespace lockstep::dashboard {
namespace {

// The place that one word of CUDA_VISIBLE_DEVICES names.
std::optional<std::size_t> place_of(const std::vector<monitor::GpuIdentity>& gpus,
                                    const std::string& word) {
  if (word.rfind("GPU-", 0) == 0) {
    const auto found = std::ranges::find_if(
        gpus, [&](const monitor::GpuIdentity& gpu) { return gpu.uuid.rfind(word, 0) == 0; });
    if (found == gpus.end()) return std::nullopt;
    return static_cast<std::size_t>(found - gpus.begin());
  }
  std::size_t number = 0;
  const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error != std::errc() || stop != word.data() + word.size() || number >= gpus.size())
    return std::nullopt;
  return number;
}

}  // namespace

std::vector<std::size_t> visible_gpus(const std::vector<monitor::GpuIdentity>& gpus,
                                      const std::optional<std::string>& variable) {
  std::vector<std::size_t> visible;
  if (!variable) {
    visible.resize(gpus.size());
    std::iota(visible.begin(), visible.end(), 0);
    return visible;
  }
  std::istringstream words(*variable);
  for (std::string word; std::getline(words, word, ',');) {
    std::erase_if(word, [](char c) { return c == ' ' || c == '\t'; });
    const auto place = place_of(gpus, word);
    if (!place) break;
    visible.push_back(*place);
  }
  return visible;
}

int gpu_of_rank(const monitor::GpuSnapshot& snapshot, const std::vector<std::size_t>& visible,
                const GpuUser& user) {
  if (!snapshot.newest) return -1;
  const auto& readings = snapshot.newest->gpus;
  for (std::size_t i = 0; i < readings.size() && i < snapshot.gpus.size(); ++i) {
    const bool uses = std::ranges::any_of(readings[i].processes, [&](const auto& process) {
      return process.pid == static_cast<std::int64_t>(user.pid);
    });
    if (uses) return snapshot.gpus[i].index;
  }
  const auto own = static_cast<std::size_t>(std::max(user.local_rank, 0));
  return own < visible.size() ? snapshot.gpus[visible[own]].index : -1;
}

monitor::HostGpus host_gpus(int host, const std::vector<monitor::GpuIdentity>& gpus,
                            const std::vector<std::size_t>& visible,
                            const std::vector<monitor::GpuSamplePtr>& samples) {
  monitor::HostGpus chosen{.host = host};
  for (const std::size_t place : visible) chosen.gpus.push_back(gpus[place]);
  for (const monitor::GpuSamplePtr& sample : samples) {
    monitor::GpuSample own{.unix_time_s = sample->unix_time_s};
    for (const std::size_t place : visible)
      if (place < sample->gpus.size()) own.gpus.push_back(sample->gpus[place]);
    chosen.samples.push_back(std::move(own));
  }
  return chosen;
}

}  // namespace lockstep::dashboard
