// What the kernel knows about a rank's process: does it run, and if not, what does it wait for?
//
//   const RankState state = read_rank_state(pid, thread);
//   console.say(state.text());    // "S waiting in read of /data/train.bin"
//
// Free functions that read /proc; what cannot be read is unknown, never an error.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::launch {

struct RankState {
  char state = '?';     // of the thread: R, S, D, T, t (traced), Z, as in /proc; ?: gone
  std::string waits{};  // "futex", "read of /data/train.bin"; empty: it runs, or not known
  double cpu_s = 0;     // all its threads together, since it began

  bool stopped() const { return state == 'T' || state == 't'; }
  bool known() const { return state != '?'; }
  std::string text() const;
};

RankState read_rank_state(pid_t pid, pid_t thread);
double cpu_seconds(pid_t pid);  // all its threads together; 0 when it is gone
// Whether one of the addresses is in a file that the process has mapped under such a name.
bool in_library(pid_t pid, const std::vector<std::uint64_t>& addresses,
                const std::vector<std::string>& beginnings_of_names);

}  // namespace lockstep::launch
