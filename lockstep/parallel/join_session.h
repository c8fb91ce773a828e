// JoinSession: uneven inputs. Which ranks still train, what sums are divided by, and whose buffers
// and order count.
//
//   join.begin(options);
//   join.exchange(true);     // before each synchronised pass; false: this rank has run out
//   join.end();
#pragma once

#include <optional>

#include "lockstep/comm/world.h"
#include "lockstep/parallel/options.h"

namespace lockstep::parallel {

class JoinSession {
 public:
  explicit JoinSession(World& world) : world_(world) {}

  void begin(const JoinOptions& options);  // UsageError inside another one
  void end();
  bool active() const { return options_.has_value(); }

  // False when all ranks have run out. UsageError with throw_on_early_termination. Collective.
  bool exchange(bool has_inputs);

  double divisor() const;  // of a sum over ranks
  bool divides_by_active() const { return active() && !options_->divide_by_initial_world_size; }
  int root() const { return root_; }

 private:
  World& world_;
  std::optional<JoinOptions> options_;
  int training_ = 0;  // ranks, in the pass in progress
  int root_ = 0;
};

}  // namespace lockstep::parallel
