// Maps torch's scalar types to the engine's element types, for the backend that has tensors.
//
//   if (const auto dtype = shm::dtype_of(tensor.scalar_type()))
//     engine.all_reduce(data, count, *dtype, op);
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "lockstep/comm/shm/reduce.h"

namespace lockstep::shm {

// Nothing for types that the engine cannot add up (complex, quantised, float8).
inline std::optional<DType> dtype_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return DType::kF32;
    case c10::ScalarType::Double:
      return DType::kF64;
    case c10::ScalarType::Half:
      return DType::kF16;
    case c10::ScalarType::BFloat16:
      return DType::kBf16;
    case c10::ScalarType::Char:
      return DType::kI8;
    case c10::ScalarType::Short:
      return DType::kI16;
    case c10::ScalarType::Int:
      return DType::kI32;
    case c10::ScalarType::Long:
      return DType::kI64;
    case c10::ScalarType::Byte:
      return DType::kU8;
    case c10::ScalarType::Bool:
      return DType::kBool;
    default:
      return std::nullopt;
  }
}

}  // namespace lockstep::shm
