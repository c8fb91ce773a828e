// The two ways a program becomes ranks.
//
//   int main() { return lockstep::run(train); }        // a rank of lockstep run, torchrun, ...
//   int main() { return lockstep::spawn(train, 4); }   // starts itself four times
//
// run() reads who this process is, connects to the others, calls `body`, and turns an exception
// into a report (error file, stderr) and an exit code. A world of one needs nothing set.
//
// After a failure nobody waits. A rank of several that fails ends its process inside run(), because
// what is left of its world (a collective that never finishes, a thread that holds a socket) could
// keep destructors and main() from returning; its peers see the connections close and the launcher
// sees the process end. What falls only because another rank failed first says so in one line. A
// process that ends inside the body (std::exit, _exit) has failed too, with whatever code:
// `lockstep run` names it as the cause, unless all ranks of its host do the same. So has a rank
// whose body returns a code other than 0: it waits 10 s for the others to return too, no longer.
//
// They own the process, so they switch on the caching of CPU memory (memory/cpu_cache.h) and log
// that in one line.
//
// Both are called from the main thread, and not from inside a body (UsageError).
#pragma once

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

#include "lockstep/comm/world.h"

namespace lockstep {

// What a rank runs: a function that takes the World& and returns nothing, or an exit code (int).
class RankBody {
 public:
  template <typename Body>
    requires std::invocable<Body&, World&>
  RankBody(Body body)
      : body_([body = std::move(body)](World& world) mutable -> int {
          using Result = std::invoke_result_t<Body&, World&>;
          static_assert(std::is_void_v<Result> || std::is_same_v<Result, int>,
                        "a body returns nothing, or the process's exit code as an int");
          if constexpr (std::is_void_v<Result>) {
            body(world);
            return 0;
          } else {
            return body(world);
          }
        }) {}

  int operator()(World& world) const { return body_(world); }

 private:
  std::function<int(World&)> body_;
};

// Returns the process's exit code: what the body returned (0 where it returns nothing), 1 after an
// exception, 2 after a UsageError. With more than one rank a failure does not return but ends the
// process with that code, after flushing stdout.
int run(const RankBody& body, const WorldOptions& options = {});

// For a program whose options stand in files: `prepare` reads what a rank needs before the
// rendezvous. What it throws on one rank ends all of them at the rendezvous, with its message, that
// rank and its host. They learn it when they get there: keep it short, and about as long on every
// rank.
using Preparation = std::function<WorldOptions()>;
int run(const Preparation& prepare, const RankBody& body);

struct SpawnOptions {
  WorldOptions world = {};
  int max_restarts = 0;
};

// Runs this same program `nprocs` times (0: one per GPU, or one per core) as ranks that reach this
// call and run `body`; code before the call runs in every rank. In the calling process returns the
// exit code as `lockstep run` would, after all ranks have ended. In a rank it does not return: the
// process ends with the body, without running main()'s remaining lines or static destructors.
// Earlier calls of spawn in the same program return in a rank what they returned in the caller.
// Already a rank of someone else's launcher: the same as run(body).
// The calling process must not have other threads yet (UsageError): call it early. While it runs,
// SIGINT and SIGTERM end the ranks, and spawn returns 130 or 143.
int spawn(const RankBody& body, int nprocs, const SpawnOptions& options = {});

}  // namespace lockstep
