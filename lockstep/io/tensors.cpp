#include "lockstep/io/tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <cstring>
#include <utility>

namespace lockstep::io {
namespace {

constexpr std::pair<at::ScalarType, DType> kTypes[] = {
    {at::kBool, DType::kBool},
    {at::kByte, DType::kU8},
    {at::kChar, DType::kI8},
    {at::kFloat8_e5m2, DType::kF8E5M2},
    {at::kFloat8_e4m3fn, DType::kF8E4M3},
    {at::kFloat8_e8m0fnu, DType::kF8E8M0},
    {at::kFloat8_e4m3fnuz, DType::kF8E4M3Fnuz},
    {at::kFloat8_e5m2fnuz, DType::kF8E5M2Fnuz},
    {at::kShort, DType::kI16},
    {at::kUInt16, DType::kU16},
    {at::kHalf, DType::kF16},
    {at::kBFloat16, DType::kBF16},
    {at::kInt, DType::kI32},
    {at::kUInt32, DType::kU32},
    {at::kFloat, DType::kF32},
    {at::kComplexFloat, DType::kC64},
    {at::kDouble, DType::kF64},
    {at::kLong, DType::kI64},
    {at::kUInt64, DType::kU64},
};

}  // namespace

DType dtype_of(at::ScalarType type) {
  for (const auto& [torch, ours] : kTypes)
    if (torch == type) return ours;
  throw UsageError("safetensors", "safetensors has no type for {} tensors. Convert them first.",
                   c10::toString(type));
}

at::ScalarType scalar_type_of(DType dtype) {
  for (const auto& [torch, ours] : kTypes)
    if (ours == dtype) return torch;
  throw UsageError("safetensors", "torch has no type for {}.", dtype_name(dtype));
}

TensorBytes bytes_of_tensor(std::string name, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.is_cpu() ||
      !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg())
    throw UsageError("safetensors",
                     "tensor '{}' cannot be written as it is: it must be dense, contiguous and on "
                     "the CPU. Pass tensor.contiguous().cpu().",
                     name);
  TensorBytes result{std::move(name), dtype_of(tensor.scalar_type()), tensor.sizes().vec(), {}};
  result.bytes = {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
  return result;
}

at::Tensor tensor_of(const SafetensorsFile& file, const TensorEntry& entry) {
  at::Tensor tensor = at::empty(entry.shape, scalar_type_of(entry.dtype));
  const auto bytes = file.bytes(entry);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

at::Tensor mapped_tensor(const SafetensorsFile& file, const TensorEntry& entry,
                         std::shared_ptr<const void> owner) {
  const auto bytes = file.bytes(entry);
  const at::ScalarType type = scalar_type_of(entry.dtype);
  if (bytes.empty() || reinterpret_cast<std::uintptr_t>(bytes.data()) % c10::elementSize(type) != 0)
    return tensor_of(file, entry);
  return at::from_blob(
      const_cast<std::byte*>(bytes.data()), entry.shape, [owner = std::move(owner)](void*) {},
      at::TensorOptions(type));
}

}  // namespace lockstep::io
