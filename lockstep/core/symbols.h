// Converts addresses to names, and stacks to what a person reads of them. dladdr() knows exported
// functions only; a file's symbol table also has static functions and the cold parts that the
// compiler splits from a function, where most `throw`s are. Debug information is not needed.
//
//   std::string text = symbols::frame_text(return_address);   // "train(World&)+0x1c (a+0x2f10)"
//
// Free functions without state; they allocate and open files, so not for a signal handler.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
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

// A stack trace for people. Three or four of a training program's 50 frames are its own; the
// others, with template arguments of several hundred characters, hide them.
//
//   brief_stack({"lockstep::Work::wait()+0x20 (train+0x9a10)",
//                "epoch(Net<float>&)+0x1c (train+0x2f10) /src/train.cpp:41",
//                "main+0x54 (train+0x31a4)",
//                "__libc_start_main+0x98 (libc.so.6+0x2777c)"});
//   // "... 1 frame of Lockstep", "epoch(Net<...>&) (/src/train.cpp:41)", "main (train+0x31a4)",
//   // "... 1 frame of libc"
//
// Free functions of texts, without state; used by a failed rank and by the launcher that reads its
// error file.
namespace lockstep {

// Whether the frame is in LibTorch, libc, CUDA, ..., judged by its file.
bool is_library_frame(std::string_view frame);

// Frames as symbols::frame_text() writes them, with file:line appended where known. Consecutive
// frames of libraries become one line. Text in any other form is not changed.
std::vector<std::string> brief_stack(const std::vector<std::string>& frames);

}  // namespace lockstep
