// Remembers where exceptions were thrown. By the time a handler sees one its stack is gone, so
// every `throw` of the process passes through here (our __cxa_throw stands in front of the C++
// runtime's). Only after enable() are the addresses of the latest ones recorded, which costs some
// microseconds per throw; until then a throw is passed on as it is.
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
