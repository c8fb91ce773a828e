// Prepared blocks: blocks that are divided or freed while a model is made, before a FullyShard,
// Pipeline or TensorParallel adopts them (ShardedConstruction, PipelinedConstruction).
//
//   prepare_block(block, mesh, /*mine=*/true);    // by the observer of nn::made()
//   check_blocks(model, mesh, kFullyShard);       // by who takes the blocks over
//   Prepared::of(block)->unit
//
// A prepared block throws when it is called. No collectives; one thread at a time.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/mesh.h"
#include "lockstep/nn/block.h"
#include "lockstep/parallel/shard_unit.h"

namespace lockstep::parallel {

// A block that was divided or freed while it was made, until a unit adopts it.
struct Prepared {
  struct Part {
    Mesh mesh;
    std::optional<ShardUnit> unit;  // none where this rank has the block whole, or not at all
    std::uint64_t values = 0;       // the fingerprint of what was drawn
  };
  std::shared_ptr<Part> part;

  at::Tensor operator()(const nn::Block::Body&, const std::vector<at::Tensor>&) const;
  static Part* of(const nn::Block& block);  // null: it was not prepared
};

template <typename Visit>
void each_block(const torch::nn::Module& module, const Visit& visit) {
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (auto* const block = dynamic_cast<nn::Block*>(item.value().get()))
      visit(item.key(), item.value(), *block);
}

// Prepares a block that was made: cuts it into slices along "tensor" if it names its cuts
// (nn::Sliced), and divides it along "shard"; or frees it if it belongs to another rank's stage. A
// block without named cuts stays whole on a mesh with slices.
void prepare_block(torch::nn::Module& module, const Mesh& mesh, bool mine,
                   bool cpu_offload = false);
// A line for each prepared block of the module, with the fingerprint of what was drawn.
std::string describe_prepared(const torch::nn::Module& module);
// UsageError for a block that has another runner, or that was made for another mesh.
void check_blocks(const torch::nn::Module& module, const Mesh& mesh, const char* component);

// UsageError for a mesh with ranks along "pipeline", or without an axis "shard"; `slices`: ranks
// along "tensor" divide a model, too.
void check_mesh(const Mesh& mesh, bool slices = false);
// On the CPU rows are in the host's memory anyway.
bool offloads_from(const Mesh& mesh, bool asked);

// A storage for a parameter of other ranks' stages: it has no memory here, and accessing it throws
// an error with the name.
c10::Storage absent_storage(const std::string& name, const at::Tensor& tensor);
void make_absent(const at::Tensor& tensor, const c10::Storage& freed, const nn::RowsPtr& rows);
nn::RowsPtr no_rows(const at::Tensor& tensor);

}  // namespace lockstep::parallel
