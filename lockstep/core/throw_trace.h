// Remembers where exceptions were thrown. A handler runs after the stack is gone, so this file
// replaces __cxa_throw, through which every `throw` of the process passes. Only after enable() are
// the addresses of the latest throws recorded, which costs some microseconds each; until then a
// throw is only passed on.
//
//   throw_trace::enable();
//   std::vector<void*> frames = throw_trace::find(dynamic_cast<const void*>(&exception));
//
// Safe from any thread. Nothing is owned; frames are return addresses, innermost first.
#pragma once

#include <vector>

namespace lockstep::throw_trace {

void enable();
std::vector<void*> find(const void* exception_object);
std::vector<void*> find_latest();  // the calling thread's, whatever was thrown

}  // namespace lockstep::throw_trace
