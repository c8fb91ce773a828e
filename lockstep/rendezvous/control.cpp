#include "lockstep/rendezvous/control.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "lockstep/core/deadline.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/core/thread_signals.h"

namespace lockstep::control {
namespace {

constexpr std::size_t kLongestLine = 1 << 16;
// The time for a rank to report the failure and exit by itself.
constexpr std::chrono::seconds kExitGrace{3};

// The control descriptor when the program started. Children of a rank inherit the variable but not
// the descriptor, so before the first use its number may belong to another file, whose data must
// not be read.
struct InheritedPipe {
  int fd = -1;
  ino_t inode = 0;

  InheritedPipe() {
    const char* text = std::getenv("LOCKSTEP_CONTROL_FD");
    if (text == nullptr || *text == '\0') return;
    char* end = nullptr;
    const long number = std::strtol(text, &end, 10);
    if (*end != '\0' || number < 3 || number > 1 << 20) return;
    fd = static_cast<int>(number);
    inode = inode_now();
    if (inode == 0) fd = -1;
  }

  // 0 unless it is the read end of a pipe.
  ino_t inode_now() const {
    struct stat status {};
    if (fd < 0 || ::fstat(fd, &status) != 0 || !S_ISFIFO(status.st_mode)) return 0;
    return (::fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY ? status.st_ino : 0;
  }
};
const InheritedPipe g_inherited;

PeerFailure parse_failure(const Node& failed) {
  PeerFailure failure{-1, "", "the launcher did not say why"};
  const Entry* rank = failed.find("rank");
  if (rank != nullptr && rank->value.is(NodeKind::kInteger))
    failure.rank = static_cast<int>(rank->value.integer);
  for (const auto& [key, member] :
       {std::pair{"host", &failure.host}, std::pair{"cause", &failure.cause}}) {
    const Entry* entry = failed.find(key);
    if (entry != nullptr && entry->value.is(NodeKind::kString)) *member = entry->value.text;
  }
  return failure;
}

class Listener {
 public:
  explicit Listener(int fd) : fd_(fd) {
    if (!fd_) return;
    set_cloexec(fd);
    wake_ = make_pipe();
    const SignalsBlocked blocked;
    std::thread([this] { listen(); }).detach();  // ends with the process; *this is never destroyed
  }

  bool connected() const { return static_cast<bool>(fd_); }
  int failure_fd() const { return wake_.read.get(); }

  std::optional<PeerFailure> failure(std::chrono::milliseconds wait) {
    std::unique_lock lock(mutex_);
    if (!fd_) return std::nullopt;
    // A SIGTERM may arrive before the listening thread has run, so read here too.
    read_available();
    const auto known = [this] { return failure_.has_value(); };
    if (wait.count() > 0) changed_.wait_until(lock, Deadline::after(wait).time(), known);
    return failure_;
  }

  Subscription subscribe(std::function<void(const PeerFailure&)> callback) {
    std::unique_lock lock(mutex_);
    if (fd_) read_available();
    if (failure_) {
      const PeerFailure known = *failure_;
      lock.unlock();
      call(callback, known);
      return std::make_shared<int>(0);
    }
    const std::uint64_t id = next_id_++;
    callbacks_.emplace(id, std::move(callback));
    return Subscription(this, [this, id](void*) { unsubscribe(id); });
  }

 private:
  static void call(const std::function<void(const PeerFailure&)>& callback,
                   const PeerFailure& failure) {
    try {
      callback(failure);
    } catch (const std::exception& e) {
      log::error("control", "a subscriber threw when notified that {}: {}", failure.text(),
                 e.what());
    }
  }

  void unsubscribe(std::uint64_t id) {
    std::unique_lock lock(mutex_);
    callbacks_.erase(id);
    if (running_thread_ == std::this_thread::get_id()) return;
    changed_.wait(lock, [this, id] { return running_ != id; });
  }

  void listen() {
    for (;;) {
      pollfd fds[] = {{fd_.get(), POLLIN, 0}, {wake_.read.get(), POLLIN, 0}};
      if (::poll(fds, 2, -1) < 0 && errno != EINTR) return;
      std::unique_lock lock(mutex_);
      read_available();
      if (failure_) {
        deliver(lock);
        lock.unlock();
        terminate_process();
      }
    }
  }

  // This thread stays to receive the launcher's SIGTERM, which all others may have blocked. If it
  // came just before the failure was read, the program's handler may have consumed it, so this
  // sends another.
  [[noreturn]] static void terminate_process() {
    std::this_thread::sleep_for(kExitGrace);
    for (;;) {
      ::kill(::getpid(), SIGTERM);
      std::this_thread::sleep_for(kExitGrace);
    }
  }

  // Reads what is in the pipe without waiting. Called with the lock held.
  void read_available() {
    while (!failure_) {
      pollfd poll_fd{fd_.get(), POLLIN, 0};
      if (::poll(&poll_fd, 1, 0) <= 0) return;
      char buffer[4096];
      const ssize_t n = ::read(fd_.get(), buffer, sizeof buffer);
      if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (n <= 0) return set_failure(PeerFailure{-1, "", "the launcher ended"});
      line_.append(buffer, static_cast<std::size_t>(n));
      for (auto end = line_.find('\n'); end != std::string::npos; end = line_.find('\n')) {
        take_line(line_.substr(0, end));
        line_.erase(0, end + 1);
      }
      if (line_.size() > kLongestLine) line_.clear();
    }
  }

  void take_line(const std::string& line) {
    Node message;
    try {
      message = parse_json(line, "control");
    } catch (const UsageError&) {
      // `message` is then not a map, which is reported below.
    }
    if (!message.is(NodeKind::kMap)) return log::warning("control", "cannot read '{}'", line);
    const Entry* failed = message.find("failed");
    if (failed != nullptr && !failure_) set_failure(parse_failure(failed->value));
  }

  void set_failure(PeerFailure failure) {
    failure_ = std::move(failure);
    std::signal(SIGTERM, SIG_DFL);
    changed_.notify_all();
    wake_.write.reset();  // wakes the listening thread, which calls subscribers, and failure_fd()
  }

  void deliver(std::unique_lock<std::mutex>& lock) {
    // A program may have blocked SIGTERM in all threads, to wait for it in one place. The
    // launcher's SIGTERM must end the process nevertheless.
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    ::pthread_sigmask(SIG_UNBLOCK, &term, nullptr);
    while (!callbacks_.empty()) {
      auto node = callbacks_.extract(callbacks_.begin());
      running_ = node.key();
      running_thread_ = std::this_thread::get_id();
      lock.unlock();
      call(node.mapped(), *failure_);
      node.mapped() = nullptr;  // destroys what it captured before unsubscribe() returns
      lock.lock();
      running_ = 0;
      running_thread_ = {};
      changed_.notify_all();
    }
  }

  const Fd fd_;
  Pipe wake_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string line_;
  std::optional<PeerFailure> failure_;
  std::map<std::uint64_t, std::function<void(const PeerFailure&)>> callbacks_;
  std::uint64_t next_id_ = 1;
  std::uint64_t running_ = 0;
  std::thread::id running_thread_;
};

Listener& listener() {
  // Never destroyed: its thread and subscribers may outlive static destructors.
  static Listener* listener = new Listener(
      g_inherited.inode != 0 && g_inherited.inode_now() == g_inherited.inode ? g_inherited.fd : -1);
  return *listener;
}

}  // namespace

std::string PeerFailure::text() const {
  if (rank < 0) {
    const bool placed = host.empty() || cause.find(host) != cause.npos;
    return placed ? cause : fmt::format("{} on {}", cause, host);
  }
  return fmt::format("rank {}{}{} failed: {}", rank, host.empty() ? "" : " on ", host, cause);
}

bool connected() {
  return listener().connected();
}

std::optional<PeerFailure> failure(std::chrono::milliseconds wait) {
  return listener().failure(wait);
}

int failure_fd() {
  return listener().failure_fd();
}

Subscription subscribe(std::function<void(const PeerFailure&)> callback) {
  return listener().subscribe(std::move(callback));
}

}  // namespace lockstep::control
