// How the kernel's files about processes, control groups and the host are read (host_files.h says
// where they are).
//
//   const std::string memory = text_or_empty(files.proc + "/meminfo");
//   const auto available_kib = number_after(memory, "MemAvailable");
//
// Free functions without state; any thread may call. None of them uses a stream: in a process with
// two C++ standard libraries (a Python extension that brings its own) streams do not find their
// locale, and read every number as 0.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Empty where the file cannot be read: processes end and groups vanish while they are read.
std::string text_or_empty(const std::string& path);

// The number that the text begins with, after blanks. "max" and "-1" are none.
std::optional<std::uint64_t> leading_number(std::string_view text);

// What follows the key in the line "key value" or "key: value"; empty without such a line.
std::string_view text_after(std::string_view text, std::string_view key);
std::optional<std::uint64_t> number_after(std::string_view text, std::string_view key);

// The fields of a stat file (proc_pid_stat(5)) by the numbers that the manual gives them, from 3
// on: fields[3] is the state. The second is the name, which may hold anything. Empty where the text
// is none.
std::vector<std::string_view> stat_fields(std::string_view text);

}  // namespace lockstep
