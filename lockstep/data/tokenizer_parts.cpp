#include "lockstep/data/tokenizer_parts.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "lockstep/core/text.h"

namespace lockstep::data {
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
