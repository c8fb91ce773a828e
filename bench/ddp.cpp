// lockstep bench ddp: what the wrapper costs where there is nothing to communicate, beside PyTorch.
// A wrapped and a bare model are ranks of their own (models.h) and train in alternating blocks.
#include <fmt/format.h>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/harness.h"
#include "bench/models.h"
#include "lockstep/core/error.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;

struct DdpOptions {
  int blocks = 30;
  int steps = 10;
  ModelSettings model;
};

struct WrapperSide {
  WrapperSide(const std::string& program, const ModelSettings& settings, bool wraps)
      : wrapped(wraps), crew({.name = program, .rank = program, .settings = settings}) {}

  // A model with the start's weights. Returns its first losses.
  json begin(const ModelSettings& settings) {
    crew.ask(new_order("eager", settings.lr, wrapped));
    return crew.ask({{"do", "train"},
                     {"steps", kVerifiedSteps},
                     {"batch_size", settings.batch_size}})["losses"];
  }
  double block_ms(int steps) {
    double sum = 0;
    for (const double ms : crew.ask({{"do", "time"}, {"warmup", 0}, {"steps", steps}})
                               .at("ms")
                               .get<std::vector<double>>())
      sum += ms;
    return sum;
  }

  bool wrapped;
  Crew crew;
};

// Wrapped / bare for each pair of blocks. The order alternates too: what drifts over time must not
// favour one side.
std::vector<double> ratios_of(const std::string& program, const DdpOptions& o, bool writes) {
  WrapperSide sides[] = {{program, o.model, false}, {program, o.model, true}};
  if (writes) sides[0].crew.ask({{"do", "write"}});
  const json bare = sides[0].begin(o.model), wrapped = sides[1].begin(o.model);
  // Verified before timed: the wrapper must not change a bit.
  if (bare != wrapped)
    throw Error("bench", fmt::format("{}: the wrapped model's losses {} are not the bare one's {}",
                                     program, wrapped.dump(), bare.dump()));
  std::vector<double> ratios;
  for (int pair = 0; pair < o.blocks / 2; ++pair) {
    double ms[2];
    for (const int i : {pair % 2, 1 - pair % 2}) ms[i] = sides[i].block_ms(o.steps);
    ratios.push_back(ms[1] / ms[0]);
    fmt::print(stderr, "{} {}/{}: bare {:.1f} ms/step, wrapped {:.1f}, ratio {:.4f}\n", program,
               pair + 1, o.blocks / 2, ms[0] / o.steps, ms[1] / o.steps, ratios.back());
  }
  for (WrapperSide& side : sides) side.crew.finish();
  return ratios;
}

}  // namespace

int ddp_main(int argc, char** argv) {
  DdpOptions o;
  o.model = small_gpt();
  o.model.tied = o.model.force_reducer = true;
  o.model.batch_size = 8;
  bool python = true;
  double require_ratio = 0;
  Options options("Cost of the DDP wrapper in a world of one: 4-layer GPT, alternating blocks");
  options.number("--blocks", o.blocks, 2, 100000, "blocks in all, half of them wrapped");
  options.number("--steps", o.steps, 1, 100000, "training steps per block");
  options.number("--batch", o.model.batch_size, 1, 100000, "sequences per step");
  options.number("--time", o.model.sequence_length, 1, 128, "tokens per sequence");
  options.number("--threads", o.model.threads, 1, 1024, "of LibTorch, here and in the peer");
  options.device(o.model.device);
  options.flag("!--no-python", python, "leave out the PyTorch peer");
  options.number("--require-ratio", require_ratio, 0, 1e6,
                 "fail when our median is above this; 0: never");
  if (const auto code = options.parse(argc, argv)) return *code;
  prepare_device(o.model.device);

  const Scratch scratch;
  o.model.start = scratch.file("start");
  Report report("ddp", "wrapped / bare, per pair of blocks");
  const auto add = [&](const char* name, const std::vector<double>& ratios) {
    // Half of the pairs lie between p25 and p75: a median means little when those are far apart.
    report.row(name).spread("", ratios, 4, "min p25 p50 p75 max").value("ratios", ratios);
    return median(ratios);
  };
  const double ours =
      add("Lockstep DistributedDataParallel", ratios_of("model", o, /*writes=*/true));
  if (python) add("PyTorch DistributedDataParallel", ratios_of("gpt_peer.py", o, false));
  report.publish(options);
  return Goals("ddp").at_most("the median ratio", ours, require_ratio).exit_code();
}

}  // namespace lockstep::bench
