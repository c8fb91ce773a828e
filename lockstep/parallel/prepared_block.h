// Blocks that are divided, or freed, while a model is made, before a FullyShard, a Pipeline or a
// TensorParallel of it takes them over (ShardedConstruction, PipelinedConstruction).
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

// A block that was divided or freed while it was made, until its unit is taken over.
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

// A block that has been made: cut into slices along "tensor" where it says how (nn::Sliced) and
// divided along "shard", or freed where it is of another rank's stage. One that does not say how it
// is cut stays whole on a mesh with slices.
void prepare_block(torch::nn::Module& module, const Mesh& mesh, bool mine,
                   bool cpu_offload = false);
// A line for each prepared block of the module, with the fingerprint of what was drawn.
std::string describe_prepared(const torch::nn::Module& module);
// UsageError for a block that something else runs, or that was made for another mesh.
void check_blocks(const torch::nn::Module& module, const Mesh& mesh, const char* component);

// UsageError for a mesh with ranks along "pipeline", or without an axis "shard"; `slices`: ranks
// along "tensor" divide a model, too.
void check_mesh(const Mesh& mesh, bool slices = false);
// On the CPU rows are in the host's memory anyway.
bool offloads_from(const Mesh& mesh, bool asked);

// A parameter that other ranks' stages have: without memory here, and an error names it when it is
// used.
c10::Storage absent_storage(const std::string& name, const at::Tensor& tensor);
void make_absent(const at::Tensor& tensor, const c10::Storage& freed, const nn::RowsPtr& rows);
nn::RowsPtr no_rows(const at::Tensor& tensor);

}  // namespace lockstep::parallel
