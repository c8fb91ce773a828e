// The collectives, each as what a rank writes and reads in a round.
//
// Those that only move bytes go in chunks, one round each. A reduction of more than a few bytes is
// divided: every rank sums one slice of a chunk (first round) and all take the slices (second). An
// array in symmetric memory needs no chunks and no copies: every rank sums its slice straight out
// of all ranks' arrays and writes it into all of them.
//
// Made by Engine, run by whoever holds the engine's seat.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/shm/collective.h"
#include "lockstep/comm/shm/engine.h"
#include "lockstep/comm/shm/symmetric.h"

namespace lockstep::shm {

class Barrier final : public Collective {
 public:
  Barrier(std::shared_ptr<EngineCore> core, const Deadline& deadline);
  void fill(EngineCore&, int) override {}
  Next take(EngineCore&, int) override { return Next::kDone; }
};

// To all ranks, or to `root` alone.
class AllReduce final : public Collective {
 public:
  struct Call {
    void* data;
    std::size_t count;
    DType dtype;
    Op op;
    int root = -1;
  };
  AllReduce(std::shared_ptr<EngineCore> core, const Deadline& deadline, const Call& call);
  void fill(EngineCore& core, int parity) override;
  Next take(EngineCore& core, int parity) override;

 private:
  enum class Stage { kAll, kAgree, kSum, kTake, kSymmetric, kEnd };
  struct Slice {
    std::size_t begin;
    std::size_t end;
  };

  std::size_t chunk(const EngineCore& core) const;
  Slice slice(const EngineCore& core, std::size_t bytes, int rank) const;
  bool wanted(const EngineCore& core) const;  // by this rank
  void sum_all(EngineCore& core, int parity);
  void sum_slice(EngineCore& core, int parity);
  void take_slices(EngineCore& core, int parity);
  Next choose_path(EngineCore& core, int parity);
  Next sum_symmetric(EngineCore& core);

  std::byte* const data_;
  const std::size_t bytes_;
  SymmetricBlocks::Place place_;
  Stage stage_ = Stage::kAll;
  std::size_t at_ = 0;  // how far it has come; the chunk's begin, or the place in the own slice
};

class Broadcast final : public Collective {
 public:
  Broadcast(std::shared_ptr<EngineCore> core, const Deadline& deadline, Part array, int root);
  void fill(EngineCore& core, int parity) override;
  Next take(EngineCore& core, int parity) override;

 private:
  const Part array_;
  std::size_t at_ = 0;
};

class AllGather final : public Collective {
 public:
  AllGather(std::shared_ptr<EngineCore> core, const Deadline& deadline, void* output,
            ConstPart input);
  void fill(EngineCore& core, int parity) override;
  Next take(EngineCore& core, int parity) override;

 private:
  std::byte* const output_;
  const std::byte* const input_;
  const std::size_t bytes_;
  std::size_t at_ = 0;
};

class ReduceScatter final : public Collective {
 public:
  struct Call {
    void* output;
    const void* input;
    std::size_t count;
    DType dtype;
    Op op;
  };
  ReduceScatter(std::shared_ptr<EngineCore> core, const Deadline& deadline, const Call& call);
  void fill(EngineCore& core, int parity) override;
  Next take(EngineCore& core, int parity) override;

 private:
  std::size_t piece(const EngineCore& core) const;  // of a chunk, for each rank

  std::byte* const output_;
  const std::byte* const input_;
  const std::size_t bytes_;  // for each rank
  std::size_t at_ = 0;
};

// Everything where the sizes may differ: gather, scatter, all-to-all. A rank's buffer is divided
// equally among the ranks it has something for; all know all sizes after the first round.
class Exchange final : public Collective {
 public:
  struct Call {
    Kind kind;
    int root = -1;
    std::vector<ConstPart> sends;
    std::vector<Part> receives;
  };
  Exchange(std::shared_ptr<EngineCore> core, const Deadline& deadline, Call call);
  void fill(EngineCore& core, int parity) override;
  Next take(EngineCore& core, int parity) override;
  std::string disagreement(EngineCore& core, int parity) override;

 private:
  struct Source {  // of what this rank receives
    std::size_t slot_bytes = 0;
    std::size_t slot = 0;
  };
  void learn(EngineCore& core, int parity);

  const std::vector<ConstPart> sends_;
  const std::vector<Part> receives_;
  std::vector<Source> sources_;
  std::size_t rounds_ = 1;
  std::size_t round_ = 0;
};

}  // namespace lockstep::shm
