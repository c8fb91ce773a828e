// Text for XML and HTML, and numbers for people.
//
//   out += fmt::format("<td>{}</td>", escape(name));   // whatever the name is, it stays text
//
// Free functions without state; call them from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::report {

// As text or as an attribute's value between quotes. What XML 1.0 cannot hold (control characters,
// bytes that are not UTF-8) becomes U+FFFD.
std::string escape(std::string_view text);

// Cut to `characters` with an ellipsis; not escaped.
std::string shortened(std::string_view text, std::size_t characters);

// Four significant digits: "0.0312", "12.5", "48,210"; "not a number", "infinite".
std::string number_text(double value);
std::string percent_text(double share);       // 0.153 -> "15.3 %"
std::string duration_text(double seconds);    // "1.2 s", "3 min 20 s", "5 h 12 min"
std::string time_text(double unix_time_s);    // "2026-11-16 18:00:05 UTC"; "" for 0
std::string bytes_text(std::uint64_t bytes);  // "1.5 GiB"

}  // namespace lockstep::report
