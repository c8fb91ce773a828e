// In which order the ranks of a pipeline compute, and which messages they exchange in between.
//
//   const PipelineShape shape{.ranks = 2, .stages_per_rank = 1, .micro_batches = 4};
//   show(compute_order(PipelineSchedule::k1F1B, shape, 0));   // 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
//   pipeline_programs(PipelineSchedule::k1F1B, shape)[0];     // with its messages
//
// The orders are those of torch.distributed.pipelining. Stage s is on rank s modulo the number of
// ranks. Pure functions.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

enum class PipelineSchedule { kGPipe, k1F1B, kInterleaved1F1B };

struct PipelineShape {
  int ranks = 1;
  int stages_per_rank = 1;
  int micro_batches = 1;
  int stages() const { return ranks * stages_per_rank; }
};

struct PipelineStep {
  enum class Kind { kForward, kBackward, kSendOutput, kRecvInput, kSendGradient, kRecvGradient };
  Kind kind;
  int stage = 0;  // this rank's
  int micro_batch = 0;
  int peer = -1;  // of a message

  bool operator==(const PipelineStep&) const = default;
};

namespace parallel {

// "GPipe", "1F1B", "Interleaved1F1B", as torchtitan writes them.
const char* name(PipelineSchedule schedule);
PipelineSchedule schedule_named(const std::string& name);  // UsageError for another one

// The forwards and backwards of a rank. Interleaved 1F1B takes micro-batches in rounds of about as
// many as there are ranks. Where they do not fill whole rounds, as in an epoch's last window, the
// order is that of GPipe stage by stage: torch refuses such numbers.
std::vector<PipelineStep> compute_order(PipelineSchedule schedule, const PipelineShape& shape,
                                        int rank);

// The steps of every rank. All ranks begin their messages in one global order: whichever message is
// the earliest that is not complete, both of its ranks have come to it, so that no two ranks wait
// for each other, even where a device runs messages in the order of the calls.
std::vector<std::vector<PipelineStep>> pipeline_programs(PipelineSchedule schedule,
                                                         const PipelineShape& shape);

// How blocks are divided over stages: the first block of each, and the number of blocks at the end.
// As equal as possible; stages in the middle get one more first, since the first and the last have
// embeddings and head.
std::vector<int> split_blocks(int blocks, int stages);

// "0F1 0B0": stage, forward or backward, micro-batch, as torch writes it; without messages.
std::string show(const std::vector<PipelineStep>& steps);

}  // namespace parallel
}  // namespace lockstep
