#include "launcher/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <ftw.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <random>
#include <string_view>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {

namespace {

constexpr std::chrono::milliseconds kSilence{200};
// A long incomplete line is most likely one large write that is still coming through the pipe.
constexpr std::chrono::milliseconds kLongSilence{5000};

Fd open_log(const std::string& path) {
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (!fd) throw SystemError("launch", "cannot create the log file " + path, errno);
  return fd;
}

// Repeats the prefix after each carriage return, which overwrites it on a terminal.
std::string with_prefix_after_returns(std::string_view text, std::string_view prefix) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    result += text[i];
    if (text[i] == '\r' && i + 1 < text.size()) result += prefix;
  }
  return result;
}

bool has(Streams streams, Streams bit) {
  return (static_cast<int>(streams) & static_cast<int>(bit)) != 0;
}

}  // namespace

std::string end_of_file(const std::string& path, std::size_t most) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0) return {};
  const off_t start = std::max<off_t>(0, info.st_size - static_cast<off_t>(most));
  std::string text(static_cast<std::size_t>(info.st_size - start), '\0');
  const ssize_t n = ::pread(fd.get(), text.data(), text.size(), start);
  text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  return text;
}

OutputStream::OutputStream(EventLoop& loop, Console& console, Options options)
    : loop_(loop), console_(console), options_(std::move(options)), silence_timer_(loop) {
  const StreamRoute& route = options_.route;
  if (!route.file.empty()) file_ = open_log(route.file);
  if (route.direct()) {
    child_end_ = std::move(file_);
    return;
  }
  Pipe pipe = make_pipe();
  pipe_ = std::move(pipe.read);
  child_end_ = std::move(pipe.write);
  set_nonblocking(pipe_.get());
  watch();
}

OutputStream::~OutputStream() {
  console_.drop_source(options_.source);
  if (pipe_ && !paused_) loop_.forget(pipe_.get());
}

void OutputStream::watch() {
  loop_.watch(pipe_.get(), EPOLLIN, [this](std::uint32_t) { on_readable(); });
}

void OutputStream::on_readable() {
  if (read_once() == Got::kEnd) return finish();
  if (console_.full(options_.source)) pause();
}

void OutputStream::pause() {
  paused_ = true;
  loop_.forget(pipe_.get());
  console_.when_drained(options_.source, [this, alive = std::weak_ptr<int>(alive_)] {
    if (alive.expired() || !pipe_) return;
    paused_ = false;
    watch();
  });
}

OutputStream::Got OutputStream::read_once() {
  static std::array<char, 64u << 10> buffer;  // called by one thread
  for (;;) {
    const ssize_t n = ::read(pipe_.get(), buffer.data(), buffer.size());
    if (n > 0) {
      take(std::string_view(buffer.data(), static_cast<std::size_t>(n)));
      return Got::kData;
    }
    if (n < 0 && errno == EINTR) continue;
    return n < 0 && errno == EAGAIN ? Got::kNothing : Got::kEnd;
  }
}

void OutputStream::take(std::string_view data) {
  append_to_file(data);
  if (options_.target == Console::kErr)
    tail_.append(data.substr(data.size() - std::min(data.size(), kTailBytes)));
  if (tail_.size() > 2 * kTailBytes) tail_.erase(0, tail_.size() - kTailBytes);
  last_data_ = EventLoop::Clock::now();
  take_lines(data);
}

void OutputStream::take_lines(std::string_view data) {
  while (!data.empty()) {
    const std::size_t end = data.find('\n');
    const std::string_view piece = data.substr(0, end);
    if (wants_lines()) whole_line_.append(piece);
    partial_.append(piece);
    if (end == std::string_view::npos) break;
    take_line();
    put(partial_, true);
    partial_.clear();
    data.remove_prefix(end + 1);
  }
  if (partial_.size() > kLongestLineBytes) {
    put(partial_, false);
    partial_.clear();
  }
  if (whole_line_.size() > kLongestLineBytes) take_line();  // it may never end
  // A progress bar returns to the beginning of its line: show what was written before that.
  const std::size_t back = partial_.rfind('\r');
  if (back != std::string::npos && back > 0) {
    put(std::string_view(partial_).substr(0, back), false);
    partial_.erase(0, back);
    show_progress();
  }
  if (partial_.empty()) {
    silence_timer_.cancel();
  } else if (!silence_timer_.pending()) {
    silence_timer_.start(kSilence, [this] { on_silence(); });
  }
}

void OutputStream::on_silence() {
  if (partial_.empty()) return;
  const auto quiet = EventLoop::Clock::now() - last_data_;
  const bool is_long = partial_.size() >= kShortBytes;
  // While the console blocks this stream, the rest of the line is probably in the pipe.
  if (paused_ || quiet < (is_long ? kLongSilence : kSilence / 2))
    return silence_timer_.start(kSilence, [this] { on_silence(); });
  put(partial_, false);
  partial_.clear();
  show_progress();
}

void OutputStream::put(std::string_view text, bool ends_line) {
  if (!options_.route.console) return;
  const bool returns = text.find('\r') != std::string_view::npos;
  const std::string& prefix = options_.route.prefix;
  const std::string changed = returns ? with_prefix_after_returns(text, prefix) : "";
  console_.put({options_.target, options_.source, prefix,
                returns ? std::string_view(changed) : text, ends_line});
}

void OutputStream::append_to_file(std::string_view data) {
  if (!file_) return;
  try {
    if (file_lost_ > 0)
      write_all(file_.get(),
                fmt::format("\n[launch] about {} bytes of output are lost here.\n", file_lost_));
    file_lost_ = 0;
    write_all(file_.get(), data);
  } catch (const SystemError& error) {
    file_lost_ += data.size();
    if (std::exchange(file_failed_, true)) return;
    console_.say(
        fmt::format("[launch] {} cannot be written: {}. What is written there is lost "
                    "until it can be.",
                    options_.route.file, std::strerror(error.error_number())));
  }
}

bool OutputStream::wants_lines() const {
  return !options_.route.filters.empty() || options_.route.on_line;
}

void OutputStream::take_line() {
  if (!wants_lines()) return;
  match_filters(whole_line_);
  if (options_.route.on_line) options_.route.on_line(whole_line_);
  whole_line_.clear();
}

void OutputStream::show_progress() {
  if (!options_.route.on_progress || whole_line_.empty()) return;
  std::string_view text = whole_line_;
  text = text.substr(0, text.find_last_not_of('\r') + 1);
  const std::size_t start = text.rfind('\r') + 1;  // 0 without any
  options_.route.on_progress(text.substr(start, kShortBytes));
  // Drop the overwritten text, unless filters need the whole line.
  if (options_.route.filters.empty()) whole_line_.erase(0, start);
}

void OutputStream::match_filters(std::string_view line) {
  const auto& filters = options_.route.filters;
  if (options_.route.filtered_fd < 0 ||
      std::ranges::none_of(filters, [line](const std::string& filter) {
        return line.find(filter) != std::string_view::npos;
      }))
    return;
  try {
    write_all(options_.route.filtered_fd,
              fmt::format("{}{}\n", options_.route.filtered_prefix, line));
  } catch (const SystemError&) {
    options_.route.filtered_fd = -1;
  }
}

void OutputStream::finish() {
  if (!pipe_) return;
  silence_timer_.cancel();
  if (!whole_line_.empty()) take_line();
  // Without a prefix the output is passed on unchanged, without an added newline.
  if (!partial_.empty()) put(partial_, !options_.route.prefix.empty());
  partial_.clear();
  if (!paused_) loop_.forget(pipe_.get());
  pipe_.reset();
}

void OutputStream::close_now() {
  // More than any pipe holds, but bounded: a process may still be writing.
  constexpr int kMaxReads = 256;
  for (int i = 0; pipe_ && i < kMaxReads; ++i) {
    if (read_once() != Got::kData) break;
  }
  finish();
}

std::vector<std::string> OutputStream::last_lines(std::size_t most) const {
  constexpr std::size_t kLineBytes = 500;
  const StreamRoute& route = options_.route;
  std::vector<std::string> lines =
      lines_of(route.direct() ? end_of_file(route.file, kTailBytes) : tail_);
  std::erase(lines, "");
  for (std::string& line : lines) line.resize(std::min(line.size(), kLineBytes));
  if (lines.size() > most) lines.erase(lines.begin(), lines.end() - static_cast<long>(most));
  return lines;
}

LinePrefix prefix_style(const LaunchPlan& plan, bool teed) {
  if (plan.line_prefix) return *plan.line_prefix;
  if (teed) return LinePrefix::kRole;
  const auto& map = plan.tee.by_local_rank;
  const bool tees =
      plan.tee.all != Streams::kNone ||
      std::ranges::any_of(map, [](const auto& item) { return item.second != Streams::kNone; });
  return tees || plan.nproc_per_node == 1 ? LinePrefix::kNone : LinePrefix::kRank;
}

std::string line_prefix(LinePrefix style, const std::string& role, int rank, int local_rank) {
  if (style == LinePrefix::kNone) return {};
  const auto chosen = env::get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
  if (!chosen && style == LinePrefix::kRank) return fmt::format("[{}] ", rank);
  if (!chosen) return fmt::format("[{}{}]:", role, local_rank);
  std::string prefix = *chosen;
  const std::pair<const char*, std::string> variables[] = {
      {"${role_name}", role},
      {"${rank}", std::to_string(rank)},
      {"${local_rank}", std::to_string(local_rank)}};
  for (const auto& [name, value] : variables) {
    std::size_t at = 0;
    while ((at = prefix.find(name, at)) != std::string::npos) {
      prefix.replace(at, std::strlen(name), value);
      at += value.size();
    }
  }
  return prefix;
}

StreamRoute route_for(const LaunchPlan& plan, int rank, int local_rank, Streams bit,
                      std::string file) {
  const bool tee = has(plan.tee.at(local_rank), bit);
  const bool redirect = has(plan.redirects.at(local_rank), bit);
  const bool shown = !plan.local_ranks_filter || plan.local_ranks_filter->count(local_rank) != 0;
  StreamRoute route;
  route.console = shown && (tee || !redirect);
  const auto prefix = [&](LinePrefix style) {
    return line_prefix(style, plan.role, rank, local_rank);
  };
  route.prefix = prefix(prefix_style(plan, tee));
  route.filtered_prefix = prefix(tee ? LinePrefix::kRole : LinePrefix::kRank);
  if (tee || redirect) route.file = std::move(file);
  return route;
}

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "lockstep_";
constexpr std::string_view kRandom = "XXXXXX";  // mkdtemp's
constexpr std::time_t kKept_s = 24 * 3600;

// Not std::filesystem::remove_all: a CUDA library of LibTorch exports a broken one, which a program
// that calls spawn() would use.
void remove_tree(const std::string& path) {
  ::nftw(
      path.c_str(),
      [](const char* each, const struct stat*, int, struct FTW*) {
        ::remove(each);
        return 0;
      },
      16, FTW_DEPTH | FTW_PHYS);
}

Fd open_directory(const std::string& path) {
  return Fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

// The kernel releases the lock when the last process with the descriptor has exited.
bool lock(const Fd& directory) {
  return directory && ::flock(directory.get(), LOCK_EX | LOCK_NB) == 0;
}

bool is_old_and_ours(const Fd& directory) {
  struct stat info {};
  return directory && ::fstat(directory.get(), &info) == 0 && info.st_uid == ::geteuid() &&
         std::time(nullptr) - info.st_mtime > kKept_s;
}

void sweep(const std::string& folder) {
  std::error_code problem;  // ignored: nothing is found in an unreadable folder
  for (fs::directory_iterator at(folder, problem), end; !problem && at != end;
       at.increment(problem)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(kPrefix) || name.size() != kPrefix.size() + kRandom.size()) continue;
    const Fd directory = open_directory(at->path().string());
    if (is_old_and_ours(directory) && lock(directory)) remove_tree(at->path().string());
  }
}

}  // namespace

LogDirectory::LogDirectory(const LaunchPlan& plan) : temporary_(plan.log_dir.empty()) {
  if (temporary_)
    make_temporary(plan.redirects.any());
  else
    base_ = fs::absolute(plan.log_dir).string();
  std::string run = plan.run_id;
  std::ranges::replace(run, '/', '_');
  if (run.empty() || run == "." || run == "..") run = "none";
  run.resize(std::min<std::size_t>(run.size(), 200));  // a file name has at most 255 bytes
  // As torchrun does: a later run with the same id does not overwrite these files.
  std::error_code problem;
  do {
    root_ = fmt::format("{}/{}_{:08x}", base_, run, std::random_device{}());
  } while (!fs::create_directories(root_, problem) && !problem);
  if (plan.nnodes > 1) root_ += fmt::format("/node_{}", plan.node_rank);
  if (!problem) fs::create_directories(root_, problem);
  if (problem)
    throw UsageError("launch", "--log-dir={} cannot be used: {}. Name a directory you may write.",
                     plan.log_dir, problem.message());
  // Only under the lock, so that no other launcher removes the directory before.
  constexpr timespec kEpoch[] = {{0, 0}, {0, 0}};
  if (lock(lock_)) ::futimens(lock_.get(), kEpoch);
}

void LogDirectory::make_temporary(bool for_output) {
  const std::string folder = env::get("TMPDIR").value_or("/tmp");
  sweep(folder);
  base_ = fmt::format("{}/{}{}{}", folder, kPrefix, for_output ? "output_" : "", kRandom);
  if (::mkdtemp(base_.data()) == nullptr)
    throw UsageError("launch",
                     "the temporary directory {} cannot be created: {}. Set TMPDIR to a "
                     "directory you may write, or name one with --log-dir=DIR.",
                     base_, std::strerror(errno));
  lock_ = open_directory(base_);
}

LogDirectory::~LogDirectory() {
  if (temporary_ && !preserved_) remove_tree(base_);
}

std::string LogDirectory::attempt(int number) const {
  return fmt::format("{}/attempt_{}", root_, number);
}

std::string LogDirectory::preserve(bool failed) {
  std::error_code problem;  // ignored, as above
  for (fs::recursive_directory_iterator at(root_, problem), end; !problem && at != end;
       at.increment(problem)) {
    std::error_code ignored;
    if (!at->is_regular_file(ignored) || at->file_size(ignored) == 0) continue;
    const bool is_error = at->path().filename() == "error.json";
    if (temporary_ && at->path().extension() != ".log" && !(failed && is_error)) continue;
    preserved_ = true;
    if (temporary_) ::futimens(lock_.get(), nullptr);
    return root_;
  }
  return {};
}

}  // namespace lockstep::launch
