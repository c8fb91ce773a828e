// The launcher's own stdout and stderr: whole lines of many ranks, and never a wait.
//
// The console may be slow, stopped (Ctrl-S, a pager) or gone (`| head`), and none of that may stall
// the supervision or another rank. Lines are queued and written when the descriptor has room; each
// source (one stream of one rank) may have only so much queued, and is then not read from until the
// console has caught up, so only the noisy one waits. A console that is gone swallows everything.
// On a disk that is full, what ranks write is lost, since they cannot wait for somebody to free
// space; the launcher's own lines wait. When there is room again, a line says how much was lost.
// When stdout and stderr are one file, they share one queue: lines keep their order.
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
    std::string_view prefix;  // put in front, unless this continues with a line already begun
    std::string_view text;    // without its newline
    bool ends_line = true;
  };

  Console(EventLoop& loop, int out_fd, int err_fd);
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  void put(const Piece& piece);
  // A line of the launcher itself, on stderr; several lines stay together.
  void say(std::string_view text) { put({kErr, kLauncher, "", printable_lines(text), true}); }

  // True when `source` should not be read from; `resume` is called once when it may again.
  bool full(int source) const;
  void when_drained(int source, EventLoop::Task resume) { waiting_[source] = std::move(resume); }
  void drop_source(int source) { waiting_.erase(source); }

  bool empty() const;
  // Calls `done` when everything is written, or when nothing could be written for `timeout`. A disk
  // that is full is given a few seconds only.
  void finish(std::chrono::milliseconds timeout, EventLoop::Task done);

 private:
  struct Entry {
    int fd;
    int source;
    std::string data;
  };
  // One per file behind the descriptors.
  struct Sink {
    explicit Sink(EventLoop& loop) : room_timer(loop) {}

    std::deque<Entry> queue;
    std::size_t offset = 0;     // bytes of the first entry already written
    int open_source = kNobody;  // whose line has begun and not ended
    bool open_marked = false;   // with a prefix
    bool dead = false;
    bool full = false;     // its disk is full
    bool torn = false;     // the last write did not end a line
    std::size_t lost = 0;  // bytes, since the disk became full
    Timer room_timer;
    bool watched = false;
    bool flush_posted = false;  // lines of one batch of events are written together
    Fd private_fd;              // our own non-blocking description of it, where possible
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
  void on_full(Sink& sink);
  void look_for_room(Sink& sink);
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
