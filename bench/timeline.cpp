// lockstep bench timeline: what two devices do at each moment of a step, as Chrome traces. Once a
// model is split over them by a device map, once each is a rank of its own with the whole model.
// tools/timeline.py draws the traces.
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/harness.h"
#include "lockstep/core/cores.h"
#include "lockstep/core/error.h"
#include "lockstep/models/gpt.h"
#include "lockstep/models/place.h"
#include "lockstep/monitor/chrome_trace.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/run.h"

namespace lockstep::bench {
namespace {

using Clock = Deadline::Clock;
using monitor::ChromeTrace;
using nlohmann::json;

constexpr int kDevices = 2;
constexpr int kWarmupSteps = 3;

struct TimelineOptions {
  std::string output;
  int steps = 4;
  int batch = 8;
  int threads = 0;
  bool split = false;  // for a rank
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TimelineOptions, output, steps, batch, threads, split)

// The head has a weight of its own, so that it is on the device of the last layers.
const models::GptConfig kGpt{.n_layer = 8,
                             .n_head = 4,
                             .n_embd = 256,
                             .vocab_size = 512,
                             .n_positions = 128,
                             .tie_word_embeddings = false};

models::Gpt drawn() {
  torch::manual_seed(0);
  return models::Gpt(kGpt);
}

at::Tensor tokens(int samples) {
  return torch::randint(kGpt.vocab_size, {samples, kGpt.n_positions});
}

void span(ChromeTrace& trace, const char* name, int device, Clock::time_point from,
          Clock::time_point to) {
  trace.complete({.name = name, .category = "step", .thread = device, .begin = from, .end = to});
}

// One process, layers in two halves on cpu:0 and cpu:1, which work one after the other.
class SplitRun {
 public:
  SplitRun(const TimelineOptions& options, ChromeTrace& trace)
      : trace_(trace), net_(drawn()), ids_(tokens(kDevices * options.batch)) {
    const models::DeviceMap map = models::balanced_device_map(net_->config(), {"cpu:0", "cpu:1"});
    models::place(*net_, map);
    for (const models::DeviceMap::Part& part : map.parts)
      if (part.name.starts_with("transformer.h.") && part.device == "cpu:0") ++border_;
    std::vector<at::Tensor> stages[kDevices];
    for (const auto& parameter : net_->named_parameters())
      stages[stage_of(map, parameter.key())].push_back(parameter.value());
    for (const auto& parameters : stages)
      optimizers_.push_back(
          std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{.lr = 3e-4}));
    // Sees every block's input: the second half's first input crosses the border.
    net_->run_blocks_with([this](models::Block block, std::vector<at::Tensor> inputs) {
      if (block_++ == border_) {
        forward_border_ = Clock::now();
        inputs[0].register_hook([this](const at::Tensor&) { backward_border_ = Clock::now(); });
      }
      return block(inputs);
    });
    trace_.thread_name(0, fmt::format("device 0: layers 0-{}", border_ - 1));
    trace_.thread_name(1, fmt::format("device 1: layers {}-{}", border_, kGpt.n_layer - 1));
  }

  void step(bool record) {
    block_ = 0;
    const auto begin = Clock::now();
    const at::Tensor loss = models::next_token_loss(net_(ids_), ids_);
    const auto forward_end = Clock::now();
    loss.backward();
    const auto backward_end = Clock::now();
    optimizers_[0]->step();
    const auto half = Clock::now();
    optimizers_[1]->step();
    const auto end = Clock::now();
    net_->zero_grad();
    if (!record) return;
    span(trace_, "forward", 0, begin, forward_border_);
    span(trace_, "forward", 1, forward_border_, forward_end);
    span(trace_, "backward", 1, forward_end, backward_border_);
    span(trace_, "backward", 0, backward_border_, backward_end);
    span(trace_, "optimizer", 0, backward_end, half);
    span(trace_, "optimizer", 1, half, end);
  }

 private:
  // The part with the longest name that matches the parameter.
  static int stage_of(const models::DeviceMap& map, const std::string& parameter) {
    std::size_t longest = 0;
    int stage = 0;
    for (const models::DeviceMap::Part& part : map.parts) {
      if (!parameter.starts_with(part.name + ".") || part.name.size() < longest) continue;
      longest = part.name.size();
      stage = part.device == "cpu:0" ? 0 : 1;
    }
    return stage;
  }

  ChromeTrace& trace_;
  models::Gpt net_;
  at::Tensor ids_;
  int border_ = 0;
  int block_ = 0;
  Clock::time_point forward_border_, backward_border_;
  std::vector<std::unique_ptr<optim::AdamW>> optimizers_;
};

// A rank with the whole model and a part of the batch.
class DdpRun {
 public:
  DdpRun(const TimelineOptions& options, ChromeTrace& trace, World& world)
      : trace_(trace),
        net_(drawn()),
        model_(net_, world),
        optimizer_(net_->parameters(), {.lr = 3e-4}),
        ids_(tokens(options.batch)) {
    trace_.thread_name(0,
                       fmt::format("device {}: rank {}, all layers", world.rank(), world.rank()));
  }

  void step(bool record) {
    const auto begin = Clock::now();
    const at::Tensor loss = models::next_token_loss(model_(ids_), ids_);
    const auto forward_end = Clock::now();
    loss.backward();
    const auto backward_end = Clock::now();
    optimizer_.step();
    const auto end = Clock::now();
    optimizer_.zero_grad();
    if (!record) return;
    const StepTiming& timing = model_.last_timing();
    const auto exposed = backward_end - std::chrono::duration_cast<Clock::duration>(
                                            std::chrono::duration<double, std::milli>(
                                                timing.finalized_ms - timing.last_gradient_ms));
    span(trace_, "forward", 0, begin, forward_end);
    span(trace_, "backward", 0, forward_end, exposed);
    span(trace_, "waits for gradients", 0, exposed, backward_end);
    span(trace_, "optimizer", 0, backward_end, end);
  }

 private:
  ChromeTrace& trace_;
  models::Gpt net_;
  DistributedDataParallel<models::Gpt> model_;
  optim::AdamW optimizer_;
  at::Tensor ids_;
};

// Its milliseconds per step.
template <typename Run>
double take_steps(Run&& run, const TimelineOptions& options, World& world) {
  for (int i = 0; i < kWarmupSteps; ++i) run.step(false);
  world.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < options.steps; ++i) run.step(true);
  return 1e3 * seconds_since(start) / options.steps;
}

}  // namespace

// One order, answered by {"ms"}.
int timeline_rank(const json& description, const std::string& orders) {
  const auto options = description.get<TimelineOptions>();
  torch::set_num_threads(options.threads);
  const auto record = [&](World& world) {
    const std::string name =
        options.split ? "split.json" : fmt::format("rank-{}.json", world.rank());
    ChromeTrace trace(options.output + "/" + name, {.rank = world.rank()});
    const double ms = options.split ? take_steps(SplitRun(options, trace), options, world)
                                    : take_steps(DdpRun(options, trace, world), options, world);
    if (!trace.flush() || trace.dropped() > 0)
      throw Error("bench", "the trace could not be written in time");
    return json{{"ms", ms}};
  };
  return run(
      [&](World& world) {
        serve(orders, world.rank(), [&](const json&) { return record(world); });
      },
      {.device = c10::Device(c10::kCPU)});
}

int timeline_main(int argc, char** argv) {
  TimelineOptions o;
  Options options(
      "Chrome traces of two devices (halves of the CPU): a model split over them, and two ranks "
      "with the whole model each; tools/timeline.py draws them",
      /*publishes=*/false);
  options.text("--output", o.output, "folder for the traces");
  options.app().get_option("--output")->required();
  options.number("--steps", o.steps, 1, 1000, "steps that are recorded, after three that are not");
  options.number("--batch", o.batch, 1, 4096, "sequences of 128 tokens for each device");
  options.number("--threads", o.threads, 0, 1024, "of a device; 0: half of the cores");
  if (const auto code = options.parse(argc, argv)) return *code;
  if (o.threads == 0) o.threads = std::max(1, allowed_cores() / kDevices);
  std::filesystem::create_directories(o.output);
  for (const bool split : {true, false}) {
    o.split = split;
    const std::string name = split ? "split over 2 devices" : "2 ranks";
    Crew crew({.name = name, .ranks = split ? 1 : kDevices, .rank = "timeline", .settings = o});
    const double ms = crew.ask({}).at("ms");
    crew.finish();
    fmt::print("{}: {:.1f} ms a step of {} samples, {:.1f} samples/s\n", name, ms,
               kDevices * o.batch, kDevices * o.batch / ms * 1e3);
  }
  fmt::print("traces are in {}: split.json, rank-0.json, rank-1.json\n", o.output);
  return 0;
}

}  // namespace lockstep::bench
