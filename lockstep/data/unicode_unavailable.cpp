// Replaces unicode.cpp where the build found no PCRE2 or no utf8proc.
#include "lockstep/core/error.h"
#include "lockstep/data/unicode.h"

namespace lockstep::data {
namespace {

[[noreturn]] void refuse_unicode(std::string_view what) {
  throw UsageError("tokenizer",
                   "{} needs PCRE2 and utf8proc, and Lockstep was built without them. Install "
                   "libpcre2-dev and libutf8proc-dev, then configure and build again.",
                   what);
}

}  // namespace

struct Regex::Code {};

Regex::Regex(const std::string& pattern) {
  refuse_unicode("the regular expression '" + pattern + "'");
}

bool Regex::find(std::string_view, std::size_t, Match&) const {
  return false;
}

std::string normalized(std::string_view, NormalForm) {
  refuse_unicode("normalization");
}

std::string lower_case(std::string_view) {
  refuse_unicode("lower case");
}

bool is_word_character(char32_t) {
  refuse_unicode("an added token with single_word");
}

void require_unicode(std::string_view what) {
  refuse_unicode(what);
}

}  // namespace lockstep::data
