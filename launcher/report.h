// Why a run ended: the first cause, with the rank's own message where it left one.
//
// The rank that is seen to die first is often a victim. The cause is the failure with the earliest
// moment, and a rank that wrote an error file failed when it wrote it, not when it was finally
// gone. torchrun's files carry whole seconds only, so the file's own time is used within that
// second; otherwise a rank that threw because its peer was killed would seem to have been first.
//
//   ErrorFile file = read_error_file(path);
//   console.say(failure_report(failure));
//
// Plain values and free functions; nothing is owned.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/process.h"

namespace lockstep::launch {

struct ErrorFile {
  bool present = false;
  std::string message;                  // empty when there is none
  std::vector<std::string> stack;       // innermost first for C++, as printed for Python
  std::vector<std::string> all_frames;  // set where `stack` leaves out the frames of libraries
  double time = 0;                      // seconds since the epoch
  bool consequence = false;             // it says itself that another rank failed first
  std::string problem;                  // why it could not be read as torchrun's JSON
};

// Seconds since the epoch, or 0 for what cannot be a time: it is cast to an integer later, and
// JSON, in which it travels to other hosts, has no infinity.
double time_or_zero(double seconds);

// Never throws: a malformed file yields its text as the message and says so in `problem`.
ErrorFile read_error_file(const std::string& path);

// The cause of a rank that ended with code 0 while its body had not returned.
inline constexpr const char* kLeftCause = "exited with code 0 in the middle of the world";

// Exit codes of a rank that was used wrongly, and of one that stopped because it was asked to.
inline constexpr int kUsageCode = 2;
inline constexpr int kStoppedCode = 128 + SIGTERM;

struct RankFailure {
  int rank = -1;  // -1: not a rank but a launcher
  int local_rank = -1;
  int node = 0;
  pid_t pid = -1;
  int attempt = 0;
  std::string host;
  std::string cause;   // "exited with code 3", "killed by SIGKILL"
  int code = 1;        // what the launcher will exit with
  double time = 0;     // seconds since the epoch
  double after_s = 0;  // since the attempt began
  bool restartable = true;
  bool stopped = false;  // a request to stop, which did not come through the launcher, was handled
  std::string program;
  std::string error_file;  // empty: none was written
  std::string message;
  std::vector<std::string> stack;
  std::vector<std::string> last_lines;
  std::vector<std::string> standing;  // as its ledger shows it: step, phase, last operation
  std::string note;                   // about the error file
  std::vector<std::string> others;    // later failures, one line each
  // How the ranks ended that did so because of it: "ranks 0, 2 killed by SIGTERM", "... with exit
  // code 1"
  std::vector<std::string> victims;
  std::vector<int> ended_before;  // ranks that had ended with code 0
  std::string stacks;             // the file with every frame of every rank; empty: none
  std::string logs;               // where more can be read; empty: nowhere

  // "rank 1 on n2 failed: killed by SIGKILL", "rank 1 on n2 stopped on request: exited with code
  // 143"
  std::string headline() const;
};

// "exited with code 3: No space left on device": with the message's first line, where there is one.
std::string with_message(const std::string& text, const std::string& message);

// "rank 0 killed by SIGTERM", "ranks 1, 2 with exit code 1", from how ranks ended.
std::vector<std::string> by_ending(const std::map<std::string, std::vector<int>>& ranks);

// A command on one line, as a shell would read it; cut where it is long.
std::string shell_text(const std::vector<std::string>& command);

// Takes message, stack and time from the error file into `failure`.
void add_error_file(RankFailure& failure, const ErrorFile& file);

// The last `most` lines of its stderr that its message and stack do not already say.
void add_last_lines(RankFailure& failure, const std::vector<std::string>& lines, std::size_t most);

// The line for LOCKSTEP_CONTROL_FD: {"failed": {"rank": 1, "host": "n2", "cause": "..."}}
std::string control_line(const RankFailure& failure);

// A rank that failed after the first one.
struct LaterFailure {
  int rank = -1;
  std::string how;     // "with exit code 1"
  double later_s = 0;  // after the first
  std::string message;
};

// "ranks 1-3 with exit code 1, 0.05 s later: [data] ...", in the order of time. Ranks that say
// the same, except for their own number and for times, share a line; "the same" means what `first`
// says.
std::vector<std::string> later_lines(const RankFailure& first, std::vector<LaterFailure> failures);

// Writes every frame of these ranks' error files, of which the report shows few, into the file
// `path`. Returns the path, or nothing where the report has them all.
std::string write_stacks(const std::string& path, const std::vector<RankFailure>& errors);
inline constexpr const char* kStacksFile = "stacks.txt";

// One line for each of these errors that is not a consequence of another, when no report has them.
std::vector<std::string> error_lines(const std::vector<RankFailure>& errors);

// What often leads to such a failure and what to look at, in sentences; empty: nothing is known.
std::string hint_for(const RankFailure& failure);

// Many lines, ready to print.
std::string failure_report(const RankFailure& failure);

// Writes the launcher's own error file in torchrun's form: the rank's file with the exit code added
// or, where it wrote none, one made from `failure`. Never throws; a problem is returned as text.
std::string pass_on_error_file(const RankFailure& failure, const std::string& rank_file,
                               const std::string& own_file);

}  // namespace lockstep::launch
