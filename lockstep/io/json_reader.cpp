#include "lockstep/io/json_reader.h"

#include <fmt/format.h>

namespace lockstep::io {
namespace {

// Files of ours nest three deep; the bound keeps a hostile one from filling memory.
constexpr std::size_t kMaxDepth = 128;

// The length of the well-formed UTF-8 sequence of two or more bytes at `at`, or 0.
std::size_t utf8_length(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u;
  };
  const auto follows = [&](std::size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
  const unsigned first = byte(0);
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if ((first & 0xf0u) == 0xe0u) {
    // No overlong forms, no surrogates.
    if (first == 0xe0 && byte(1) < 0xa0) return 0;
    if (first == 0xed && byte(1) > 0x9f) return 0;
    return follows(1) && follows(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if (first == 0xf0 && byte(1) < 0x90) return 0;
    if (first == 0xf4 && byte(1) > 0x8f) return 0;
    return follows(1) && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&out](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xc0 | (c >> 6));
    put(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    put(0xe0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3f));
    put(0x80 | (c & 0x3f));
  } else {
    put(0xf0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3f));
    put(0x80 | ((c >> 6) & 0x3f));
    put(0x80 | (c & 0x3f));
  }
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

}  // namespace

std::optional<std::size_t> invalid_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {  // nearly all of it
      ++at;
      continue;
    }
    const std::size_t length = utf8_length(text, at);
    if (length == 0) return at;
    at += length;
  }
  return std::nullopt;
}

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  out.reserve(text.size() + 2);
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20)
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        else
          out += c;
    }
  }
  return out += '"';
}

JsonReader::JsonReader(std::string_view text) : text_(text) {
  if (const auto bad = invalid_utf8(text)) throw JsonError(*bad, "not valid UTF-8");
}

char JsonReader::peek() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return c;
    ++at_;
  }
  return '\0';  // a real NUL is not a token either
}

void JsonReader::expect(char wanted, const char* what) {
  if (peek() != wanted || at_ >= text_.size()) fail(fmt::format("expected {}", what));
  ++at_;
}

void JsonReader::enter_object() {
  expect('{', "an object");
  if (first_.size() >= kMaxDepth) fail("nested too deeply");
  first_.push_back(true);
}

void JsonReader::enter_array() {
  expect('[', "an array");
  if (first_.size() >= kMaxDepth) fail("nested too deeply");
  first_.push_back(true);
}

bool JsonReader::next_item(char closing) {
  if (peek() == closing) {
    ++at_;
    first_.pop_back();
    return false;
  }
  if (!first_.back()) expect(',', closing == '}' ? "',' or '}'" : "',' or ']'");
  first_.back() = false;
  return true;
}

bool JsonReader::next_key(std::string& key) {
  if (!next_item('}')) return false;
  key = string();
  expect(':', "':'");
  return true;
}

bool JsonReader::next_element() {
  return next_item(']');
}

unsigned JsonReader::hex4() {
  if (text_.size() - at_ < 4) fail("a cut-off escape");
  unsigned value = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    const char c = text_[at_];
    value <<= 4;
    if (is_digit(c))
      value += static_cast<unsigned>(c - '0');
    else if (c >= 'a' && c <= 'f')
      value += static_cast<unsigned>(c - 'a' + 10);
    else if (c >= 'A' && c <= 'F')
      value += static_cast<unsigned>(c - 'A' + 10);
    else
      fail("an escape that is not hexadecimal");
  }
  return value;
}

// After the backslash.
char32_t JsonReader::escape() {
  if (at_ >= text_.size()) fail("a cut-off escape");
  switch (text_[at_++]) {
    case '"':
      return '"';
    case '\\':
      return '\\';
    case '/':
      return '/';
    case 'b':
      return '\b';
    case 'f':
      return '\f';
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    case 'u':
      break;
    default:
      fail("an unknown escape");
  }
  const unsigned high = hex4();
  if (high < 0xd800 || high > 0xdfff) return high;
  if (high > 0xdbff || text_.substr(at_, 2) != "\\u") fail("half of a surrogate pair");
  at_ += 2;
  const unsigned low = hex4();
  if (low < 0xdc00 || low > 0xdfff) fail("half of a surrogate pair");
  return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
}

std::string JsonReader::string() {
  expect('"', "a string");
  std::string out;
  for (;;) {
    if (at_ >= text_.size()) fail("a string without its end");
    const char c = text_[at_];
    if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
    ++at_;
    if (c == '"') return out;
    if (c == '\\')
      append_utf8(out, escape());
    else
      out.push_back(c);
  }
}

std::uint64_t JsonReader::unsigned_integer() {
  if (!is_digit(peek())) fail("expected a number of 0 or more, without a fraction");
  const std::size_t start = at_;
  std::uint64_t value = 0;
  for (; at_ < text_.size() && is_digit(text_[at_]); ++at_) {
    const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
    if (value > (UINT64_MAX - digit) / 10) fail("a number beyond 64 bits");
    value = value * 10 + digit;
  }
  if (text_[start] == '0' && at_ - start > 1) fail("a number with a leading zero");
  if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E'))
    fail("expected a number without a fraction");
  return value;
}

void JsonReader::skip_number() {
  const auto digits = [this] {
    const std::size_t start = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    if (at_ == start) fail("expected a digit");
    return at_ - start;
  };
  const auto at = [this](char c) { return at_ < text_.size() && text_[at_] == c; };
  if (at('-')) ++at_;
  const bool zero = at('0');
  if (digits() > 1 && zero) fail("a number with a leading zero");
  if (at('.')) {
    ++at_;
    digits();
  }
  if (at('e') || at('E')) {
    ++at_;
    if (at('+') || at('-')) ++at_;
    digits();
  }
}

void JsonReader::skip_word(std::string_view word) {
  if (text_.substr(at_, word.size()) != word) fail("expected a value");
  at_ += word.size();
}

void JsonReader::skip() {
  const std::size_t depth = first_.size();
  std::string key;
  // A loop and not recursion: first_ is the stack. Its bits do not distinguish objects from arrays,
  // so `kinds` does.
  std::string kinds;
  do {
    const char c = peek();
    if (c == '{') {
      enter_object();
      kinds.push_back('}');
    } else if (c == '[') {
      enter_array();
      kinds.push_back(']');
    } else if (c == '"') {
      string();
    } else if (c == '-' || is_digit(c)) {
      skip_number();
    } else {
      skip_word(c == 't' ? "true" : c == 'f' ? "false" : "null");
    }
    // Close what ends here; stop at the next value.
    while (!kinds.empty() && !(kinds.back() == '}' ? next_key(key) : next_element()))
      kinds.pop_back();
  } while (first_.size() > depth);
}

void JsonReader::end() {
  if (peek() != '\0' || at_ < text_.size()) fail("text after the end");
}

}  // namespace lockstep::io
