// Reports why a rank died, in the error file that torchrun defined and `lockstep run` reads.
//
//   {"message": {"message": "lockstep::CommError: [comm] ...",
//                "extraInfo": {"timestamp": "1700000000", "rank": 1, "host": "n1",
//                              "cpp_stack": ["train(lockstep::World&)+0x1c (mnist+0x2f10)", ...]}}}
//
// A frame of the program ends with its file and line where there is debug information. The file has
// every frame; a person is shown those of the program (brief_stack() of core/symbols.h).
//
// A signal handler can rely on nothing, so it writes a plain report with system calls only; a
// forked copy of the process then makes the readable report, against a deadline. The signal is
// raised again under the previous action, so core dumps and exit statuses are unchanged.
//
//   crash::install(rank);
//   try { ... } catch (const std::exception& e) { crash::report(e); }
//
// run() and spawn() do both.
#pragma once

#include <exception>
#include <string>
#include <vector>

namespace lockstep::crash {

// What is known about the program that will read the error file.
struct Reader {
  bool lockstep_run = false;  // torchrun reads the stack from a field of its own
  bool prints_all = false;  // it prints all ranks' errors, so stderr gets only what cannot be filed
};

// From now on fatal signals (SEGV, ABRT, BUS, FPE, ILL, TRAP, SYS) and std::terminate leave a
// report, and every `throw` remembers where it was if there is an error file to write, as under a
// launcher, or LOCKSTEP_TRACE_THROWS is 1; 0: never. TRAP and SYS stay with a handler that is
// already there: it belongs to a sandbox or a debugger. Once per process, from the main thread;
// later calls only change the rank that reports name (-1: unknown) and their reader.
void install(int rank = -1, const Reader& reader = {});

// Frames of the calling thread, innermost first, without `skip` frames of our own: the demangled
// function where it is known, module+offset for addr2line, and file:line where that knows them.
std::vector<std::string> stack(int skip = 0);

// Where this exception object was thrown, even on another thread; empty when not remembered (by
// install(), or too many throws ago).
std::vector<std::string> thrown_at(const std::exception& e);

// Formats an exception as Python does: "lockstep::UsageError: [world] ...".
std::string describe(const std::exception& e);

struct Report {
  std::string message;
  std::vector<std::string> frames;
  // Another rank failed first, and this failure follows from it: one line on stderr, and a later
  // timestamp in the error file, because torchrun takes the earliest for the root cause.
  bool consequence = false;
  bool printed = false;  // stderr has it already
};

// Writes TORCHELASTIC_ERROR_FILE (if set) and, unless its reader prints it, a short report to
// stderr. The first report of a process wins, later ones are dropped: true when this was the first.
// Never throws.
bool report(const Report& report) noexcept;
bool report(const std::exception& e) noexcept;

}  // namespace lockstep::crash

// Remembers where exceptions were thrown. A handler runs after the stack is gone, so
// throw_trace.cpp replaces __cxa_throw, through which every `throw` of the process passes. Only
// after enable() are the addresses of the latest throws recorded, which costs some microseconds
// each; until then a throw is only passed on.
//
//   throw_trace::enable();
//   std::vector<void*> frames = throw_trace::find(dynamic_cast<const void*>(&exception));
//
// Safe from any thread. Nothing is owned; frames are return addresses, innermost first.
namespace lockstep::throw_trace {

void enable();
std::vector<void*> find(const void* exception_object);
std::vector<void*> find_latest();  // the calling thread's, whatever was thrown

}  // namespace lockstep::throw_trace
