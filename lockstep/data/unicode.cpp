#include "lockstep/data/unicode.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::data {
namespace {

// As members of a class. PCRE2's own \s also has U+180E, no longer white space since Unicode 6.3.
constexpr std::string_view kSpaces = R"(\t-\r\x{85}\p{Z})";
// Letters and numbers that Unicode 15 and 16 added, which Oniguruma knows and PCRE2 10.42 does not.
constexpr std::string_view kLetters =
    R"(\p{L}\x{1c89}\x{1c8a}\x{a7cb}-\x{a7cd}\x{a7da}-\x{a7dc}\x{105c0}-\x{105f3})"
    R"(\x{10d4a}-\x{10d65}\x{10d6f}-\x{10d85}\x{10ec2}-\x{10ec4}\x{1123f}\x{11240})"
    R"(\x{11380}-\x{11389}\x{1138b}\x{1138e}\x{11390}-\x{113b5}\x{113b7}\x{113d1}\x{113d3})"
    R"(\x{11bc0}-\x{11be0}\x{11f02}\x{11f04}-\x{11f10}\x{11f12}-\x{11f33}\x{1342f})"
    R"(\x{13441}-\x{13446}\x{13460}-\x{143fa}\x{16100}-\x{1611d}\x{16d40}-\x{16d6c}\x{18cff})"
    R"(\x{1b132}\x{1b155}\x{1df25}-\x{1df2a}\x{1e030}-\x{1e06d}\x{1e4d0}-\x{1e4eb})"
    R"(\x{1e5d0}-\x{1e5ed}\x{1e5f0}\x{2b739}\x{2ebf0}-\x{2ee5d}\x{31350}-\x{323af})";
constexpr std::string_view kNumbers =
    R"(\p{N}\x{10d40}-\x{10d49}\x{116d0}-\x{116e3}\x{11bf0}-\x{11bf9}\x{11f50}-\x{11f59})"
    R"(\x{16130}-\x{16139}\x{16d70}-\x{16d79}\x{1ccf0}-\x{1ccf9}\x{1d2c0}-\x{1d2d3})"
    R"(\x{1e4f0}-\x{1e4f9}\x{1e5f1}-\x{1e5fa})";

// A pattern of Oniguruma in the syntax of PCRE2.
class Translation {
 public:
  explicit Translation(const std::string& pattern) : pattern_(pattern) {}

  std::string text() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      if (c == '\\') {
        escape();
      } else if (in_class_) {
        if (c == '[' || pattern_.compare(at_, 2, "&&") == 0) refuse("a class within a class");
        if (c == ']' && at_ > class_begin_) in_class_ = false;
        copy(1);
      } else {
        plain(c);
      }
    }
    return out_;
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw UsageError("tokenizer",
                     "the regular expression '{}' is not supported: {} at position {} means one "
                     "thing to the tokenizers package and another to PCRE2.",
                     pattern_, what, at_);
  }

  void copy(std::size_t count) {
    out_.append(pattern_, at_, count);
    at_ += count;
  }

  void plain(char c) {
    if (c == '^' || c == '$') refuse("an anchor");
    if (c == '}' && pattern_.compare(at_ + 1, 1, "+") == 0) refuse("'+' after '}'");
    copy(1);
    if (c != '[') return;
    in_class_ = true;
    if (pattern_.compare(at_, 1, "^") == 0) copy(1);
    class_begin_ = at_;
  }

  // A set of characters in place of `count` characters of the pattern.
  void put_set(std::string_view members, bool negated, std::size_t count) {
    if (negated && in_class_) refuse("a negated set in a class");
    if (in_class_)
      out_ += members;
    else
      out_.append(negated ? "[^" : "[").append(members).append("]");
    at_ += count;
  }

  void escape() {
    const char c = at_ + 1 < pattern_.size() ? pattern_[at_ + 1] : '\0';
    if (c == 's' || c == 'S') return put_set(kSpaces, c == 'S', 2);
    for (const auto& [name, members] : {std::pair{"{L}", kLetters}, std::pair{"{N}", kNumbers}})
      if ((c == 'p' || c == 'P') && pattern_.compare(at_ + 2, 3, name) == 0)
        return put_set(members, c == 'P', 5);
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool digit = c >= '0' && c <= '9';
    if (c == '\0' || digit ||
        (letter && std::string_view("pPdrnt").find(c) == std::string_view::npos))
      refuse(std::string("\\") + c);
    copy(2);
  }

  const std::string& pattern_;
  std::string out_;
  std::size_t at_ = 0;
  std::size_t class_begin_ = 0;
  bool in_class_ = false;
};

std::string pcre2_message(int code) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

// The memory of a match. A thread runs only one match at a time, so all patterns share it.
struct MatchMemory {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(32 * 1024, 4 * 1024 * 1024, nullptr);

  MatchMemory() { pcre2_jit_stack_assign(context, nullptr, stack); }
  MatchMemory(const MatchMemory&) = delete;
  MatchMemory& operator=(const MatchMemory&) = delete;
  ~MatchMemory() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
};

}  // namespace

struct Regex::Code {
  std::string pattern;
  pcre2_code* code = nullptr;
  bool jit = false;

  ~Code() { pcre2_code_free(code); }
};

Regex::Regex(const std::string& pattern) {
  const std::string text = Translation(pattern).text();
  auto made = std::make_shared<Code>();
  made->pattern = pattern;
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);  // what '.' does not match
  made->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                             PCRE2_UTF | PCRE2_UCP, &error, &offset, context);
  pcre2_compile_context_free(context);
  if (made->code == nullptr)
    throw UsageError("tokenizer", "the regular expression '{}' cannot be compiled: {}.", pattern,
                     pcre2_message(error));
  made->jit = pcre2_jit_compile(made->code, PCRE2_JIT_COMPLETE) == 0;
  code_ = std::move(made);
}

bool Regex::find(std::string_view text, std::size_t from, Match& match) const {
  thread_local const MatchMemory memory;
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  int count = PCRE2_ERROR_JIT_STACKLIMIT;
  if (code_->jit)
    count = pcre2_jit_match(code_->code, subject, text.size(), from, PCRE2_NO_UTF_CHECK,
                            memory.data, memory.context);
  if (count == PCRE2_ERROR_JIT_STACKLIMIT)  // the interpreter keeps its state on the heap
    count = pcre2_match(code_->code, subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                        memory.data, nullptr);
  if (count == PCRE2_ERROR_NOMATCH) return false;
  if (count < 0)
    throw UsageError("tokenizer",
                     "the regular expression '{}' gives up at byte {} of {}: {}. Encode the text "
                     "in shorter pieces.",
                     code_->pattern, from, text.size(), pcre2_message(count));
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(memory.data);
  match = {ends[0], ends[1]};
  return true;
}

std::string normalized(std::string_view text, NormalForm form) {
  if (std::none_of(text.begin(), text.end(),
                   [](char c) { return static_cast<unsigned char>(c) >= 0x80; }))
    return std::string(text);
  const bool composed = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  const bool compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const int options = UTF8PROC_STABLE | (composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                      (compatible ? UTF8PROC_COMPAT : 0);
  utf8proc_uint8_t* out = nullptr;
  const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                             static_cast<utf8proc_ssize_t>(text.size()), &out,
                                             static_cast<utf8proc_option_t>(options));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(out, &std::free);
  if (size < 0)
    throw UsageError("tokenizer", "a text of {} bytes cannot be normalized: {}.", text.size(),
                     utf8proc_errmsg(size));
  return {reinterpret_cast<const char*>(out), static_cast<std::size_t>(size)};
}

std::string lower_case(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const char32_t c = next_character(text, at);
    if (c == 0x130)
      out += "i\xCC\x87";  // the one letter whose lower case has two characters
    else
      append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<int>(c))));
  }
  return out;
}

bool is_word_character(char32_t c) {
  const utf8proc_category_t kind = utf8proc_category(static_cast<int>(c));
  const bool enclosed = (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
                        (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
  return (kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_NL) ||
         kind == UTF8PROC_CATEGORY_PC || enclosed || c == 0x200C || c == 0x200D;
}

void require_unicode(std::string_view) {}

}  // namespace lockstep::data
