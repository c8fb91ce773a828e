#include "lockstep/dashboard/record_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <filesystem>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/io/file.h"

namespace lockstep::dashboard {
namespace {

// A run that was killed may have left half a line, to which nothing may be added.
void cut_torn_line(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return;
  off_t end = info.st_size;
  for (char last = 0; end > 0; --end)
    if (::pread(fd, &last, 1, end - 1) != 1 || last == '\n') break;
  if (end < info.st_size && ::ftruncate(fd, end) != 0)
    throw SystemError("record", "cannot shorten a file of the record", errno);
}

}  // namespace

RecordWriter::RecordWriter(const std::string& directory, int host)
    : folder_(directory + "/" + monitor::kRecordFolder), host_(host) {
  io::make_directories(folder_);
}

void RecordWriter::write(const monitor::RunFacts& facts) {
  const std::string text = monitor::facts_json(facts) + "\n";
  if (text == std::exchange(facts_, text)) return;
  const std::string path = folder_ + "/run.json";
  // Launchers of several hosts may share the folder; the facts of the first one stand.
  if (failed_ || (host_ != 0 && std::filesystem::exists(path))) return;
  try {
    write_file_atomically(path, text);
  } catch (const std::exception& error) {
    failed_ = true;
    problem_ = error.what();
  }
}

void RecordWriter::add(int rank, const monitor::Interval& interval) {
  append(fmt::format("rank_{}.jsonl", rank), monitor::interval_json(interval) + "\n");
}

void RecordWriter::add(const monitor::GpuSample& sample,
                       const std::vector<monitor::GpuIdentity>& gpus) {
  append(fmt::format("gpus_{}.jsonl", host_), monitor::gpu_sample_json(sample, gpus) + "\n");
}

void RecordWriter::append(const std::string& name, const std::string& line) {
  if (failed_) return;
  try {
    Fd& file = files_[name];
    if (!file) {
      const std::string path = folder_ + "/" + name;
      file.reset(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
      if (!file) throw io::file_error("open", path, errno);
      cut_torn_line(file.get());
    }
    write_all(file.get(), line);
  } catch (const std::exception& error) {
    failed_ = true;
    problem_ = error.what();
  }
}

std::string RecordWriter::problem() {
  return std::exchange(problem_, {});
}

}  // namespace lockstep::dashboard
