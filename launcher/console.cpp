#include "launcher/console.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

constexpr long kGone = -1;
constexpr long kNoSpace = -2;
constexpr std::chrono::milliseconds kRoomRetry{200};
constexpr std::chrono::milliseconds kRoomTimeout{3000};  // at the end
constexpr std::size_t kOwnBytes = 1u << 20;              // of the launcher's lines in the queue

}  // namespace

Console::Console(EventLoop& loop, int out_fd, int err_fd)
    : loop_(loop), fds_{out_fd, err_fd}, timeout_timer_(loop) {
  struct stat out {};
  struct stat err {};
  const bool same = ::fstat(out_fd, &out) == 0 && ::fstat(err_fd, &err) == 0 &&
                    out.st_dev == err.st_dev && out.st_ino == err.st_ino;
  for (int target = 0; target < 2; ++target) {
    if (target == kErr && same) {
      sink_of_[kErr] = sink_of_[kOut];
      break;
    }
    sinks_.push_back(std::make_unique<Sink>(loop_));
    sink_of_[target] = sinks_.back().get();
    open_sink(*sinks_.back(), fds_[target]);
  }
}

Console::~Console() {
  for (const auto& sink : sinks_) {
    if (sink->watched) loop_.forget(sink->watch_fd);
  }
}

void Console::open_sink(Sink& sink, int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    sink.dead = true;
    return;
  }
  sink.is_socket = S_ISSOCK(info.st_mode);
  sink.never_blocks = S_ISREG(info.st_mode);
  // O_NONBLOCK would apply to the user's shell too, which shares the open file, so open it again. A
  // regular file is not opened again, because its offset is shared.
  if (S_ISFIFO(info.st_mode) || S_ISCHR(info.st_mode)) {
    const std::string path = fmt::format("/proc/self/fd/{}", fd);
    sink.private_fd.reset(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  }
  sink.watch_fd = sink.private_fd ? sink.private_fd.get() : fd;
}

void Console::put(const Piece& piece) {
  Sink& sink = *sink_of_[piece.target];
  if (sink.dead) return;
  std::string data;
  data.reserve(piece.prefix.size() + piece.text.size() + 2);
  const bool continues = sink.open_source == piece.source;
  if (!continues && sink.open_source != kNobody) data += '\n';
  if (!continues) data += piece.prefix;
  data += piece.text;
  if (piece.ends_line) data += '\n';
  sink.open_source = piece.ends_line ? kNobody : piece.source;
  sink.open_marked = !piece.prefix.empty();
  enqueue(sink, fds_[piece.target], piece.source, std::move(data));
}

void Console::enqueue(Sink& sink, int fd, int source, std::string data) {
  if (data.empty()) return;
  if (sink.full && (source != kLauncher || pending_[source] > kOwnBytes)) {
    sink.lost += data.size();
    return;
  }
  pending_[source] += data.size();
  // Joins small lines, so that many of them need few writes.
  constexpr std::size_t kJoinBytes = 64u << 10;
  if (!sink.queue.empty() && sink.queue.back().fd == fd && sink.queue.back().source == source &&
      sink.queue.back().data.size() + data.size() <= kJoinBytes) {
    sink.queue.back().data += data;
  } else {
    sink.queue.push_back({fd, source, std::move(data)});
  }
  if (sink.watched || sink.flush_posted || sink.full) return;
  sink.flush_posted = true;
  loop_.post([this, &sink] {
    sink.flush_posted = false;
    if (!sink.watched && !sink.full) flush(sink);
  });
}

// Returns the bytes written, 0 if the file accepts nothing now, kNoSpace or kGone.
long Console::write_some(Sink& sink, int fd, std::string_view data) {
  if (!sink.is_socket && !sink.never_blocks && !sink.private_fd) {
    // The file could not be opened again: poll first, and write no more than is certain to fit.
    pollfd poll_fd{fd, POLLOUT, 0};
    if (::poll(&poll_fd, 1, 0) == 0) return 0;
    data = data.substr(0, PIPE_BUF);
  }
  for (;;) {
    const ssize_t n =
        sink.is_socket
            ? ::send(fd, data.data(), data.size(), MSG_DONTWAIT | MSG_NOSIGNAL)
            : ::write(sink.private_fd ? sink.private_fd.get() : fd, data.data(), data.size());
    if (n >= 0) return n;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno == ENOSPC || errno == EDQUOT) return kNoSpace;
    if (errno != EINTR) return kGone;
  }
}

void Console::flush(Sink& sink) {
  bool progress = false;
  while (!sink.queue.empty()) {
    Entry& entry = sink.queue.front();
    const std::string_view rest = std::string_view(entry.data).substr(sink.offset);
    const long n = write_some(sink, entry.fd, rest);
    if (n == kNoSpace) return on_disk_full(sink);
    if (n < 0) return kill(sink);
    if (n == 0) break;
    progress = true;
    sink.full = false;
    sink.torn = rest[static_cast<std::size_t>(n) - 1] != '\n';
    sink.offset += static_cast<std::size_t>(n);
    const int source = entry.source;
    if (sink.offset == entry.data.size()) {
      sink.queue.pop_front();
      sink.offset = 0;
    }
    account(source, static_cast<std::size_t>(n));
  }
  const bool wait = !sink.queue.empty();
  if (wait && !sink.watched) {
    loop_.watch(sink.watch_fd, EPOLLOUT, [this, &sink](std::uint32_t) { flush(sink); });
  } else if (!wait && sink.watched) {
    loop_.forget(sink.watch_fd);
  }
  sink.watched = wait;
  if (progress && timeout_timer_.pending()) wait_at_most(timeout_);
  check_finished();
}

// No event tells when the disk has space again, so a timer retries.
void Console::on_disk_full(Sink& sink) {
  std::deque<Entry> before;
  before.swap(sink.queue);
  for (Entry& entry : before) {
    const std::size_t rest = entry.data.size() - std::exchange(sink.offset, 0);
    if (entry.source == kLauncher) {  // written again from its beginning
      pending_[kLauncher] += entry.data.size() - rest;
      sink.queue.push_back(std::move(entry));
    } else {
      sink.lost += rest;
      account(entry.source, rest);
    }
  }
  sink.open_source = kNobody;
  if (sink.watched) loop_.forget(sink.watch_fd);
  sink.watched = false;
  sink.room_timer.start(kRoomRetry, [this, &sink] { retry_full_disk(sink); });
  if (!std::exchange(sink.full, true)) {
    if (&sink != sink_of_[kErr])
      say("[launch] stdout cannot be written: the disk is full. What the ranks print there is lost "
          "until there is room.");
    if (timeout_timer_.pending()) wait_at_most(kRoomTimeout);
  }
  check_finished();
}

void Console::retry_full_disk(Sink& sink) {
  if (sink.lost == 0) return flush(sink);
  const int fd = sink.queue.empty() ? sink.watch_fd : sink.queue.front().fd;
  const std::string news =
      fmt::format("{}[launch] the disk was full: {} bytes of output are lost here.\n",
                  sink.torn ? "\n" : "", sink.lost);
  const long n = write_some(sink, fd, news);
  if (n == kNoSpace) return on_disk_full(sink);
  if (n < 0) return kill(sink);
  sink.full = false;
  sink.lost = 0;
  const std::string rest = news.substr(static_cast<std::size_t>(n));
  sink.torn = !rest.empty();
  if (sink.torn) sink.queue.push_front({fd, kLauncher, rest});
  pending_[kLauncher] += rest.size();
  flush(sink);
}

void Console::wait_at_most(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  timeout_timer_.start(timeout, [this] {
    for (const auto& stuck : sinks_) kill(*stuck);
  });
}

void Console::kill(Sink& sink) {
  sink.room_timer.cancel();
  if (sink.watched) loop_.forget(sink.watch_fd);
  sink.watched = false;
  sink.dead = true;
  std::deque<Entry> lost;
  lost.swap(sink.queue);
  for (std::size_t i = 0; i < lost.size(); ++i)
    account(lost[i].source, lost[i].data.size() - (i == 0 ? sink.offset : 0));
  sink.offset = 0;
  check_finished();
}

void Console::account(int source, std::size_t written) {
  std::size_t& pending = pending_[source];
  pending -= written;
  if (pending > kQuotaBytes / 2) return;
  const auto found = waiting_.find(source);
  if (found == waiting_.end()) return;
  loop_.post(std::move(found->second));
  waiting_.erase(found);
}

bool Console::full(int source) const {
  const auto found = pending_.find(source);
  return found != pending_.end() && found->second > kQuotaBytes;
}

bool Console::empty() const {
  return std::ranges::all_of(sinks_, [](const auto& sink) { return sink->queue.empty(); });
}

void Console::finish(std::chrono::milliseconds timeout, EventLoop::Task done) {
  for (int target = 0; target < 2; ++target) {
    Sink& sink = *sink_of_[target];
    if (sink.dead || sink.open_source == kNobody || !sink.open_marked) continue;
    sink.open_source = kNobody;
    enqueue(sink, fds_[target], kLauncher, "\n");
  }
  for (const auto& sink : sinks_) {
    if (!sink->full) continue;
    sink->room_timer.cancel();
    retry_full_disk(*sink);
    if (sink->full) timeout = std::min(timeout, kRoomTimeout);
  }
  done_ = std::move(done);
  wait_at_most(timeout);
  check_finished();
}

void Console::check_finished() {
  if (!done_ || !empty()) return;
  timeout_timer_.cancel();
  loop_.post(std::move(done_));
  done_ = nullptr;
}

}  // namespace lockstep::launch
