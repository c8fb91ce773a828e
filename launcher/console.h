// Writes the ranks' lines to the launcher's stdout and stderr without ever blocking.
//
// The console may be slow, stopped (Ctrl-S, a pager) or closed (`| head`), which must not stall the
// supervisor or another rank. Lines are queued and written when the descriptor accepts them. Each
// source (one stream of one rank) has a quota; above it, the source is not read until the console
// has caught up, so only a noisy rank waits. A closed console discards everything. On a full disk
// the ranks' output is discarded, because they cannot wait for space; the launcher's own lines
// wait, and a line says how much was lost. If stdout and stderr are one file, they share one queue,
// so lines keep their order.
//
//   Console console(loop, STDOUT_FILENO, STDERR_FILENO);
//   console.put({Console::kOut, 3, "[1] ", "hello", true});
//
// Owned and called by the supervisor's one thread; the descriptors belong to the process.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/event_loop.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {

class Console {
 public:
  enum Target { kOut = 0, kErr = 1 };
  static constexpr int kLauncher = -1;  // the source of the launcher's own lines
  static constexpr std::size_t kQuotaBytes = 256u << 10;

  struct Piece {
    Target target = kOut;
    int source = kLauncher;
    std::string_view prefix;  // omitted if this continues a line
    std::string_view text;    // without the newline
    bool ends_line = true;
  };

  Console(EventLoop& loop, int out_fd, int err_fd);
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  void put(const Piece& piece);
  // Prints text of the launcher itself on stderr; its lines stay together.
  void say(std::string_view text) { put({kErr, kLauncher, "", printable_lines(text), true}); }

  // True if `source` is above its quota; `resume` is called once when it may be read again.
  bool full(int source) const;
  void when_drained(int source, EventLoop::Task resume) { waiting_[source] = std::move(resume); }
  void drop_source(int source) { waiting_.erase(source); }

  bool empty() const;
  // Calls `done` when everything is written, or nothing could be written for `timeout` (a few
  // seconds on a full disk).
  void finish(std::chrono::milliseconds timeout, EventLoop::Task done);

 private:
  struct Entry {
    int fd;
    int source;
    std::string data;
  };
  // An output file: one for stdout and one for stderr, or one for both.
  struct Sink {
    explicit Sink(EventLoop& loop) : room_timer(loop) {}

    std::deque<Entry> queue;
    std::size_t offset = 0;     // bytes of the first entry already written
    int open_source = kNobody;  // the source whose line has not ended
    bool open_marked = false;   // that line has a prefix
    bool dead = false;
    bool full = false;     // its disk is full
    bool torn = false;     // the last write did not end a line
    std::size_t lost = 0;  // bytes since the disk became full
    Timer room_timer;
    bool watched = false;
    bool flush_posted = false;  // lines of one batch of events are written together
    Fd private_fd;              // the file, opened again as non-blocking where possible
    bool is_socket = false;
    bool never_blocks = false;  // a regular file
    int watch_fd = -1;
  };
  static constexpr int kNobody = -2;

  void open_sink(Sink& sink, int fd);
  void enqueue(Sink& sink, int fd, int source, std::string data);
  void flush(Sink& sink);
  long write_some(Sink& sink, int fd, std::string_view data);
  void account(int source, std::size_t written);
  void kill(Sink& sink);
  void on_disk_full(Sink& sink);
  void retry_full_disk(Sink& sink);
  void wait_at_most(std::chrono::milliseconds timeout);
  void check_finished();

  EventLoop& loop_;
  int fds_[2];
  std::vector<std::unique_ptr<Sink>> sinks_;
  Sink* sink_of_[2];
  std::map<int, std::size_t> pending_;
  std::map<int, EventLoop::Task> waiting_;
  EventLoop::Task done_;
  Timer timeout_timer_;
  std::chrono::milliseconds timeout_{0};
};

}  // namespace lockstep::launch
