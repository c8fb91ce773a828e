// The output of the ranks: to the console with a prefix, to files unchanged, or both; and the
// directory of those files.
//
// If a stream goes only to a file, the rank writes that file itself: at any speed, and without loss
// if the launcher dies. Every other stream is a pipe that the launcher reads, so that only whole
// lines reach the console. An incomplete line is held until its newline; a short one (a prompt, a
// progress bar) is shown after a moment of silence, and other ranks' lines then begin on a new
// line.
//
//   OutputStream out(loop, console, {Console::kOut, 2, {.console = true, .prefix = "[1] "}});
//   start_process({.stdout_fd = out.child_end(), ...}); out.close_child_end();
//   out.close_now();                          // when no process is left that could write
//
// Owned by a worker, two per rank and attempt; one thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "launcher/console.h"
#include "launcher/plan.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {

// The last bytes of a file, at most `most`; empty if it cannot be read.
std::string end_of_file(const std::string& path, std::size_t most);

// The destinations of one stream of one rank.
struct StreamRoute {
  bool console = false;
  std::string prefix;                // before its lines on the console
  std::string file;                  // empty: none
  std::vector<std::string> filters;  // lines that contain any of these are also appended to ...
  int filtered_fd = -1;              // ... this file, which ranks share; not owned
  std::string filtered_prefix;
  // Called for every line, unless the rank writes the file itself.
  std::function<void(std::string_view)> on_line = {};
  // Called with an incomplete line, such as a progress bar, which may never end. The next call of
  // either function replaces its text.
  std::function<void(std::string_view)> on_progress = {};

  bool direct() const { return !file.empty() && !console && filters.empty(); }
};

// One pipe (or one file) of one rank.
class OutputStream {
 public:
  struct Options {
    Console::Target target;
    int source;
    StreamRoute route;
  };
  OutputStream(EventLoop& loop, Console& console, Options options);
  ~OutputStream();
  OutputStream(const OutputStream&) = delete;
  OutputStream& operator=(const OutputStream&) = delete;

  int child_end() const { return child_end_.get(); }
  void close_child_end() { child_end_.reset(); }
  const StreamRoute& route() const { return options_.route; }
  // The file that the rank writes itself; empty: it writes to a pipe.
  std::string direct_file() const { return route().direct() ? route().file : ""; }
  // Reads what is in the pipe and closes it, even if a process still has the other end.
  void close_now();
  // The last lines, at most `most`, for the failure report.
  std::vector<std::string> last_lines(std::size_t most) const;

  static constexpr std::size_t kTailBytes = 16u << 10;
  static constexpr std::size_t kLongestLineBytes = 4u << 20;
  static constexpr std::size_t kShortBytes = 4096;  // PIPE_BUF: one write of this arrives whole

 private:
  enum class Got { kData, kNothing, kEnd };

  void on_readable();
  Got read_once();
  void take(std::string_view data);
  void take_lines(std::string_view data);
  void watch();
  void put(std::string_view text, bool ends_line);
  void append_to_file(std::string_view data);
  bool wants_lines() const;
  void take_line();
  void show_progress();
  void match_filters(std::string_view line);
  void on_silence();
  void pause();
  void finish();

  EventLoop& loop_;
  Console& console_;
  Options options_;
  Fd pipe_;
  Fd child_end_;
  Fd file_;
  std::string partial_;     // the part of the current line that is not yet on the console
  std::string whole_line_;  // all of the current line, for filters and on_line
  std::string tail_;
  Timer silence_timer_;
  EventLoop::Clock::time_point last_data_;
  bool paused_ = false;
  bool file_failed_ = false;                              // at some time, and reported
  std::size_t file_lost_ = 0;                             // bytes since it cannot be written
  std::shared_ptr<int> alive_ = std::make_shared<int>();  // the console may resume it too late
};

// The prefix that --line-prefix chooses. Without the flag: with --tee, torchrun's for teed streams
// and none for others; without --tee, the rank, or none for a single rank, whose output may be
// piped into another program.
LinePrefix prefix_style(const LaunchPlan& plan, bool teed);

// "[1] ", "[trainer0]:" (with the local rank, as torchrun) or "". If it is set,
// TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE replaces the first two.
std::string line_prefix(LinePrefix style, const std::string& role, int rank, int local_rank);

// redirects: file only; tee: file and console; neither: console only.
StreamRoute route_for(const LaunchPlan& plan, int rank, int local_rank, Streams bit,
                      std::string file);

// The directory of a run's files. A temporary one is removed at the end, unless it has output that
// was shown nowhere else, or output or an error file of a failed run.
//
// A launcher that is killed cannot remove its directory, so each start removes old ones of the same
// user: directories whose lock the kernel has released and which were modified more than a day ago.
// The modification time is set to 1970 and updated by preserve(). So the next start removes the
// directory of a killed launcher, while that of a failed run stays for a day. Output of --redirects
// is never removed.
//
//   LogDirectory logs(plan);
//   write(logs.attempt(0) + "/0/stdout.log");
//   const std::string report = logs.preserve(failed);   // "": there is nothing to read
class LogDirectory {
 public:
  explicit LogDirectory(const LaunchPlan& plan);  // throws UsageError
  ~LogDirectory();
  LogDirectory(const LogDirectory&) = delete;
  LogDirectory& operator=(const LogDirectory&) = delete;

  bool temporary() const { return temporary_; }
  std::string attempt(int number) const;
  // Keeps the directory if it has anything to read, and returns its path then.
  std::string preserve(bool failed);

 private:
  void make_temporary(bool for_output);

  bool temporary_;
  bool preserved_ = false;
  Fd lock_;  // of a temporary directory
  std::string base_;
  std::string root_;
};

}  // namespace lockstep::launch
