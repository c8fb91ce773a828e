// fmt's compiled part for lockstep_portable: Debian ships it as a shared library and as headers,
// not as an archive. Built without inlining, so that every function that these calls reach is
// emitted.
#include <fmt/format.h>

namespace lockstep::cli {

std::string reach_all_of_fmt(fmt::string_view text, fmt::format_args values);

std::string reach_all_of_fmt(fmt::string_view text, fmt::format_args values) {
  fmt::vprint(stderr, text, values);
  return fmt::vformat(text, values);
}

}  // namespace lockstep::cli
