#include "cli/prompt_format.h"

#include "lockstep/core/document.h"
#include "lockstep/core/fd.h"

namespace lockstep::cli {

using data::RecordKind;

std::string prompt_format_text(const PromptFormat& format) {
  const bool texts = format.kind == RecordKind::kInstruction;
  const char* kind = texts                              ? "instruction"
                     : format.kind == RecordKind::kChat ? "chat"
                                                        : "completion";
  Node map = map_node({{"kind", text_node(kind)}});
  const auto set = [&](const char* key, const std::string& value) {
    map.entries.push_back({key, {}, text_node(value)});
  };
  if (texts) {
    set("prompt", format.texts.prompt);
    set("prompt_without_input", format.texts.prompt_without_input);
    set("response", format.texts.response);
  }
  if (!format.tokenizer.empty()) set("tokenizer", format.tokenizer);
  return to_json(map) + "\n";
}

PromptFormat read_prompt_format(const std::string& path) {
  const Node root = parse_json(read_file(path), path);
  MapReader keys(root, "prompt_format");
  PromptFormat format;
  const std::string kind =
      keys.choice("kind", "instruction", {"instruction", "completion", "chat"});
  format.kind = kind == "chat"         ? RecordKind::kChat
                : kind == "completion" ? RecordKind::kCompletion
                                       : RecordKind::kInstruction;
  format.texts.prompt = keys.text("prompt", format.texts.prompt);
  format.texts.prompt_without_input =
      keys.text("prompt_without_input", format.texts.prompt_without_input);
  format.texts.response = keys.text("response", format.texts.response);
  format.tokenizer = keys.text("tokenizer", "");
  return format;
}

}  // namespace lockstep::cli
