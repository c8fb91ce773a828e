#include "lockstep/comm/types.h"

#include "lockstep/core/error.h"

namespace lockstep {

const char* detail::name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kAnd:
      return "and";
    case ReduceOp::kOr:
      return "or";
    case ReduceOp::kXor:
      return "xor";
  }
  return "?";
}

bool detail::is_bitwise(ReduceOp op) {
  return op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
}

}  // namespace lockstep
