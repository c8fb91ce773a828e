// lockstep bench gpt, llama, lora and resnet: training steps of whole models, beside PyTorch's on
// the same weights and data. All sides stay alive for the whole run and take turns in blocks of
// steps.
#include "bench/models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <numeric>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/harness.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;

constexpr const char* kUs = "lockstep";
constexpr const char* kBare = "bare";  // ours without the wrapper
constexpr const char* kOursInBf16 = "bf16";

// Relative tolerances for fp32 losses: sums in another order, then AdamW steps on gradients that
// differ by as much. Twice the learning rate shows as 6e-4 in the second step of the tiny GPT, and
// as more in larger ones.
constexpr double kFirstTolerance = 1e-4, kLaterTolerance = 3e-4;
// For the model as it is timed: in bf16 each side rounds at different places.
constexpr double kTimedTolerance = 5e-3;
// In fp8 a layer's output is within some percent of the other's, and the loss much closer.
constexpr double kFp8Tolerance = 2e-2;
constexpr int kBreakdownSteps = 5;  // at most
constexpr int kSaves = 4;

struct ModelOptions {
  ModelSettings settings;
  Turns turns{.rounds = 5, .unit = "ms"};
  int steps = 20;
  int warmup = 3;
  std::string peer;
  std::vector<std::string> peer_modes;
  bool bare = false, bf16 = false;
  bool one_at_a_time = false;
  bool save_stall = false;
  int kernels = 0;  // rows of their table
  std::string corrupt, losses;
};

// One side: our worker, or PyTorch in one mode.
struct ModelSide {
  ModelSide(const std::string& key, const ModelSettings& settings)
      : name(key),
        crew({.name = key,
              .rank = ours() ? "model" : settings.kind + "_peer.py",
              .settings = settings}) {}

  bool ours() const { return name == kUs || name == kBare || name == kOursInBf16; }

  std::string name;
  Crew crew;
  bool failed = false;
  json facts;                               // the answer to "new"
  std::vector<double> first_losses;         // of the timed model
  std::vector<std::vector<double>> rounds;  // milliseconds of each step
  json memory, breakdown = json::object(), stalls = json::array();

  std::vector<double> all_ms() const {
    std::vector<double> all;
    for (const auto& round : rounds) all.insert(all.end(), round.begin(), round.end());
    return all;
  }
  std::vector<double> medians() const {
    std::vector<double> all;
    for (const auto& round : rounds) all.push_back(median(round));
    return all;
  }
  bool measured() const { return !failed && !rounds.empty(); }
};
using ModelSides = std::deque<ModelSide>;

std::vector<double> losses_of(const json& answer) {
  std::vector<double> losses;
  for (const json& loss : answer.at("losses"))
    losses.push_back(loss.is_number() ? loss.get<double>() : NAN);  // JSON has no NaN
  return losses;
}

// A peer that fails, for example out of memory, is reported and skipped from then on.
template <typename Body>
void attempt(ModelSide& side, const Body& body) {
  if (side.failed) return;
  try {
    body(side);
  } catch (const Error& error) {
    if (side.ours()) throw;
    side.failed = true;
    fmt::print(stderr, "{} is skipped: {}\n", side.name, error.what());
  }
}

template <typename Body>
void for_each(ModelSides& sides, const Body& body) {
  for (ModelSide& side : sides) attempt(side, body);
}

// The first of PyTorch's sides that works.
ModelSide* peer_of(ModelSides& sides) {
  for (ModelSide& side : sides)
    if (!side.ours() && !side.failed) return &side;
  return nullptr;
}

// ---------------------------------------------------------------- start and verification

json timed_order(const ModelOptions& options, const ModelSide& side) {
  const ModelSettings& s = options.settings;
  return new_order(side.ours() ? s.mode : side.name, s.lr * (options.corrupt == side.name ? 2 : 1),
                   s.ddp && side.name != kBare, side.name == kOursInBf16 ? "bf16" : s.dtype,
                   /*tf32=*/true);
}

// The order for the model that a bf16 run is compared with.
json fp32_order(const ModelOptions& options, const ModelSide& side) {
  json order = timed_order(options, side);
  order.update({{"dtype", "fp32"}, {"tf32", false}, {"mode", "eager"}});
  return order;
}

// The order for the same model without anything that is allowed to differ.
json exact_order(const ModelOptions& options, const ModelSide& side) {
  json order = fp32_order(options, side);
  order["exact"] = true;
  return order;
}

json train_order(std::int64_t steps, std::int64_t batch_size) {
  return {{"do", "train"}, {"steps", steps}, {"batch_size", batch_size}};
}

// The largest relative difference; Error if it exceeds the tolerances.
double compare(const ModelSide& side, const std::vector<double>& ours,
               const std::vector<double>& other, double first, double later) {
  double worst = 0;
  for (std::size_t step = 0; step < ours.size(); ++step) {
    const double difference = std::abs(ours[step] - other.at(step)) / std::abs(ours[step]);
    const double allowed = step == 0 ? first : later;
    if (!(difference <= allowed))
      throw Error("bench", fmt::format("{} and {} do not train the same: the loss of step {} is "
                                       "{:.9g} and {:.9g}, {:.1e} apart; allowed are {:.0e}",
                                       kUs, side.name, step + 1, ours[step], other[step],
                                       difference, allowed));
    worst = std::max(worst, difference);
  }
  return worst;
}

// In fp32 and without compiling, on a small batch: in all modes the peer is the same program.
void verify(ModelSides& sides, const ModelOptions& options) {
  const auto peer = std::find_if(sides.begin() + 1, sides.end(),
                                 [](const ModelSide& side) { return !side.failed; });
  if (peer == sides.end()) return;
  // A batch norm needs several samples.
  const std::int64_t most = options.settings.kind == "resnet" ? 8 : 2;
  const std::int64_t batch = std::min(options.settings.batch_size, most);
  const auto train = [&](ModelSide& side) {
    side.crew.ask(exact_order(options, side));
    const auto losses = losses_of(side.crew.ask(train_order(kVerifiedSteps, batch)));
    if (options.one_at_a_time) side.crew.ask({{"do", "drop"}});
    return losses;
  };
  const std::vector<double> ours = train(sides.front()), other = train(*peer);
  const double worst = compare(*peer, ours, other, kFirstTolerance, kLaterTolerance);
  fmt::print(stderr, "verified: {} and pytorch train the same in fp32, losses differ by {:.1g}\n",
             kUs, worst);
}

void begin_timed(ModelSide& side, const ModelOptions& options) {
  side.facts = side.crew.ask(timed_order(options, side));
  side.first_losses =
      losses_of(side.crew.ask(train_order(kVerifiedSteps, options.settings.batch_size)));
  fmt::print(stderr, "{}: first losses {:.5f}\n", side.name, fmt::join(side.first_losses, " "));
}

void compare_first(const ModelSides& sides, const ModelOptions& options) {
  const double allowed = options.settings.dtype == "fp8" ? kFp8Tolerance : kTimedTolerance;
  for (const ModelSide& side : sides)
    if (!side.failed)
      compare(side, sides.front().first_losses, side.first_losses, allowed, allowed);
}

// ---------------------------------------------------------------- measurement

void measure_once(ModelSide& side, const ModelOptions& options) {
  const json answer =
      side.crew.ask({{"do", "time"}, {"warmup", options.warmup}, {"steps", options.steps}});
  if (!answer.at("loss").is_number())
    throw Error("bench", fmt::format("the loss of {} is not finite", side.name));
  side.rounds.push_back(answer.at("ms").get<std::vector<double>>());
  side.memory = answer;
}

void break_down(ModelSide& side, const ModelOptions& options) {
  side.breakdown =
      side.crew.ask({{"do", "breakdown"}, {"steps", std::min(options.steps, kBreakdownSteps)}});
}

void measure(ModelSides& sides, const ModelOptions& options) {
  by_turns(options.turns, sides, [&](ModelSide& side) {
    const std::size_t before = side.rounds.size();
    attempt(side, [&](ModelSide&) { measure_once(side, options); });
    return side.rounds.size() > before ? median(side.rounds.back()) : NAN;
  });
  for_each(sides, [&](ModelSide& side) { break_down(side, options); });
}

// Shows the kernels that take most of a step.
void show_kernels(ModelSide& side, const ModelOptions& options) {
  const json answer = side.crew.ask({{"do", "kernels"}, {"steps", kBreakdownSteps}});
  std::vector<json> all = answer.at("kernels");
  const auto ms = [](const json& kernel) { return kernel.at("ms").get<double>(); };
  std::sort(all.begin(), all.end(), [&](const json& a, const json& b) { return ms(a) > ms(b); });
  double sum = 0;
  for (const json& kernel : all) sum += ms(kernel);
  Report report(options.settings.kind,
                fmt::format("kernels of {}, {:.2f} ms in all", side.name, sum));
  for (std::size_t i = 0; i < all.size() && i < static_cast<std::size_t>(options.kernels); ++i)
    report.row(all[i].at("name").get<std::string>().substr(0, 100))
        .number("in a step", all[i].at("count").get<double>(), 1)
        .number("ms", ms(all[i]), 3)
        .text("share", fmt::format("{:.1f} %", 100 * ms(all[i]) / sum));
  fmt::print("{}", report.text());
}

// For models of which a GPU holds one: all rounds of a side, then it gives the memory back.
void measure_in_turn(ModelSides& sides, const ModelOptions& options) {
  for_each(sides, [&](ModelSide& side) {
    begin_timed(side, options);
    for (int round = 0; round < options.turns.rounds; ++round) {
      measure_once(side, options);
      fmt::print(stderr, "{}: {:.2f} ms\n", side.name, median(side.rounds.back()));
    }
    break_down(side, options);
    if (options.kernels > 0) show_kernels(side, options);
    side.crew.ask({{"do", "drop"}});
  });
  compare_first(sides, options);
}

void measure_saves(ModelSides& sides, const Scratch& scratch) {
  for_each(sides, [&](ModelSide& side) {
    const json answer = side.crew.ask(
        {{"do", "save"}, {"folder", scratch.file("saves-" + side.name)}, {"saves", kSaves}});
    side.stalls = answer.at("stalls");
  });
  for (const ModelSide& side : sides)
    for (std::size_t i = 0; i < side.stalls.size(); ++i) {
      const json& stall = side.stalls[i];
      fmt::print(
          "{}, asynchronous save {}: stall {:.1f} ms, host blocked {:.1f} ms, written in "
          "{:.0f} ms\n",
          side.name, i + 1, stall.at("stall_ms").get<double>(),
          stall.at("blocked_ms").get<double>(), stall.at("write_ms").get<double>());
    }
}

// ---------------------------------------------------------------- results

// Floating-point operations per second of dense bf16 matrix products, from NVIDIA's data sheets.
// The first name that the device's name contains decides.
double peak_flops(const ModelSettings& settings, const std::string& device) {
  static const std::pair<const char*, double> table[] = {
      {"GH200", 989e12}, {"H200", 989e12},  {"H100 PCIe", 756e12},
      {"H100", 989e12},  {"B200", 2250e12}, {"A100", 312e12},
      {"L40S", 362e12},  {"L4", 121e12},    {"A10", 125e12}};
  if (settings.dtype == "fp32") return 0;
  for (const auto& [name, flops] : table)
    if (device.find(name) != std::string::npos) return flops;
  return 0;
}

double per_step(const ModelSettings& s) {
  const double samples = static_cast<double>(s.batch_size);
  return s.kind == "resnet" ? samples : samples * static_cast<double>(s.sequence_length);
}

std::string long_name(const ModelSide& side, const ModelSettings& s) {
  const char* wrapper = s.ddp && side.name != kBare ? "DDP" : "no DDP";
  const bool fp8 = s.dtype == "fp8" && side.name != kOursInBf16;
  if (side.ours()) return fmt::format("Lockstep, {}, {}{}", wrapper, s.mode, fp8 ? ", fp8" : "");
  const std::string mode = side.name == "graphs" ? "compile with CUDA graphs"
                           : side.name == "fp8"  ? "compile, linear layers in fp8"
                                                 : side.name;
  return fmt::format("PyTorch, {}, {}", wrapper, mode);
}

Report report_of(const ModelSides& sides, const ModelSettings& s) {
  const json& facts = sides.front().facts;
  const double peak = peak_flops(s, facts.at("device"));
  json all{{"settings", s}};
  all.update(facts);
  if (peak > 0) all["peak_flops_per_s"] = peak;
  Report report(
      s.kind,
      fmt::format("{} {}, {} x {}, {}", s.kind, s.model, s.batch_size, s.sequence_length, s.dtype),
      std::move(all));
  const std::string unit = s.kind == "resnet" ? "samples/s" : "tokens/s";
  for (const ModelSide& side : sides) {
    if (!side.measured()) continue;
    const std::vector<double> ms = side.all_ms();
    const double p50 = median(ms), bytes = side.memory.at("peak_bytes");
    const double mfu = peak > 0 ? facts.at("flops").get<double>() / p50 * 1e3 / peak : 0;
    Row& row = report.row(long_name(side, s))
                   .value("contender", side.name)
                   .value("ms", side.rounds)
                   .value("first_losses", side.first_losses)
                   .value("peak_bytes", bytes)
                   .value("reserved_bytes", side.memory.at("reserved_bytes"))
                   .number("steps", static_cast<double>(ms.size()))
                   .spread("ms", ms, 2)
                   .number(unit, per_step(s) / p50 * 1e3, 0,
                           s.kind == "resnet" ? "samples_per_s" : "tokens_per_s")
                   .number("MFU %", mfu > 0 ? std::optional(100 * mfu) : std::nullopt, 1);
    if (mfu > 0) row.value("mfu", mfu);
    row.number("peak GiB", bytes > 0 ? std::optional(bytes / (1 << 30)) : std::nullopt, 2);
    for (const std::string part : {"forward", "backward", "optimizer"}) {
      const std::string key = part + "_ms";
      const bool known = side.breakdown.contains(key);
      row.number(part + " ms", known ? std::optional<double>(side.breakdown[key]) : std::nullopt, 2,
                 key);
    }
    row.ratio("ours / this", over(side.medians(), sides.front().medians()), "ours_times_this");
    if (!side.stalls.empty()) row.value("save_stalls", side.stalls);
  }
  return report;
}

// ---------------------------------------------------------------- losses

// The loss of every step: for each side as it would be timed, and for the same steps in fp32
// without compiling. PyTorch's eager run is made twice, because ours is compared with its spread.
void write_losses(ModelSides& sides, const ModelOptions& options) {
  std::vector<std::string> names;
  std::vector<std::vector<double>> columns;
  const auto add = [&](ModelSide& side, const std::string& name, const json& order) {
    side.crew.ask(order);
    const json steps = train_order(options.steps, options.settings.batch_size);
    columns.push_back(losses_of(side.crew.ask(steps)));
    names.push_back(name);
  };
  for_each(sides, [&](ModelSide& side) {
    add(side, side.name, timed_order(options, side));
    if (!side.ours() && side.name == "eager") add(side, "eager again", timed_order(options, side));
  });
  ModelSide* peer = peer_of(sides);
  ModelSide& reference = peer != nullptr ? *peer : sides.front();
  add(reference, "fp32", fp32_order(options, reference));

  Report all("losses", "step");
  for (int step = 0; step < options.steps; ++step) {
    Row& row = all.row(fmt::format("{}", step + 1));
    for (std::size_t k = 0; k < names.size(); ++k)
      row.text(names[k], fmt::format("{:.7g}", columns[k].at(static_cast<std::size_t>(step))));
  }
  write_file_atomically(options.losses, all.csv());
  Report report("losses", fmt::format("losses of {} steps", options.steps));
  for (std::size_t k = 0; k < names.size(); ++k) {
    std::vector<double> away;
    for (std::size_t i = 0; i < columns[k].size(); ++i)
      away.push_back(std::abs(columns[k][i] - columns.back()[i]));
    const auto worst = std::max_element(away.begin(), away.end());
    report.row(names[k])
        .number("first", columns[k].front(), 4)
        .number("last", columns[k].back(), 4)
        .number("mean |this - fp32|",
                std::accumulate(away.begin(), away.end(), 0.0) / options.steps, 5)
        .number("max |this - fp32|", *worst, 5)
        .number("at step", static_cast<double>(worst - away.begin() + 1));
  }
  fmt::print("{}every loss is in {}\n", report.text(), options.losses);
}

// ---------------------------------------------------------------- the whole

int run_sides(const ModelOptions& options, const Options& output,
              const std::map<std::string, double>& wanted) {
  const Scratch scratch;
  ModelSettings settings = options.settings;
  if (options.bare || options.bf16 || !options.peer.empty() || !options.losses.empty())
    settings.start = scratch.file("start");
  ModelSides sides;
  sides.emplace_back(kUs, settings);
  if (options.bare) sides.emplace_back(kBare, settings);
  if (options.bf16) sides.emplace_back(kOursInBf16, settings);
  if (!options.peer.empty())
    for (const std::string& mode : options.peer_modes) sides.emplace_back(mode, settings);
  for_each(sides, [](ModelSide& side) { side.crew.wait_ready(); });
  if (!settings.start.empty()) sides.front().crew.ask({{"do", "write"}});
  verify(sides, options);
  if (!options.losses.empty()) {
    write_losses(sides, options);
  } else {
    if (options.one_at_a_time) {
      measure_in_turn(sides, options);
    } else {
      for_each(sides, [&](ModelSide& side) { begin_timed(side, options); });
      compare_first(sides, options);
      measure(sides, options);
      if (options.kernels > 0)
        for_each(sides, [&](ModelSide& side) { show_kernels(side, options); });
    }
    if (options.save_stall) measure_saves(sides, scratch);
    report_of(sides, options.settings).publish(output);
  }
  Goals goals(settings.kind);
  bool failed = false;
  for (ModelSide& side : sides) {
    failed |= side.failed;
    if (!side.failed) side.crew.finish();
    if (const auto found = wanted.find(side.name); found != wanted.end())
      goals.at_least(fmt::format("ours / {}", side.name),
                     side.measured() ? over(side.medians(), sides.front().medians()).p50 : 0,
                     found->second);
  }
  return failed ? 1 : goals.exit_code();
}

// Names of the presets of one kind; a preset's sizes are the defaults.
std::vector<std::string> preset_names(const std::string& kind) {
  std::vector<std::string> names;
  for (const ModelPreset& preset : kPresets)
    if (preset.kind == kind) names.emplace_back(preset.name);
  return names;
}

void complete(ModelSettings& settings) {
  for (const ModelPreset& preset : kPresets) {
    if (preset.kind != settings.kind || preset.name != settings.model) continue;
    if (settings.batch_size == 0) settings.batch_size = preset.batch_size;
    if (settings.sequence_length == 0) settings.sequence_length = preset.sequence_length;
  }
}

void add_model_options(Options& options, ModelSettings& s) {
  const bool images = s.kind == "resnet";
  options.text("--model", s.model, "the model's size", preset_names(s.kind));
  options.number("--batch_size", s.batch_size, 0, 1 << 20, "samples per step; 0: the model's own");
  options.number(images ? "--image_size" : "--sequence_length", s.sequence_length, 0, 1 << 20,
                 images ? "height and width in pixels; 0: the model's own"
                        : "tokens per sample; 0: the model's own");
  if (images)
    options.text("--dtype", s.dtype, "of matrix products, by autocast; fp32 may use TF32",
                 {"bf16", "fp32"});
  else
    options.text("--dtype", s.dtype,
                 "of matrix products, by autocast; fp32 may use TF32; fp8: bf16 with our linear "
                 "layers in fp8, beside peers in bf16",
                 {"bf16", "fp32", "fp8"});
  if (!images)
    options.text("--fp8_recipe", s.fp8_recipe, "one scale for a tensor, or one for each row",
                 {"tensorwise", "rowwise"});
  options.device(s.device);
  options.text(
      "--mode", s.mode,
      "how our steps are taken: as one CUDA graph, as written, or without fused operations",
      {std::begin(kModes), std::end(kModes)});
  options.flag("!--no-ddp", s.ddp, "the bare model on all sides, without DistributedDataParallel");
  options.flag("--force-reducer", s.force_reducer,
               "our wrapper works as with several ranks, although there is one");
  options.positive("--lr", s.lr, "AdamW's learning rate, on all sides");
  if (!images)
    options.flag("--residual_in_fp32", s.residual_in_fp32,
                 "our residual stream is float32, as PyTorch's is under autocast; else bfloat16");
  if (s.kind == "gpt")
    options.number("--vocab_size", s.vocab_size, 2, 1 << 20,
                   "GPT-2 has 50257, often padded to 50304");
  if (s.kind != "lora") return;
  options.number("--lora_dropout", s.lora_dropout, 0, 0.99, "of the adapters, on all sides");
  options.flag("!--no-peft", s.peft,
               "let the peer use its own modules, also where transformers and PEFT are there");
}

void add_run_options(Options& options, ModelOptions& o) {
  options.number("--steps", o.steps, 1, 1e6, "timed steps per block");
  options.number("--rounds", o.turns.rounds, 1, 100000, "blocks of each side");
  options.number("--warmup", o.warmup, 0, 100000, "steps before each block that are not timed");
  options.text("--peer", o.peer, "also run this one, from the same weights on the same data",
               {"pytorch"});
  options.list("--peer-modes", o.peer_modes,
               "of eager, compile, graphs (mode=reduce-overhead) and fp8 (compiled, with linear "
               "layers by torch._scaled_mm)",
               {"eager", "compile", "graphs", "fp8"});
  options.flag("--bare", o.bare, "also our model without DistributedDataParallel, by turns");
  options.flag("--bf16", o.bf16, "with --dtype fp8: also our model in bf16");
  options.flag("--one-at-a-time", o.one_at_a_time,
               "the sides do not take turns, so that one model at a time is in memory");
  options.flag("--save-stall", o.save_stall,
               "also what asynchronous checkpoints cost the step after them, the first included");
  options.number("--kernels", o.kernels, 0, 10000,
                 "also list this many of the kernels that take most time");
  options.text("--losses", o.losses,
               "instead of timing, train --steps steps and write the loss of each to this file");
  options.text("--corrupt", o.corrupt,
               "let this side train differently, to see that it is refused");
}

struct Kind {
  const char *noun, *arithmetic;
};
const std::map<std::string, Kind> kKinds{
    {"gpt", {"a GPT-2", "6N + 12LTC a token: N parameters, L layers, T tokens, C channels"}},
    {"llama", {"a Llama", "6N + 12LTC a token: N parameters, L layers, T tokens, C channels"}},
    {"lora",
     {"Phi-3 with LoRA adapters",
      "4N + 6n + 12LTC a token: N frozen and n trained parameters, L layers, T tokens, C "
      "channels"}},
    {"resnet",
     {"a ResNet", "6 for each multiplication of a forward's convolutions and last layer"}}};

int model_main(const std::string& kind, int argc, char** argv) {
  const bool gpu = cuda_device_count() > 0;
  ModelOptions o;
  std::string require;
  o.settings.kind = kind;
  o.settings.device = gpu ? "cuda" : "cpu";
  o.settings.mode = gpu ? "captured" : "eager";
  o.settings.model = gpu ? preset_names(kind).front() : "tiny";
  o.peer_modes = gpu ? std::vector<std::string>{"eager", "compile", "graphs"}
                     : std::vector<std::string>{"eager"};
  Options options(fmt::format(
      "Training steps of {}, beside PyTorch's on the same weights and data. MFU is the model's "
      "arithmetic ({}) over the device's peak of dense bf16 products.",
      kKinds.at(kind).noun, kKinds.at(kind).arithmetic));
  add_model_options(options, o.settings);
  add_run_options(options, o);
  options.text("--require", require, "MODE:RATIO,...: fail when ours / that mode is below");
  if (const auto code = options.parse(argc, argv)) return *code;
  complete(o.settings);
  if (!o.settings.ddp && (o.settings.force_reducer || o.bare))
    throw UsageError("bench", "--force-reducer and --bare need the wrapper. Drop --no-ddp.");
  if (o.one_at_a_time && o.save_stall)
    throw UsageError("bench", "--save-stall needs all models at the end. Drop --one-at-a-time.");
  const auto wanted = parse_goals(
      require, o.peer.empty() ? std::vector<std::string>{} : o.peer_modes,
      {"MODE", "compile:1.05,graphs:1", "", "Add --peer pytorch and it to --peer-modes."});
  prepare_device(o.settings.device);
  return run_sides(o, options, wanted);
}

}  // namespace

int gpt_main(int argc, char** argv) {
  return model_main("gpt", argc, argv);
}
int llama_main(int argc, char** argv) {
  return model_main("llama", argc, argv);
}
int lora_main(int argc, char** argv) {
  return model_main("lora", argc, argv);
}
int resnet_main(int argc, char** argv) {
  return model_main("resnet", argc, argv);
}

}  // namespace lockstep::bench
