// KeptRows: what ranks along "shard" exchange where parameters stay whole and each rank steps rows
// of them (Shard::kGradients and kState).
//
//   for (ShardUnit& unit : units) unit.keep();
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
#include "lockstep/parallel/options.h"
#include "lockstep/parallel/shard_unit.h"

namespace lockstep::parallel {

const char* name(Shard shard);
const char* divided_by(Shard shard);  // "state"
// UsageError where the mode does not go with other options. `divided_further`: what else divides
// the parameters, or nothing.
void check_mode(const FullyShardOptions& options, const std::string& divided_further);

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
  // UsageError for a parameter that was given other memory, or that was written since then.
  void check() const;
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
    std::uint64_t print = 0;   // of a few elements
  };
  bool written(const Kept& kept) const;
  void begin(Message& message) const;
  static void end(Message& message);

  World& shard_;
  const bool shared_;
  std::vector<Kept> kept_;
  std::uint64_t written_ = 0;  // past a step: what the last backward has found, or zero
  std::vector<std::vector<ShardedParameter*>> messages_;
};

}  // namespace lockstep::parallel
