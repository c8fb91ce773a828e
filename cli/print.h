// What a command prints. Names and texts from files go to a terminal without control characters
// (core/text.h).
//
//   print_text("{}: {} tensors\n", name_in_a_file, count);
//   print_text(stderr, "note: {}\n", note);
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

#include "lockstep/core/text.h"

namespace lockstep::cli {

template <typename... Args>
void print_text(std::FILE* to, fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = printable_lines(fmt::format(format, std::forward<Args>(args)...));
  std::fwrite(text.data(), 1, text.size(), to);
}

template <typename... Args>
void print_text(fmt::format_string<Args...> format, Args&&... args) {
  print_text(stdout, format, std::forward<Args>(args)...);
}

}  // namespace lockstep::cli
