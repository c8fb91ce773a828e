// KeptRows: what ranks along "shard" exchange where parameters stay whole and each rank steps rows
// of them (Shard::kGradients and kState).
//
//   for (ShardUnit& unit : units) unit.keep(by_blocks);
//   KeptRows kept(units, shard);
//   ...                               // each rank steps ShardedParameter::shard
//   kept.publish();                   // everybody has all rows
//   kept.remember();
//
// Where all ranks map the parameters, a step writes them once and publish() sends nothing. Nobody
// else may write them between steps, with gradients that are not averaged: check() finds it. Refers
// to the units, which outlive it and do not move. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/options.h"
#include "lockstep/parallel/replicas.h"
#include "lockstep/parallel/shard_unit.h"

namespace torch::nn {
class Module;
}

namespace lockstep::parallel {

const char* name(Shard shard);
const char* divided_by(Shard shard);  // "state"
// UsageError where the mode does not go with other options. `divided_further`: what else divides
// the parameters, or nothing.
void check_mode(const FullyShardOptions& options, const std::string& divided_further);
// UsageError for parameters that lie in the same memory, each of which would get memory of its own,
// and for embeddings with sparse gradients, of which rows have no average.
void check_shardable(const torch::nn::Module& module);

class KeptRows {
 public:
  // `shared`: the parameters lie in memory that all ranks map.
  KeptRows(std::vector<ShardUnit>& units, World& shard, bool shared);
  // Gives the parameters memory of their own where it is shared.
  ~KeptRows();
  KeptRows(const KeptRows&) = delete;
  KeptRows& operator=(const KeptRows&) = delete;

  // Sends the rows of trained parameters to all ranks. Collective.
  void publish();
  // Takes the parameters as they are now for what a step has left: when all ranks have written.
  void remember();
  // UsageError for a parameter that was given other memory, or that was written since then: under
  // LOCKSTEP_DEBUG all elements are compared.
  void check() const;
  // The same on every rank of `world`, and CommError where parameters differ on them. Collective.
  void verify(World& world) const;
  // UsageError on every rank of `world` where the parameters of `model`, which are these, differ,
  // were moved to another type or device, or lie in the same memory. Collective.
  void check_equal(World& world, const ModelTensors& model) const;
  // Before a backward. A single write is left to the step, where with kState all ranks refuse it
  // together. UsageError where parameters are written again after another backward, in a loop that
  // never steps them with our optimizer.
  void check_backward();
  // Takes values over that were loaded into other memory. Every rank has the same values. No
  // collective.
  void take_back();

 private:
  // Parameters of a unit, of one type on one device, which are sent together.
  struct Message {
    std::vector<ShardedParameter*> members;
    at::Tensor parts;  // the rows of each rank
    Work work;
  };
  struct Kept {
    ShardedParameter* p;
    std::int64_t version = 0;  // of its tensor
    std::uint64_t print = 0;   // of some elements
  };
  std::uint64_t print_of(const at::Tensor& tensor) const;
  void check_forms() const;
  Fingerprints fingerprints() const;
  bool written(const Kept& kept) const;
  void begin(Message& message) const;
  static void end(Message& message);

  World& shard_;
  const bool shared_;
  const bool debug_;
  std::vector<Kept> kept_;
  std::uint64_t written_ = 0;  // past a step: what the last backward has found, or zero
  std::vector<std::vector<ShardedParameter*>> messages_;
};

}  // namespace lockstep::parallel
