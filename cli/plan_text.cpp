// The output of `lockstep plan`: tables, or JSON.
#include <cmath>
#include <span>

#include "cli/plan.h"

namespace lockstep::cli {
namespace {

std::string gib(std::uint64_t bytes) {
  return fmt::format("{:.2f}", static_cast<double>(bytes) / (1u << 30));
}

std::string duration(double seconds) {
  if (seconds < 120) return fmt::format("{:.1f} s", seconds);
  if (seconds < 2 * 3600) return fmt::format("{:.0f} min", seconds / 60);
  if (seconds < 48 * 3600) return fmt::format("{:.1f} h", seconds / 3600);
  return fmt::format("{:.1f} days", seconds / 86400);
}

std::string large(double value) {
  if (value >= 1e9) return fmt::format("{:.2f} B", value / 1e9);
  if (value >= 1e6) return fmt::format("{:.1f} M", value / 1e6);
  return fmt::format("{:.0f}", value);
}

std::string plan_head_text(const PlanReport& r) {
  const plan::Training& t = r.training;
  const plan::Card& card = r.devices.card;
  const auto total = static_cast<double>(r.parameters.total());
  std::string text = fmt::format(
      "model     {} parameters, {} trained{}; {:.3g} GFLOP a {}\n", large(total),
      r.parameters.frozen == 0 ? "all" : large(static_cast<double>(r.parameters.trainable)),
      r.parameters.unused == 0
          ? ""
          : fmt::format(", {} used by a token",
                        large(total - static_cast<double>(r.parameters.unused))),
      plan::flops_per_token(t.model) / 1e9, r.unit());
  const char* logits = t.model.causal_lm() == nullptr ? ""
                       : t.unfused || card.cpu        ? ", logits as a whole"
                                                      : ", fused, logits in chunks";
  const bool captured = t.captured && !card.cpu && !t.fsdp && t.pipeline * t.tensor == 1;
  text += fmt::format("training  {}{}, gradient checkpointing {}{}{}\n",
                      t.model.length > 1 ? fmt::format("{} tokens a sample, ", t.model.length) : "",
                      t.fp8    ? "fp8 and 16-bit autocast"
                      : t.half ? "16-bit autocast"
                               : "float32",
                      t.checkpointing ? "on"
                      : t.again.any() ? fmt::format("of {}", models::names_of(t.again))
                                      : "off",
                      logits, captured ? ", one CUDA graph" : "");
  text += fmt::format("devices   {} x {}, {} GiB each\n", r.devices.count, card.name,
                      card.memory_bytes > 0 ? gib(card.memory_bytes) : "unknown");
  std::string speed = std::ranges::any_of(r.strategies, &plan::Strategy::measured)
                          ? "speed as measured"
                          : "speed not known: use --probe, or give --tokens-per-second";
  if (r.request.speed.tokens_per_second)
    speed =
        fmt::format("{:.0f} {}s/s measured on one", *r.request.speed.tokens_per_second, r.unit());
  else if (plan::peak_flops(t, card) > 0)
    speed = fmt::format("{:.0f} % of {:.0f} TFLOP/s", 100 * r.utilisation(),
                        plan::peak_flops(t, card) / 1e12);
  return text + fmt::format("assumed   {}; {}\n", speed, r.machine.cluster.text);
}

// The width of the column with the choices' strategies.
int strategy_width(const PlanReport& r, const auto& choices) {
  std::size_t width = 32;
  for (const auto& one : choices) width = std::max(width, r.strategy_text(one.choice).size() + 1);
  return static_cast<int>(width);
}

std::string rows_text(const PlanReport& r) {
  const int width = strategy_width(r, r.rows);
  const bool timed =
      std::ranges::any_of(r.rows, [](const PlanRow& row) { return row.step.has_value(); });
  std::string text =
      fmt::format("\n{:>5}  {:<{}}{:>14}{:>8}{:>10}  {:<5}", r.device_text() + std::string("s"),
                  "strategy", width, "batch x accum", "global", "GiB each", "fits");
  if (timed)
    text += fmt::format("{:>11}{:>12}{:>10}", "ms/step", r.unit() + std::string("s/s"), "speed-up");
  if (timed && r.request.tokens)
    text += fmt::format("{:>18}", large(*r.request.tokens) + " " + r.unit() + "s");
  text += "\n";
  for (const PlanRow& row : r.rows) {
    const plan::Choice& c = row.choice;
    text += fmt::format("{:>5}  {:<{}}{:>14}{:>8}{:>10}  {:<5}", c.gpus, r.strategy_text(c), width,
                        fmt::format("{} x {}", c.batch, c.accumulation), c.global_batch,
                        gib(c.memory.total()), c.fits ? "yes" : "no");
    if (row.step)
      // Rounded down, so that a factor below 2.00 is not shown as 2.00.
      text += fmt::format("{:>11.1f}{:>12.0f}{:>9.2f}x", 1e3 * row.step->total_s(),
                          row.tokens_per_second, std::floor(100 * row.speedup + 1e-9) / 100);
    if (row.step && r.request.tokens)
      text += fmt::format("{:>18}", duration(*r.request.tokens / row.tokens_per_second));
    text += "\n";
  }
  return text;
}

std::string memory_text(const PlanReport& r) {
  const plan::Choice& c = r.rows.back().choice;
  const plan::Memory& m = c.memory;
  std::string text = fmt::format("\nmemory of a {} at its peak ({}), {}:\n", r.device_text(),
                                 m.moment, r.devices_text(c.gpus));
  const auto line = [&](const char* name, std::uint64_t bytes) {
    const bool small = m.total() < (1u << 30) || (bytes > 0 && bytes < (1u << 30));
    text += fmt::format("  {:<34}{:>9}{}\n", name, gib(small ? bytes << 10 : bytes),
                        small ? " MiB" : " GiB");
  };
  line("parameters", m.parameters);
  line("16-bit copies of weights", m.copies);
  line("gradients", m.gradients);
  line("optimizer state", m.optimizer);
  line("activations", m.activations);
  if (r.training.model.causal_lm() != nullptr) line("logits and their gradients", m.head);
  if (!r.devices.card.cpu) {
    line("workspace and fragmentation", m.workspace);
    line(c.replicas() > 1 ? "CUDA and NCCL" : "CUDA", m.context);
  }
  line("together", m.total());
  return text;
}

std::string scale_text(const PlanReport& r) {
  if (r.points.empty()) return "";
  const bool held = r.training.global_batch.has_value();
  std::string text = fmt::format(
      "\nscaling, {}, {}:\n",
      held ? "the global batch is held" : fmt::format("the same work on every {}", r.device_text()),
      r.machine.cluster.text);
  text += fmt::format("{:>7}{:>15}{:>9}{:>11}{:>11}{:>15}{:>11}{:>12}{:>14}\n",
                      r.device_text() + std::string("s"), "batch x accum", "global", "ms/step",
                      "compute", "communication", "exposed", "efficiency",
                      r.unit() + std::string("s/s"));
  for (const plan::ScalePoint& p : r.points) {
    text += fmt::format("{:>7}{:>15}{:>9}", p.choice.gpus,
                        fmt::format("{} x {}", p.choice.batch, p.choice.accumulation),
                        p.choice.global_batch);
    text += p.choice.fits ? fmt::format("{:>11.1f}{:>11.1f}{:>15.1f}{:>11.1f}{:>11.1f}%{:>14.0f}\n",
                                        1e3 * p.step->total_s(), 1e3 * p.step->compute_s,
                                        1e3 * p.step->communication_s, 1e3 * p.step->exposed_s,
                                        100 * p.efficiency, p.tokens_per_second)
                          : "  does not fit\n";
  }
  if (std::ranges::none_of(r.points, [](const auto& p) { return p.choice.fits; })) return text;
  if (r.stops_at > 0)
    return text + fmt::format("efficiency falls below {:.0f} % at {}\n", 100 * kPlanFloor,
                              r.devices_text(r.stops_at));
  return text + fmt::format("efficiency stays above {:.0f} % up to {}{}\n", 100 * kPlanFloor,
                            r.devices_text(plan::most_gpus(r.training)),
                            held ? ", one for each sample of the global batch" : "");
}

std::string changes_text(const PlanReport& r) {
  if (r.fits()) return "";
  if (r.refused())
    return fmt::format(
        "\nAs the file is written lockstep train refuses it on {}: the notes say what to change.\n",
        r.devices_text(r.rows.back().choice.gpus));
  const bool other = r.rows.back().choice.fits;  // what the table shows does
  std::string text = fmt::format("\n{} does not fit ({} GiB are usable).",
                                 other ? "As the file is written it" : "It",
                                 gib(plan::usable_bytes(r.devices.card)));
  if (!r.changes.empty())
    text += fmt::format(" What to change, cheapest first, GiB:\n  {:<58}{:>8}{:>10}  {}\n", "",
                        "alone", "together", "cost") +
            fmt::format("  {:<58}{:>7} {:>9}\n", "as the file is written", gib(r.written_bytes),
                        gib(r.written_bytes));
  for (const plan::Change& c : r.changes)
    text += fmt::format("  {:<58}{:>8}{:>10}{} {}\n", c.text,
                        gib(c.alone_bytes) + (c.alone_fits ? "*" : " "), gib(c.together_bytes),
                        c.together_fits ? "*" : " ", c.cost);
  if (!r.changes.empty() && r.changes.back().together_fits) return text + "  * fits\n";
  if (!r.strategies.empty())
    return text + (r.changes.empty() ? " " : "Even together they do not suffice. ") +
           "The strategies above change more.\n";
  return text + fmt::format("{}Use {}, or a smaller model.\n",
                            r.changes.empty() ? " " : "Even together they do not suffice. ",
                            r.devices.card.cpu ? "a host with more memory, fewer ranks"
                                               : "a card with more memory, more GPUs");
}

std::string strategies_text(const PlanReport& r) {
  if (r.strategies.size() < 2) return "";
  const std::span shown(r.strategies.data(), std::min(r.strategies.size(), r.request.strategies));
  const int width = strategy_width(r, shown);
  const std::size_t marked = r.rows.back().number;
  std::string text = fmt::format(
      "\nstrategies with a global batch of {}, the fastest first{}:\n{:>4}{:>6}  {:<{}}{:>14}"
      "{:>10}{:>11}{:>12}",
      r.strategies.front().choice.global_batch,
      r.strategies.size() > r.request.strategies
          ? fmt::format(" ({} of {}; --strategies all shows all)", r.request.strategies,
                        r.strategies.size())
          : "",
      "no.", r.device_text() + std::string("s"), "strategy", width, "batch x accum", "GiB each",
      "ms/step", r.unit() + std::string("s/s"));
  const bool measured = std::ranges::any_of(r.strategies, &plan::Strategy::measured);
  if (measured) text += fmt::format("{:>11}", "");
  if (r.request.tokens)
    text += fmt::format("{:>18}", large(*r.request.tokens) + " " + r.unit() + "s");
  text += "  what to set\n";
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const plan::Strategy& strategy = shown[i];
    const plan::Choice& c = strategy.choice;
    text += fmt::format(
        "{:>4}{}{:>5}  {:<{}}{:>14}{:>10}{:>11.1f}{:>12.0f}", i + 1, i + 1 == marked ? '*' : ' ',
        c.gpus, r.strategy_text(c), width, fmt::format("{} x {}", c.batch, c.accumulation),
        gib(strategy.memory_bytes()), 1e3 * strategy.step->total_s(), strategy.tokens_per_second);
    if (measured) text += fmt::format("{:>11}", strategy.measured ? "measured" : "estimate");
    if (r.request.tokens)
      text += fmt::format("{:>18}", duration(*r.request.tokens / strategy.tokens_per_second));
    text += fmt::format("  {}\n", settings_text(strategy.settings));
  }
  if (marked > 0 && marked <= shown.size())
    text += fmt::format("* the row of {} above\n", r.devices_text(r.devices.count));
  if (const int used = r.strategies.front().choice.gpus; used < r.devices.count)
    text += fmt::format("strategy 1 uses {} of {}\n", used, r.devices_text(r.devices.count));
  return text;
}

// ---------------------------------------------------------------- JSON

Node strategy_node(const PlanReport& r, const plan::Strategy& strategy) {
  NodeMembers settings;
  for (const plan::Setting& setting : strategy.settings)
    settings.push_back({setting.key, plain_scalar(setting.value, {})});
  const plan::Choice& c = strategy.choice;
  return map_node(
      {{"gpus", integer_node(c.gpus)},
       {"strategy", text_node(r.strategy_text(c))},
       {"per_device_train_batch_size", integer_node(c.batch)},
       {"gradient_accumulation_steps", integer_node(c.accumulation)},
       {"global_batch", integer_node(c.global_batch)},
       {"gradient_checkpointing", bool_node(strategy.checkpointing)},
       {"half", bool_node(strategy.half)},
       {"memory_bytes", integer_node(static_cast<std::int64_t>(strategy.memory_bytes()))},
       {"planned_memory_bytes", integer_node(static_cast<std::int64_t>(c.memory.total()))},
       {"measured", bool_node(strategy.measured)},
       {"disturbance", text_node(strategy.disturbance)},
       {"step_s", real_node(strategy.step->total_s())},
       {"estimated_step_s", real_node(strategy.estimate.total_s())},
       {"tokens_per_second", real_node(strategy.tokens_per_second)},
       {"settings", map_node(std::move(settings))}});
}

Node bytes_node(std::uint64_t value) {
  return integer_node(static_cast<std::int64_t>(value));
}

Node memory_node(const plan::Memory& m) {
  return map_node({{"parameters", bytes_node(m.parameters)},
                   {"copies", bytes_node(m.copies)},
                   {"gradients", bytes_node(m.gradients)},
                   {"optimizer", bytes_node(m.optimizer)},
                   {"activations", bytes_node(m.activations)},
                   {"logits", bytes_node(m.head)},
                   {"workspace", bytes_node(m.workspace)},
                   {"context", bytes_node(m.context)},
                   {"allocated", bytes_node(m.allocated())},
                   {"total", bytes_node(m.total())}});
}

NodeMembers step_members(const plan::StepTime& step) {
  return {{"step_s", real_node(step.total_s())},
          {"compute_s", real_node(step.compute_s)},
          {"communication_s", real_node(step.communication_s)},
          {"exposed_s", real_node(step.exposed_s)},
          {"optimizer_s", real_node(step.optimizer_s)}};
}

Node choice_node(const PlanReport& r, const PlanRow& row) {
  const plan::Choice& c = row.choice;
  NodeMembers members{
      {"gpus", integer_node(c.gpus)},
      {"strategy", text_node(r.strategy_text(c))},
      {"replicas", integer_node(c.replicas())},
      {"gpus_per_replica", integer_node(c.gpus_per_replica())},
      {"per_device_train_batch_size", integer_node(c.batch)},
      {"gradient_accumulation_steps", integer_node(c.accumulation)},
      {"global_batch", integer_node(c.global_batch)},
      {"fits", bool_node(c.fits)},
      {"as_written", bool_node(c.as_written)},
      {"strategy_number",
       row.number > 0 ? integer_node(static_cast<std::int64_t>(row.number)) : Node{}},
      {"memory_bytes", memory_node(c.memory)},
      {"peak_at", text_node(std::string(c.memory.moment))}};
  if (row.step) {
    for (auto& member : step_members(*row.step)) members.push_back(std::move(member));
    members.push_back({"tokens_per_second", real_node(row.tokens_per_second)});
    members.push_back({"speedup", real_node(row.speedup)});
    if (r.request.tokens)
      members.push_back({"training_s", real_node(*r.request.tokens / row.tokens_per_second)});
  }
  return map_node(std::move(members));
}

}  // namespace

std::string settings_text(const std::vector<plan::Setting>& settings) {
  std::string text;
  for (const plan::Setting& setting : settings)
    text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", setting.key, setting.value);
  return text.empty() ? "as it is written" : text;
}

std::string plan_text(const PlanReport& r) {
  return plan_head_text(r) + rows_text(r) + memory_text(r) + strategies_text(r) + scale_text(r) +
         changes_text(r);
}

Node plan_node(const PlanReport& r) {
  std::vector<Node> rows, points, changes, strategies;
  for (const plan::Strategy& strategy : r.strategies)
    strategies.push_back(strategy_node(r, strategy));
  for (const PlanRow& row : r.rows) rows.push_back(choice_node(r, row));
  for (const plan::ScalePoint& p : r.points) {
    NodeMembers members{{"gpus", integer_node(p.choice.gpus)},
                        {"per_device_train_batch_size", integer_node(p.choice.batch)},
                        {"gradient_accumulation_steps", integer_node(p.choice.accumulation)},
                        {"global_batch", integer_node(p.choice.global_batch)},
                        {"fits", bool_node(p.choice.fits)}};
    if (p.choice.fits) {
      for (auto& member : step_members(*p.step)) members.push_back(std::move(member));
      members.push_back({"efficiency", real_node(p.efficiency)});
      members.push_back({"tokens_per_second", real_node(p.tokens_per_second)});
    }
    points.push_back(map_node(std::move(members)));
  }
  for (const plan::Change& c : r.changes)
    changes.push_back(map_node({{"change", text_node(c.text)},
                                {"cost", text_node(c.cost)},
                                {"alone_bytes", bytes_node(c.alone_bytes)},
                                {"alone_fits", bool_node(c.alone_fits)},
                                {"together_bytes", bytes_node(c.together_bytes)},
                                {"together_fits", bool_node(c.together_fits)}}));
  const plan::Card& card = r.devices.card;
  return map_node(
      {{"parameters", integer_node(r.parameters.total())},
       {"trainable_parameters", integer_node(r.parameters.trainable)},
       {"parameters_used_by_a_token", integer_node(r.parameters.total() - r.parameters.unused)},
       {"flops_per_token", real_node(plan::flops_per_token(r.training.model))},
       {"card", map_node({{"name", text_node(card.name)},
                          {"count", integer_node(r.devices.count)},
                          {"memory_bytes", bytes_node(card.memory_bytes)},
                          {"usable_bytes",
                           bytes_node(card.memory_bytes > 0 ? plan::usable_bytes(card) : 0)}})},
       {"link", text_node(r.machine.cluster.text)},
       {"utilisation", real_node(r.utilisation())},
       {"fits", bool_node(r.fits())},
       {"rows", list_node(std::move(rows))},
       {"scale", list_node(std::move(points))},
       {"stops_scaling_at", integer_node(r.stops_at)},
       {"changes", list_node(std::move(changes))},
       {"strategies", list_node(std::move(strategies))},
       {"notes", texts_node(r.notes)}});
}

}  // namespace lockstep::cli
