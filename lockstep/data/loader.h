// Batches of a dataset, for one rank of a world: sharded, shuffled, loaded ahead by threads, copied
// to the device during the computation.
//
// Workers run ahead, but state() does not: it is the position after the last batch handed out.
// Whatever workers have loaded beyond it is discarded when a loop is left early, a worker throws or
// the run restarts.
//
//   auto loader = data::loader(dataset, world, {.batch_size = 32, .shuffle = true});
//   for (int epoch = 0; epoch < 10; ++epoch)
//     for (auto& batch : loader.epoch(epoch)) train_step(batch);   // set_epoch cannot be forgotten
//
// loader.windows(epoch, {.micro_batches = 4}) gives the batches of a step at a time (window.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/data/batch.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/window.h"

namespace lockstep::data {

using Collate = std::function<Batch(std::vector<Example>)>;

// Names and defaults of PyTorch's DataLoader and DistributedSampler.
struct LoaderOptions {
  std::int64_t batch_size = 1;  // per rank
  bool shuffle = false;
  bool drop_last = false;   // incomplete batches, and samples that do not divide by ranks
  bool evaluation = false;  // no duplicates: ranks may differ by one sample, and so by one batch
  std::uint64_t seed = 0;   // equal on all ranks
  int num_workers = 0;      // threads; 0 loads in the caller's
  int prefetch_factor = 2;  // batches ahead per worker
  bool pin_memory = false;  // for copies to a GPU; no effect without one
  bool persistent_workers = false;                              // threads live on between epochs
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};  // for one batch
  Collate collate{};                                            // default: the dataset's own
  SamplerPtr sampler{};                 // overrides the order that shuffle gives; has its own seed
  std::optional<c10::Device> device{};  // default: the world's
  bool check_ranks = true;  // compare options and sizes, which makes loader() a collective
};

// The seconds that one batch took. `wait` is the time that the training loop lost.
struct BatchTiming {
  double load = 0;      // get() of all samples; includes collate with get_batch()
  double collate = 0;   // the worker's, as load and copy are
  double copy = 0;      // pinning, and handing over to the device's copy engine
  double transfer = 0;  // the copy engine's own time; 0 on the CPU, and until it is known
  double wait = 0;      // the caller's, until it had the batch
};
struct LoaderTiming {
  std::int64_t batches = 0;
  BatchTiming total{};
  BatchTiming last{};  // the last batch handed out
};

// A sample that could not be loaded; the text includes the cause's message.
class SampleError : public Error {
 public:
  SampleError(std::int64_t index, const std::string& text, std::exception_ptr cause);
  std::int64_t index() const { return index_; }  // in the dataset; -1: the batch as a whole
  std::exception_ptr cause() const { return cause_; }

 private:
  std::int64_t index_;
  std::exception_ptr cause_;
};

class Epoch;
class Loader;
class Windows;

namespace detail {
class LoaderImpl;

// The rank that a loader serves.
struct RankInfo {
  int rank = 0;
  int ranks = 1;
  c10::Device device{c10::kCPU};
};
Loader make_loader(DatasetPtr dataset, RankInfo info, LoaderOptions options);
}  // namespace detail

// Made by loader(). Used by one thread at a time; owns its workers and shares the dataset. Cheap to
// move. The destructor stops the workers; one that hangs in a dataset's get() is abandoned after 10
// s, with a warning.
class Loader {
 public:
  explicit Loader(std::shared_ptr<detail::LoaderImpl> impl);
  ~Loader();
  Loader(Loader&&) noexcept;
  Loader& operator=(Loader&&) noexcept;

  // The batches of one epoch, from the loaded state's cursor if there is one, else from its start.
  // One epoch at a time: asking for another ends the one before.
  Epoch epoch(std::int64_t epoch);
  // The same batches, in the windows of optimizer steps. The ranks of the world that loader() was
  // given add up their tokens when a window is taken.
  Windows windows(std::int64_t epoch, const WindowOptions& options = {});

  // The number of batches in a whole epoch: equal on every rank (with evaluation: the maximum).
  std::int64_t batches_per_epoch() const;
  // The number of batches that epoch(epoch) will give this rank; for the epoch in progress, those
  // that are left.
  std::int64_t batches_left(std::int64_t epoch) const;
  std::int64_t dataset_size() const;
  const LoaderOptions& options() const;
  c10::Device device() const;  // where batches arrive

  // After the last batch of an epoch the cursor is at the order's end, and epoch(e) is empty.
  SamplerState state() const;
  // Accepts any world size and batch size. The next epoch() must be the state's, or, where that is
  // complete, the one after it. Throws UsageError when the seed, the size or the epoch's order
  // differ.
  void load_state(const SamplerState& state);

  LoaderTiming timing() const;

 private:
  std::shared_ptr<detail::LoaderImpl> impl_;
};

// A range over one epoch. Leaving the loop in any way ends it.
class Epoch {
 public:
  using Iterator = detail::RangeIterator<Epoch, Batch>;

  Epoch(std::shared_ptr<detail::LoaderImpl> impl, std::uint64_t ticket)
      : impl_(std::move(impl)), ticket_(ticket) {}
  ~Epoch();
  Epoch(const Epoch&) = delete;
  Epoch& operator=(const Epoch&) = delete;

  // The next batch, or nothing at the end. Throws SampleError or TimeoutError, which end the epoch;
  // UsageError when another epoch has been asked for since.
  std::optional<Batch> next();

  Iterator begin() { return Iterator(this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend Iterator;
  std::shared_ptr<detail::LoaderImpl> impl_;  // a loop over a temporary loader is right too
  std::uint64_t ticket_;
  std::optional<Batch> current_{};
};

// A range over the windows of one epoch, which Loader::windows() makes; otherwise as Epoch.
class Windows {
 public:
  using Iterator = detail::RangeIterator<Windows, Window>;

  Windows(std::shared_ptr<detail::LoaderImpl> impl, std::uint64_t ticket, WindowOptions options)
      : impl_(impl), epoch_(std::move(impl), ticket), options_(options) {}

  std::optional<Window> next();

  Iterator begin() { return Iterator(this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend Iterator;
  std::shared_ptr<detail::LoaderImpl> impl_;
  Epoch epoch_;
  WindowOptions options_;
  std::optional<Window> current_{};
};

// With options.check_ranks every rank must call it, and UsageError names the rank that differs. A
// loader for a single rank is given a world of one: loader(dataset, World{}, ...). Also UsageError
// for a dataset without samples, or of which drop_last leaves no batch.
Loader loader(DatasetPtr dataset, World world, LoaderOptions options = {});

// Accepts a dataset of torch::data directly.
template <detail::TorchDataset T>
Loader loader(T dataset, World world, LoaderOptions options = {}) {
  return loader(make_dataset(std::move(dataset)), std::move(world), std::move(options));
}

}  // namespace lockstep::data
