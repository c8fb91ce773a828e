// lockstep bench gpt, lora and resnet: training steps of whole models, beside PyTorch's on the same
// weights and data. All sides stay alive for the whole run and take turns in blocks of steps.
#include "bench/models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <sstream>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/goals.h"
#include "bench/scratch.h"
#include "bench/stats.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;
using std::chrono::minutes;

constexpr const char* kUs = "lockstep";
constexpr const char* kBare = "bare";  // ours without the wrapper
constexpr const char* kPeerModes[] = {"eager", "compile", "graphs"};

constexpr int kVerifiedSteps = 3;
// Relative tolerances for fp32 losses: sums in another order, then AdamW steps on gradients that
// differ by as much. Twice the learning rate shows as 6e-4 in the second step of the tiny GPT, and
// as more in larger ones.
constexpr double kFirstTolerance = 1e-4, kLaterTolerance = 3e-4;
// For the model as it is timed: in bf16 each side rounds at different places.
constexpr double kTimedTolerance = 5e-3;
constexpr int kBreakdownSteps = 5;  // at most
constexpr int kSaves = 4;

struct Options {
  ModelSettings settings;
  int steps = 20;
  int rounds = 5;
  int warmup = 3;
  std::string peer;
  std::vector<std::string> peer_modes;
  bool bare = false;
  bool save_stall = false;
  int kernels = 0;  // rows of their table
  std::string corrupt, require, losses, csv, json;
};

// One side: our worker, or PyTorch in one mode.
struct Side {
  Side(CrewOptions crew_options, const std::string& socket)
      : name(crew_options.name), crew(crew_options, socket) {}

  bool ours() const { return name == kUs || name == kBare; }
  // Throws Error when it cannot do it.
  json ask(const json& order, minutes limit) {
    const json answer = json::parse(crew.request(order.dump(), limit).at(0));
    if (answer.contains("error"))
      throw Error("bench", fmt::format("{}: {}", name, answer["error"].get<std::string>()));
    return answer;
  }

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
};
using Sides = std::deque<Side>;

std::vector<double> losses_of(const json& answer) {
  std::vector<double> losses;
  for (const json& loss : answer.at("losses"))
    losses.push_back(loss.is_number() ? loss.get<double>() : NAN);  // JSON has no NaN
  return losses;
}

// A peer that fails, for example out of memory, is reported and skipped from then on.
void for_each(Sides& sides, const std::function<void(Side&)>& body, std::size_t first = 0) {
  for (std::size_t k = 0; k < sides.size(); ++k) {
    Side& side = sides[(k + first) % sides.size()];
    if (side.failed) continue;
    try {
      body(side);
    } catch (const Error& error) {
      if (side.ours()) throw;
      side.failed = true;
      fmt::print(stderr, "{} is skipped: {}\n", side.name, error.what());
    }
  }
}

// The first of PyTorch's sides that works.
Side* peer_of(Sides& sides) {
  for (Side& side : sides)
    if (!side.ours() && !side.failed) return &side;
  return nullptr;
}

// ---------------------------------------------------------------- start and verification

json new_order(const Options& options, const Side& side) {
  const ModelSettings& s = options.settings;
  return {{"do", "new"},
          {"dtype", s.dtype},
          {"tf32", true},
          {"mode", side.ours() ? s.mode : side.name},
          {"lr", s.lr * (options.corrupt == side.name ? 2 : 1)},
          {"ddp", s.ddp && side.name != kBare},
          {"exact", false}};
}

// The order for the model that a bf16 run is compared with.
json fp32_order(const Options& options, const Side& side) {
  json order = new_order(options, side);
  order.update({{"dtype", "fp32"}, {"tf32", false}, {"mode", "eager"}});
  return order;
}

// The order for the same model without anything that is allowed to differ.
json exact_order(const Options& options, const Side& side) {
  json order = fp32_order(options, side);
  order["exact"] = true;
  return order;
}

json train_order(std::int64_t steps, std::int64_t batch_size) {
  return {{"do", "train"}, {"first", 0}, {"steps", steps}, {"batch_size", batch_size}};
}

// The largest relative difference; Error if it exceeds the tolerances.
double compare(const Side& side, const std::vector<double>& ours, const std::vector<double>& other,
               double first, double later) {
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
void verify(Sides& sides, const Options& options) {
  const auto peer =
      std::find_if(sides.begin() + 1, sides.end(), [](const Side& side) { return !side.failed; });
  if (peer == sides.end()) return;
  // A batch norm needs several samples.
  const std::int64_t most = options.settings.kind == "resnet" ? 8 : 2;
  const std::int64_t batch = std::min(options.settings.batch_size, most);
  const auto train = [&](Side& side) {
    side.ask(exact_order(options, side), minutes(20));
    return losses_of(side.ask(train_order(kVerifiedSteps, batch), minutes(20)));
  };
  const std::vector<double> ours = train(sides.front()), other = train(*peer);
  const double worst = compare(*peer, ours, other, kFirstTolerance, kLaterTolerance);
  fmt::print(stderr, "verified: {} and pytorch train the same in fp32, losses differ by {:.1g}\n",
             kUs, worst);
}

void begin_timed(Sides& sides, const Options& options) {
  for_each(sides, [&](Side& side) {
    side.facts = side.ask(new_order(options, side), minutes(20));
    side.first_losses =
        losses_of(side.ask(train_order(kVerifiedSteps, options.settings.batch_size), minutes(30)));
    fmt::print(stderr, "{}: first losses {:.5f}\n", side.name, fmt::join(side.first_losses, " "));
  });
  for (const Side& side : sides)
    if (!side.failed)
      compare(side, sides.front().first_losses, side.first_losses, kTimedTolerance,
              kTimedTolerance);
}

// ---------------------------------------------------------------- measurement

void measure(Sides& sides, const Options& options) {
  const json order{{"do", "time"}, {"warmup", options.warmup}, {"steps", options.steps}};
  for (int round = 0; round < options.rounds; ++round) {
    std::string shown;
    const auto turn = [&](Side& side) {
      const json answer = side.ask(order, minutes(30));
      if (!answer.at("loss").is_number())
        throw Error("bench", fmt::format("the loss of {} is not finite", side.name));
      side.rounds.push_back(answer.at("ms").get<std::vector<double>>());
      side.memory = answer;
      shown += fmt::format(" {} {:.2f}", side.name, median(side.rounds.back()));
    };
    for_each(sides, turn, static_cast<std::size_t>(round));
    fmt::print(stderr, "round {}/{}:{} ms\n", round + 1, options.rounds, shown);
  }
  for_each(sides, [&](Side& side) {
    side.breakdown = side.ask(
        {{"do", "breakdown"}, {"steps", std::min(options.steps, kBreakdownSteps)}}, minutes(10));
  });
}

void measure_saves(Sides& sides, const Scratch& scratch) {
  for_each(sides, [&](Side& side) {
    const json answer = side.ask(
        {{"do", "save"}, {"folder", scratch.file("saves-" + side.name)}, {"saves", kSaves}},
        minutes(30));
    side.stalls = answer.at("stalls");
  });
  for (const Side& side : sides)
    for (std::size_t i = 0; i < side.stalls.size(); ++i) {
      const json& stall = side.stalls[i];
      fmt::print(
          "{}, asynchronous save {}: stall {:.1f} ms, host blocked {:.1f} ms, written in "
          "{:.0f} ms\n",
          side.name, i + 1, stall.at("stall_ms").get<double>(),
          stall.at("blocked_ms").get<double>(), stall.at("write_ms").get<double>());
    }
}

// Shows the kernels that take most of a step.
void show_kernels(Sides& sides, const Options& options) {
  for_each(sides, [&](Side& side) {
    const json answer = side.ask({{"do", "kernels"}, {"steps", kBreakdownSteps}}, minutes(10));
    std::vector<json> all = answer.at("kernels");
    const auto ms = [](const json& kernel) { return kernel.at("ms").get<double>(); };
    std::sort(all.begin(), all.end(), [&](const json& a, const json& b) { return ms(a) > ms(b); });
    double sum = 0;
    for (const json& kernel : all) sum += ms(kernel);
    Table table({fmt::format("kernels of {}, {:.2f} ms in all", side.name, sum), "in a step", "ms",
                 "share"});
    for (std::size_t i = 0; i < all.size() && i < static_cast<std::size_t>(options.kernels); ++i)
      table.add({all[i].at("name").get<std::string>().substr(0, 100),
                 fmt::format("{:.1f}", all[i].at("count").get<double>()),
                 fmt::format("{:.3f}", ms(all[i])),
                 fmt::format("{:.1f} %", 100 * ms(all[i]) / sum)});
    publish(table, "");
  });
}

// ---------------------------------------------------------------- results

// Floating-point operations per second of dense bf16 matrix products, from NVIDIA's data sheets.
// The first name that the device's name contains decides.
double peak_flops(const ModelSettings& settings, const std::string& device) {
  static const std::pair<const char*, double> table[] = {
      {"GH200", 989e12}, {"H200", 989e12},  {"H100 PCIe", 756e12},
      {"H100", 989e12},  {"B200", 2250e12}, {"A100", 312e12},
      {"L40S", 362e12},  {"L4", 121e12},    {"A10", 125e12}};
  if (settings.dtype != "bf16") return 0;
  for (const auto& [name, flops] : table)
    if (device.find(name) != std::string::npos) return flops;
  return 0;
}

// How many times faster ours is, round by round.
std::optional<Summary> speedup(const Side& ours, const Side& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(ours.rounds.size(), other.rounds.size()); ++i)
    ratios.push_back(median(other.rounds[i]) / median(ours.rounds[i]));
  if (ratios.empty()) return std::nullopt;
  return summarize(ratios);
}

double per_step(const ModelSettings& s) {
  const double samples = static_cast<double>(s.batch_size);
  return s.kind == "resnet" ? samples : samples * static_cast<double>(s.sequence_length);
}

const char* unit_of(const ModelSettings& s) {
  return s.kind == "resnet" ? "samples/s" : "tokens/s";
}

std::string long_name(const Side& side, const ModelSettings& s) {
  const char* wrapper = s.ddp && side.name != kBare ? "DDP" : "no DDP";
  if (side.ours()) return fmt::format("Lockstep, {}, {}", wrapper, s.mode);
  const std::string mode = side.name == "graphs" ? "compile with CUDA graphs" : side.name;
  return fmt::format("PyTorch, {}, {}", wrapper, mode);
}

Table table_of(const Sides& sides, const ModelSettings& s) {
  Table table(
      {fmt::format("{} {}, {} x {}, {}", s.kind, s.model, s.batch_size, s.sequence_length, s.dtype),
       "steps", "min ms", "p50 ms", "p99 ms", "max ms", unit_of(s), "MFU %", "peak GiB",
       "forward ms", "backward ms", "optimizer ms", "ours / this", "p25", "p75"});
  const double peak = peak_flops(s, sides.front().facts.at("device"));
  for (const Side& side : sides) {
    if (side.failed || side.rounds.empty()) continue;
    const Summary ms = summarize(side.all_ms());
    std::vector<std::string> cells{long_name(side, s), fmt::format("{}", side.all_ms().size())};
    for (const double value : {ms.min, ms.p50, ms.p99, ms.max})
      cells.push_back(fmt::format("{:.2f}", value));
    cells.push_back(fmt::format("{:.0f}", per_step(s) / ms.p50 * 1e3));
    const double flops = sides.front().facts.at("flops").get<double>() / ms.p50 * 1e3;
    cells.push_back(peak > 0 ? fmt::format("{:.1f}", 100 * flops / peak) : "-");
    const double bytes = side.memory.at("peak_bytes");
    cells.push_back(bytes > 0 ? fmt::format("{:.2f}", bytes / (1 << 30)) : "-");
    for (const char* part : {"forward_ms", "backward_ms", "optimizer_ms"})
      cells.push_back(side.breakdown.contains(part)
                          ? fmt::format("{:.2f}", side.breakdown[part].get<double>())
                          : "-");
    const Summary ratio = speedup(sides.front(), side).value();
    for (const double value : {ratio.p50, ratio.p25, ratio.p75})
      cells.push_back(fmt::format("{:.3f}", value));
    table.add(std::move(cells));
  }
  return table;
}

std::string json_of(const Sides& sides, const ModelSettings& s) {
  const json& facts = sides.front().facts;
  const double peak = peak_flops(s, facts.at("device"));
  const std::string rate = s.kind == "resnet" ? "samples_per_s" : "tokens_per_s";
  json document{{"benchmark", s.kind}, {"settings", s}};
  document.update(facts);
  if (peak > 0) document["peak_flops_per_s"] = peak;
  document["settings"].erase("start");
  for (const Side& side : sides) {
    if (side.failed || side.rounds.empty()) continue;
    const double p50 = median(side.all_ms());
    const Summary ratio = speedup(sides.front(), side).value();
    json row{{"contender", side.name},
             {"ms", side.rounds},
             {"p50_ms", p50},
             {rate, per_step(s) / p50 * 1e3},
             {"peak_bytes", side.memory.at("peak_bytes")},
             {"reserved_bytes", side.memory.at("reserved_bytes")},
             {"first_losses", side.first_losses},
             {"ours_times_this", ratio.p50},
             {"ours_times_this_p25", ratio.p25},
             {"ours_times_this_p75", ratio.p75}};
    if (peak > 0) row["mfu"] = facts.at("flops").get<double>() / p50 * 1e3 / peak;
    row.update(side.breakdown);
    if (!side.stalls.empty()) row["save_stalls"] = side.stalls;
    document["rows"].push_back(std::move(row));
  }
  return document.dump(1) + "\n";
}

// ---------------------------------------------------------------- losses

// The loss of every step: for each side as it would be timed, and for the same steps in fp32
// without compiling. PyTorch's eager run is made twice, because ours is compared with its spread.
void write_losses(Sides& sides, const Options& options) {
  std::vector<std::string> names;
  std::vector<std::vector<double>> columns;
  const auto add = [&](Side& side, const std::string& name, const json& order) {
    side.ask(order, minutes(20));
    const json steps = train_order(options.steps, options.settings.batch_size);
    columns.push_back(losses_of(side.ask(steps, minutes(60))));
    names.push_back(name);
  };
  for_each(sides, [&](Side& side) {
    add(side, side.name, new_order(options, side));
    if (!side.ours() && side.name == "eager") add(side, "eager again", new_order(options, side));
  });
  Side* peer = peer_of(sides);
  Side& reference = peer != nullptr ? *peer : sides.front();
  add(reference, "fp32", fp32_order(options, reference));

  std::vector<std::string> heads{"step"};
  heads.insert(heads.end(), names.begin(), names.end());
  Table all(heads);
  for (int step = 0; step < options.steps; ++step) {
    std::vector<std::string> cells{fmt::format("{}", step + 1)};
    for (const auto& column : columns)
      cells.push_back(fmt::format("{:.7g}", column.at(static_cast<std::size_t>(step))));
    all.add(std::move(cells));
  }
  write_file_atomically(options.losses, all.csv());
  Table table({fmt::format("losses of {} steps", options.steps), "first", "last",
               "mean |this - fp32|", "max |this - fp32|", "at step"});
  for (std::size_t k = 0; k < names.size(); ++k) {
    double sum = 0, most = 0;
    std::size_t worst = 0;
    for (std::size_t i = 0; i < columns[k].size(); ++i) {
      const double difference = std::abs(columns[k][i] - columns.back()[i]);
      sum += difference;
      if (difference > most) worst = i;
      most = std::max(most, difference);
    }
    table.add({names[k], fmt::format("{:.4f}", columns[k].front()),
               fmt::format("{:.4f}", columns[k].back()), fmt::format("{:.5f}", sum / options.steps),
               fmt::format("{:.5f}", most), fmt::format("{}", worst + 1)});
  }
  publish(table, "");
  fmt::print("every loss is in {}\n", options.losses);
}

// ---------------------------------------------------------------- the whole

int run_sides(const Options& options, const std::map<std::string, double>& wanted) {
  const Scratch scratch;
  ModelSettings settings = options.settings;
  if (options.bare || !options.peer.empty() || !options.losses.empty())
    settings.start = scratch.file("start");
  write_file_atomically(scratch.file("settings"), json(settings).dump());
  Sides sides;
  const auto start = [&](const std::string& name, std::vector<std::string> command) {
    command.insert(command.end(), {"--settings", scratch.file("settings")});
    sides.emplace_back(CrewOptions{name, 1, std::move(command)}, scratch.file("orders-" + name));
  };
  start(kUs, {program_beside("lockstep-bench"), "_model-rank"});
  if (options.bare) start(kBare, {program_beside("lockstep-bench"), "_model-rank"});
  if (!options.peer.empty())
    for (const std::string& mode : options.peer_modes)
      start(mode, {env::get("LOCKSTEP_PYTHON").value_or(default_python()),
                   peer(settings.kind + "_peer.py")});
  for_each(sides, [](Side& side) { side.crew.wait_ready(minutes(5)); });
  if (!settings.start.empty()) sides.front().ask({{"do", "write"}}, minutes(20));
  verify(sides, options);
  if (!options.losses.empty()) {
    write_losses(sides, options);
  } else {
    begin_timed(sides, options);
    measure(sides, options);
    if (options.save_stall) measure_saves(sides, scratch);
    if (options.kernels > 0) show_kernels(sides, options);
    publish(table_of(sides, settings), options.csv);
    if (!options.json.empty()) write_file_atomically(options.json, json_of(sides, settings));
  }
  Goals goals(settings.kind);
  bool failed = false;
  for (Side& side : sides) {
    failed |= side.failed;
    if (!side.failed) side.crew.finish();
    const auto found = wanted.find(side.name);
    if (found == wanted.end()) continue;
    const auto ratio = speedup(sides.front(), side);
    goals.at_least(fmt::format("ours / {}", side.name), ratio ? ratio->p50 : 0, found->second);
  }
  return failed ? 1 : goals.exit_code();
}

// "compile:1.05,graphs:1"; each mode must be among those that run.
std::map<std::string, double> parse_wanted(const Options& options) {
  std::map<std::string, double> wanted;
  std::istringstream stream(options.require);
  for (std::string part; std::getline(stream, part, ',');) {
    const auto colon = part.find(':');
    const std::string mode = part.substr(0, colon);
    const std::string ratio = colon == std::string::npos ? "" : part.substr(colon + 1);
    if (!positive_problem(ratio).empty())
      throw UsageError("bench", "'{}' is not MODE:RATIO. Write compile:1.05,graphs:1.", part);
    const auto& modes = options.peer_modes;
    if (options.peer.empty() || std::find(modes.begin(), modes.end(), mode) == modes.end())
      throw UsageError("bench",
                       "{} is required but not measured. Add --peer pytorch and {} to "
                       "--peer-modes.",
                       mode, mode);
    wanted[mode] = std::stod(ratio);
  }
  return wanted;
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

void add_model_options(CLI::App& app, ModelSettings& s) {
  const bool images = s.kind == "resnet";
  app.add_option("--model", s.model, "the model's size")
      ->check(CLI::IsMember(preset_names(s.kind)));
  app.add_option("--batch_size", s.batch_size, "samples per step; 0: the model's own")
      ->check(CLI::Range(0, 1 << 20));
  app.add_option(images ? "--image_size" : "--sequence_length", s.sequence_length,
                 images ? "height and width in pixels; 0: the model's own"
                        : "tokens per sample; 0: the model's own")
      ->check(CLI::Range(0, 1 << 20));
  app.add_option("--dtype", s.dtype, "of matrix products, by autocast; fp32 may use TF32")
      ->check(CLI::IsMember(std::vector<std::string>{"bf16", "fp32"}));
  app.add_option("--device", s.device, "cpu, cuda or cuda:N")->check(device_problem);
  app.add_option(
         "--mode", s.mode,
         "how our steps are taken: as one CUDA graph, as written, or without fused operations")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kModes), std::end(kModes))));
  app.add_flag("!--no-ddp", s.ddp, "the bare model on all sides, without DistributedDataParallel");
  app.add_flag("--force-reducer", s.force_reducer,
               "our wrapper works as with several ranks, although there is one");
  app.add_option("--lr", s.lr, "AdamW's learning rate, on all sides")->check(CLI::PositiveNumber);
  if (!images)
    app.add_flag("--residual_in_fp32", s.residual_in_fp32,
                 "our residual stream is float32, as PyTorch's is under autocast; else bfloat16");
  if (s.kind == "gpt")
    app.add_option("--vocab_size", s.vocab_size, "GPT-2 has 50257, often padded to 50304")
        ->check(CLI::Range(2, 1 << 20));
  if (s.kind != "lora") return;
  app.add_option("--lora_dropout", s.lora_dropout, "of the adapters, on all sides")
      ->check(CLI::Range(0.0, 0.99));
  app.add_flag("!--no-peft", s.peft,
               "let the peer use its own modules, also where transformers and PEFT are there");
}

void add_run_options(CLI::App& app, Options& o) {
  app.add_option("--steps", o.steps, "timed steps per block")->check(CLI::Range(1, 1000000));
  app.add_option("--rounds", o.rounds, "blocks of each side")->check(CLI::Range(1, 100000));
  app.add_option("--warmup", o.warmup, "steps before each block that are not timed")
      ->check(CLI::Range(0, 100000));
  app.add_option("--peer", o.peer, "also run this one, from the same weights on the same data")
      ->check(CLI::IsMember(std::vector<std::string>{"pytorch"}));
  app.add_option("--peer-modes", o.peer_modes,
                 "of eager, compile and graphs (mode=reduce-overhead)")
      ->delimiter(',')
      ->check(
          CLI::IsMember(std::vector<std::string>(std::begin(kPeerModes), std::end(kPeerModes))));
  app.add_flag("--bare", o.bare, "also our model without DistributedDataParallel, by turns");
  app.add_flag("--save-stall", o.save_stall,
               "also what asynchronous checkpoints cost the step after them, the first included");
  app.add_option("--kernels", o.kernels, "also list this many of the kernels that take most time")
      ->check(CLI::Range(0, 10000));
  app.add_option("--losses", o.losses,
                 "instead of timing, train --steps steps and write the loss of each to this file");
  app.add_option("--corrupt", o.corrupt,
                 "let this side train differently, to see that it is refused");
  app.add_option("--require", o.require, "MODE:RATIO,...: fail when ours / that mode is below");
  app.add_option("--csv", o.csv, "also write the table to this file");
  app.add_option("--json", o.json, "also write the time of every step to this file");
}

int model_main(const std::string& kind, int argc, char** argv) {
  const bool gpu = cuda_device_count() > 0;
  Options options;
  options.settings.kind = kind;
  options.settings.device = gpu ? "cuda" : "cpu";
  options.settings.mode = gpu ? "captured" : "eager";
  options.settings.model = gpu ? preset_names(kind).front() : "tiny";
  options.peer_modes = gpu ? std::vector<std::string>{"eager", "compile", "graphs"}
                           : std::vector<std::string>{"eager"};
  CLI::App app{fmt::format(
      "Training steps of {}, beside PyTorch's on the same weights and data. MFU is the model's "
      "arithmetic ({}) over the device's peak of dense bf16 products.",
      kind == "gpt"    ? "a GPT-2"
      : kind == "lora" ? "Phi-3 with LoRA adapters"
                       : "a ResNet",
      kind == "gpt"    ? "6N + 12LTC a token: N parameters, L layers, T tokens, C channels"
      : kind == "lora" ? "4N + 6n + 12LTC a token: N frozen and n trained parameters, L layers, T "
                         "tokens, C channels"
                       : "6 for each multiplication of a forward's convolutions and last layer")};
  add_model_options(app, options.settings);
  add_run_options(app, options);
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  complete(options.settings);
  if (!options.settings.ddp && (options.settings.force_reducer || options.bare))
    throw UsageError("bench", "--force-reducer and --bare need the wrapper. Drop --no-ddp.");
  const auto wanted = parse_wanted(options);
  prepare_device(options.settings.device);
  return run_sides(options, wanted);
}

}  // namespace

int gpt_main(int argc, char** argv) {
  return model_main("gpt", argc, argv);
}
int lora_main(int argc, char** argv) {
  return model_main("lora", argc, argv);
}
int resnet_main(int argc, char** argv) {
  return model_main("resnet", argc, argv);
}

}  // namespace lockstep::bench
