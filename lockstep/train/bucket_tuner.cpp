#include "lockstep/train/bucket_tuner.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::train {
namespace {

constexpr double kSizes[] = {1, 5, 10, 25, 50, 100, 200, 400};  // MiB
constexpr double kMiB = 1024 * 1024;
constexpr int kRounds = 3;
constexpr std::size_t kStepsPerTurn = 3;  // those that count
// The first steps make the optimizer's state and lay the buckets out in the order of gradients.
constexpr int kFirstSteps = 3;
constexpr double kWorthwhile = 0.01;

// The value that `quarters` quarters of the values are below.
double quartile_of(std::vector<double> values, std::size_t quarters) {
  const auto place = values.begin() + static_cast<std::ptrdiff_t>(values.size() * quarters / 4);
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

std::string cap_text(BucketCap cap) {
  return cap ? fmt::format("{}", *cap) : "unset";
}

std::int64_t gradient_bytes(const torch::nn::Module& module) {
  std::int64_t bytes = 0;
  for (const at::Tensor& parameter : module.parameters())
    if (parameter.requires_grad()) bytes += static_cast<std::int64_t>(parameter.nbytes());
  return bytes;
}

}  // namespace

std::vector<BucketCap> bucket_candidates(std::int64_t gradient_bytes, BucketCap as_set) {
  const double total = static_cast<double>(gradient_bytes) / kMiB;
  std::vector<BucketCap> caps{as_set};
  if (total <= kSizes[0]) return {};
  for (const double size : kSizes) {
    if (size != as_set) caps.emplace_back(size);
    if (size >= total) break;
  }
  return caps;
}

std::size_t best_trial(const std::vector<BucketTrial>& trials) {
  const auto fastest =
      std::ranges::min_element(trials, {}, [](const BucketTrial& trial) { return trial.step_ms; });
  const double gain_ms = trials.front().step_ms - fastest->step_ms;
  const bool worthwhile = gain_ms >= kWorthwhile * trials.front().step_ms &&
                          gain_ms > std::max(trials.front().spread_ms, fastest->spread_ms);
  return worthwhile ? static_cast<std::size_t>(fastest - trials.begin()) : 0;
}

std::string tuning_text(const std::vector<BucketTrial>& trials, std::size_t best) {
  std::string text = fmt::format("{:>18} {:>8} {:>10} {:>8}\n", "ddp_bucket_cap_mb", "buckets",
                                 "ms/step", "spread");
  for (std::size_t i = 0; i < trials.size(); ++i)
    text += fmt::format("{:>18} {:>8} {:>10.3f} {:>8.3f}{}{}\n", cap_text(trials[i].cap),
                        trials[i].buckets, trials[i].step_ms, trials[i].spread_ms,
                        i == 0 ? "  as set" : "", i == best ? "  chosen" : "");
  if (best == 0)
    return text +
           "No other size is faster by 1 % and by more than the spread of its steps; the file may "
           "stay as it is.";
  const double gain = trials.front().step_ms / trials[best].step_ms - 1;
  return text + fmt::format(
                    "This run continues with {} ({:.1f} % faster). For the next one write "
                    "ddp_bucket_cap_mb: {}",
                    cap_text(trials[best].cap), 100 * gain,
                    trials[best].cap ? cap_text(trials[best].cap) : "null");
}

std::unique_ptr<BucketTuner> BucketTuner::make(RunContext& run, std::int64_t steps_left) {
  const auto without = [&](const std::string& why) {
    if (run.world.is_leader()) log::warning("trainer", "tune: bucket_cap_mb is not tuned: {}", why);
    return nullptr;
  };
  if (run.batch_ranks() == 1) return without("one rank averages nothing.");
  const BucketCap as_set = run.arguments.ddp_bucket_cap_mb;
  try {
    run.parallelism->set_bucket_cap_mb(as_set);
  } catch (const UsageError& e) {
    if (run.arguments.shard_optimizer != "auto") throw;
    return without(e.what());
  }
  const std::int64_t bytes = gradient_bytes(*run.task.module);
  auto caps = bucket_candidates(bytes, as_set);
  if (caps.empty())
    return without(fmt::format("{} bytes of gradients fit into one bucket of any size.", bytes));
  const auto round = static_cast<std::int64_t>(caps.size() * (1 + kStepsPerTurn));
  const auto rounds = std::min<std::int64_t>(kRounds, (steps_left - kFirstSteps) / round);
  if (rounds < 1)
    return without(fmt::format("{} sizes need {} steps and {} are left. Raise max_steps.",
                               caps.size(), kFirstSteps + round, steps_left));
  return std::unique_ptr<BucketTuner>(
      new BucketTuner(run, std::move(caps), static_cast<int>(rounds)));
}

BucketTuner::BucketTuner(RunContext& run, std::vector<BucketCap> caps, int rounds)
    : run_(run),
      times_ms_(caps.size()),
      turns_left_(rounds * static_cast<int>(caps.size())),
      uncounted_(kFirstSteps + 1) {
  for (const BucketCap& cap : caps) trials_.push_back({.cap = cap});
}

// On a GPU the host is ahead of the device; a step's time ends when its work is done.
void BucketTuner::wait_for_device() const {
  const c10::Device device = run_.world.device();
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  const DeviceWait wait(device);
  guard.synchronizeDevice(device.index());
}

void BucketTuner::begin_step() {
  wait_for_device();
  began_ = Clock::now();
}

void BucketTuner::begin_turn(std::size_t trial) {
  trial_ = trial;
  uncounted_ = 1;
  run_.parallelism->set_bucket_cap_mb(trials_[trial].cap);
}

bool BucketTuner::end_step() {
  wait_for_device();
  if (uncounted_ > 0) {
    --uncounted_;
    return false;
  }
  auto& times = times_ms_[trial_];
  times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - began_).count());
  trials_[trial_].buckets = run_.parallelism->bucket_count();
  if (times.size() % kStepsPerTurn != 0) return false;
  if (--turns_left_ == 0) {
    choose();
    return true;
  }
  begin_turn((trial_ + 1) % trials_.size());
  return false;
}

void BucketTuner::choose() {
  std::vector<double> mine;
  for (const auto& times : times_ms_) {
    mine.push_back(quartile_of(times, 2));
    mine.push_back(quartile_of(times, 3) - quartile_of(times, 1));
  }
  at::Tensor slowest = at::tensor(mine, at::kDouble);
  run_.world.all_reduce(slowest, ReduceOp::kMax).wait();
  const auto* value = slowest.const_data_ptr<double>();
  for (BucketTrial& trial : trials_) {
    trial.step_ms = *value++;
    trial.spread_ms = *value++;
  }
  const std::size_t best = best_trial(trials_);
  if (best != trial_) begin_turn(best);
  if (run_.world.is_leader())
    log::info("trainer", "tune: bucket_cap_mb, medians of {} steps each on {} ranks\n{}",
              times_ms_.front().size(), run_.world.size(), tuning_text(trials_, best));
}

}  // namespace lockstep::train
