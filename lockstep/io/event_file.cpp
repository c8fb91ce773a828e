#include "lockstep/io/event_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>

#include "lockstep/core/deadline.h"
#include "lockstep/core/text.h"
#include "lockstep/io/file.h"

namespace lockstep::io {
namespace {

constexpr std::size_t kEventBufferBytes = 64u << 10;

// Field numbers of tensorflow.Event, Summary, Summary.Value and SessionLog, as (number << 3 | wire
// type).
constexpr char kEventWallTime = 1 << 3 | 1;
constexpr char kEventStep = 2 << 3 | 0;
constexpr char kEventFileVersion = 3 << 3 | 2;
constexpr char kEventSummary = 5 << 3 | 2;
constexpr char kEventSessionLog = 7 << 3 | 2;
constexpr char kSummaryValue = 1 << 3 | 2;
constexpr char kValueTag = 1 << 3 | 2;
constexpr char kValueSimple = 2 << 3 | 5;
constexpr char kSessionStatus = 1 << 3 | 0;
constexpr char kSessionStart = 1;

template <typename T>
void put_fixed(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void put_bytes(std::string& out, char field, std::string_view bytes) {
  out.push_back(field);
  put_varint(out, bytes.size());
  out += bytes;
}

std::string event_at(double wall_time_s) {
  std::string event(1, kEventWallTime);
  put_fixed(event, wall_time_s);
  return event;
}

// A checksum stored beside the data it covers is masked, as the record format wants it.
std::uint32_t masked_crc(std::string_view data) {
  return std::rotr(crc32c(bytes_of(data)), 15) + 0xa282ead8u;
}

std::string new_path(const std::string& directory) {
  static std::atomic<unsigned> count{0};
  char host[HOST_NAME_MAX + 1] = "localhost";
  ::gethostname(host, sizeof host - 1);
  return fmt::format("{}/events.out.tfevents.{}.{}.{}.{}", directory,
                     static_cast<std::int64_t>(unix_time_s()), host, ::getpid(), count++);
}

}  // namespace

EventFile::EventFile(const std::string& directory) {
  make_directories(directory);
  path_ = new_path(directory);
  fd_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644));
  if (!fd_) throw file_error("create", path_, errno);
  std::string event = event_at(unix_time_s());
  put_bytes(event, kEventFileVersion, "brain.Event:2");
  record(event);
  flush();
}

EventFile::~EventFile() {
  try {
    flush();
  } catch (...) {
    // Metrics are no reason to end a program.
  }
}

void EventFile::scalars(std::int64_t step, const std::vector<Scalar>& values,
                        std::optional<double> wall_time_s) {
  std::string summary;
  for (const auto& [tag, number] : values) {
    if (tag.empty() || invalid_utf8(tag))
      throw UsageError("events", "'{}' cannot be a tag: tags are UTF-8 and not empty.", tag);
    std::string value;
    put_bytes(value, kValueTag, tag);
    value.push_back(kValueSimple);
    put_fixed(value, number);
    put_bytes(summary, kSummaryValue, value);
  }
  record_step(step, wall_time_s.value_or(unix_time_s()), kEventSummary, summary);
}

void EventFile::begin_at(std::int64_t step) {
  record_step(step, unix_time_s(), kEventSessionLog, std::string{kSessionStatus, kSessionStart});
}

void EventFile::record_step(std::int64_t step, double wall_time_s, char field,
                            std::string_view bytes) {
  std::string event = event_at(wall_time_s);
  event.push_back(kEventStep);
  put_varint(event, static_cast<std::uint64_t>(step));
  put_bytes(event, field, bytes);
  record(event);
}

void EventFile::record(std::string_view event) {
  std::string length;
  put_fixed(length, static_cast<std::uint64_t>(event.size()));
  buffer_ += length;
  put_fixed(buffer_, masked_crc(length));
  buffer_ += event;
  put_fixed(buffer_, masked_crc(event));
  if (buffer_.size() >= kEventBufferBytes) flush();
}

void EventFile::flush() {
  // Removed as it is written: a retry after an error must not write the same bytes again.
  while (!buffer_.empty()) {
    const ssize_t n = ::write(fd_.get(), buffer_.data(), buffer_.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw file_error("write to", path_, errno, buffer_.size());
    buffer_.erase(0, static_cast<std::size_t>(n));
  }
}

}  // namespace lockstep::io
