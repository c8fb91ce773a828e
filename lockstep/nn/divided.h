// Tensors whose elements are divided over ranks: a tensor in its whole shape without memory, and
// the elements of it that this rank holds. FullyShard, Pipeline and TensorParallel make them; code
// that reads or writes files needs no more than this to do so in parts.
//
//   if (const nn::Rows* mine = nn::rows_of(parameter)) write_at(mine->begin, mine->values);
//   nn::assign(parameter, values);       // of a divided one only what this rank holds
//
// A divided tensor that is gathered to compute with has memory and keeps its Rows, which hold the
// values that count. While gathered() is held it has no Rows and is a plain tensor. Functions on
// tensors; one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/nn/tensor_group.h"

namespace lockstep::nn {

// A part of a whole tensor: ranges of one of its dimensions, side by side (nn::Sliced::Cut).
struct Slice {
  std::vector<std::int64_t> whole;  // sizes
  std::int64_t dimension = 0;
  std::vector<Range> ranges{};
  std::vector<std::int64_t> sizes() const;
  at::Tensor of(const at::Tensor& values) const;  // a copy
  bool operator==(const Slice&) const = default;
};

// What this rank holds of a tensor: elements `begin` and on, in the order of a dense one. With a
// slice (tensor parallelism) the tensor has the slice's shape, and files have the whole.
struct Rows final : c10::BackendMeta {
  Rows(at::Tensor its_values, std::int64_t its_begin, std::shared_ptr<const Slice> its_slice = {})
      : values(std::move(its_values)), begin(its_begin), slice(std::move(its_slice)) {}
  at::Tensor values;  // flat, in the tensor's type and on its device; may be empty
  std::int64_t begin;
  std::shared_ptr<const Slice> slice;  // null: the tensor has the shape of the whole
};
using RowsPtr = c10::intrusive_ptr<Rows>;

// Elements that lie side by side in the whole tensor and in Rows::values.
struct Run {
  std::int64_t in_whole = 0, in_values = 0, length = 0;
};
std::vector<Run> runs_of(const Rows& rows);

// Null: read and write the tensor itself. Valid until the tensor is gathered, freed or cut again.
const Rows* rows_of(const at::Tensor& tensor);
void set_rows(const at::Tensor& tensor, const RowsPtr& rows);
// What files have; the tensor's own unless it is a slice.
std::vector<std::int64_t> whole_sizes(const at::Tensor& tensor);

// For code that reads a parameter as a whole, to write it for example. UsageError where this rank
// holds only a part of it.
void check_whole(const std::string& name, const at::Tensor& tensor);

// Copies `values`, which are whole, into the tensor or into what this rank holds of it.
void assign(const at::Tensor& tensor, const at::Tensor& values);

// A divided tensor for what is written to a file.
at::Tensor divided(at::IntArrayRef sizes, const at::TensorOptions& options, RowsPtr rows);

// Memory of `bytes` that is not there: whoever reads it gets `message`. It claims the size, or a
// view, which is made before it is read, would be refused without the message.
c10::Storage storage_that_throws(std::size_t bytes, c10::Device device, const std::string& message);

// Gives a storage the memory of `fresh`, and takes it away again. Whoever has the storage keeps it:
// autograd may.
void fill_storage(const c10::Storage& storage, at::Tensor fresh);
void empty_storage(const c10::Storage& storage);

}  // namespace lockstep::nn
