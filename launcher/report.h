// The failure report: why a run failed, with the message of the rank that caused it.
//
// The rank whose end is noticed first is often a victim. The cause is the earliest failure, and a
// rank that wrote an error file failed when it wrote it, not when it exited. The times in
// torchrun's files are whole seconds, so the file's modification time is used within that second;
// otherwise a rank that threw because its peer was killed would seem to be first.
//
//   ErrorFile file = read_error_file(path);
//   console.say(failure_report(failure));
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launcher/process.h"

namespace lockstep::launch {

struct ErrorFile {
  bool present = false;
  std::string message;                  // empty if there is none
  std::vector<std::string> stack;       // C++: innermost first; Python: as printed
  std::vector<std::string> all_frames;  // set if `stack` omits frames of libraries
  double time = 0;                      // seconds since the epoch
  bool consequence = false;             // the rank says that another rank failed first
  std::string problem;                  // why it is not torchrun's JSON
};

// `seconds` since the epoch, or 0 if that cannot be a time: it is cast to an integer later, and
// JSON, in which it is sent to other hosts, has no infinity.
double time_or_zero(double seconds);

// Never throws: the message of a malformed file is its text, and `problem` is set.
ErrorFile read_error_file(const std::string& path);

// The cause for a rank that exited with code 0 before its body had returned.
inline constexpr const char* kEarlyExitCause = "exited with code 0 in the middle of the world";

// Exit codes of a rank after a UsageError, and after a requested stop.
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
  int code = 1;        // the launcher's exit code
  double time = 0;     // seconds since the epoch
  double after_s = 0;  // since the attempt began
  bool restartable = true;
  bool stopped = false;  // the rank handled a stop request that did not come from the launcher
  std::string program;
  std::string error_file;  // empty: none was written
  std::string message;
  std::vector<std::string> stack;
  std::vector<std::string> last_lines;
  std::vector<std::string> standing;  // step, phase and last operation, from its ledger
  std::string note;                   // about the error file
  std::vector<std::string> others;    // later failures, one line each
  // How ranks ended because of this failure: "ranks 0, 2 killed by SIGTERM"
  std::vector<std::string> victims;
  std::vector<int> ended_before;  // ranks that had exited with code 0
  std::string stacks;             // the file with every frame of every rank; empty: none
  std::string logs;               // where more can be read; empty: nowhere

  // "rank 1 on n2 failed: killed by SIGKILL", "rank 1 on n2 stopped on request: exited with code
  // 143"
  std::string headline() const;
};

// "exited with code 3: No space left on device": `text` with the message's first line, if any.
std::string with_message(const std::string& text, const std::string& message);

// A command on one line, quoted for a shell, and shortened.
std::string shell_text(const std::vector<std::string>& command);

// Copies the error file's message, stack and time into `failure`.
void add_error_file(RankFailure& failure, const ErrorFile& file);

// Adds the last lines of the rank's stderr, at most `most`, without those of its message and stack.
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

// "ranks 1-3 with exit code 1, 0.05 s later: [data] ...", in order of time. Ranks whose messages
// differ only in their rank and in times share a line; "the same" stands for the message of
// `first`.
std::vector<std::string> later_lines(const RankFailure& first, std::vector<LaterFailure> failures);

// Writes all frames of these ranks' error files to `path`, since the report omits some. Returns the
// path, or "" if the report has all of them.
std::string write_stacks(const std::string& path, const std::vector<RankFailure>& errors);
inline constexpr const char* kStacksFile = "stacks.txt";

// A line for each error that is not a consequence of another, for use without a report.
std::vector<std::string> error_lines(const std::vector<RankFailure>& errors);

// Common reasons for such a failure, in sentences; empty if none are known.
std::string hint_for(const RankFailure& failure);

// Many lines, ready to print.
std::string failure_report(const RankFailure& failure);

// Writes the launcher's own error file in torchrun's format: the rank's file with the exit code
// added, or one made from `failure`. Never throws; returns a problem as text.
std::string pass_on_error_file(const RankFailure& failure, const std::string& rank_file,
                               const std::string& own_file);

}  // namespace lockstep::launch
