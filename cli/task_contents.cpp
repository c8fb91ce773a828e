#include "cli/task_contents.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::cli {
namespace {

// A row is padded to the longest in its batch, so the longest of all must fit.
void check_positions(const TaskConfig& task, const data::InstructionRows& rows) {
  const std::vector<std::int64_t> lengths = rows.lengths();
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const std::int64_t multiple = task.data.pad_to_multiple_of;
  const std::int64_t padded =
      task.data.pad_at_most > 0 ? longest : (longest + multiple - 1) / multiple * multiple;
  if (task.data.padding != "longest" || padded <= task.model.n_positions) return;
  throw UsageError("config",
                   "{}: the longest sample has {} tokens{}, and model.n_positions is {}. Set "
                   "model.n_positions: {}, or lower max_seq_len.",
                   rows.options().source, longest,
                   padded == longest ? ""
                                     : fmt::format(", which data.pad_to_multiple_of {} pads to {}",
                                                   multiple, padded),
                   task.model.n_positions, padded);
}

data::InstructionRows read_rows(const DataConfig& data, const std::string& path,
                                const data::ReadProgress& progress) {
  data::InstructionOptions options;
  options.max_length = data.length;
  options.length_key = "max_seq_len";
  options.source = path;
  options.padding = data.padding == "packed"       ? data::Padding::kPacked
                    : data.padding == "max_length" ? data::Padding::kMaxLength
                                                   : data::Padding::kLongest;
  options.pad_to_multiple_of = data.pad_to_multiple_of;
  options.pad_at_most = data.pad_at_most;
  options.train_on_prompt = data.train_on_prompt;
  options.prompt = data.prompt;
  if (data.tokenizer) options.encoder = data.tokenizer->text_encoder();
  options.chat = data.tokenizer;
  if (!progress) return data::InstructionRows(data::load_instructions(path), options);
  // Parsing takes about the first half of the time, and cutting into rows the second.
  const auto items = data::load_instructions(
      path, [&](std::uint64_t done, std::uint64_t total) { progress(done, 2 * total); });
  data::InstructionRows rows(items, options, [&](std::uint64_t done, std::uint64_t total) {
    progress(total + done, 2 * total + 1);  // not the end yet: the rest of them follows
  });
  progress(1, 1);
  return rows;
}

}  // namespace

data::InstructionRows read_instructions(const TaskConfig& task, const std::string& path,
                                        const data::ReadProgress& progress) {
  data::InstructionRows rows = read_rows(task.data, path, progress);
  check_positions(task, rows);
  return rows;
}

std::string what_was_cut(const data::InstructionRows& rows) {
  const data::InstructionCounts& counts = rows.counts();
  if (counts.truncated == 0 && counts.dropped == 0) return {};
  return fmt::format(
      "{}: of {} samples {} are longer than max_seq_len {} and lose their end, {} are skipped "
      "because their prompt alone fills it.",
      rows.options().source, counts.read, counts.truncated, rows.options().max_length,
      counts.dropped);
}

}  // namespace lockstep::cli
