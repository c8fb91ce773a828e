// Text taken apart and put together: the few operations that every layer needs.
//
//   for (const std::string& part : split("0:3,1:1", ',')) read(trim(part));
//   listed({"a", "b", "c"});                     // "a, b or c"
//   ranges_text(std::vector{0, 2, 3, 4});        // "0, 2-4"
//
// Free functions without state; call them from any thread. ASCII alone has cases and white space.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

std::vector<std::string> split(std::string_view text, char separator);  // empty parts as well
std::vector<std::string> lines_of(std::string_view text);  // no empty one after the last newline
std::string trim(std::string_view text);                   // without white space around it
std::string lower(std::string_view text);

// "a, b or c", with another word before the last one.
std::string listed(std::span<const std::string> names, std::string_view word = "or");
// "0, 2-5" of numbers in ascending order.
std::string ranges_text(std::span<const int> numbers, std::string_view separator = ", ");
// "1, 2, 3 and 40 more": the first sixteen.
std::string first_numbers(std::span<const int> numbers);

}  // namespace lockstep
