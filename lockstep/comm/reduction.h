// How a reduction is carried out when a backend does not have it as such.
//
// World offers every (dtype, op) pair that has a meaning; backends offer fewer. plan_reduction says
// which dtype travels, which op the backend is asked for, and what is done to the result. Integer
// averages are summed in 64 bits and rounded towards zero; booleans are numbers 0 and 1.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/types.h"

namespace lockstep::detail {

struct ReductionPlan {
  at::ScalarType wire;     // what travels
  ReduceOp op;             // what the backend is asked for
  bool divide = false;     // by the world's size, afterwards
  bool by_gather = false;  // the backend has no such reduction: gather all, reduce here, rank order
  bool reinterpret = false;  // `wire` is the same memory (bool as bytes, complex as real pairs)
};

ReductionPlan plan_reduction(at::ScalarType dtype, ReduceOp op, const Backend& backend);

// Reduces the rows of `rows` ({n, ...}) in order.
at::Tensor reduce_rows(const at::Tensor& rows, ReduceOp op);

// False for pairs without a meaning: bitwise on floats, averages of booleans.
bool reduction_exists(at::ScalarType dtype, ReduceOp op);

}  // namespace lockstep::detail
