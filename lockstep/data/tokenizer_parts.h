// The steps of a tokenizer as tokenizer.json lists them, and their effect on a text. Private to
// this layer: tokenizer_file.cpp reads them, tokenizer.cpp runs them.
//
//   const TokenizerConfig config = read_tokenizer_config("Phi-3-mini-4k-instruct/tokenizer.json");
//   const TokenizerParts parts = read_tokenizer_file(path, config);
//   for (const Normalizer& step : parts.normalizers) text = step.apply(std::move(text));
//
// Values, read-only once they are read; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lockstep/data/bpe.h"
#include "lockstep/data/unicode.h"

namespace lockstep::data {

struct ChatMessage;
struct ChatText;

// {"String": ...} or {"Regex": ...}
struct Pattern {
  std::string literal{};
  std::optional<Regex> regex{};

  // All parts of the text in order: the matches and what lies between them.
  void split(std::string_view text,
             const std::function<void(std::size_t begin, std::size_t end, bool match)>& use) const;
  std::string replaced(std::string_view text, std::string_view content) const;

 private:
  bool find(std::string_view text, std::size_t from, Regex::Match& match) const;
};

struct Normalizer {
  enum class Kind { kUnicode, kLowercase, kStrip, kPrepend, kReplace };

  Kind kind = Kind::kUnicode;
  NormalForm form = NormalForm::kNfc;
  Pattern pattern{};      // Replace
  std::string content{};  // Replace, Prepend
  bool left = false;      // Strip
  bool right = false;

  std::string apply(std::string text) const;
};

struct PreTokenizer {
  enum class Kind { kSplit, kMetaspace, kByteLevel };
  enum class Prepend { kAlways, kFirst, kNever };

  Kind kind = Kind::kSplit;
  Pattern pattern{};              // Split, and ByteLevel with use_regex
  bool splits = true;             // Metaspace and ByteLevel may leave a text whole
  std::optional<bool> removes{};  // Split: matches (true) or what is between them (false)
  std::optional<bool> merges{};   // Split: these go to the piece before them
  std::string mark{};             // Metaspace: what stands for a space
  Prepend prepend = Prepend::kNever;
};

struct Decoder {
  enum class Kind { kByteLevel, kByteFallback, kFuse, kStrip, kReplace, kMetaspace };

  Kind kind = Kind::kFuse;
  Pattern pattern{};       // Replace
  std::string content{};   // Replace; the one character of Strip and Metaspace
  std::int64_t start = 0;  // Strip: at most this many
  std::int64_t stop = 0;
  bool drops_first = false;  // Metaspace: the marks of the first token

  void apply(std::vector<std::string>& tokens) const;
};

struct AddedToken {
  std::string content{};
  std::string text{};  // normalized, where the token is: what it decodes to
  std::int64_t id = 0;
  bool special = false;
  bool normalized = false;
  bool single_word = false;
  bool lstrip = false;
  bool rstrip = false;
};

// Searches for many texts at once: the longest match at each position, from left to right.
class TextSet {
 public:
  TextSet() { first_.fill(kNone); }

  void add(std::string_view text, std::size_t value);
  struct Match {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::size_t value = 0;
  };
  bool find(std::string_view text, std::size_t from, Match& match) const;

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  struct Node {
    char byte;
    std::size_t child = kNone;
    std::size_t sibling = kNone;
    std::size_t value = kNone;  // the value of the text that ends here
  };

  std::vector<Node> nodes_;
  std::array<std::size_t, 256> first_;
};

struct AddedTokens {
  std::vector<AddedToken> tokens{};
  std::int64_t end = 0;  // the largest of their ids, plus one
  std::unordered_map<std::int64_t, std::size_t> by_id{};
  std::unordered_map<std::string, std::size_t> by_content{};
  TextSet raw{};         // looked for in the text as it is
  TextSet normalized{};  // looked for when it is normalized

  // Looked up by content, as in `tokenizers`: it never finds a token that normalization changes.
  bool is_special(const std::string& content) const;
  // Every part of the text in order, with the added token that it is or nullptr.
  void split(std::string_view text, const TextSet& set,
             const std::function<void(std::string_view part, const AddedToken* token)>& use) const;
};

struct TokenizerParts {
  Bpe model{BpeOptions{}};
  AddedTokens added{};
  std::vector<Normalizer> normalizers{};
  std::vector<PreTokenizer> pre_tokenizers{};
  std::vector<std::int64_t> prefix{};  // special tokens around a text
  std::vector<std::int64_t> suffix{};
  std::optional<std::vector<Decoder>> decoders{};  // none: tokens with spaces between them

  std::string normalize(std::string_view text) const;
  // A token of the model's vocabulary keeps its id, others follow the largest. Returns the token
  // itself, or an existing one with the same content, which gets the new flags with `replaces`.
  AddedToken& add_token(AddedToken token, bool replaces);
  // Call it after the last add_token(): prepares the search for the added tokens.
  void index_added_tokens();
};

// The settings in the files beside a tokenizer.json: tokenizer_config.json,
// special_tokens_map.json, chat_template.jinja, and the kind of model in config.json. Read as
// transformers' AutoTokenizer does: special tokens that tokenizer.json lacks are added, and GPT-2's
// class has its own rule for spaces.
struct TokenizerConfig {
  std::string bos{};
  std::string eos{};
  std::string chat_template{};
  std::string chat_template_file{};
  // Added to the file's tokens in this order. The listed ones replace existing ones.
  std::vector<AddedToken> listed{};  // added_tokens_decoder
  std::vector<AddedToken> named{};   // bos_token, pad_token, ...: special wherever they are
  std::vector<AddedToken> extra{};   // additional_special_tokens
  // Set for GPT2Tokenizer, which takes vocabulary and merges from tokenizer.json and little else.
  std::optional<bool> gpt2_prefix_space{};
};

// Renders a chat by the tokenizer's template (chat_template.cpp). Throws UsageError for a template
// of an unknown family, and for messages that the template has no place for.
ChatText render_chat(const TokenizerConfig& files, std::span<const ChatMessage> messages,
                     bool add_generation_prompt);

// UsageError for files that are not JSON, and for split_special_tokens.
TokenizerConfig read_tokenizer_config(const std::string& tokenizer_file);

// UsageError `[tokenizer] FILE: FIELD is VALUE, ...` for what is not supported.
TokenizerParts read_tokenizer_file(const std::string& path, const TokenizerConfig& config = {});

}  // namespace lockstep::data
