// Scalars in a file that TensorBoard reads: records framed with masked CRC-32C, each an Event
// message. The few fields needed are encoded by hand; LibTorch brings a protobuf of its own, and a
// second one in the process would clash with it.
//
//   EventFile events("out/runs");
//   events.scalars(step, {{"train/loss", loss}, {"train/lr", lr}});
//   events.flush();
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep::io {

// Used by one thread. Owns its file, which is always new: a record truncated by a crash stays the
// last of its file. The destructor writes unflushed records if it can.
class EventFile {
 public:
  // Makes the directory if need be and a file events.out.tfevents.<time>.<host>.<pid>.<count> in
  // it. SystemError when it cannot.
  explicit EventFile(const std::string& directory);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  using Scalar = std::pair<std::string, float>;
  // One event with all the values, of now. UsageError for a tag that is empty or not UTF-8.
  void scalars(std::int64_t step, const std::vector<Scalar>& values,
               std::optional<double> wall_time_s = {});
  // A run begins, or continues, with this step: readers discard what earlier files say of it and of
  // later steps.
  void begin_at(std::int64_t step);
  // After it returns readers see all records, even if this process dies.
  void flush();

  const std::string& path() const { return path_; }

 private:
  void record_step(std::int64_t step, double wall_time_s, char field, std::string_view bytes);
  void record(std::string_view event);

  std::string path_;
  Fd fd_;
  std::string buffer_;
};

}  // namespace lockstep::io
