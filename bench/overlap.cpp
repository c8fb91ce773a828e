// lockstep bench overlap: how much of the communication backward hides.
//
// The wire is made slow on purpose: each bucket's all-reduce (real, over gloo) holds a simulated
// wire for `delay` more milliseconds, one bucket after the other. What is left of that after the
// last gradient is exposed; the rest was hidden behind backward.
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <thread>

#include "bench/bench.h"
#include "bench/harness.h"
#include "lockstep/core/error.h"
#include "lockstep/models/gpt.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::bench {
namespace {

using Clock = Deadline::Clock;

struct OverlapSettings {
  int ranks = 2;
  int steps = 10;
  double delay_ms = 10;
  // Small, so that there are many: the last one can never be hidden, and it and its neighbour would
  // be a quarter of eight.
  double bucket_mb = 1;
};

struct Observed {
  std::vector<double> hidden_percent;
  std::vector<double> exposed_ms;
  std::vector<double> tail_ms;
  std::vector<double> backward_ms;
  std::size_t buckets = 0;
  double first_launch_ms = 0;  // in iteration 1
  double last_gradient_ms = 0;
};

CommHook slow_wire(double delay_ms) {
  auto free_at = std::make_shared<Clock::time_point>();
  const auto delay = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double, std::milli>(delay_ms));
  return [free_at, delay](World& world, const Bucket& bucket) -> Reduction {
    *free_at = std::max(*free_at, Clock::now()) + delay;
    return {world.all_reduce(bucket.data, ReduceOp::kAvg),
            [until = *free_at] { std::this_thread::sleep_until(until); }};
  };
}

void observe(World& world, const OverlapSettings& settings, Observed& observed) {
  torch::manual_seed(0);
  world.barrier();
  models::Gpt net(models::GptConfig{
      .n_layer = 4, .n_head = 4, .n_embd = 256, .vocab_size = 8192, .n_positions = 128});
  DistributedDataParallel model{net, world, {.bucket_cap_mb = settings.bucket_mb}};
  model.register_comm_hook(slow_wire(settings.delay_ms));
  const auto ids = torch::randint(8192, {16, 128});
  for (int step = 0; step < settings.steps; ++step) {
    models::next_token_loss(model(ids), ids).backward();
    net->zero_grad();
    if (!world.is_leader()) continue;
    const StepTiming& timing = model.last_timing();
    if (step == 0) {
      observed.first_launch_ms = timing.buckets.front().launched_ms;
      observed.last_gradient_ms = timing.last_gradient_ms;
    }
    // When the wire is free again after the last bucket; the wait for a slower rank does not count.
    double wire_free_ms = 0;
    for (const BucketTiming& bucket : timing.buckets)
      wire_free_ms = std::max(wire_free_ms, bucket.launched_ms) + settings.delay_ms;
    const double injected = settings.delay_ms * static_cast<double>(timing.buckets.size());
    const double exposed = std::max(0.0, wire_free_ms - timing.last_gradient_ms);
    observed.buckets = timing.buckets.size();
    observed.backward_ms.push_back(timing.last_gradient_ms);
    observed.exposed_ms.push_back(exposed);
    observed.tail_ms.push_back(timing.finalized_ms - timing.last_gradient_ms);
    observed.hidden_percent.push_back(100 * (1 - exposed / injected));
  }
}

}  // namespace

int overlap_main(int argc, char** argv) {
  OverlapSettings settings;
  double require_hidden = 0;
  Options options("Share of an injected delay that backward hides (gloo, 4-layer GPT)");
  options.number("--ranks", settings.ranks, 2, 16, "threads of this process, one rank each");
  options.number("--steps", settings.steps, 2, 10000, "training steps");
  options.positive("--delay-ms", settings.delay_ms,
                   "milliseconds added to the all-reduce of each bucket");
  options.positive("--bucket-mb", settings.bucket_mb, "MiB of gradients in a bucket");
  options.number("--require-hidden", require_hidden, 0, 100,
                 "fail when less than this percentage is hidden; 0: never");
  if (const auto code = options.parse(argc, argv)) return *code;
  torch::set_num_threads(1);

  Observed observed;
  // With shared memory there is no wire whose time could be hidden.
  testing::ThreadOptions on_gloo;
  on_gloo.world.backend = "gloo";
  testing::run_threads(
      settings.ranks, [&](World& world) { observe(world, settings, observed); }, on_gloo);
  Report report("overlap", fmt::format("{} buckets, {} ms injected each", observed.buckets,
                                       settings.delay_ms));
  const auto row = [&](const char* name, const std::vector<double>& samples) {
    report.row(name).spread("", samples, 1, "min p50 max");
  };
  row("hidden behind backward, %", observed.hidden_percent);
  row("of it left after the last gradient, ms", observed.exposed_ms);
  row("last gradient to end of backward, ms", observed.tail_ms);
  row("backward from first to last gradient, ms", observed.backward_ms);
  report.publish(options);
  fmt::print("iteration 1: first launch at {:.1f} ms, last gradient at {:.1f} ms\n",
             observed.first_launch_ms, observed.last_gradient_ms);
  if (!(observed.first_launch_ms < observed.last_gradient_ms))
    throw Error("bench", "in iteration 1 the first launch follows the last gradient");
  return Goals("overlap")
      .at_least("% hidden", median(observed.hidden_percent), require_hidden)
      .exit_code();
}

}  // namespace lockstep::bench
