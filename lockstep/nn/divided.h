// Divided tensors: tensors of a whole shape without memory, of which this rank holds some elements.
// FullyShard, Pipeline and TensorParallel make them; code that reads or writes files in parts needs
// only this header.
//
//   if (const nn::Rows* mine = nn::rows_of(parameter)) write_at(mine->begin, mine->values);
//   nn::assign(parameter, values);       // of a divided one only what this rank holds
//
// A divided tensor that is gathered for computation has memory and keeps its Rows, whose values are
// authoritative. While gathered() is held it has no Rows and is a plain tensor. Functions on
// tensors; one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/nn/tensor_group.h"

namespace lockstep::nn {

// A slice of a whole tensor: adjacent ranges of one of its dimensions (nn::Sliced::Cut).
struct Slice {
  std::vector<std::int64_t> whole;  // sizes
  std::int64_t dimension = 0;
  std::vector<Range> ranges{};
  std::vector<std::int64_t> sizes() const;
  at::Tensor of(const at::Tensor& values) const;  // a copy
  bool operator==(const Slice&) const = default;
};

// The elements of a tensor that this rank holds: those from `begin` on, in dense order. With a
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
// The sizes that files have; the tensor's own unless it is a slice.
std::vector<std::int64_t> whole_sizes(const at::Tensor& tensor);

// For code that needs a whole parameter, for example to write it. UsageError where this rank holds
// only a part of it.
void check_whole(const std::string& name, const at::Tensor& tensor);

// Copies `values`, which are whole, into the tensor or into what this rank holds of it.
void assign(const at::Tensor& tensor, const at::Tensor& values);

// Makes a divided tensor to be written to a file.
at::Tensor divided(at::IntArrayRef sizes, const at::TensorOptions& options, RowsPtr rows);

// A storage of `bytes` without memory: accessing it throws `message`. It claims the size, because
// otherwise making a view of it, before any access, would fail without the message.
c10::Storage storage_that_throws(std::size_t bytes, c10::Device device, const std::string& message);

// Frees the memory of `x`, which only operations between it and `output` need in backward, until
// the gradient of `output` is there; then `again` makes its values once more, bit by bit. Does
// nothing without `again`, and where no gradient is wanted.
void make_again(const at::Tensor& x, const at::Tensor& output, std::function<at::Tensor()> again);

// Gives a storage the memory of `fresh`, and takes it away again. The storage object stays the
// same, since others, such as autograd, may hold it.
void fill_storage(const c10::Storage& storage, at::Tensor fresh);
void empty_storage(const c10::Storage& storage);

}  // namespace lockstep::nn
