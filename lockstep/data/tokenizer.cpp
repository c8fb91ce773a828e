#include "lockstep/data/tokenizer.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <mutex>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/data/tokenizer_parts.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<std::int64_t>;

// The steps of encoding one text, up to its special tokens.
class Encoding {
 public:
  Encoding(const TokenizerParts& parts, BpeScratch& scratch, Ids& ids)
      : parts_(parts), scratch_(scratch), ids_(ids) {}

  void run(std::string_view text) {
    parts_.added.split(text, parts_.added.raw, [&](std::string_view part, const AddedToken* token) {
      if (token != nullptr)
        ids_.push_back(token->id);
      else
        normalize(part, part.data() == text.data());
    });
  }

 private:
  // `at_start`: the part begins the whole text.
  void normalize(std::string_view part, bool at_start) {
    std::string storage;
    if (!parts_.normalizers.empty()) {
      storage = parts_.normalize(part);
      part = storage;
    }
    parts_.added.split(part, parts_.added.normalized,
                       [&](std::string_view piece, const AddedToken* token) {
                         if (token != nullptr)
                           ids_.push_back(token->id);
                         else
                           pre_tokenize(piece, at_start && piece.data() == part.data(), 0);
                       });
  }

  void pre_tokenize(std::string_view part, bool at_start, std::size_t step) {
    if (part.empty()) return;
    if (step == parts_.pre_tokenizers.size()) return parts_.model.encode(part, scratch_, ids_);
    const PreTokenizer& rule = parts_.pre_tokenizers[step];
    const auto next = [&](std::string_view whole, std::size_t begin, std::size_t end) {
      pre_tokenize(whole.substr(begin, end - begin), at_start && begin == 0, step + 1);
    };
    switch (rule.kind) {
      case PreTokenizer::Kind::kSplit:
        if (rule.merges) return split_after(rule, part, next);
        return rule.pattern.split(part, [&](std::size_t begin, std::size_t end, bool match) {
          if (rule.removes != match) next(part, begin, end);
        });
      case PreTokenizer::Kind::kMetaspace:
        return split_at_marks(rule, part, at_start, next);
      case PreTokenizer::Kind::kByteLevel:
        break;
    }
    std::string storage;
    if (rule.prepend == PreTokenizer::Prepend::kAlways && !part.starts_with(' ')) {
      storage.append(" ").append(part);
      part = storage;
    }
    if (!rule.splits) return next(part, 0, part.size());
    rule.pattern.split(part,
                       [&](std::size_t begin, std::size_t end, bool) { next(part, begin, end); });
  }

  // A merged match joins the piece before it, but the second of two in a row begins a new piece.
  template <typename Next>
  void split_after(const PreTokenizer& rule, std::string_view part, const Next& next) {
    std::size_t from = 0;
    bool merged = false;
    rule.pattern.split(part, [&](std::size_t begin, std::size_t, bool match) {
      const bool merges = match == *rule.merges;
      if (begin > 0 && (!merges || merged)) {
        next(part, from, begin);
        from = begin;
      }
      merged = merges;
    });
    next(part, from, part.size());
  }

  // Each mark begins a piece.
  template <typename Next>
  void split_at_marks(const PreTokenizer& rule, std::string_view part, bool at_start,
                      const Next& next) {
    using Prepend = PreTokenizer::Prepend;
    std::string text = Pattern{.literal = " "}.replaced(part, rule.mark);
    const bool prepends =
        rule.prepend == Prepend::kAlways || (rule.prepend == Prepend::kFirst && at_start);
    if (prepends && !text.starts_with(rule.mark)) text.insert(0, rule.mark);
    if (!rule.splits) return next(text, 0, text.size());
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find(rule.mark, begin + 1), text.size());
      next(text, begin, end);
      begin = end;
    }
  }

  const TokenizerParts& parts_;
  BpeScratch& scratch_;
  Ids& ids_;
};

}  // namespace

struct Tokenizer::Impl {
  std::string path;
  TokenizerParts parts;
  TokenizerConfig config;
  // Memory of finished calls, reused by new ones so that their caches stay warm.
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<BpeScratch>> idle;

  std::unique_ptr<BpeScratch> take() const {
    const std::lock_guard lock(mutex);
    if (idle.empty()) return std::make_unique<BpeScratch>();
    std::unique_ptr<BpeScratch> scratch = std::move(idle.back());
    idle.pop_back();
    return scratch;
  }
  void give_back(std::unique_ptr<BpeScratch> scratch) const {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(scratch));
  }
};

Tokenizer::Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Tokenizer Tokenizer::from_file(const std::string& path_or_folder) {
  auto impl = std::make_shared<Impl>();
  std::error_code unknown;
  impl->path = fs::is_directory(path_or_folder, unknown)
                   ? (fs::path(path_or_folder) / "tokenizer.json").string()
                   : path_or_folder;
  if (!fs::is_regular_file(impl->path, unknown))
    throw UsageError(
        "tokenizer",
        "there is no tokenizer '{}'. Name a tokenizer.json or the folder of a model that has one "
        "(transformers' save_pretrained() writes it).{}",
        impl->path, hub_advice(path_or_folder));
  impl->config = read_tokenizer_config(impl->path);
  impl->parts = read_tokenizer_file(impl->path, impl->config);
  return Tokenizer(std::move(impl));
}

Ids Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  if (text.size() >= std::numeric_limits<std::int32_t>::max())
    throw UsageError("tokenizer",
                     "a text of {} bytes is too long. Encode it in pieces below 2 GiB.",
                     text.size());
  std::string storage;
  text = valid_utf8(text, storage);
  const TokenizerParts& parts = impl_->parts;
  Ids ids;
  ids.reserve(text.size() / 3 + 8);
  if (options.add_special_tokens) ids = parts.prefix;
  std::unique_ptr<BpeScratch> scratch = impl_->take();
  Encoding(parts, *scratch, ids).run(text);
  impl_->give_back(std::move(scratch));
  if (options.add_special_tokens) ids.insert(ids.end(), parts.suffix.begin(), parts.suffix.end());
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int64_t> ids, DecodeOptions options) const {
  const TokenizerParts& parts = impl_->parts;
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (const std::int64_t id : ids) {
    if (const auto added = parts.added.by_id.find(id); added != parts.added.by_id.end()) {
      const std::string& token = parts.added.tokens[added->second].text;
      if (!options.skip_special_tokens || !parts.added.is_special(token)) tokens.push_back(token);
    } else if (const std::string_view token = parts.model.text_of(id); !token.empty()) {
      tokens.emplace_back(token);
    }
  }
  std::string text;
  if (!parts.decoders) {
    for (const std::string& token : tokens) text.append(text.empty() ? "" : " ").append(token);
    return text;
  }
  for (const Decoder& step : *parts.decoders) step.apply(tokens);
  for (const std::string& token : tokens) text += token;
  return text;
}

std::optional<std::int64_t> Tokenizer::token_to_id(std::string_view token) const {
  const AddedTokens& added = impl_->parts.added;
  if (const auto found = added.by_content.find(std::string(token)); found != added.by_content.end())
    return added.tokens[found->second].id;
  const std::int32_t id = impl_->parts.model.id_of(token);
  return id < 0 ? std::optional<std::int64_t>() : id;
}

std::optional<std::string> Tokenizer::id_to_token(std::int64_t id) const {
  const AddedTokens& added = impl_->parts.added;
  if (const auto found = added.by_id.find(id); found != added.by_id.end())
    return added.tokens[found->second].text;
  const std::string_view token = impl_->parts.model.text_of(id);
  return token.empty() ? std::optional<std::string>() : std::string(token);
}

std::int64_t Tokenizer::vocab_size() const {
  auto size = static_cast<std::int64_t>(impl_->parts.model.size());
  for (const AddedToken& token : impl_->parts.added.tokens)
    if (impl_->parts.model.id_of(token.content) < 0) ++size;
  return size;
}

std::int64_t Tokenizer::max_id() const {
  std::int64_t largest = impl_->parts.model.max_id();
  for (const AddedToken& token : impl_->parts.added.tokens) largest = std::max(largest, token.id);
  return largest;
}

std::optional<std::int64_t> Tokenizer::bos_token_id() const {
  return token_to_id(impl_->config.bos);
}

std::optional<std::int64_t> Tokenizer::eos_token_id() const {
  return token_to_id(impl_->config.eos);
}

ChatText Tokenizer::chat_text(std::span<const ChatMessage> messages, ChatOptions options) const {
  const TokenizerConfig& files = impl_->config;
  if (files.chat_template.empty())
    throw UsageError("tokenizer",
                     "{} has no chat template: neither chat_template.jinja nor the key "
                     "chat_template of tokenizer_config.json is beside it. Write the text of the "
                     "chat yourself and encode it.",
                     impl_->path);
  return render_chat(files, messages, options.add_generation_prompt);
}

std::string Tokenizer::apply_chat_template(std::span<const ChatMessage> messages,
                                           ChatOptions options) const {
  return chat_text(messages, options).text;
}

TextEncoder Tokenizer::text_encoder() const {
  const std::optional<std::int64_t> end = eos_token_id();
  if (!end)
    throw UsageError("tokenizer",
                     "{} does not say which token ends an answer: there is no eos_token in a "
                     "tokenizer_config.json beside it. Add one.",
                     impl_->path);
  return {.encode =
              [tokenizer = *this](std::string_view text) {
                const Ids ids = tokenizer.encode(text);
                return Tokens(ids.begin(), ids.end());
              },
          .end_of_text = static_cast<std::int32_t>(*end)};
}

const std::string& Tokenizer::path() const {
  return impl_->path;
}

Tokens ByteTokenizer::encode(std::string_view text) const {
  Tokens tokens(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) tokens[i] = static_cast<unsigned char>(text[i]);
  return tokens;
}

std::string ByteTokenizer::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  text.reserve(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == kEndOfText) continue;
    if (tokens[i] < 0 || tokens[i] > 255)
      throw UsageError("tokenizer",
                       "token {} at position {} is not a byte. It was probably made by another "
                       "tokenizer.",
                       tokens[i], i);
    text.push_back(static_cast<char>(tokens[i]));
  }
  return text;
}

// ---------------------------------------------------------------- the parts

namespace {

std::string_view stripped(std::string_view text, bool left, bool right) {
  while (left && !text.empty()) {
    std::size_t at = 0;
    if (!is_white_space(next_character(text, at))) break;
    text.remove_prefix(at);
  }
  while (right && !text.empty()) {
    std::size_t at = text.size();
    if (!is_white_space(previous_character(text, at))) break;
    text = text.substr(0, at);
  }
  return text;
}

// <0x41> is 0x41; -1 for any other token. "+" is what Rust's parser of numbers lets pass.
int fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return -1;
  std::string_view digits = token.substr(3, 2);
  if (digits[0] == '+') digits.remove_prefix(1);
  int value = -1;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return error == std::errc() && end == digits.data() + digits.size() && value >= 0 ? value : -1;
}

void decode_bytes(std::vector<std::string>& tokens) {
  std::string bytes;
  for (const std::string& token : tokens) {
    std::string word;
    bool all = true;
    for (std::size_t at = 0; at < token.size() && all;) {
      const int byte = byte_of_character(next_character(token, at));
      all = byte >= 0;
      word += static_cast<char>(byte);
    }
    bytes += all ? word : token;  // a token that was not made of bytes is its own text
  }
  std::string storage;
  tokens = {std::string(valid_utf8(bytes, storage))};
}

void decode_fallback(std::vector<std::string>& tokens) {
  std::vector<std::string> out;
  std::string bytes;
  const auto flush = [&] {
    if (bytes.empty()) return;
    std::string storage;
    if (valid_utf8(bytes, storage).data() == bytes.data())
      out.push_back(bytes);
    else
      out.insert(out.end(), bytes.size(), "\xEF\xBF\xBD");  // U+FFFD for every byte
    bytes.clear();
  };
  for (std::string& token : tokens) {
    if (const int byte = fallback_byte(token); byte >= 0) {
      bytes += static_cast<char>(byte);
      continue;
    }
    flush();
    out.push_back(std::move(token));
  }
  flush();
  tokens = std::move(out);
}

void strip_token(std::string& token, const Decoder& step) {
  const std::string& mark = step.content;
  std::size_t begin = 0;
  for (std::int64_t i = 0; i < step.start && token.compare(begin, mark.size(), mark) == 0; ++i)
    begin += mark.size();
  std::size_t end = token.size();
  for (std::int64_t i = 0; i < step.stop && end >= begin + mark.size() &&
                           token.compare(end - mark.size(), mark.size(), mark) == 0;
       ++i)
    end -= mark.size();
  token = token.substr(begin, end - begin);
}

}  // namespace

// ---------------------------------------------------------------- patterns

bool Pattern::find(std::string_view text, std::size_t from, Regex::Match& match) const {
  if (regex) return regex->find(text, from, match);
  const std::size_t found = text.find(literal, from);
  if (found == text.npos) return false;
  match = {found, found + literal.size()};
  return true;
}

void Pattern::split(
    std::string_view text,
    const std::function<void(std::size_t begin, std::size_t end, bool match)>& use) const {
  std::size_t done = 0;
  std::size_t from = 0;
  std::optional<std::size_t> last;
  for (Regex::Match match; from <= text.size() && find(text, from, match);) {
    if (match.begin == match.end && last == match.end) {  // nothing, and again at the same place
      from += from < text.size() ? character_size(text[from]) : 1;
      continue;
    }
    last = from = match.end;
    if (done < match.begin) use(done, match.begin, false);
    use(match.begin, match.end, true);
    done = match.end;
  }
  if (done < text.size()) use(done, text.size(), false);
}

std::string Pattern::replaced(std::string_view text, std::string_view content) const {
  std::string out;
  out.reserve(text.size() + text.size() / 4);
  split(text, [&](std::size_t begin, std::size_t end, bool match) {
    out += match ? content : text.substr(begin, end - begin);
  });
  return out;
}

// ---------------------------------------------------------------- steps

std::string Normalizer::apply(std::string text) const {
  switch (kind) {
    case Kind::kUnicode:
      return normalized(text, form);
    case Kind::kLowercase:
      return lower_case(text);
    case Kind::kStrip:
      return std::string(stripped(text, left, right));
    case Kind::kPrepend:
      return text.empty() ? text : content + text;
    case Kind::kReplace:
      break;
  }
  return pattern.replaced(text, content);
}

void Decoder::apply(std::vector<std::string>& tokens) const {
  switch (kind) {
    case Kind::kByteLevel:
      return decode_bytes(tokens);
    case Kind::kByteFallback:
      return decode_fallback(tokens);
    case Kind::kFuse: {
      std::string all;
      for (const std::string& token : tokens) all += token;
      tokens = {std::move(all)};
      return;
    }
    case Kind::kStrip:
      for (std::string& token : tokens) strip_token(token, *this);
      return;
    case Kind::kReplace:
      for (std::string& token : tokens) token = pattern.replaced(token, content);
      return;
    case Kind::kMetaspace:
      const Pattern marks{.literal = content};
      for (std::size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = marks.replaced(tokens[i], i == 0 && drops_first ? "" : " ");
      return;
  }
}

// ---------------------------------------------------------------- added tokens

void TextSet::add(std::string_view text, std::size_t value) {
  std::size_t parent = kNone;
  for (const char byte : text) {
    const auto head = [&]() -> std::size_t& {
      return parent == kNone ? first_[static_cast<unsigned char>(byte)] : nodes_[parent].child;
    };
    std::size_t at = head();
    while (at != kNone && nodes_[at].byte != byte) at = nodes_[at].sibling;
    if (at == kNone) {
      at = nodes_.size();
      nodes_.push_back({.byte = byte, .sibling = head()});
      head() = at;
    }
    parent = at;
  }
  if (parent != kNone) nodes_[parent].value = value;
}

bool TextSet::find(std::string_view text, std::size_t from, Match& match) const {
  if (nodes_.empty()) return false;
  for (std::size_t begin = from; begin < text.size(); ++begin) {
    std::size_t value = kNone;
    std::size_t at = first_[static_cast<unsigned char>(text[begin])];
    for (std::size_t i = begin; i < text.size(); ++i) {
      while (at != kNone && nodes_[at].byte != text[i]) at = nodes_[at].sibling;
      if (at == kNone) break;
      if (nodes_[at].value != kNone) {
        value = nodes_[at].value;
        match.end = i + 1;
      }
      at = nodes_[at].child;
    }
    if (value == kNone) continue;
    match.begin = begin;
    match.value = value;
    return true;
  }
  return false;
}

bool AddedTokens::is_special(const std::string& content) const {
  const auto found = by_content.find(content);
  return found != by_content.end() && tokens[found->second].special;
}

void AddedTokens::split(
    std::string_view text, const TextSet& set,
    const std::function<void(std::string_view part, const AddedToken* token)>& use) const {
  std::size_t done = 0;
  for (TextSet::Match match; set.find(text, match.end, match);) {
    const AddedToken& token = tokens[match.value];
    std::size_t begin = match.begin;
    std::size_t end = match.end;
    if (token.single_word) {
      std::size_t before = begin;
      std::size_t after = end;
      if (begin > 0 && is_word_character(previous_character(text, before))) continue;
      if (end < text.size() && is_word_character(next_character(text, after))) continue;
    }
    if (token.lstrip) begin = std::max(stripped(text.substr(0, begin), false, true).size(), done);
    if (token.rstrip) end = text.size() - stripped(text.substr(end), true, false).size();
    if (done < begin) use(text.substr(done, begin - done), nullptr);
    use(text.substr(begin, end - begin), &token);
    done = end;
  }
  if (done < text.size()) use(text.substr(done), nullptr);
}

AddedToken& TokenizerParts::add_token(AddedToken token, bool replaces) {
  const auto [place, is_new] = added.by_content.emplace(token.content, added.tokens.size());
  if (is_new) {
    const std::int32_t known = model.id_of(token.content);
    token.id = known >= 0 ? known : std::max(static_cast<std::int64_t>(model.size()), added.end);
    added.end = std::max(added.end, token.id + 1);
    return added.tokens.emplace_back(std::move(token));
  }
  AddedToken& there = added.tokens[place->second];
  token.id = there.id;
  if (replaces) there = std::move(token);
  return there;
}

void TokenizerParts::index_added_tokens() {
  for (std::size_t i = 0; i < added.tokens.size(); ++i) {
    AddedToken& token = added.tokens[i];
    if (token.single_word) require_unicode("an added token with single_word");
    added.by_id[token.id] = i;
    token.text = token.normalized ? normalize(token.content) : token.content;
    (token.normalized ? added.normalized : added.raw).add(token.text, i);
  }
}

std::string TokenizerParts::normalize(std::string_view text) const {
  std::string out(text);
  for (const Normalizer& step : normalizers) out = step.apply(std::move(out));
  return out;
}

}  // namespace lockstep::data
