// Maps torch's scalar types to the engine's element types, for the backend that has tensors.
//
//   if (const auto dtype = shm::dtype_of(tensor.scalar_type()))
//     engine.all_reduce(data, count, *dtype, op);
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <utility>

#include "lockstep/comm/shm/reduce.h"

namespace lockstep::shm {

// Nothing for types that the engine cannot add up (complex, quantised, float8).
inline std::optional<DType> dtype_of(c10::ScalarType dtype) {
  using Theirs = c10::ScalarType;
  constexpr std::pair<Theirs, DType> kTypes[] = {
      {Theirs::Float, DType::kF32},  {Theirs::BFloat16, DType::kBf16}, {Theirs::Half, DType::kF16},
      {Theirs::Double, DType::kF64}, {Theirs::Long, DType::kI64},      {Theirs::Int, DType::kI32},
      {Theirs::Short, DType::kI16},  {Theirs::Char, DType::kI8},       {Theirs::Byte, DType::kU8},
      {Theirs::Bool, DType::kBool}};
  for (const auto& [theirs, ours] : kTypes)
    if (theirs == dtype) return ours;
  return std::nullopt;
}

}  // namespace lockstep::shm
