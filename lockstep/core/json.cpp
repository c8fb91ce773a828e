// Read by hand: offsets of keys and values are needed, and the remedies are about what people type
// (comments, single quotes, a comma too many).
#include "lockstep/core/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "lockstep/core/text.h"

namespace lockstep {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

// Control characters too: no message may bring them to a terminal.
bool ends_scalar(char c) {
  return static_cast<unsigned char>(c) <= ' ' || c == ',' || c == '}' || c == ']' || c == ':' ||
         c == '"' || c == '{' || c == '[';
}

// Whether all of the text is a JSON number.
bool is_number(std::string_view text) {
  const auto digits = [&] {
    std::size_t count = 0;
    while (count < text.size() && is_digit(text[count])) ++count;
    text.remove_prefix(count);
    return count;
  };
  const auto take = [&](std::string_view any) {
    const bool there = !text.empty() && any.find(text[0]) != any.npos;
    if (there) text.remove_prefix(1);
    return there;
  };
  take("-");
  const bool zero = text.starts_with('0');
  const std::size_t whole = digits();
  if (whole == 0 || (whole > 1 && zero)) return false;
  if (take(".") && digits() == 0) return false;
  if (take("eE")) {
    take("+-");
    if (digits() == 0) return false;
  }
  return text.empty();
}

constexpr std::string_view kEscapeLetters = "\"\\/bfnrt";
constexpr std::string_view kEscapeMeanings = "\"\\/\b\f\n\r\t";

}  // namespace

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  out.reserve(text.size() + 2);
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    const std::size_t size = std::max<std::size_t>(utf8_size(text.substr(at)), 1);
    const std::size_t known = c == '/' ? kEscapeMeanings.npos : kEscapeMeanings.find(c);
    if (known != kEscapeMeanings.npos) {
      out += '\\';
      out += kEscapeLetters[known];
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else if (size == 1 && static_cast<unsigned char>(c) >= 0x80) {
      out += "\xEF\xBF\xBD";
    } else {
      out += text.substr(at, size);
    }
    at += size;
  }
  return out += '"';
}

JsonReader::JsonReader(std::string_view text, std::size_t begin, std::size_t max_depth)
    : text_(text), at_(begin), max_depth_(max_depth) {
  const auto bad = invalid_utf8(text.substr(begin));
  if (!bad) return;
  at_ += *bad;
  fail(fmt::format("the byte 0x{:02x} is not valid UTF-8. Save the file as UTF-8",
                   static_cast<unsigned char>(text[at_])));
}

// The next character that is not white space, or 0 at the end: a real NUL is not a token either.
char JsonReader::skip_space() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t') {
      const std::string_view two = text_.substr(at_, 2);
      if (c == '#' || two == "//" || two == "/*")
        fail("JSON has no comments. Delete it, or write YAML");
      return c;
    }
    ++at_;
  }
  return '\0';
}

char JsonReader::peek() {
  const char c = skip_space();
  if (at_ < text_.size()) return c;
  if (open_.empty()) fail("a value is missing");
  const auto before = text_.substr(0, open_.back().at);
  fail(fmt::format("the text ends inside a list or map that line {} opened. Close it",
                   std::count(before.begin(), before.end(), '\n') + 1));
}

void JsonReader::enter(char opening, char closing, const char* what) {
  if (peek() != opening) fail(fmt::format("expected {}", what));
  if (open_.size() >= max_depth_) fail(fmt::format("nested deeper than {}", max_depth_));
  open_.push_back({at_++, closing, true});
}

void JsonReader::enter_object() {
  enter('{', '}', "an object");
}

void JsonReader::enter_array() {
  enter('[', ']', "a list");
}

bool JsonReader::next_item(char closing) {
  const char c = peek();
  if (c == closing) {
    ++at_;
    open_.pop_back();
    return false;
  }
  if (!std::exchange(open_.back().first, false)) {
    if (c != ',') fail(fmt::format("a ',' or '{}' was expected. Write one before this", closing));
    ++at_;
    if (const char next = peek(); next == '}' || next == ']')
      fail("JSON has no comma before a closing bracket. Delete the comma");
  }
  return true;
}

bool JsonReader::next_key(std::string& key) {
  if (!next_item('}')) return false;
  const char c = peek();
  if (c == '\'' || is_letter(c))
    fail("JSON takes double quotes around keys and strings. Write \"key\": value");
  if (c != '"') fail("a key in double quotes was expected");
  key_at_ = at_;
  key = string();
  if (skip_space() != ':') fail(fmt::format("a ':' was expected after the key '{}'", key));
  ++at_;
  return true;
}

bool JsonReader::next_element() {
  return next_item(']');
}

std::string JsonReader::string() {
  if (peek() != '"') fail("expected a string");
  const std::size_t opened = at_++;
  std::string out;
  for (;;) {
    const std::size_t start = at_;
    while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' &&
           static_cast<unsigned char>(text_[at_]) >= 0x20)
      ++at_;
    out.append(text_, start, at_ - start);
    if (at_ >= text_.size() || static_cast<unsigned char>(text_[at_]) < 0x20)
      refuse_string_byte(opened);
    if (text_[at_] == '"') {
      ++at_;
      return out;
    }
    append_escape(out);
  }
}

void JsonReader::refuse_string_byte(std::size_t opened) const {
  if (at_ >= text_.size()) throw JsonError(opened, "A quote that was opened is not closed");
  const char c = text_[at_];
  if (c == '\n' || c == '\r') fail("a string contains a line break. Write \\n");
  if (c == '\t') fail("a string contains a tab. Write \\t");
  fail(fmt::format("a string contains the control character 0x{:02x}. Write \\u{:04x}",
                   static_cast<unsigned>(c), static_cast<unsigned>(c)));
}

// At the backslash; leaves at_ after the escape.
void JsonReader::append_escape(std::string& out) {
  const std::size_t start = at_;
  const std::string_view letter = text_.substr(start + 1, 1);
  if (letter != "u") {
    const std::size_t known = letter.empty() ? letter.npos : kEscapeLetters.find(letter[0]);
    if (known == letter.npos)
      fail(fmt::format("\\{} is not an escape. Write \\\\ for a backslash", letter));
    out += kEscapeMeanings[known];
    at_ += 2;
    return;
  }
  constexpr std::size_t kSize = 6;  // \u0041
  unsigned code = hex4(start);
  std::size_t end = start + kSize;
  if (code >= 0xD800 && code < 0xDC00 && text_.substr(end, 2) == "\\u") {
    const unsigned low = hex4(end);
    end += kSize;
    if (low >= 0xDC00 && low < 0xE000) code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  if (code >= 0xD800 && code < 0xE000)
    fail("half of a surrogate pair. Write both halves, or the character itself");
  append_utf8(out, code);
  at_ = end;
}

// The four hexadecimal digits of the escape whose backslash is at `escape`.
unsigned JsonReader::hex4(std::size_t escape) const {
  unsigned code = 0;
  const std::string_view digits = text_.substr(escape + 2, 4);
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, code, 16);
  if (digits.size() != 4 || error != std::errc() || stop != end)
    fail("\\u takes four hexadecimal digits");
  return code;
}

std::string_view JsonReader::scalar() {
  const char first = peek();
  std::size_t end = at_;
  while (end < text_.size() && !ends_scalar(text_[end])) ++end;
  const std::string_view text = text_.substr(at_, end - at_);
  const auto refuse = [&](std::string_view why) {
    fail(fmt::format("'{}' is not a JSON {}", utf8_prefix(text, 40), why));
  };
  if (text.empty()) fail("a value is missing");
  if (is_digit(first) || first == '-') {
    if (!is_number(text)) refuse("number. Write it as 12, -1.5 or 5e-5");
  } else if (first == '\'') {
    fail("JSON takes double quotes around keys and strings");
  } else if (text != "true" && text != "false" && text != "null") {
    refuse(text == "True"    ? "value. Write true"
           : text == "False" ? "value. Write false"
           : text == "None"  ? "value. Write null"
                             : "value. Put strings in double quotes");
  }
  at_ = end;
  return text;
}

std::uint64_t JsonReader::unsigned_integer() {
  const char first = peek();
  const std::size_t start = at_;
  std::uint64_t value = 0;
  if (is_digit(first)) {
    const std::string_view text = scalar();
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc() && stop == end) return value;
    if (error != std::errc() && stop == end) throw JsonError(start, "a number beyond 64 bits");
  }
  throw JsonError(start, "expected a number of 0 or more, without a fraction");
}

void JsonReader::skip() {
  const std::size_t depth = open_.size();
  std::string key;
  do {
    const char c = peek();
    if (c == '{') {
      enter_object();
    } else if (c == '[') {
      enter_array();
    } else if (c == '"') {
      string();
    } else {
      scalar();
    }
    // Close what ends here; stop at the next value.
    while (open_.size() > depth &&
           !(open_.back().closing == '}' ? next_key(key) : next_element())) {
    }
  } while (open_.size() > depth);
}

void JsonReader::end() {
  skip_space();
  if (at_ < text_.size()) fail("one value was expected, but more follows. Delete it");
}

}  // namespace lockstep
