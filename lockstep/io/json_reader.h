// JSON read strictly and in order, for files that must not be half understood: a cursor whose
// caller says what comes next; it throws when something else does. Valid UTF-8, no duplicates
// hidden (the caller sees every key), integers exact, nothing after the end, a bound on nesting.
//
//   JsonReader json(text);
//   json.enter_object();
//   while (json.next_key(key)) sizes[key] = json.unsigned_integer();
//   json.end();
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::io {

// What is wrong and where; whoever knows the file turns it into a UsageError.
class JsonError : public std::runtime_error {
 public:
  JsonError(std::size_t offset, const std::string& what)
      : std::runtime_error(what), offset_(offset) {}
  std::size_t offset() const { return offset_; }

 private:
  std::size_t offset_;
};

// The offset of the first byte that is not well-formed UTF-8.
std::optional<std::size_t> invalid_utf8(std::string_view text);

// The text as a JSON string, quotes included: the shortest escapes, other characters as they are.
std::string json_quote(std::string_view text);

// Used by one thread; the text must outlive it.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text);

  void enter_object();
  // False at the closing brace, which it consumes. Otherwise the value must be read next.
  bool next_key(std::string& key);
  void enter_array();
  // False at the closing bracket, which it consumes. Otherwise an element must be read next.
  bool next_element();

  std::string string();
  std::uint64_t unsigned_integer();
  void skip();  // any value, checked as strictly
  void end();   // only white space is left
  std::size_t offset() const { return at_; }

  [[noreturn]] void fail(const std::string& what) const { throw JsonError(at_, what); }

 private:
  char peek();
  void expect(char wanted, const char* what);
  bool next_item(char closing);
  char32_t escape();
  unsigned hex4();
  void skip_number();
  void skip_word(std::string_view word);

  std::string_view text_;
  std::size_t at_ = 0;
  std::vector<bool> first_;  // for each open object or array: nothing read in it yet
};

}  // namespace lockstep::io
