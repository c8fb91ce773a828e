#include "lockstep/data/tokenizer_config.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <utility>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

// In the order in which transformers adds them.
constexpr std::array<std::string_view, 7> kNamed{"bos_token", "eos_token", "unk_token", "sep_token",
                                                 "pad_token", "cls_token", "mask_token"};
constexpr std::string_view kEndOfText = "<|endoftext|>";  // GPT2Tokenizer's bos, eos and unk

Node read_map(const std::string& path) {
  std::error_code unknown;
  if (!fs::is_regular_file(path, unknown)) return map_node({});
  return parse_json(read_file(path), path, {.bytes = 64u << 20, .depth = 64, .nodes = 10'000'000});
}

std::string text_of(const Node& root, std::string_view key) {
  const Entry* entry = root.find(key);
  return entry != nullptr && entry->value.is(NodeKind::kString) ? entry->value.text : "";
}

// "<s>", or {"content": "<s>", "lstrip": false, ...}, which says whether it is special; in
// special_tokens_map.json all are.
AddedToken token_of(const Node& node, bool legacy = false) {
  if (node.is(NodeKind::kString)) return {.content = node.text, .special = true};
  const auto flag = [&](std::string_view key, bool fallback) {
    const Entry* entry = node.find(key);
    return entry != nullptr && entry->value.is(NodeKind::kBool) ? entry->value.boolean : fallback;
  };
  const bool special = legacy || flag("special", false);
  return {.content = text_of(node, "content"),
          .special = special,
          .normalized = flag("normalized", !special),
          .single_word = flag("single_word", false),
          .lstrip = flag("lstrip", false),
          .rstrip = flag("rstrip", false)};
}

// One template, or several with names.
std::string template_text(const Node& root) {
  const Entry* entry = root.find("chat_template");
  if (entry == nullptr) return {};
  if (entry->value.is(NodeKind::kString)) return entry->value.text;
  for (const Node& item : entry->value.items)
    if (text_of(item, "name") == "default") return text_of(item, "template");
  return {};
}

void read_chat_template(const std::string& folder, const Node& config, TokenizerConfig& found) {
  found.chat_template = template_text(config);
  found.chat_template_file = folder + "tokenizer_config.json";
  const std::string jinja = folder + "chat_template.jinja";
  std::error_code unknown;
  if (!fs::is_regular_file(jinja, unknown)) return;
  found.chat_template = read_file(jinja);
  found.chat_template_file = jinja;
}

// {"50256": {"content": "<|endoftext|>", ...}, ...}, in the order of the numbers.
std::vector<AddedToken> read_listed(const Node& listed) {
  std::vector<std::pair<std::int64_t, AddedToken>> numbered;
  for (const Entry& entry : listed.entries) {
    std::int64_t number = 0;
    std::from_chars(entry.key.data(), entry.key.data() + entry.key.size(), number);
    numbered.emplace_back(number, token_of(entry.value));
  }
  std::ranges::stable_sort(numbered, {}, [](const auto& item) { return item.first; });
  std::vector<AddedToken> all;
  for (auto& [number, token] : numbered) all.push_back(std::move(token));
  return all;
}

// Where tokenizer_config.json names no class, the folder's model decides.
bool is_gpt2_class(const Node& config, const Node& model) {
  std::string name = text_of(config, "tokenizer_class");
  if (name.empty()) name = text_of(model, "tokenizer_class");
  const std::string type = text_of(model, "model_type");
  if (name.empty()) return type == "gpt2";
  return (name == "GPT2Tokenizer" || name == "GPT2TokenizerFast") && type != "phi3";
}

// A list of tokens, or a map of names to them.
void add_more(const Node& root, std::string_view key, std::vector<AddedToken>& all) {
  const Entry* entry = root.find(key);
  if (entry == nullptr) return;
  for (const Node& item : entry->value.items) all.push_back(token_of(item));
  for (const Entry& item : entry->value.entries) all.push_back(token_of(item.value));
}

void read_special(const Node& config, const Node& legacy, TokenizerConfig& found) {
  const auto named = [&](std::string_view key) {
    const Entry* entry = legacy.find(key);
    if (entry != nullptr && !entry->value.is(NodeKind::kNull)) return token_of(entry->value, true);
    entry = config.find(key);
    const bool has_default = key == "bos_token" || key == "eos_token" || key == "unk_token";
    if (entry == nullptr && has_default && found.gpt2_prefix_space)
      return AddedToken{.content = std::string(kEndOfText), .special = true};
    return entry != nullptr ? token_of(entry->value) : AddedToken{};
  };
  for (const std::string_view key : kNamed) {
    AddedToken token = named(key);
    if (key == "bos_token") found.bos = token.content;
    if (key == "eos_token") found.eos = token.content;
    found.named.push_back(std::move(token));
  }
  for (const Entry& entry : config.entries)  // keys of one kind of model: "image_token"
    if (entry.key.ends_with("_token") && entry.value.is(NodeKind::kString) &&
        std::ranges::find(kNamed, entry.key) == kNamed.end())
      found.named.push_back(token_of(entry.value));
  for (const Node* root : {&config, &legacy})
    for (const char* key : {"extra_special_tokens", "additional_special_tokens"})
      add_more(*root, key, found.extra);
  for (auto* tokens : {&found.listed, &found.named, &found.extra})
    std::erase_if(*tokens, [](const AddedToken& token) { return token.content.empty(); });
}

}  // namespace

TokenizerConfig read_tokenizer_config(const std::string& tokenizer_file) {
  const std::string folder = (fs::path(tokenizer_file).parent_path() / "").string();
  const Node config = read_map(folder + "tokenizer_config.json");
  const auto is_true = [&](std::string_view key) {
    const Entry* entry = config.find(key);
    return entry != nullptr && entry->value.is(NodeKind::kBool) && entry->value.boolean;
  };
  if (is_true("split_special_tokens"))
    throw UsageError("tokenizer",
                     "{}tokenizer_config.json: split_special_tokens is true, which is not "
                     "supported: special tokens in a text become their ids. Delete it.",
                     folder);
  TokenizerConfig found;
  read_chat_template(folder, config, found);
  if (is_gpt2_class(config, read_map(folder + "config.json")))
    found.gpt2_prefix_space = is_true("add_prefix_space");
  const Entry* listed = config.find("added_tokens_decoder");
  if (listed != nullptr) found.listed = read_listed(listed->value);
  // The older file counts where the newer list is not there.
  const Node legacy =
      listed != nullptr ? map_node({}) : read_map(folder + "special_tokens_map.json");
  read_special(config, legacy, found);
  return found;
}

}  // namespace lockstep::data
