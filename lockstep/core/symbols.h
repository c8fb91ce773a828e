// Converts addresses to names. dladdr() knows exported functions only; a file's symbol table also
// has static functions and the cold parts that the compiler splits from a function, where most
// `throw`s are. Debug information is not needed.
//
//   std::string text = symbols::frame_text(return_address);   // "train(World&)+0x1c (a+0x2f10)"
//
// Free functions without state; they allocate and open files, so not for a signal handler.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/deadline.h"

namespace lockstep::symbols {

std::string demangle(const char* name);

// For a return address as backtrace() gives it: function+offset where known, and (module+offset),
// which addr2line understands.
std::string frame_text(void* return_address);

// The same for an address of another process, or of one that has ended: `bias` is how far from its
// own addresses the file was loaded there.
std::string frame_text(const std::string& file, std::uint64_t return_address, std::uint64_t bias);

// The file and file address of the instruction before a return address.
struct Place {
  std::string file;  // empty: none is known
  std::uint64_t address = 0;
};
Place place_of(void* return_address);

// Whether the file has debug information with lines, or names another file that does.
bool has_line_numbers(const std::string& file);

// The file and line ("/src/train.cpp:41") of instructions' addresses, from the program's debug
// information; empty where it is not known. The host's addr2line reads it in a process of its own
// with a deadline, so a program that fails needs no parser and does not hang. Never throws.
std::vector<std::string> source_lines(const std::string& file,
                                      const std::vector<std::uint64_t>& addresses,
                                      const Deadline& deadline);

}  // namespace lockstep::symbols
