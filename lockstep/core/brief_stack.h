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
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Whether the frame is in LibTorch, libc, CUDA, ..., judged by its file.
bool is_library_frame(std::string_view frame);

// Frames as symbols::frame_text() writes them, with file:line appended where known. Consecutive
// frames of libraries become one line. Text in any other form is not changed.
std::vector<std::string> brief_stack(const std::vector<std::string>& frames);

}  // namespace lockstep
