// Reads a tokenizer.json and the files beside it, the former strictly: an unsupported feature is
// refused with its field and value.
#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <utility>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/data/tokenizer_parts.h"

namespace lockstep::data {
namespace {

// The pattern of ByteLevel with use_regex, which splits as GPT-2's tokenizer does.
constexpr const char* kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// A map in the file with its path in it: "pre_tokenizer.pretokenizers[1]".
class Field {
 public:
  Field(const Node& node, const std::string& file, std::string name)
      : node_(&node), file_(&file), name_(std::move(name)) {}

  const Node& node() const { return *node_; }
  const std::string& name() const { return name_; }
  bool is_null() const { return node_->is(NodeKind::kNull); }

  // Null where there is no such key.
  Field at(std::string_view key) const {
    static const Node nothing;
    if (!node_->is(NodeKind::kMap)) refuse("a map was expected");
    const Entry* entry = node_->find(key);
    return {entry == nullptr ? nothing : entry->value, *file_,
            name_.empty() ? std::string(key) : fmt::format("{}.{}", name_, key)};
  }
  std::vector<Field> items() const {
    if (!node_->is(NodeKind::kList)) refuse("a list was expected");
    std::vector<Field> all;
    for (const Node& item : node_->items)
      all.emplace_back(item, *file_, fmt::format("{}[{}]", name_, all.size()));
    return all;
  }

  const std::string& text() const {
    if (!node_->is(NodeKind::kString)) refuse("a string was expected");
    return node_->text;
  }
  bool boolean(std::optional<bool> fallback = {}) const {
    if (is_null() && fallback) return *fallback;
    if (!node_->is(NodeKind::kBool)) refuse("true or false was expected");
    return node_->boolean;
  }
  std::int64_t integer(std::optional<std::int64_t> fallback = {}) const {
    if (is_null() && fallback) return *fallback;
    if (!node_->is(NodeKind::kInteger)) refuse("a whole number was expected");
    return node_->integer;
  }

  [[noreturn]] void refuse(std::string_view why) const {
    std::string value = to_json(*node_);
    if (value.size() > 100) value = value.substr(0, 100) + "...";
    std::string storage;
    throw UsageError("tokenizer", "{}: {} is {}: {}.", *file_, name_, valid_utf8(value, storage),
                     why);
  }
  [[noreturn]] void refuse_kind(std::string_view supported) const {
    at("type").refuse(fmt::format("it is not supported; {} are", supported));
  }

 private:
  const Node* node_;
  const std::string* file_;
  std::string name_;
};

Node read_json(const std::string& path) {
  const std::string text = read_file(path, std::size_t{1} << 30);
  return parse_json(text, path, {.bytes = text.size(), .depth = 64, .nodes = 100'000'000});
}

// The steps of a Sequence, or the single step; none for null.
std::vector<Field> steps_of(const Field& field, std::string_view list) {
  if (field.is_null()) return {};
  if (field.at("type").text() != "Sequence") return {field};
  std::vector<Field> steps;
  for (const Field& item : field.at(list).items())
    for (Field& step : steps_of(item, list)) steps.push_back(std::move(step));
  return steps;
}

Pattern read_pattern(const Field& field) {
  if (const Field literal = field.at("String"); !literal.is_null()) {
    if (literal.text().empty()) literal.refuse("an empty text is everywhere");
    return {.literal = literal.text()};
  }
  return {.regex = Regex(field.at("Regex").text())};
}

Normalizer read_normalizer(const Field& field) {
  using Kind = Normalizer::Kind;
  const std::string& type = field.at("type").text();
  for (const auto& [name, form] :
       {std::pair{"NFC", NormalForm::kNfc}, std::pair{"NFD", NormalForm::kNfd},
        std::pair{"NFKC", NormalForm::kNfkc}, std::pair{"NFKD", NormalForm::kNfkd}}) {
    if (type != name) continue;
    require_unicode("the normalizer " + type);
    return {.kind = Kind::kUnicode, .form = form};
  }
  if (type == "Lowercase") {
    require_unicode("the normalizer Lowercase");
    return {.kind = Kind::kLowercase};
  }
  if (type == "Strip")
    return {.kind = Kind::kStrip,
            .left = field.at("strip_left").boolean(),
            .right = field.at("strip_right").boolean()};
  if (type == "Prepend") return {.kind = Kind::kPrepend, .content = field.at("prepend").text()};
  if (type == "Replace")
    return {.kind = Kind::kReplace,
            .pattern = read_pattern(field.at("pattern")),
            .content = field.at("content").text()};
  field.refuse_kind("Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Strip, Prepend and Replace");
}

std::string one_character(const Field& field) {
  const std::string& text = field.text();
  if (text.empty() || character_size(text[0]) != text.size())
    field.refuse("one character was expected");
  return text;
}

// Older files have add_prefix_space in place of prepend_scheme.
PreTokenizer::Prepend read_prepend(const Field& field) {
  using Prepend = PreTokenizer::Prepend;
  const Field scheme = field.at("prepend_scheme");
  if (scheme.is_null())
    return field.at("add_prefix_space").boolean(true) ? Prepend::kAlways : Prepend::kNever;
  if (scheme.text() == "always") return Prepend::kAlways;
  if (scheme.text() == "first") return Prepend::kFirst;
  if (scheme.text() == "never") return Prepend::kNever;
  scheme.refuse("it is not supported; always, first and never are");
}

PreTokenizer read_split(const Field& field) {
  PreTokenizer step{.kind = PreTokenizer::Kind::kSplit,
                    .pattern = read_pattern(field.at("pattern"))};
  const bool invert = field.at("invert").boolean(false);
  const Field behavior = field.at("behavior");
  if (behavior.text() == "Removed")
    step.removes = !invert;
  else if (behavior.text() == "MergedWithPrevious")
    step.merges = !invert;
  else if (behavior.text() != "Isolated")
    behavior.refuse("it is not supported; Isolated, Removed and MergedWithPrevious are");
  return step;
}

PreTokenizer read_pre_tokenizer(const Field& field) {
  using Kind = PreTokenizer::Kind;
  using Prepend = PreTokenizer::Prepend;
  const std::string& type = field.at("type").text();
  if (type == "Split") return read_split(field);
  if (type == "Metaspace")
    return {.kind = Kind::kMetaspace,
            .splits = field.at("split").boolean(true),
            .mark = one_character(field.at("replacement")),
            .prepend = read_prepend(field)};
  if (type != "ByteLevel") field.refuse_kind("Sequence, Split, Metaspace and ByteLevel");
  PreTokenizer step{.kind = Kind::kByteLevel, .splits = field.at("use_regex").boolean(true)};
  if (step.splits) step.pattern.regex = Regex(kGpt2Words);
  if (field.at("add_prefix_space").boolean()) step.prepend = Prepend::kAlways;
  return step;
}

std::vector<PreTokenizer> read_pre_tokenizers(const Field& field) {
  std::vector<PreTokenizer> steps;
  for (const Field& item : steps_of(field, "pretokenizers")) {
    if (!steps.empty() && steps.back().kind == PreTokenizer::Kind::kByteLevel)
      item.refuse("a step after ByteLevel is not supported");
    steps.push_back(read_pre_tokenizer(item));
  }
  return steps;
}

Decoder read_decoder(const Field& field) {
  using Kind = Decoder::Kind;
  const std::string& type = field.at("type").text();
  if (type == "ByteLevel") return {.kind = Kind::kByteLevel};
  if (type == "ByteFallback") return {.kind = Kind::kByteFallback};
  if (type == "Fuse") return {.kind = Kind::kFuse};
  if (type == "Strip")
    return {.kind = Kind::kStrip,
            .content = one_character(field.at("content")),
            .start = field.at("start").integer(),
            .stop = field.at("stop").integer()};
  if (type == "Replace")
    return {.kind = Kind::kReplace,
            .pattern = read_pattern(field.at("pattern")),
            .content = field.at("content").text()};
  if (type == "Metaspace")
    return {.kind = Kind::kMetaspace,
            .content = one_character(field.at("replacement")),
            .drops_first = read_prepend(field) != PreTokenizer::Prepend::kNever};
  field.refuse_kind("Sequence, ByteLevel, ByteFallback, Fuse, Strip, Replace and Metaspace");
}

// The special tokens of a template's piece.
std::vector<std::int64_t> read_piece(const Field& piece, const Field& special_tokens) {
  const std::string& name = piece.at("id").text();
  std::vector<std::int64_t> ids;
  for (const Field& id : special_tokens.at(name).at("ids").items()) ids.push_back(id.integer());
  return ids;
}

// Each processor puts its tokens around the output of the previous one.
void read_post_processor(const Field& field, TokenizerParts& parts) {
  for (const Field& step : steps_of(field, "processors")) {
    const std::string& type = step.at("type").text();
    if (type == "ByteLevel") continue;  // it only changes offsets
    if (type != "TemplateProcessing")
      step.refuse_kind("Sequence, ByteLevel and TemplateProcessing");
    std::vector<std::int64_t> before;
    int texts = 0;
    const Field single = step.at("single");
    for (const Field& item : single.items()) {
      if (const Field piece = item.at("SpecialToken"); !piece.is_null()) {
        const auto ids = read_piece(piece, step.at("special_tokens"));
        auto& side = texts == 0 ? before : parts.suffix;
        side.insert(side.end(), ids.begin(), ids.end());
      } else if (item.at("Sequence").at("id").text() == "A") {
        ++texts;
      } else {
        item.refuse("a template for one text has the sequence A alone");
      }
    }
    if (texts != 1) single.refuse("the sequence A was expected once");
    parts.prefix.insert(parts.prefix.begin(), before.begin(), before.end());
  }
}

// "a b", or ["a", "b"]
void read_merge(const Node& node, Bpe& model, const Field& merges, std::size_t index) {
  std::string_view left;
  std::string_view right;
  if (node.is(NodeKind::kString)) {
    const std::string_view text = node.text;
    if (text.starts_with("#version")) return;
    const std::size_t space = text.find(' ');
    if (space != text.npos && text.find(' ', space + 1) == text.npos) {
      left = text.substr(0, space);
      right = text.substr(space + 1);
    }
  } else if (node.items.size() == 2 && node.items[0].is(NodeKind::kString) &&
             node.items[1].is(NodeKind::kString)) {
    left = node.items[0].text;
    right = node.items[1].text;
  }
  if (!model.add_merge(left, right))
    merges.items()[index].refuse("it is not two tokens of the vocabulary that make a third");
}

Bpe read_model(const Field& field, bool byte_level) {
  if (field.at("type").text() != "BPE") field.refuse_kind("BPE models, and no others,");
  const Field dropout = field.at("dropout");
  if (!dropout.is_null() && dropout.node().real != 0)
    dropout.refuse("encoding would be random; set it to null");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (const Field affix = field.at(key); !affix.is_null() && !affix.text().empty())
      affix.refuse("it is not supported");
  BpeOptions options{.byte_level = byte_level,
                     .fuse_unk = field.at("fuse_unk").boolean(false),
                     .byte_fallback = field.at("byte_fallback").boolean(false),
                     .ignore_merges = field.at("ignore_merges").boolean(false)};
  const Field unk = field.at("unk_token");
  if (!unk.is_null()) options.unk_token = unk.text();
  Bpe model(std::move(options));
  const Field vocab = field.at("vocab");
  const Field merges = field.at("merges");
  if (!vocab.node().is(NodeKind::kMap)) vocab.refuse("a map was expected");
  if (!merges.node().is(NodeKind::kList)) merges.refuse("a list was expected");
  model.reserve(vocab.node().entries.size(), merges.node().items.size());
  for (const Entry& entry : vocab.node().entries)
    if (!entry.value.is(NodeKind::kInteger) || !model.add_token(entry.key, entry.value.integer))
      vocab.at(entry.key).refuse(
          fmt::format("an id of 0 to {} that no other token has was expected", Bpe::kMaxId));
  if (!unk.is_null() && !byte_level && model.id_of(unk.text()) < 0)
    unk.refuse("it is not in the vocabulary");
  for (std::size_t i = 0; i < merges.node().items.size(); ++i)
    read_merge(merges.node().items[i], model, merges, i);
  model.finish();
  return model;
}

void read_added_tokens(const Field& field, TokenizerParts& parts) {
  if (field.is_null()) return;
  for (const Field& item : field.items()) {
    AddedToken token{.content = item.at("content").text(),
                     .special = item.at("special").boolean(false),
                     .normalized = item.at("normalized").boolean(true),
                     .single_word = item.at("single_word").boolean(false),
                     .lstrip = item.at("lstrip").boolean(false),
                     .rstrip = item.at("rstrip").boolean(false)};
    if (token.content.empty()) continue;
    if (parts.added.by_content.contains(token.content)) item.refuse("it appears twice");
    const std::int64_t id = parts.add_token(std::move(token), /*replaces=*/false).id;
    if (item.at("id").integer() != id)
      item.refuse(fmt::format("its id would be {} to the tokenizers package", id));
  }
}

// Rewrites another tokenizer's file as GPT2Tokenizer does, from vocabulary and merges.
void rewrite_for_gpt2(Node& root, bool prefix_space) {
  const auto set = [&](const std::string& key, Node value) {
    const auto there = std::ranges::find(root.entries, key, &Entry::key);
    if (there != root.entries.end())
      there->value = std::move(value);
    else
      root.entries.push_back({key, {}, std::move(value)});
  };
  const Node bytes =
      map_node({{"type", text_node("ByteLevel")}, {"add_prefix_space", bool_node(prefix_space)}});
  set("normalizer", {});
  set("pre_tokenizer", bytes);
  set("decoder", bytes);
  Node& model = std::ranges::find(root.entries, "model", &Entry::key)->value;
  std::erase_if(model.entries, [](const Entry& entry) {
    return entry.key != "type" && entry.key != "vocab" && entry.key != "merges";
  });
}

}  // namespace

TokenizerParts read_tokenizer_file(const std::string& path, const TokenizerConfig& config) {
  Node root = read_json(path);
  const Field file(root, path, "");
  if (!root.is(NodeKind::kMap) || file.at("model").is_null())
    throw UsageError("tokenizer", "{} is not a tokenizer.json: it has no model.", path);
  if (config.gpt2_prefix_space) rewrite_for_gpt2(root, *config.gpt2_prefix_space);
  TokenizerParts parts;
  for (const Field& step : steps_of(file.at("normalizer"), "normalizers"))
    parts.normalizers.push_back(read_normalizer(step));
  parts.pre_tokenizers = read_pre_tokenizers(file.at("pre_tokenizer"));
  const bool byte_level = !parts.pre_tokenizers.empty() &&
                          parts.pre_tokenizers.back().kind == PreTokenizer::Kind::kByteLevel;
  parts.model = read_model(file.at("model"), byte_level);
  read_added_tokens(file.at("added_tokens"), parts);
  for (const AddedToken& token : config.listed) parts.add_token(token, /*replaces=*/true);
  for (const AddedToken& token : config.named) parts.add_token(token, false).special = true;
  for (const AddedToken& token : config.extra) parts.add_token(token, /*replaces=*/false);
  parts.index_added_tokens();
  read_post_processor(file.at("post_processor"), parts);
  if (const Field decoder = file.at("decoder"); !decoder.is_null()) {
    parts.decoders.emplace();
    for (const Field& step : steps_of(decoder, "decoders"))
      parts.decoders->push_back(read_decoder(step));
  }
  return parts;
}

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

// If tokenizer_config.json names no class, the folder's model decides.
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
  // The older file is used where the newer list is missing.
  const Node legacy =
      listed != nullptr ? map_node({}) : read_map(folder + "special_tokens_map.json");
  read_special(config, legacy, found);
  return found;
}

}  // namespace lockstep::data
