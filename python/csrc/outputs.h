// Tensors that are not one plain array: staging memory for strided and several ones, and bytes for
// sparse ones.
//
//   Outputs outputs;
//   at::Tensor data = outputs.stage(tensor, true);  // the tensor itself, if it is contiguous
//   engine.all_reduce(data.mutable_data_ptr(), count_of(data), how.dtype, how.op);
//   call.finish = outputs.finish();                 // copies back what was staged
//
//   const at::Tensor packed = sparse::pack(tensor.coalesce());
//   engine.all_gather_v(*parts, {packed.const_data_ptr(), packed.nbytes()});
//   sparse::add_up(*parts, tensor, op);             // after the end
//
// Outputs belong to one call. Everything is inline: for the backend's one source file.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

namespace lockstep::python {

using Tensors = std::vector<at::Tensor>;

// Autograd and version counters do not see this, as with every backend of torch.distributed.
using PlainTensors = at::AutoDispatchBelowADInplaceOrView;

// The results of an operation: the tensors themselves where they are plain arrays, else staging
// memory and the copy back.
class Outputs {
 public:
  // `filled`: the operation reads it too.
  at::Tensor stage(const at::Tensor& tensor, bool filled = false) {
    if (tensor.is_contiguous()) return tensor;
    at::Tensor staged = filled ? tensor.contiguous() : at::empty(tensor.sizes(), tensor.options());
    copy_back(tensor, staged);
    return staged;
  }
  // One array for tensors of equal size, which may already be one.
  at::Tensor stage_all(const Tensors& tensors) {
    if (auto whole = as_one(tensors)) return *whole;
    const auto n = static_cast<std::int64_t>(tensors.size());
    at::Tensor staged = at::empty({n, tensors[0].numel()}, tensors[0].options());
    for (std::int64_t i = 0; i < n; ++i) {
      const at::Tensor& tensor = tensors[static_cast<std::size_t>(i)];
      copy_back(tensor, staged.select(0, i).view(tensor.sizes()));
    }
    held.push_back(staged);
    return staged;
  }
  void copy_back(const at::Tensor& to, const at::Tensor& from) {
    held.push_back(from);
    pairs.emplace_back(to, from);
  }
  std::function<void()> finish() {
    if (pairs.empty()) return nullptr;
    return [copies = std::move(pairs)] {
      const PlainTensors plain;
      for (const auto& [to, from] : copies) to.copy_(from);
    };
  }
  // The tensors as one, when they follow each other in memory.
  static std::optional<at::Tensor> as_one(const Tensors& tensors) {
    const at::Tensor& first = tensors[0];
    const auto* place = static_cast<const std::byte*>(first.const_data_ptr());
    for (const auto& tensor : tensors) {
      if (!tensor.is_contiguous() || tensor.const_data_ptr() != place ||
          !tensor.storage().is_alias_of(first.storage()))
        return std::nullopt;
      place += tensor.nbytes();
    }
    const auto n = static_cast<std::int64_t>(tensors.size());
    return first.as_strided({n, first.numel()}, {first.numel(), 1});
  }

  Tensors held;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
};

inline at::Tensor as_input(const Tensors& tensors) {
  if (tensors.size() == 1) return tensors[0].contiguous();
  if (auto whole = Outputs::as_one(tensors)) return *whole;
  Tensors flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  return at::cat(flat);
}

}  // namespace lockstep::python

// Sparse COO tensors as bytes: what an all_reduce of them sends and how the ranks' parts add up.
//
//   const at::Tensor packed = sparse::pack(tensor.coalesce());
//   engine.all_gather_v(*parts, {packed.const_data_ptr(), packed.nbytes()});
//   sparse::add_up(*parts, tensor, op);             // after the end
//
// Ranks may hold different indices, so their parts differ in size. For the backend's one source
// file: everything is inline.

namespace lockstep::python::sparse {

using Parts = std::vector<std::vector<std::byte>>;

// The dtype, the number of sparse dimensions and of values, and the shape; all as 64-bit numbers.
inline std::vector<std::int64_t> head_of(const at::Tensor& tensor) {
  std::vector<std::int64_t> head;
  head.reserve(static_cast<std::size_t>(tensor.dim()) + 4);
  head.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
  head.push_back(tensor.sparse_dim());
  head.push_back(tensor._nnz());
  head.push_back(tensor.dim());
  for (const std::int64_t size : tensor.sizes()) head.push_back(size);
  return head;
}

inline at::Tensor pack(const at::Tensor& coalesced) {
  const std::vector<std::int64_t> head = head_of(coalesced);
  const at::Tensor indices = coalesced.indices().contiguous();
  const at::Tensor values = coalesced.values().contiguous();
  const std::size_t head_bytes = head.size() * sizeof(std::int64_t);
  at::Tensor packed = at::empty(
      {static_cast<std::int64_t>(head_bytes + indices.nbytes() + values.nbytes())}, at::kByte);
  auto* to = static_cast<std::byte*>(packed.mutable_data_ptr());
  std::memcpy(to, head.data(), head_bytes);
  if (indices.nbytes() > 0)
    std::memcpy(to + head_bytes, indices.const_data_ptr(), indices.nbytes());
  if (values.nbytes() > 0)
    std::memcpy(to + head_bytes + indices.nbytes(), values.const_data_ptr(), values.nbytes());
  return packed;
}

// Shares the part's memory.
inline at::Tensor unpack(std::vector<std::byte>& part, const at::Tensor& like) {
  const std::vector<std::int64_t> own = head_of(like);
  std::vector<std::int64_t> head(own.size());
  const std::size_t head_bytes = head.size() * sizeof(std::int64_t);
  if (part.size() >= head_bytes) std::memcpy(head.data(), part.data(), head_bytes);
  const std::int64_t count = head[2];
  head[2] = own[2];  // the one thing in which ranks may differ
  TORCH_CHECK(head == own,
              "[lockstep_torch] allreduce: ranks have sparse tensors of different "
              "type, shape or number of sparse dimensions.");
  std::vector<std::int64_t> value_sizes{count};
  for (std::int64_t i = like.sparse_dim(); i < like.dim(); ++i) value_sizes.push_back(like.size(i));
  std::byte* const data = part.data() + head_bytes;
  const at::Tensor indices = at::from_blob(data, {like.sparse_dim(), count}, at::kLong);
  const at::Tensor values =
      at::from_blob(data + indices.nbytes(), value_sizes, like.options().layout(at::kStrided));
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes(), std::nullopt, std::nullopt,
                                       std::nullopt, std::nullopt, /*is_coalesced=*/true);
}

// In the order of the ranks, so that all of them get the same bits; the result is coalesced.
inline void add_up(Parts& parts, const at::Tensor& into, const c10d::ReduceOp& op) {
  at::Tensor sum = unpack(parts[0], into);
  for (std::size_t rank = 1; rank < parts.size(); ++rank) sum = sum + unpack(parts[rank], into);
  sum = sum.coalesce();
  const auto ranks = static_cast<std::int64_t>(parts.size());
  at::Tensor values = sum.values();
  if (op == c10d::ReduceOp::AVG && at::isIntegralType(values.scalar_type(), true))
    values.div_(ranks, "trunc");
  else if (op == c10d::ReduceOp::AVG)
    values.div_(ranks);
  into.copy_(sum);
}

}  // namespace lockstep::python::sparse
