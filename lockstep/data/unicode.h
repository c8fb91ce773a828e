// The functions of Unicode that a tokenizer needs: regular expressions, normal forms, lower case.
// They use PCRE2 and utf8proc (unicode.cpp). A build without these libraries has
// unicode_unavailable.cpp instead, where each function throws a UsageError that says what to
// install; tokenizers like those of Llama 2 and Phi-3 need none of them.
//
//   const Regex words(R"( ?\p{L}+|\s+(?!\S))");
//   for (Regex::Match match; words.find(text, match.end, match);) use(match.begin, match.end);
//
// Read-only after construction; any thread. Texts must be valid UTF-8.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep::data {

// A pattern in the syntax of Oniguruma, which the `tokenizers` package uses. What PCRE2 reads
// differently (\w, \b, \h, ^, $, nested classes, {1,3}+) is refused.
class Regex {
 public:
  struct Match {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  explicit Regex(const std::string& pattern);  // UsageError: what is wrong with the pattern
  // The first match at or after `from`; false without one.
  bool find(std::string_view text, std::size_t from, Match& match) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
std::string normalized(std::string_view text, NormalForm form);
std::string lower_case(std::string_view text);  // character by character, as Rust's to_lowercase
bool is_word_character(char32_t character);     // \w of Rust's regex
// UsageError where the libraries are missing; `what` is the feature that needs them.
void require_unicode(std::string_view what);

}  // namespace lockstep::data
