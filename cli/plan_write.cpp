#include "cli/plan_write.h"

#include <fmt/format.h>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::cli {
namespace {

// The line's number, from 0, of a key's value; the last line's where it has none.
std::size_t line_of(const Entry& entry) {
  return static_cast<std::size_t>(entry.location.line - 1);
}

void set_scalar(std::vector<std::string>& lines, const Node& root, const plan::Setting& setting) {
  const std::string line = fmt::format("{}: {}", setting.key, setting.value);
  const Entry* entry = root.find(setting.key);
  if (entry == nullptr) return lines.push_back(line);
  std::string& old = lines.at(line_of(*entry));
  const std::size_t comment = old.find(" #");
  old = comment == std::string::npos ? line : line + old.substr(comment);
}

// model: {config: x} on one line, or a block of lines.
void set_in_model(std::vector<std::string>& lines, const Node& root, const std::string& setting) {
  const Entry* model = root.find("model");
  if (model == nullptr || !model->value.is(NodeKind::kMap) || model->value.entries.empty())
    throw UsageError("plan", "the file has no model: with keys, to which {} could be added.",
                     setting);
  const std::size_t at = line_of(*model);
  const std::size_t brace = lines.at(at).rfind('}');
  if (brace != std::string::npos) {
    lines[at].insert(brace, ", " + setting);
    return;
  }
  const std::string& first = lines.at(line_of(model->value.entries.front()));
  const std::string indent = first.substr(0, first.find_first_not_of(' '));
  lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(at) + 1, indent + setting);
}

}  // namespace

std::string with_settings(const std::string& text, const std::vector<plan::Setting>& settings,
                          const std::string& name) {
  constexpr std::string_view kModel = "model.";
  if (name.ends_with(".json"))
    throw UsageError("plan", "{} is JSON, and --write writes YAML files. Set by hand what it says.",
                     name);
  const Node root = parse_yaml(text, name);
  std::vector<std::string> lines = lines_of(text);
  // What is in the model moves the lines after it, so it comes last.
  for (const plan::Setting& setting : settings)
    if (!setting.key.starts_with(kModel)) set_scalar(lines, root, setting);
  for (const plan::Setting& setting : settings)
    if (setting.key.starts_with(kModel))
      set_in_model(lines, root,
                   fmt::format("{}: {}", setting.key.substr(kModel.size()), setting.value));
  std::string written;
  for (const std::string& line : lines) written += line + "\n";
  // What it reads as is what was meant, however the file is laid out.
  const Node after = parse_yaml(written, name);
  for (const plan::Setting& setting : settings) {
    const bool inside = setting.key.starts_with(kModel);
    const Node& map = inside ? after.at("model") : after;
    const Entry* entry = map.find(inside ? setting.key.substr(kModel.size()) : setting.key);
    const std::string meant = setting.value == "\"\"" ? "" : setting.value;
    if (entry == nullptr || plain_text(entry->value) != meant)
      throw UsageError("plan", "{} cannot be set in {} as it is written. Set it by hand.",
                       setting.key, name);
  }
  return written;
}

}  // namespace lockstep::cli
