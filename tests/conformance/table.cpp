#include "table.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep::conformance {

const char* name(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kReduce:
      return "reduce";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kBroadcast:
      return "broadcast";
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kGather:
      return "gather";
    case Operation::kScatter:
      return "scatter";
    case Operation::kAllToAll:
      return "all_to_all";
    case Operation::kSendRecv:
      return "send/recv";
    case Operation::kBatch:
      return "batch";
  }
  return "?";
}

bool reduces(Operation operation) {
  return operation == Operation::kAllReduce || operation == Operation::kReduce ||
         operation == Operation::kReduceScatter;
}

const char* name(Shape shape) {
  switch (shape) {
    case Shape::kEmpty:
      return "empty";
    case Shape::kOne:
      return "one";
    case Shape::kOdd:
      return "odd";
    case Shape::kLarge:
      return "large";
    case Shape::kNonContiguous:
      return "non-contiguous";
    case Shape::kSymmetric:
      return "symmetric";
  }
  return "?";
}

const std::vector<Row>& reduction_table() {
  static const std::vector<Row> table = {
      {{at::kByte, at::kChar, at::kShort, at::kInt, at::kLong},
       {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
        ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor}},
      {{at::kHalf, at::kBFloat16, at::kFloat, at::kDouble},
       {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}},
      {{at::kBool},
       {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAnd,
        ReduceOp::kOr, ReduceOp::kXor}},
      {{at::kComplexFloat, at::kComplexDouble}, {ReduceOp::kSum, ReduceOp::kAvg}},
  };
  return table;
}

bool supported(Operation operation, at::ScalarType dtype, ReduceOp op) {
  if (!reduces(operation)) return op == ReduceOp::kSum;
  return std::any_of(reduction_table().begin(), reduction_table().end(), [&](const Row& row) {
    return std::find(row.dtypes.begin(), row.dtypes.end(), dtype) != row.dtypes.end() &&
           std::find(row.reductions.begin(), row.reductions.end(), op) != row.reductions.end();
  });
}

std::string Case::text() const {
  return fmt::format("{}{}{} {} {}", name(operation), reduces(operation) ? " " : "",
                     reduces(operation) ? lockstep::detail::name(op) : "", c10::toString(dtype),
                     name(shape));
}

std::vector<Case> supported_cases() {
  std::vector<Case> cases;
  for (const auto operation : kOperations) {
    for (const auto op : kReductions) {
      for (const auto dtype : kDtypes) {
        if (!supported(operation, dtype, op)) continue;
        for (const auto shape : kShapes) cases.push_back({operation, op, dtype, shape});
      }
    }
  }
  return cases;
}

std::vector<Case> refused_cases() {
  std::vector<Case> cases;
  for (const auto operation : kOperations) {
    if (!reduces(operation)) continue;
    for (const auto op : kReductions) {
      for (const auto dtype : kDtypes) {
        if (!supported(operation, dtype, op)) cases.push_back({operation, op, dtype, Shape::kOdd});
      }
    }
  }
  return cases;
}

}  // namespace lockstep::conformance
