// Converts tensors to safetensors entries and back: the only part of this layer with torch.
//
//   std::vector<TensorBytes> all;
//   for (auto& item : state) all.push_back(bytes_of_tensor(item.key(), item.value()));
//   at::Tensor weight = tensor_of(file, file.at("wte.weight"));
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "lockstep/io/safetensors.h"

namespace lockstep::io {

// UsageError for a type without a counterpart.
DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType dtype);

// The tensor's own memory: it must be dense, on the CPU, and live until it is written (UsageError
// otherwise; `tensor.contiguous().cpu()` makes it so).
TensorBytes bytes_of_tensor(std::string name, const at::Tensor& tensor);

// A copy in memory of its own, on the CPU: it outlives the file and is aligned even if the file's
// data is not.
at::Tensor tensor_of(const SafetensorsFile& file, const TensorEntry& entry);
inline at::Tensor tensor_of(const SafetensorsSet::Found& found) {
  return tensor_of(*found.file, *found.entry);
}

// A view of the mapped file if its alignment allows one, otherwise a copy: read-only, and only
// while the file is open. Pages are loaded on access. The tensor keeps `owner`, which may be the
// file, alive.
at::Tensor mapped_tensor(const SafetensorsFile& file, const TensorEntry& entry,
                         std::shared_ptr<const void> owner = nullptr);

}  // namespace lockstep::io
