// Pipeline: every rank holds some blocks of a model, and micro-batches flow through the ranks. The
// schedules of torch.distributed.pipelining: GPipe, 1F1B and interleaved 1F1B.
//
//   const Mesh mesh(world, {{"pipeline", 2}, {"data", -1}});
//   const auto model = std::make_shared<Pipeline>(*net, mesh);     // net is an nn::Staged
//   const optim::AdamWOptions adamw{.lr = 3e-4};
//   const auto optimizer = model->make_optimizer({{net->parameters(), adamw}});
//   const auto loss = [&](const data::Batch& batch) {
//     const at::Tensor y = net->forward(batch.data);
//     return net->stage().last ? loss_of(y, batch.target) : y;
//   };
//   for (auto& window : loader.windows(epoch, {.micro_batches = 8})) {   // of mesh.batch()
//     model->run_window(passes_of(window, loss));
//     optimizer->step({.max_grad_norm = 1.0});
//     optimizer->zero_grad();
//   }
//
// A stage is a range of blocks, the first with the embeddings, the last with norm, head and loss
// (lockstep/nn/block.h; the bundled language models are such). While the pipeline calls `loss`,
// the model computes one stage, and the function returns what the next stage takes, or on the last
// one the loss; CausalLm::loss() does. Ranks along "pipeline" see the same samples. Ranks along
// "data" hold copies of a stage, whose gradients are averaged when a window ends. Ranks along
// "shard" divide what their stage has by rows, as FullyShard does, and ranks along "tensor" compute
// its blocks with slices, as TensorParallel's do, and send what they return, which is the same on
// all of them or a part of the sequence, to their like in the next stage: a mesh of pipeline x data
// x shard x tensor, as torchtitan's.
//
// Parameters keep their tensors and their names; those of other stages have no memory. Gradients
// of a weight that two stages share are added up between them. With m micro-batches on p stages a
// rank waits (p - 1) / (m + p - 1) of the time; interleaving v stages on a rank divides p - 1 by v.
// Evaluation runs through the stages, by run_window() without gradients, and checkpoints are
// written and read in parts. A model that is larger than one memory is split while it is made:
//
//   const PipelinedConstruction split(mesh, config.layers());
//   const auto net = models::make_causal_lm(config);
//
// Refers to the module, which must outlive it. All functions are collectives unless stated
// otherwise. One thread.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/nn/block.h"
#include "lockstep/parallel/options.h"
#include "lockstep/parallel/parallelism.h"

namespace lockstep {

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

// Computes the order of each rank's forwards and backwards, and of the messages between them.
//
//   const PipelineShape shape{.ranks = 2, .stages_per_rank = 1, .micro_batches = 4};
//   show(compute_order(PipelineSchedule::k1F1B, shape, 0));   // 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
//   pipeline_programs(PipelineSchedule::k1F1B, shape)[0];     // with its messages
//
// The orders are those of torch.distributed.pipelining. Stage s is on rank s modulo the number of
// ranks. Pure functions, defined in pipeline_schedule.cpp.
namespace parallel {

class PipelineImpl;

// The forwards and backwards of a rank. Interleaved 1F1B takes micro-batches in rounds of about as
// many as there are ranks. Where they do not fill whole rounds, as in an epoch's last window, the
// order is that of GPipe stage by stage: torch refuses such numbers.
std::vector<PipelineStep> compute_order(PipelineSchedule schedule, const PipelineShape& shape,
                                        int rank);

// The steps of every rank. All ranks start their messages in one global order: both ranks of the
// earliest incomplete message have reached it, so no two ranks wait for each other, even on a
// device that runs messages in call order.
std::vector<std::vector<PipelineStep>> pipeline_programs(PipelineSchedule schedule,
                                                         const PipelineShape& shape);

// How blocks are divided over stages: the first block of each, and the number of blocks at the end.
// As equal as possible; stages in the middle get one more first, since the first and the last have
// embeddings and head.
std::vector<int> split_blocks(int blocks, int stages);

// "0F1 0B0": stage, forward or backward, micro-batch, as torch writes it; without messages.
std::string show(const std::vector<PipelineStep>& steps);

}  // namespace parallel

struct PipelineOptions {
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
  int stages_per_rank = 0;  // 0: 2 with kInterleaved1F1B, otherwise 1
  // With ranks along "shard". A block is gathered for each micro-batch; reshard_after_forward =
  // false keeps those of a stage whole in a window.
  FullyShardOptions shard{};
};

class Pipeline final : public Parallelism {
 public:
  // Rank 0's parameters and buffers go to the others, whose memory for other stages is freed.
  // UsageError on every rank for a module that is no nn::Staged or has fewer blocks than there are
  // stages, with ranks along "tensor" for one that is no nn::Sliced or does not divide by them, and
  // for modules that differ over ranks.
  Pipeline(torch::nn::Module& module, Mesh mesh, PipelineOptions options = {});
  ~Pipeline() override;

  const Mesh& mesh() const override;
  std::string text() const override;
  // Each rank steps the parameters of its stages, by any rule.
  std::unique_ptr<optim::Optimizer> make_optimizer(std::vector<optim::ParamGroup> groups) override;
  bool takes_windows() const override { return true; }
  // The passes of all ranks along "pipeline" are of the same samples. An output of a stage has the
  // same shape and type for all passes with the same Pass::sizes. A buffer that a forward has
  // changed is brought from its stage to the others. In no-grad mode passes have no backward, and
  // Pass::weigh is not called.
  std::vector<at::Tensor> run_window(const std::vector<Pass>& passes) override;
  void backward(const at::Tensor& loss, bool last) override;  // UsageError
  // What was gathered is freed by the next window.
  std::shared_ptr<void> gathered() override;
  bool divided() const override;
  void verify_parameters() override;
  void verify_buffers() override;
  std::string unavailable_for_capture() const override;

  std::vector<std::string> parameter_names() const;  // of this rank's stages; no collective

 private:
  std::shared_ptr<parallel::PipelineImpl> impl_;
};

// While it exists, each block that this thread makes (nn::made) is moved to the world's device, and
// freed if it belongs to another rank's stages, or otherwise divided as by ShardedConstruction.
// `blocks` is the total number of blocks.
class PipelinedConstruction {
 public:
  PipelinedConstruction(Mesh mesh, int blocks, PipelineOptions options = {});
  ~PipelinedConstruction();
  PipelinedConstruction(const PipelinedConstruction&) = delete;
  PipelinedConstruction& operator=(const PipelinedConstruction&) = delete;

 private:
  nn::BlockObserver before_;
};

}  // namespace lockstep
