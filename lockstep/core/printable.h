// Makes foreign text safe for a terminal: control characters could move the cursor, or set the
// terminal's title to a command.
//
//   fmt::print("{}\n", printable(text_of_a_file));
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// Control characters, what is not UTF-8, and marks that reorder text, written as escapes such as
// \x1b. Line breaks and tabs are spaces, so that a text cannot have lines that look like ours.
std::string printable(std::string_view text);
// The same with its line breaks and tabs.
std::string printable_lines(std::string_view text);

}  // namespace lockstep
