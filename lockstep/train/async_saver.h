// AsyncSaver: writes checkpoints while training continues. write_divided(): a checkpoint of a model
// that is divided over ranks.
//
// Parameters and optimizer state change only in step(). They can therefore be copied during the
// next forward and backward, and only the next step has to wait for the copy (wait_copied); the
// copy is written to disk after that. State that a forward changes (buffers, generators, the
// cursor) is copied by the caller before begin(). On a GPU with enough free memory, begin() copies
// on the device, in milliseconds, and the next step need not wait at all.
//
//   AsyncSaver saver({.output_dir = "out", .limit = 2});
//   saver.begin(std::move(contents));        // returns at once
//   forward(); backward();
//   saver.wait_copied();
//   optimizer.step();
//   if (auto ended = saver.poll()) ...       // durable, or what went wrong
//
// One save in flight: begin() waits for the one before. Used by one thread, on the rank that
// writes. Owns a thread while a save is under way and, between saves, the memory it copies into.
// The destructor waits until what is being written is written. No wait is bounded by time alone,
// for a slow disk may take hours: it ends when the save has made no progress for `stall_limit`, and
// the save is then abandoned.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/comm/mesh.h"
#include "lockstep/train/checkpoint.h"

namespace lockstep::train {

struct SaverOptions {
  std::string output_dir{};
  int limit = 0;  // checkpoints to keep; 0: all
  // False: the tensors are written from their own memory, because nothing changes them before the
  // save has ended.
  bool copy = true;
  // A single fsync of a large file on a loaded network file system may take minutes.
  std::chrono::milliseconds stall_limit{std::chrono::minutes(30)};
  WriteOptions write{};
};

struct SaveOutcome {
  std::string path;
  std::int64_t step = 0;
  bool committed = false;
  std::string alert;  // why it was not, where the run can continue (a full disk); or what was not
                      // deleted
  double waited_ms = 0;  // how long the caller waited in begin() and wait_copied()
  double copy_ms = 0;    // beside the training, to the host's memory
  double write_ms = 0;
};

// Deletes the checkpoints beyond `limit`, except the durable one; returns an error's text, or
// nothing.
std::string delete_older(const SaverOptions& options, const std::string& durable,
                         const std::string& keep);

class AsyncSaver {
 public:
  explicit AsyncSaver(SaverOptions options);
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  // Loads the kernel that copies tensors on a GPU, which would take the first save about 18 ms.
  static void prepare(c10::Device device);
  // The folder is checkpoint-<contents.state.global_step>. The limit does not delete `keep`. Throws
  // the previous save's error.
  void begin(CheckpointContents contents, std::string keep = {});
  // Parameters and optimizer state may change from here on. Error when the copy is stuck.
  void wait_copied();
  // The save that ended since the last call; wait() waits for it. Both throw the save's error,
  // except for a full disk, which is an alert.
  std::optional<SaveOutcome> poll();
  std::optional<SaveOutcome> wait();
  bool busy() const;
  // Waits until the current save has ended, or for `time`. Error when the save is stuck.
  void wait_a_while(std::chrono::milliseconds time);

 private:
  struct Job;
  struct Shared;  // used by the thread, also by one that is stuck and outlives the saver
  static void run(Shared& shared, Job& job);
  static bool copy_on_device(Shared& shared, CheckpointContents& contents, c10::Device device);
  static void bring(Shared& shared, const at::Tensor& from, const at::Tensor& to);
  static void copy(Shared& shared, Job& job);
  static void copy_beside(Shared& shared, Job& job);
  static void copy_everything(Shared& shared, Job& job);
  void wait_until_copied();
  bool ended() const;
  void check_progress();

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Job> job_;
  std::optional<SaveOutcome> ended_;  // from a job that begin() had to wait for
};

bool any_divided(const NamedTensors& tensors);

// A checkpoint of a model that is divided over ranks, written by all of them.
//
//   const SaveOutcome outcome = write_divided(mesh, contents, {.output_dir = "out", .limit = 2});
//
// `contents` has the same tensors on every rank, divided (lockstep/nn/divided.h) or whole; its
// other members are used on rank 0 only. Each rank writes its own elements into the files that rank
// 0 has laid out, in parallel and from their memory: nothing is gathered, and nothing is copied on
// the CPU. The bytes are those of write_checkpoint() with the whole tensors. Rank 0 then computes
// the files' checksums and commits the folder.
//
// Collective. Returns when the folder is durable, on every rank; ranks exchange meanwhile, so that
// the save's own progress bounds the wait. A full disk is an alert, with nothing committed. Other
// errors are thrown on every rank. On several hosts output_dir is on a file system that all mount.
SaveOutcome write_divided(const Mesh& mesh, CheckpointContents contents,
                          const SaverOptions& options, const std::string& keep = {});

}  // namespace lockstep::train
