#include "lockstep/monitor/line_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/io/file.h"

namespace lockstep::monitor {
namespace {

// A run that was killed may have left half a line, which only the last one may be.
void cut_torn_line(int fd) {
  constexpr off_t kBlock = 4096;
  char block[kBlock];
  const off_t size = ::lseek(fd, 0, SEEK_END);
  for (off_t end = size; end > 0;) {
    const off_t begin = end > kBlock ? end - kBlock : 0;
    const ssize_t n = ::pread(fd, block, static_cast<std::size_t>(end - begin), begin);
    if (n != static_cast<ssize_t>(end - begin)) return;
    const std::size_t last = std::string_view(block, static_cast<std::size_t>(n)).rfind('\n');
    const bool found = last != std::string_view::npos;
    end = found ? begin + static_cast<off_t>(last) + 1 : begin;
    if (!found && end > 0) continue;
    if (end < size && ::ftruncate(fd, end) != 0)
      throw SystemError("record", "cannot cut a torn line off", errno);
    return;
  }
}

}  // namespace

void LineFile::append(const std::string& line) {
  if (!fd_) open();
  struct stat info {};
  if (::fstat(fd_.get(), &info) == 0 && info.st_nlink == 0) {
    fd_.reset();  // somebody has deleted it: the next line makes it again
    throw io::file_error("write to", path_, ENOENT);
  }
  const std::string text = line + "\n";
  const off_t end = ::lseek(fd_.get(), 0, SEEK_END);
  try {
    write_all(fd_.get(), text);
  } catch (const SystemError& error) {
    [[maybe_unused]] const int cut = ::ftruncate(fd_.get(), end);
    throw io::file_error("write to", path_, error.error_number(), text.size());
  }
}

void LineFile::open() {
  io::make_directories(std::filesystem::path(path_).parent_path().string());
  Fd fd(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!fd) throw io::file_error("open", path_, errno);
  cut_torn_line(fd.get());
  fd_ = std::move(fd);
}

RecordFiles::File& RecordFiles::file(const char* kind, int number) {
  const std::string path = fmt::format("{}/{}_{}.jsonl", folder_, kind, number);
  return files_.try_emplace(path, File{LineFile(path)}).first->second;
}

void RecordFiles::write(File& file) {
  file.file.append(interval_json(file.pending));
  ++file.lines;
  file.pending = {};
}

void RecordFiles::add(int rank, const Interval& interval) {
  File& to = file("rank", rank);
  if (interval.start && to.pending.seconds > 0) write(to);
  join(to.pending, interval);
  if (to.lines < limits_.fine_lines || to.pending.seconds >= limits_.coarse_s) write(to);
}

void RecordFiles::add(int host, const GpuSample& sample, const std::vector<GpuIdentity>& gpus) {
  File& to = file("gpus", host);
  if (to.lines >= limits_.fine_lines && sample.unix_time_s - to.time_s < limits_.coarse_s) return;
  to.file.append(gpu_sample_json(sample, gpus));
  ++to.lines;
  to.time_s = sample.unix_time_s;
}

void RecordFiles::end() {
  for (auto& [path, file] : files_)
    if (file.pending.seconds > 0) write(file);
}

}  // namespace lockstep::monitor
