// What the ranks print: to the console, marked with their rank, to files byte for byte, or both.
//
// A stream that goes only to a file is that file (the rank writes it directly, at any speed, and
// the launcher's death loses nothing); every other stream is a pipe that the launcher reads, so
// that only whole lines reach the console. A line is held until its newline comes; a short
// beginning (a prompt, a progress bar) is shown after a moment of silence, and if another rank has
// something to print meanwhile, it gets a line of its own.
//
//   OutputStream out(loop, console, {Console::kOut, 2, {.console = true, .prefix = "[1] "}});
//   start_process({.stdout_fd = out.child_end(), ...}); out.close_child_end();
//   out.close_now();                          // when nobody is left who could write
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

// The last bytes of a file, at most `most`; empty when it cannot be read.
std::string end_of_file(const std::string& path, std::size_t most);

// Where one stream of one rank goes.
struct StreamRoute {
  bool console = false;
  std::string prefix;                // before its lines on the console
  std::string file;                  // empty: none
  std::vector<std::string> filters;  // lines holding any of these are also appended to ...
  int filtered_fd = -1;              // ... this file; not owned
  std::string filtered_prefix;       // many ranks share that file
  // Gets every line, unless the stream is a file that the rank writes itself.
  std::function<void(std::string_view)> on_line = {};
  // Gets what a line that has not ended shows so far: a progress bar, which may never end. The next
  // call for the stream, of either function, replaces it.
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
  // The file that the rank itself writes; empty: it writes to a pipe.
  std::string direct_file() const { return route().direct() ? route().file : ""; }
  // Takes what is in the pipe now and closes it, whoever may still hold the other end.
  void close_now();
  // The last lines that went through, at most `most`, for the failure report.
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
  std::string partial_;     // the beginning of a line, not yet on the console
  std::string whole_line_;  // the same for filters and on_line, which want all of it
  std::string tail_;
  Timer silence_timer_;
  EventLoop::Clock::time_point last_data_;
  bool paused_ = false;
  bool file_failed_ = false;                              // at some time
  std::size_t file_lost_ = 0;                             // bytes, since it cannot be written
  std::shared_ptr<int> alive_ = std::make_shared<int>();  // for a resumption that comes too late
};

// As --line-prefix says. Without it: with --tee, torchrun's mark for what is teed and none for the
// rest; without --tee, none for a rank that is alone, whose output may be meant for a pipe,
// otherwise its number.
LinePrefix prefix_style(const LaunchPlan& plan, bool teed);

// "[1] ", "[trainer0]:" (the local rank, as torchrun writes it) or "". The two marks are replaced
// by TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE where that is set.
std::string line_prefix(LinePrefix style, const std::string& role, int rank, int local_rank);

// redirects: file only; tee: file and console; neither: console only.
StreamRoute route_for(const LaunchPlan& plan, int rank, int local_rank, Streams bit,
                      std::string file);

// Where the files of a run go. A temporary directory is removed at the end, unless it holds output
// that was shown nowhere else, or output or an error file of a failed run.
//
// Nobody may be left to remove it, so each start sweeps what earlier ones of the same user have
// left beside it: directories whose process has ended (the kernel has released its lock on them)
// and which were modified more than a day ago. Until preserve() keeps a directory its time of
// modification is 1970. So the next start removes the directory of a launcher that was killed, and
// keeps that of a failed run for a day. Output of --redirects is never removed.
//
//   LogDirectory logs(plan);
//   write(logs.attempt(0) + "/0/stdout.log");
//   const std::string report = logs.preserve(failed);   // "": there is nothing to read
//
// Owned by the supervisor.

class LogDirectory {
 public:
  explicit LogDirectory(const LaunchPlan& plan);  // throws UsageError
  ~LogDirectory();
  LogDirectory(const LogDirectory&) = delete;
  LogDirectory& operator=(const LogDirectory&) = delete;

  bool temporary() const { return temporary_; }
  std::string attempt(int number) const;
  // The directory, if it holds anything to read; it is preserved then.
  std::string preserve(bool failed);

 private:
  void make_temporary(bool for_output);

  bool temporary_;
  bool preserved_ = false;
  Fd lock_;  // of a temporary one
  std::string base_;
  std::string root_;
};

}  // namespace lockstep::launch
