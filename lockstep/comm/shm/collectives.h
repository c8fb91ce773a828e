// The collectives of the shm engine: what a rank writes and reads in each round.
//
// Those that only move bytes go in chunks, one round each. A reduction of more than a few bytes is
// divided: every rank sums one slice of each chunk. An array in symmetric memory needs no chunks
// and no copies: every rank sums its slice straight out of all ranks' arrays and writes it into all
// of them.
//
// The key idea is how a private array of S bytes goes through the buffers with one round per
// chunk. Buffers have a slot for each rank. In its own buffer a rank writes the others' slices of
// chunk k into their slots, and into its own, which needs no input, its sum of chunk k - 1; when
// all have posted, everyone takes the sums of chunk k - 1, and sums its slice of chunk k out of the
// others' slots and its own array. So one of N ranks copies (N-1)/N of the S bytes in, sums S/N
// (its own part in place) and copies (N-1)/N out: for two ranks 2 S bytes are read and 2 S written,
// of which S each reach the memory and the rest stays in the caches, since a chunk is read and
// written within two rounds.
//
// Made by Engine, run by the thread that drives the engine.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/shm/engine_types.h"
#include "lockstep/comm/shm/operations.h"
#include "lockstep/comm/shm/peers.h"

namespace lockstep::shm {

class Barrier final : public Collective {
 public:
  Barrier(const Group& group, const Deadline& deadline, Kind kind);
  void fill(const Group&, int) override {}
  Next take(const Group&, int) override { return Next::kDone; }
};

// To all ranks, or only to `root`.
class AllReduce final : public Collective {
 public:
  struct Call {
    void* data;
    std::size_t count;
    DType dtype;
    Op op;
    int root = -1;
  };
  AllReduce(const Group& group, const Deadline& deadline, const Call& call);
  void fill(const Group& group, int parity) override;
  Next take(const Group& group, int parity) override;

 private:
  enum class Stage { kAll, kAgree, kChunks, kSymmetric, kEnd };
  // The slice that one rank sums: its offsets in the array and in the ranks' buffers.
  struct Slice {
    std::size_t at;
    std::size_t bytes;
    std::size_t slot;
  };
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };

  Slice slice(const Group& group, std::size_t chunk, int rank) const;
  bool wanted(const Group& group) const;  // whether this rank receives the result
  std::size_t chunks(const Group& group) const;
  void copy_in(const Group& group, int parity);  // the first chunk
  void sum_all(const Group& group, int parity);
  void sum_slice(const Group& group, int parity);
  Next take_chunk(const Group& group, int parity);
  Next choose_path(const Group& group, int parity);
  Next sum_symmetric(const Group& group);

  std::byte* const data_;
  const std::size_t bytes_;
  SymmetricBlocks::Location location_;
  Stage stage_ = Stage::kAll;
  std::size_t chunk_ = 0;     // the chunk being summed
  std::vector<Copy> copies_;  // beside the sum: sums of the chunk before it, slices of the next
  std::size_t at_ = 0;        // position in this rank's slice of a symmetric array
};

class Broadcast final : public Collective {
 public:
  Broadcast(const Group& group, const Deadline& deadline, Part array, int root);
  void fill(const Group& group, int parity) override;
  Next take(const Group& group, int parity) override;

 private:
  const Part array_;
  std::size_t at_ = 0;
};

class AllGather final : public Collective {
 public:
  AllGather(const Group& group, const Deadline& deadline, void* output, ConstPart input);
  void fill(const Group& group, int parity) override;
  Next take(const Group& group, int parity) override;

 private:
  std::byte* const output_;
  const std::byte* const input_;
  const std::size_t bytes_;
  std::size_t at_ = 0;
};

// Gathers arrays of different sizes, which the ranks exchange in the first round.
class AllGatherV final : public Collective {
 public:
  using Outputs = std::vector<std::vector<std::byte>>;
  AllGatherV(const Group& group, const Deadline& deadline, Outputs& outputs, ConstPart input);
  void fill(const Group& group, int parity) override;
  Next take(const Group& group, int parity) override;

 private:
  Outputs& outputs_;
  const ConstPart input_;
  std::size_t largest_ = 0;
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
  ReduceScatter(const Group& group, const Deadline& deadline, const Call& call);
  void fill(const Group& group, int parity) override;
  Next take(const Group& group, int parity) override;

 private:
  std::byte* const output_;
  const std::byte* const input_;
  const std::size_t bytes_;  // for each rank
  std::size_t at_ = 0;
};

// Collectives whose sizes may differ between ranks: gather, scatter, all-to-all. A rank's buffer is
// divided equally among the ranks it sends to; all sizes are known after the first round.
class Exchange final : public Collective {
 public:
  struct Call {
    Kind kind;
    int root = -1;
    std::vector<ConstPart> sends;
    std::vector<Part> receives;
  };
  Exchange(const Group& group, const Deadline& deadline, Call call);
  void fill(const Group& group, int parity) override;
  Next take(const Group& group, int parity) override;
  std::string disagreement(const Group& group, int parity) override;

 private:
  struct Source {  // what this rank receives
    std::size_t slot_bytes = 0;
    std::size_t slot = 0;
  };
  void learn(const Group& group, int parity);

  const std::vector<ConstPart> sends_;
  const std::vector<Part> receives_;
  std::vector<Source> sources_;
  std::size_t rounds_ = 1;
  std::size_t round_ = 0;
};

}  // namespace lockstep::shm
