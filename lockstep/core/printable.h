// Makes foreign text safe for a terminal: control characters could move the cursor, or set the
// terminal's title to a command.
//
//   fmt::print("{}\n", printable(text_of_a_file));
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// One line: a tab is a space, and U+FFFD stands for every other control character, for those that
// change the direction of writing, and for what is not UTF-8.
std::string printable(std::string_view text);

}  // namespace lockstep
