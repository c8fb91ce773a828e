// JSON as RFC 8259 defines it: the only parser, and the only function that quotes strings.
//
// The parser is a cursor whose caller says what must come next; otherwise it throws, with the
// offset and a remedy. Valid UTF-8, no hidden duplicates (the caller sees every key), exact
// integers, nothing after the end, bounded nesting. It copies only the strings that are asked for,
// so large files cost little; parse_json() in document.h makes a tree of a small one.
//
//   JsonReader json(text);
//   json.enter_object();
//   while (json.next_key(key)) sizes[key] = json.unsigned_integer();
//   json.end();
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// The error and its offset, without a full stop; callers that know the file throw UsageError.
class JsonError : public std::runtime_error {
 public:
  JsonError(std::size_t offset, const std::string& what)
      : std::runtime_error(what), offset_(offset) {}
  std::size_t offset() const { return offset_; }

 private:
  std::size_t offset_;
};

// The text as a JSON string, quotes included: the shortest escapes, other characters as they are,
// and U+FFFD for each byte that is not UTF-8.
std::string json_quote(std::string_view text);

// Used by one thread; the text must outlive it.
class JsonReader {
 public:
  // Starts at the offset `begin`; offsets count from the beginning of the text.
  explicit JsonReader(std::string_view text, std::size_t begin = 0, std::size_t max_depth = 128);

  // The first character of the value that comes next, at offset().
  char peek();
  void enter_object();
  // False at the closing brace, which it consumes. Otherwise the value must be read next.
  bool next_key(std::string& key);
  void enter_array();
  // False at the closing bracket, which it consumes. Otherwise an element must be read next.
  bool next_element();

  std::string string();
  std::uint64_t unsigned_integer();
  std::string_view scalar();  // a number, true, false or null, as it is written
  void skip();                // any value, checked as strictly
  void end();                 // only white space is left
  std::size_t offset() const { return at_; }
  std::size_t key_offset() const { return key_at_; }  // of the last key

  [[noreturn]] void fail(const std::string& what) const { throw JsonError(at_, what); }

 private:
  struct Open {
    std::size_t at;
    char closing;
    bool first;  // nothing was read in it yet
  };

  char skip_space();
  void enter(char opening, char closing, const char* what);
  bool next_item(char closing);
  void append_escape(std::string& out);
  unsigned hex4(std::size_t escape) const;
  [[noreturn]] void refuse_string_byte(std::size_t opened) const;

  std::string_view text_;
  std::size_t at_;
  std::size_t max_depth_;
  std::size_t key_at_ = 0;
  std::vector<Open> open_;
};

}  // namespace lockstep
