#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <tuple>

#include "lockstep/core/error.h"
#include "lockstep/parallel/pipeline.h"

namespace lockstep::parallel {
namespace {

using Kind = PipelineStep::Kind;
using Steps = std::vector<PipelineStep>;

// Every stage of the rank in turn; backward takes the stages in the other direction.
Steps all_forwards_first(const PipelineShape& shape, int rank) {
  Steps steps;
  for (int local = 0; local < shape.stages_per_rank; ++local)
    for (int k = 0; k < shape.micro_batches; ++k)
      steps.push_back({Kind::kForward, local * shape.ranks + rank, k});
  for (int local = shape.stages_per_rank; local-- > 0;)
    for (int k = 0; k < shape.micro_batches; ++k)
      steps.push_back({Kind::kBackward, local * shape.ranks + rank, k});
  return steps;
}

// A backward as soon as there can be one, so that a rank never holds the activations of more
// micro-batches than there are stages after it.
Steps one_forward_one_backward(const PipelineShape& shape, int rank) {
  const int ahead = std::min(shape.micro_batches, shape.ranks - rank);
  Steps steps;
  for (int k = 0; k < ahead; ++k) steps.push_back({Kind::kForward, rank, k});
  for (int k = 0; k < shape.micro_batches; ++k) {
    steps.push_back({Kind::kBackward, rank, k});
    if (ahead + k < shape.micro_batches) steps.push_back({Kind::kForward, rank, ahead + k});
  }
  return steps;
}

// Narayanan et al., 2021 (Megatron-LM), with torch's rounds for other numbers of micro-batches.
Steps interleaved(const PipelineShape& shape, int rank) {
  const int rounds = std::max(1, shape.micro_batches / shape.ranks);
  if (shape.micro_batches % rounds != 0) return all_forwards_first(shape, rank);
  const int round = shape.micro_batches / rounds;
  const int locals = shape.stages_per_rank, total = locals * shape.micro_batches;
  const int ahead = std::min(total, (locals - 1) * round + 2 * (shape.ranks - 1 - rank));
  std::vector<int> next_forward(static_cast<std::size_t>(locals));
  std::vector<int> next_backward(static_cast<std::size_t>(locals));
  Steps steps;
  const auto add = [&](Kind kind, int local, std::vector<int>& next) {
    const int k = next[static_cast<std::size_t>(local)]++;
    steps.push_back({kind, local * shape.ranks + rank, k});
  };
  for (int i = 0; i < ahead + total; ++i) {
    if (i < total) add(Kind::kForward, i / round % locals, next_forward);
    if (i >= ahead) add(Kind::kBackward, locals - 1 - (i - ahead) / round % locals, next_backward);
  }
  return steps;
}

// Runs all ranks in steps of one time unit, and writes down who sends what to whom.
class Simulation {
 public:
  Simulation(PipelineSchedule schedule, const PipelineShape& shape) : shape_(shape) {
    for (int rank = 0; rank < shape.ranks; ++rank)
      orders_.push_back(compute_order(schedule, shape, rank));
    next_.resize(orders_.size());
    programs_.resize(orders_.size());
  }

  std::vector<Steps> run() {
    for (bool moved = true; moved;) {
      Steps now;
      for (std::size_t rank = 0; rank < orders_.size(); ++rank) {
        if (next_[rank] == orders_[rank].size()) continue;
        const PipelineStep& step = orders_[rank][next_[rank]];
        if (!is_ready(step)) continue;
        ++next_[rank];
        programs_[rank].push_back(step);
        now.push_back(step);
      }
      moved = !now.empty();
      for (const PipelineStep& step : now) finish(step);
    }
    for (std::size_t rank = 0; rank < orders_.size(); ++rank)
      LOCKSTEP_ASSERT(next_[rank] == orders_[rank].size());
    return std::move(programs_);
  }

 private:
  using Done = std::tuple<Kind, int, int>;
  bool has(Kind kind, int stage, int k) const { return done_.contains(Done{kind, stage, k}); }

  bool is_ready(const PipelineStep& step) const {
    const int stage = step.stage, k = step.micro_batch;
    if (step.kind == Kind::kForward) return stage == 0 || has(Kind::kForward, stage - 1, k);
    return has(Kind::kForward, stage, k) &&
           (stage == shape_.stages() - 1 || has(Kind::kBackward, stage + 1, k));
  }

  void finish(const PipelineStep& step) {
    done_.insert(Done{step.kind, step.stage, step.micro_batch});
    const bool forward = step.kind == Kind::kForward;
    const int other = step.stage + (forward ? 1 : -1);
    if (other < 0 || other == shape_.stages()) return;
    const int from = step.stage % shape_.ranks, to = other % shape_.ranks;
    if (from == to) return;
    programs_[static_cast<std::size_t>(from)].push_back(
        {forward ? Kind::kSendOutput : Kind::kSendGradient, step.stage, step.micro_batch, to});
    programs_[static_cast<std::size_t>(to)].push_back(
        {forward ? Kind::kRecvInput : Kind::kRecvGradient, other, step.micro_batch, from});
  }

  PipelineShape shape_;
  std::vector<Steps> orders_;
  std::vector<std::size_t> next_;
  std::vector<Steps> programs_;
  std::set<Done> done_;
};

}  // namespace

const char* name(PipelineSchedule schedule) {
  switch (schedule) {
    case PipelineSchedule::kGPipe:
      return "GPipe";
    case PipelineSchedule::k1F1B:
      return "1F1B";
    case PipelineSchedule::kInterleaved1F1B:
      break;
  }
  return "Interleaved1F1B";
}

PipelineSchedule schedule_named(const std::string& text) {
  for (const PipelineSchedule each :
       {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B, PipelineSchedule::kInterleaved1F1B})
    if (text == name(each)) return each;
  throw UsageError("pipeline", "'{}' is none of the schedules GPipe, 1F1B and Interleaved1F1B.",
                   text);
}

std::vector<PipelineStep> compute_order(PipelineSchedule schedule, const PipelineShape& shape,
                                        int rank) {
  if (schedule == PipelineSchedule::kInterleaved1F1B) return interleaved(shape, rank);
  if (schedule == PipelineSchedule::k1F1B && shape.stages_per_rank == 1)
    return one_forward_one_backward(shape, rank);
  return all_forwards_first(shape, rank);
}

std::vector<Steps> pipeline_programs(PipelineSchedule schedule, const PipelineShape& shape) {
  return Simulation(schedule, shape).run();
}

std::vector<int> split_blocks(int blocks, int stages) {
  const int extra = blocks % stages, first_with_more = (stages - extra) / 2;
  std::vector<int> begins{0};
  for (int stage = 0; stage < stages; ++stage) {
    const bool more = stage >= first_with_more && stage < first_with_more + extra;
    begins.push_back(begins.back() + blocks / stages + (more ? 1 : 0));
  }
  return begins;
}

std::string show(const std::vector<PipelineStep>& steps) {
  std::string text;
  for (const PipelineStep& step : steps) {
    if (step.kind != Kind::kForward && step.kind != Kind::kBackward) continue;
    text += fmt::format("{}{}{}{}", text.empty() ? "" : " ", step.stage,
                        step.kind == Kind::kForward ? 'F' : 'B', step.micro_batch);
  }
  return text;
}

}  // namespace lockstep::parallel
