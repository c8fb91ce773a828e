#include "lockstep/parallel/prepared_block.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/parallel/sharding.h"
#include "lockstep/parallel/tensor_slices.h"

namespace lockstep::parallel {

void check_mesh(const Mesh& mesh, bool slices) {
  const auto has = [&](std::string_view name) {
    return std::ranges::any_of(mesh.axes(),
                               [&](const MeshAxis& axis) { return axis.name == name; });
  };
  if (!has("shard") && mesh.world().size() > 1 && !(slices && has("tensor")))
    throw UsageError(kFullyShard,
                     "the mesh ({}) has no axis 'shard', so that ranks would divide no rows. Add "
                     "the axis, {{\"shard\", -1}}, or use {}.",
                     mesh.text(),
                     mesh.size("tensor") > 1 ? "TensorParallel" : "DistributedDataParallel");
  if (mesh.size("pipeline") > 1)
    throw UsageError(kFullyShard,
                     "the mesh ({}) has ranks along 'pipeline', and here every rank computes all "
                     "blocks. Make a Pipeline with it, or leave the axis out.",
                     mesh.text());
}

c10::Storage absent_storage(const std::string& name, const at::Tensor& tensor) {
  return nn::storage_that_throws(
      tensor.nbytes(), tensor.device(),
      fmt::format("[{}] parameter '{}' was used on a rank whose stages do not have it. Run forward "
                  "and backward by run_window(), and hold gathered() while you use parameters.",
                  kPipeline, name));
}

void make_absent(const at::Tensor& tensor, const c10::Storage& freed, const nn::RowsPtr& rows) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(freed);
  nn::set_rows(tensor, rows);
}

bool offloads_from(const Mesh& mesh, bool asked) {
  return asked && !mesh.world().device().is_cpu();
}

nn::RowsPtr no_rows(const at::Tensor& tensor) {
  return c10::make_intrusive<nn::Rows>(at::empty({0}, tensor.options().requires_grad(false)), 0);
}

at::Tensor Prepared::operator()(const nn::Block::Body&, const std::vector<at::Tensor>&) const {
  throw UsageError(kFullyShard,
                   "a block was called that was divided over ranks while it was made. Make a "
                   "FullyShard, a Pipeline or a TensorParallel of the model first.");
}

Prepared::Part* Prepared::of(const nn::Block& block) {
  const auto* const prepared = block.runner().target<Prepared>();
  return prepared != nullptr ? prepared->part.get() : nullptr;
}

namespace {

using BlockSlices = std::unordered_map<at::TensorImpl*, std::shared_ptr<const nn::Slice>>;

// The parameters that the block cuts are slices afterwards.
BlockSlices cut_block(const nn::Sliced& block, const World& line) {
  const at::NoGradGuard no_grad;
  BlockSlices slices;
  for (const nn::Sliced::Cut& cut : block.cuts(line.size())) {
    at::Tensor tensor = cut.parameter;
    if (nn::rows_of(tensor) != nullptr) continue;  // of a block inside of this one
    const auto slice =
        std::make_shared<const nn::Slice>(slice_for(cut, tensor.sizes(), line.rank(), line.size()));
    tensor.set_data(slice->of(tensor.detach()));
    slices.emplace(tensor.unsafeGetTensorImpl(), slice);
  }
  return slices;
}

}  // namespace

void prepare_block(torch::nn::Module& module, const Mesh& mesh, bool mine, bool cpu_offload) {
  auto* const block = dynamic_cast<nn::Block*>(&module);
  if (block == nullptr)
    throw UsageError(kFullyShard,
                     "nn::made() was called with a module that is no nn::Block. Derive it from "
                     "nn::Block, and let its forward call run().");
  ShardUnit::Named parameters;
  std::uint64_t values = 0;
  for (const auto& item : module.named_parameters()) {
    if (nn::rows_of(item.value()) != nullptr) continue;  // of a block inside of this one
    parameters.emplace_back(item.key(), item.value());
    values = 31 * values + fingerprint(item.value().detach());
  }
  const auto* const sliced = dynamic_cast<const nn::Sliced*>(&module);
  const bool slices_known = mesh.size("tensor") == 1 || sliced != nullptr;
  BlockSlices slices;
  if (mine && mesh.size("tensor") > 1 && sliced != nullptr)
    slices = cut_block(*sliced, mesh["tensor"]);
  const auto slice_of = [&](const at::Tensor& tensor) {
    const auto found = slices.find(tensor.unsafeGetTensorImpl());
    return found == slices.end() ? nullptr : found->second;
  };
  module.to(mesh.world().device());
  const auto part = std::make_shared<Prepared::Part>(Prepared::Part{mesh, std::nullopt, values});
  World& shard = mesh["shard"];
  if (mine && slices_known && (shard.size() > 1 || cpu_offload)) {
    part->unit.emplace("", parameters, shard);
    if (cpu_offload) part->unit->offload();
    for (ShardedParameter& p : part->unit->parameters()) p.rows->slice = slice_of(p.tensor);
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : parameters) {
    if (part->unit) break;
    own_memory(tensor);
    if (mine)  // of one rank's stage, or a slice: no other rank has values to send
      nn::set_rows(tensor,
                   c10::make_intrusive<nn::Rows>(alias_of(tensor.detach(), 0, {tensor.numel()}), 0,
                                                 slice_of(tensor)));
    else
      make_absent(tensor, absent_storage(name, tensor), no_rows(tensor));
  }
  block->run_with(Prepared{part});
}

std::string describe_prepared(const torch::nn::Module& module) {
  std::string text;
  each_block(module, [&](const std::string& name, const auto&, const nn::Block& block) {
    const Prepared::Part* const prepared = Prepared::of(block);
    text += fmt::format("{}: block{}\n", name,
                        prepared == nullptr
                            ? ""
                            : fmt::format(" with values of fingerprint {:x}", prepared->values));
  });
  return text;
}

void check_blocks(const torch::nn::Module& module, const Mesh& mesh, const char* component) {
  each_block(module, [&](const std::string& name, const auto&, const nn::Block& block) {
    if (!block.has_runner()) return;
    const Prepared::Part* const prepared = Prepared::of(block);
    if (prepared != nullptr && &prepared->mesh.world() != &mesh.world())
      throw UsageError(component,
                       "block '{}' was divided along another mesh while it was made. Make the "
                       "model and the parallelism with the same Mesh.",
                       name);
    if (prepared == nullptr)
      throw UsageError(component,
                       "block '{}' is run by something else already, probably by another "
                       "FullyShard of this module. Make one, and keep it.",
                       name);
  });
}

}  // namespace lockstep::parallel
