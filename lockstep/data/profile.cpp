#include "lockstep/data/profile.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

using Clock = std::chrono::steady_clock;

double mean_ms(const std::vector<BatchTiming>& batches, double BatchTiming::*member) {
  double sum = 0;
  for (const BatchTiming& timing : batches) sum += timing.*member;
  return batches.empty() ? 0.0 : 1000 * sum / static_cast<double>(batches.size());
}

double percentile_ms(std::vector<double> seconds, double part) {
  if (seconds.empty()) return 0;
  std::sort(seconds.begin(), seconds.end());
  const auto last = static_cast<double>(seconds.size() - 1);
  return 1000 * seconds[static_cast<std::size_t>(std::lround(part * last))];
}

}  // namespace

std::vector<std::string> loader_advice(const LoaderFigures& f) {
  std::vector<std::string> advice;
  const double make_ms = f.load_ms + f.collate_ms + f.copy_ms;
  if (f.accelerator && f.transfer_ms > kSlowTransferMs) {
    std::string text = fmt::format(
        "A batch takes {:.1f} ms to reach the device, more than {:.0f} ms: ", f.transfer_ms,
        kSlowTransferMs);
    text += f.pin_memory ? "send less (uint8 images, int32 tokens; convert on the device)."
                         : "set pin_memory = true.";
    advice.push_back(text);
  }
  if (!f.step_ms) {
    advice.push_back(fmt::format(
        "No step was profiled, so it is not known how many workers hide loading: a batch takes "
        "{:.1f} ms to make and comes every {:.1f} ms with num_workers = {}. Give the profile what "
        "training does with a batch (ProfileOptions::step).",
        make_ms, f.wait_ms, f.num_workers));
  } else if (f.wait_percent >= 1) {
    const double steps = std::max(*f.step_ms, 0.001);
    const int needed = static_cast<int>(std::min(std::ceil(make_ms / steps), 1e6)) + 1;
    if (f.num_workers == 0)
      advice.push_back(
          fmt::format("The step waits {:.1f} ms for each batch, because loading runs in its own "
                      "thread: set num_workers = {}.",
                      f.wait_ms, std::max(1, needed)));
    else if (needed > f.num_workers)
      advice.push_back(
          fmt::format("A batch takes {:.1f} ms to make and the step {:.1f} ms, so {} workers are "
                      "too few: set num_workers = {}, if there are cores for them.",
                      make_ms, *f.step_ms, f.num_workers, needed));
    else
      advice.push_back(fmt::format(
          "Workers are enough on average ({:.1f} ms for a batch, {:.1f} ms for a step), "
          "but some batches come late: raise prefetch_factor.",
          make_ms, *f.step_ms));
  }
  if (f.wait_percent >= 1) {
    if (f.collate_ms > f.load_ms && f.collate_ms > 1)
      advice.push_back(
          fmt::format("Collating takes longer ({:.1f} ms) than loading ({:.1f} ms): give the "
                      "dataset a get_batch() that fills the batch directly.",
                      f.collate_ms, f.load_ms));
    if (make_ms > kSlowTransferMs)
      advice.push_back(
          fmt::format("Making a batch takes {:.1f} ms, more than {:.0f} ms: do less per sample, or "
                      "do it once and store the result.",
                      make_ms, kSlowTransferMs));
  }
  if (advice.empty())
    advice.push_back(
        fmt::format("Loading is hidden: the step waits {:.2f} % of the time.", f.wait_percent));
  return advice;
}

LoaderProfile profile_loader(Loader& loader, const ProfileOptions& options) {
  if (options.batches < 1)
    throw UsageError("loader", "a profile of {} batches says nothing.", options.batches);
  if (loader.batches_left(options.epoch + 1) == 0)
    throw UsageError("loader",
                     "this rank has no batch to profile: with evaluation, more ranks than samples "
                     "leave some without. Profile rank 0, or use fewer ranks.");
  LoaderProfile profile;
  double step_seconds = 0;
  auto start = Clock::now();
  const auto wanted = static_cast<std::size_t>(options.batches);
  for (std::int64_t epoch = options.epoch; profile.batches.size() < wanted; ++epoch) {
    for (auto& batch : loader.epoch(epoch)) {
      profile.batches.push_back(loader.timing().last);
      if (profile.batches.size() == 1) start = Clock::now();
      const auto began = Clock::now();
      if (options.step) options.step(batch);
      step_seconds += seconds_since(began);
      if (profile.batches.size() == wanted) break;
    }
  }
  profile.seconds = seconds_since(start);
  const std::vector<BatchTiming> later(profile.batches.begin() + (wanted > 1 ? 1 : 0),
                                       profile.batches.end());
  std::vector<double> waits;
  for (const BatchTiming& timing : later) waits.push_back(timing.wait);
  profile.wait_p99_ms = percentile_ms(waits, 0.99);
  const double wait_ms = mean_ms(later, &BatchTiming::wait);
  profile.wait_percent =
      100 * wait_ms * static_cast<double>(later.size()) / 1000 / std::max(profile.seconds, 1e-9);
  std::optional<double> step_ms;
  if (options.step) step_ms = 1000 * step_seconds / static_cast<double>(wanted);
  profile.advice = loader_advice({.load_ms = mean_ms(later, &BatchTiming::load),
                                  .collate_ms = mean_ms(later, &BatchTiming::collate),
                                  .copy_ms = mean_ms(later, &BatchTiming::copy),
                                  .transfer_ms = mean_ms(later, &BatchTiming::transfer),
                                  .wait_ms = wait_ms,
                                  .step_ms = step_ms,
                                  .wait_percent = profile.wait_percent,
                                  .num_workers = loader.options().num_workers,
                                  .pin_memory = loader.options().pin_memory,
                                  .accelerator = !loader.device().is_cpu()});
  return profile;
}

}  // namespace lockstep::data
