// The tokenizer of a Hugging Face model, read from its tokenizer.json: text to the ids that the
// model was trained with, and back.
//
//   const auto tokenizer = data::Tokenizer::from_file("Phi-3-mini-4k-instruct");
//   const std::vector<std::int64_t> ids = tokenizer.encode("The text of a document");
//   const std::string text = tokenizer.decode(ids);
//
// BPE in its two forms: over bytes (GPT-2, Llama 3, Qwen) and over characters with byte fallback
// (Llama 2, Phi-3, Mistral, Gemma). Ids and texts are those of the `tokenizers` package. An
// unsupported feature is refused when the file is read, with the file, the field and its value. A
// file's truncation and padding are not applied; transformers sets them in each call too.
//
// A chat becomes text first. Its template writes the special tokens, so none are added afterwards:
//
//   const std::string chat = tokenizer.apply_chat_template({{"user", "Why?"}},
//                                                          {.add_generation_prompt = true});
//   const auto prompt = tokenizer.encode(chat, {.add_special_tokens = false});
//
// ByteTokenizer needs no file: its tokens are the bytes of the text. Without torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

using Tokens = std::vector<std::int32_t>;

struct ChatMessage {
  std::string role;  // system, user or assistant
  std::string content;

  bool operator==(const ChatMessage&) const = default;
};

struct ChatText {
  struct Range {
    std::size_t begin;
    std::size_t end;
  };
  std::string text;
  // The byte ranges of the assistant's messages, each with the token that ends it: what a template
  // in Hugging Face's form would put between {% generation %} and {% endgeneration %}.
  std::vector<Range> answers{};
};

// A tokenizer that refuses no text. Token b is byte b; 256 ends a document. Any thread.
struct ByteTokenizer {
  static constexpr std::int32_t kEndOfText = 256;
  static constexpr std::int64_t kVocabSize = 257;

  Tokens encode(std::string_view text) const;
  // End-of-text tokens are skipped. UsageError for a token outside of the vocabulary.
  std::string decode(std::span<const std::int32_t> tokens) const;
};

// The interface that instruction data needs of any tokenizer.
struct TextEncoder {
  std::function<Tokens(std::string_view)> encode = [](std::string_view text) {
    return ByteTokenizer{}.encode(text);
  };
  std::int32_t end_of_text = ByteTokenizer::kEndOfText;  // ends an answer, and pads
};

struct EncodeOptions {
  bool add_special_tokens = true;  // what the post-processor adds: <s> before a text of Llama
};

struct DecodeOptions {
  bool skip_special_tokens = true;
};

struct ChatOptions {
  bool add_generation_prompt = false;  // ends with the beginning of an answer
};

// A handle: copies share one read-only tokenizer. Any thread may call any function at any time.
class Tokenizer {
 public:
  // A tokenizer.json, or a folder with one. Beside it tokenizer_config.json,
  // special_tokens_map.json, chat_template.jinja and the kind of model in config.json are read if
  // they exist, as transformers does: special tokens that they name and the file lacks are added.
  // UsageError for a file that is not a tokenizer or needs what is not supported.
  static Tokenizer from_file(const std::string& path_or_folder);

  // Special tokens in the text become their ids. Bytes that are not UTF-8 are read as U+FFFD, as
  // with Python's errors="replace".
  std::vector<std::int64_t> encode(std::string_view text, EncodeOptions options = {}) const;
  // Ids without a token are skipped, as in `tokenizers`. The result is always valid UTF-8.
  std::string decode(std::span<const std::int64_t> ids, DecodeOptions options = {}) const;

  std::optional<std::int64_t> token_to_id(std::string_view token) const;
  std::optional<std::string> id_to_token(std::int64_t id) const;
  std::int64_t vocab_size() const;  // tokens, the added ones included
  std::int64_t max_id() const;      // a model needs max_id() + 1 rows; ids may have gaps

  // As tokenizer_config.json or special_tokens_map.json names them.
  std::optional<std::int64_t> bos_token_id() const;
  std::optional<std::int64_t> eos_token_id() const;

  // The text of a chat by the model's own template. The templates of Phi-3, Llama 2 and 3, Mistral,
  // Gemma and Qwen2 and plain ChatML are known, and recognised by the text that the template writes
  // (chat_template.cpp); any other is a UsageError with what is supported.
  std::string apply_chat_template(std::span<const ChatMessage> messages,
                                  ChatOptions options = {}) const;
  std::string apply_chat_template(std::initializer_list<ChatMessage> messages,
                                  ChatOptions options = {}) const {
    return apply_chat_template(std::span(messages.begin(), messages.size()), options);
  }
  // The same, with the places of the assistant's messages.
  ChatText chat_text(std::span<const ChatMessage> messages, ChatOptions options = {}) const;

  // For InstructionOptions::encoder, with special tokens. UsageError without an eos_token.
  TextEncoder text_encoder() const;

  const std::string& path() const;  // of the tokenizer.json

 private:
  struct Impl;
  explicit Tokenizer(std::shared_ptr<const Impl> impl);

  std::shared_ptr<const Impl> impl_;
};

}  // namespace lockstep::data
