#include "lockstep/nn/divided.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/nn/block.h"

namespace lockstep::nn {
namespace {

thread_local BlockObserver block_observer;

}  // namespace

// ---------------------------------------------------------------- blocks as they are made

BlockObserver observe_blocks(BlockObserver observer) {
  return std::exchange(block_observer, std::move(observer));
}

void report_made(torch::nn::Module& block) {
  if (block_observer) block_observer(block);
}

// ---------------------------------------------------------------- slices

std::vector<std::int64_t> Slice::sizes() const {
  std::vector<std::int64_t> sizes = whole;
  std::int64_t& length = sizes[static_cast<std::size_t>(dimension)] = 0;
  for (const Range& range : ranges) length += range.length;
  return sizes;
}

at::Tensor Slice::of(const at::Tensor& values) const {
  std::vector<at::Tensor> parts;
  for (const Range& range : ranges)
    parts.push_back(values.narrow(dimension, range.begin, range.length));
  return at::cat(parts, dimension);
}

// The ranges repeat for each index of the dimensions before the one that is cut.
std::vector<Run> runs_of(const Rows& rows) {
  if (!rows.slice) return {{rows.begin, 0, rows.values.numel()}};
  const Slice& slice = *rows.slice;
  const auto wide = slice.whole.begin() + slice.dimension;
  const std::int64_t outer = c10::multiply_integers(slice.whole.begin(), wide);
  const std::int64_t inner = c10::multiply_integers(wide + 1, slice.whole.end());
  const std::int64_t end = rows.begin + rows.values.numel();
  std::vector<Run> runs;
  std::int64_t at = 0;  // in the slice
  for (std::int64_t i = 0; i < outer; ++i)
    for (const Range& range : slice.ranges) {
      const std::int64_t after = at + range.length * inner;
      const std::int64_t from = std::max(at, rows.begin), to = std::min(after, end);
      if (from < to)
        runs.push_back(
            {(i * *wide + range.begin) * inner + from - at, from - rows.begin, to - from});
      at = after;
    }
  return runs;
}

// ---------------------------------------------------------------- divided tensors

const Rows* rows_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return dynamic_cast<const Rows*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

void set_rows(const at::Tensor& tensor, const RowsPtr& rows) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(rows);
}

std::vector<std::int64_t> whole_sizes(const at::Tensor& tensor) {
  const Rows* const rows = rows_of(tensor);
  return rows != nullptr && rows->slice ? rows->slice->whole : tensor.sizes().vec();
}

void check_whole(const std::string& name, const at::Tensor& tensor) {
  const Rows* const rows = rows_of(tensor);
  if (rows == nullptr || (!rows->slice && rows->values.numel() == tensor.numel())) return;
  throw UsageError("weights",
                   "'{}' is divided over ranks, and the whole of it is wanted here. Hold "
                   "gathered() of the FullyShard, Pipeline or TensorParallel meanwhile, on every "
                   "rank.",
                   name);
}

void assign(const at::Tensor& tensor, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const Rows* const rows = rows_of(tensor);
  if (c10::isFloat8Type(tensor.scalar_type()) && values.scalar_type() != tensor.scalar_type())
    throw UsageError("weights",
                     "a weight is stored in fp8 with a scale, and other values do not fit it. Load "
                     "weights before store_frozen_fp8().");
  if (rows == nullptr) {
    at::Tensor(tensor).copy_(values);
    return;
  }
  if (rows->values.numel() == 0) return;
  const at::Tensor from = rows->slice ? rows->slice->of(values) : values;
  at::Tensor(rows->values).copy_(from.reshape({-1}).narrow(0, rows->begin, rows->values.numel()));
}

at::Tensor divided(at::IntArrayRef sizes, const at::TensorOptions& options, RowsPtr rows) {
  at::Tensor tensor = at::empty({0}, options);
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  impl->set_storage_keep_dtype(storage_that_throws(
      tensor.nbytes(), tensor.device(), "this tensor is divided over ranks, and was read whole"));
  set_rows(tensor, rows);
  return tensor;
}

c10::Storage storage_that_throws(std::size_t bytes, c10::Device device,
                                 const std::string& message) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device));
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  return storage;
}

void fill_storage(const c10::Storage& storage, at::Tensor fresh) {
  const std::size_t bytes = fresh.storage().nbytes();
  c10::StorageImpl* const from = fresh.storage().unsafeGetStorageImpl();
  c10::StorageImpl* const to = storage.unsafeGetStorageImpl();
  to->set_data_ptr_noswap(from->set_data_ptr(c10::DataPtr(nullptr, fresh.device())));
  to->set_nbytes(bytes);
  from->set_nbytes(static_cast<std::size_t>(0));
}

void empty_storage(const c10::Storage& storage) {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(c10::DataPtr(nullptr, impl->device()));
  impl->set_nbytes(static_cast<std::size_t>(0));
}

void make_again(const at::Tensor& x, const at::Tensor& output, std::function<at::Tensor()> again) {
  if (!again || !at::GradMode::is_enabled() || !output.requires_grad()) return;
  empty_storage(x.storage());
  struct Held {
    c10::Storage to;
    std::function<at::Tensor()> again;
  };
  const auto held = std::make_shared<Held>(Held{x.storage(), std::move(again)});
  // Only the operations that need it hold the memory from then on, and a graph that is kept.
  output.register_hook([held](const at::Tensor&) {
    const at::NoGradGuard no_grad;
    const Held now = std::exchange(*held, {});
    if (now.again) fill_storage(now.to, now.again());
  });
}

}  // namespace lockstep::nn
