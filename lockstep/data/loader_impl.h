// The implementation of Loader: one rank's share of an epoch, divided into batches that workers or
// the caller make. Private to lockstep/data.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/data/loader.h"
#include "lockstep/data/prefetch.h"

namespace lockstep::data::detail {

// The rank that this loader serves.
struct RankInfo {
  int rank = 0;
  int ranks = 1;
  c10::Device device{c10::kCPU};
};

// A batch, and on a GPU the event that the training stream must wait for before it reads it.
struct Loaded {
  Batch batch{};
  BatchTiming timing{};
  std::optional<c10::Event> copy_began{};
  std::optional<c10::Event> copied{};
};

// Makes a batch on the device from indices. Const and independent of the loader: workers hold a
// pointer to it, and a hanging worker keeps it alive.
class BatchMaker {
 public:
  BatchMaker(DatasetPtr dataset, LoaderOptions options, c10::Device device);
  Loaded make(Indices indices, const RandomKey& key) const;

 private:
  Batch load(Indices indices, const RandomKey& key, BatchTiming& timing) const;
  void check(const Batch& batch, Indices indices) const;
  void copy(Loaded& loaded) const;

  DatasetPtr dataset_;
  LoaderOptions options_;
  c10::Device device_;
  std::optional<c10::Stream> side_{};  // copies run during the computation
};

// Used by one thread.
class LoaderImpl {
 public:
  LoaderImpl(DatasetPtr dataset, RankInfo info, LoaderOptions options);

  std::uint64_t open(std::int64_t epoch);  // a ticket for next() and close()
  std::optional<Batch> next(std::uint64_t ticket);
  void close(std::uint64_t ticket) noexcept;

  std::int64_t batches(std::int64_t cursor, int rank) const;
  std::int64_t batches_left(std::int64_t epoch) const;
  const LoaderOptions& options() const { return options_; }
  const RankInfo& info() const { return info_; }
  std::int64_t dataset_size() const { return dataset_->size(); }

  std::int64_t order_sum(std::int64_t epoch) const {
    return order_checksum(sampler_->order(epoch));
  }
  const SamplerState& state() const { return state_; }
  void load_state(const SamplerState& state);
  const LoaderTiming& timing() const { return timing_; }

 private:
  struct Round;
  void check_not_empty() const;
  Loaded take();
  void finish_round();

  DatasetPtr dataset_;
  RankInfo info_;
  LoaderOptions options_;
  SamplerPtr sampler_;
  std::shared_ptr<const BatchMaker> maker_;
  std::unique_ptr<Prefetcher> prefetcher_;
  std::shared_ptr<const Round> round_;  // the current round; empty between epochs
  std::uint64_t ticket_ = 0;
  std::int64_t handed_out_ = 0;  // batches of this round
  std::int64_t start_cursor_ = 0;
  SamplerState state_;
  bool resume_ = false;  // the next epoch continues at state_'s cursor
  LoaderTiming timing_;
};

Loader make_loader(DatasetPtr dataset, RankInfo info, LoaderOptions options);

}  // namespace lockstep::data::detail
