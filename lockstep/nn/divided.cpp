#include "lockstep/nn/divided.h"

#include <ATen/ATen.h>

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

// ---------------------------------------------------------------- divided tensors

const Rows* rows_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return dynamic_cast<const Rows*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

void set_rows(const at::Tensor& tensor, const RowsPtr& rows) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(rows);
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
  at::Tensor(rows->values).copy_(values.reshape({-1}).narrow(0, rows->begin, rows->values.numel()));
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

}  // namespace lockstep::nn
