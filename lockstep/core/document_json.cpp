// JSON, strictly as RFC 8259 has it. Read by hand: the places of keys and values are needed, and
// the remedies are about what people type (comments, single quotes, a comma too many).
#include <algorithm>
#include <charconv>
#include <limits>
#include <unordered_map>

#include "lockstep/core/document_text.h"

namespace lockstep {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// The grammar of a JSON number; npos when the front of `text` is none.
std::size_t number_size(std::string_view text) {
  std::size_t i = 0;
  const auto digits = [&] {
    const std::size_t before = i;
    while (i < text.size() && is_digit(text[i])) ++i;
    return i - before;
  };
  if (i < text.size() && text[i] == '-') ++i;
  const std::size_t first = i;
  const std::size_t whole = digits();
  if (whole == 0 || (whole > 1 && text[first] == '0')) return text.npos;
  if (i < text.size() && text[i] == '.') {
    ++i;
    if (digits() == 0) return text.npos;
  }
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    ++i;
    if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
    if (digits() == 0) return text.npos;
  }
  return i;
}

void append_utf8(std::string& out, unsigned code) {
  const auto put = [&](unsigned byte) { out += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6), put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12), put(0x80 | (code >> 6 & 0x3F)), put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18), put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F)), put(0x80 | (code & 0x3F));
  }
}

class JsonReader {
 public:
  JsonReader(DocumentText& document, Problems* problems)
      : document_(document), problems_(problems), text_(document.text()) {}

  Node read() {
    skip_space();
    if (at_end()) refuse_at(here(), "the file is empty. Write at least {{}}.");
    Node root = value(1);
    skip_space();
    if (!at_end()) refuse_at(here(), "one value was expected, but more follows. Delete it.");
    return root;
  }

 private:
  bool at_end() const { return next_ >= text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[next_]; }
  SourceLocation here() const { return document_.at(next_); }

  void skip_space() {
    next_ = std::min(text_.find_first_not_of(" \t\r\n", next_), text_.size());
    const std::string_view rest = text_.substr(next_, 2);
    if (rest == "//" || rest == "/*" || rest.substr(0, 1) == "#")
      refuse_at(here(), "JSON has no comments. Delete it, or write YAML.");
  }

  Node value(std::size_t depth) {
    const SourceLocation location = here();
    document_.count(1, location);
    Node node;
    switch (peek()) {
      case '{':
        document_.check_depth(depth, location);
        node = map(depth, location);
        break;
      case '[':
        document_.check_depth(depth, location);
        node = list(depth, location);
        break;
      case '"':
        node = text_node(string());
        node.quoted = true;
        break;
      default:
        node = word();
    }
    node.location = location;
    return node;
  }

  Node map(std::size_t depth, const SourceLocation& opened) {
    Node node;
    node.kind = NodeKind::kMap;
    std::unordered_map<std::string, std::size_t> seen;
    ++next_;
    skip_space();
    if (peek() == '}') {
      ++next_;
      return node;
    }
    for (;;) {
      Entry entry;
      entry.location = here();
      entry.key = key(opened);
      const auto [found, fresh] = seen.emplace(entry.key, node.entries.size());
      if (!fresh)
        refuse_duplicate(node.entries[found->second], entry.key, entry.location, problems_);
      skip_space();
      if (peek() != ':') refuse_at(here(), "a ':' was expected after the key '{}'.", entry.key);
      ++next_;
      skip_space();
      if (at_end()) refuse_end(opened);
      entry.value = value(depth + 1);
      if (fresh) node.entries.push_back(std::move(entry));
      if (!another('}', opened)) return node;
    }
  }

  Node list(std::size_t depth, const SourceLocation& opened) {
    Node node;
    node.kind = NodeKind::kList;
    ++next_;
    skip_space();
    if (peek() == ']') {
      ++next_;
      return node;
    }
    for (;;) {
      if (at_end()) refuse_end(opened);
      node.items.push_back(value(depth + 1));
      if (!another(']', opened)) return node;
    }
  }

  // Past the comma or the closing bracket after an element; whether there is one more.
  bool another(char closing, const SourceLocation& opened) {
    skip_space();
    if (at_end()) refuse_end(opened);
    const char c = peek();
    if (c != ',' && c != closing)
      refuse_at(here(), "a ',' or '{}' was expected. Write one before this.", closing);
    ++next_;
    if (c == closing) return false;
    skip_space();
    if (peek() == '}' || peek() == ']')
      refuse_at(here(), "JSON has no comma before a closing bracket. Delete the comma.");
    return true;
  }

  [[noreturn]] void refuse_end(const SourceLocation& opened) const {
    refuse_at(here(), "the file ends inside a list or map that line {} opened. Close it.",
              opened.line);
  }

  std::string key(const SourceLocation& opened) {
    const char c = peek();
    if (at_end()) refuse_end(opened);
    if (c == '\'' || c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
      refuse_at(here(), "JSON takes double quotes around keys and strings. Write \"key\": value.");
    if (c != '"') refuse_at(here(), "a key in double quotes was expected.");
    return string();
  }

  std::string string() {
    const SourceLocation opened = here();
    std::string out;
    for (++next_;; ++next_) {
      if (at_end()) refuse_at(opened, "A quote that was opened is not closed.");
      const char c = text_[next_];
      if (c == '"') break;
      if (c == '\n' || c == '\r')
        refuse_at(here(), "a line end stands inside a string. Write \\n.");
      if (c == '\t') refuse_at(here(), "a tab stands inside a string. Write \\t.");
      if (c == '\\') {
        escape(out);
      } else {
        out += c;
      }
    }
    ++next_;
    return out;
  }

  // At the backslash; leaves next_ at the escape's last character.
  void escape(std::string& out) {
    const SourceLocation location = here();
    ++next_;
    constexpr std::string_view kLetters = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    if (const auto found = kLetters.find(peek()); !at_end() && found != kLetters.npos) {
      out += kMeanings[found];
      return;
    }
    if (peek() != 'u') {
      refuse_at(location, "\\{} is not an escape. Write \\\\ for a backslash.",
                at_end() ? "" : std::string(1, peek()));
    }
    unsigned code = hex(location);
    if (code >= 0xD800 && code < 0xDC00 && text_.substr(next_ + 1, 2) == "\\u") {
      next_ += 2;
      const unsigned low = hex(location);
      code = low >= 0xDC00 && low < 0xE000 ? 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
                                           : 0xD800;
    }
    if (code >= 0xD800 && code < 0xE000)
      refuse_at(location, "half of a surrogate pair. Write both halves, or the character itself.");
    append_utf8(out, code);
  }

  // At the 'u'; leaves next_ at the last digit.
  unsigned hex(const SourceLocation& location) {
    unsigned code = 0;
    const std::string_view digits = text_.substr(next_ + 1, 4);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (digits.size() != 4 || error != std::errc() || end != digits.data() + 4)
      refuse_at(location, "\\u takes four hexadecimal digits.");
    next_ += 4;
    return code;
  }

  // A number, true, false or null.
  Node word() {
    const std::size_t end = std::min(text_.find_first_of(" \t\r\n,:]}[{\"", next_), text_.size());
    const std::string_view all = text_.substr(next_, end - next_);
    const SourceLocation location = here();
    const auto said = [&] { return std::string(all.substr(0, 40)); };
    if (all == "true" || all == "false" || all == "null") {
      next_ = end;
      return plain_scalar(all, location);
    }
    if (all.empty()) refuse_at(location, "a value is missing.");
    if (is_digit(all[0]) || all[0] == '-') {
      if (number_size(all) != all.size())
        refuse_at(location, "'{}' is not a JSON number. Write it as 12, -1.5 or 5e-5.", said());
      Node node = plain_scalar(all, location);
      if (node.real == std::numeric_limits<double>::infinity() ||
          node.real == -std::numeric_limits<double>::infinity())
        refuse_at(location, "'{}' is too large for a number.", said());
      next_ = end;
      return node;
    }
    if (all[0] == '\'') refuse_at(location, "JSON takes double quotes around keys and strings.");
    const std::string_view hint = all == "True"    ? " Write true."
                                  : all == "False" ? " Write false."
                                  : all == "None"  ? " Write null."
                                                   : " Put strings in double quotes.";
    refuse_at(location, "'{}' is not a JSON value.{}", said(), hint);
  }

  DocumentText& document_;
  Problems* problems_;
  std::string_view text_;
  std::size_t next_ = 0;
};

}  // namespace

Node parse_json(std::string_view text, const std::string& name, const DocumentLimits& limits,
                Problems* problems) {
  DocumentText document(text, name, limits);
  return JsonReader(document, problems).read();
}

}  // namespace lockstep
