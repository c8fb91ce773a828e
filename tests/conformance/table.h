// What every backend must be able to do, written down by hand: operation x reduction x dtype.
//
// The suite runs exactly these cases and fails when fewer ran, so an operation or a dtype cannot
// get lost silently. It is deliberately not computed from the library's own idea of what is
// supported.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::conformance {

enum class Operation {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kSendRecv,
  kBatch
};
const char* name(Operation operation);
bool reduces(Operation operation);

// kSymmetric: like kLarge, in memory that all ranks map where the backend has it.
enum class Shape { kEmpty, kOne, kOdd, kLarge, kNonContiguous, kSymmetric };
const char* name(Shape shape);

inline constexpr std::array kOperations = {
    Operation::kAllReduce, Operation::kReduce, Operation::kReduceScatter, Operation::kBroadcast,
    Operation::kAllGather, Operation::kGather, Operation::kScatter,       Operation::kAllToAll,
    Operation::kSendRecv,  Operation::kBatch};
inline constexpr std::array kReductions = {ReduceOp::kSum, ReduceOp::kAvg,     ReduceOp::kMin,
                                           ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAnd,
                                           ReduceOp::kOr,  ReduceOp::kXor};
inline constexpr std::array kShapes = {Shape::kEmpty, Shape::kOne,           Shape::kOdd,
                                       Shape::kLarge, Shape::kNonContiguous, Shape::kSymmetric};
inline constexpr std::array kDtypes = {
    at::kByte,     at::kChar,  at::kShort,  at::kInt,  at::kLong,         at::kHalf,
    at::kBFloat16, at::kFloat, at::kDouble, at::kBool, at::kComplexFloat, at::kComplexDouble};

// One row: these reductions for these dtypes, identically on every backend, because World emulates
// what a backend lacks. Operations that only move bytes take every dtype.
struct Row {
  std::vector<at::ScalarType> dtypes;
  std::vector<ReduceOp> reductions;
};
const std::vector<Row>& reduction_table();
bool supported(Operation operation, at::ScalarType dtype, ReduceOp op);

struct Case {
  Operation operation;
  ReduceOp op;  // kSum where the operation does not reduce
  at::ScalarType dtype;
  Shape shape;
  std::string text() const;
};
// In a fixed order, the same on every rank.
std::vector<Case> supported_cases();
// Pairs without a meaning: these must be refused with UsageError, not computed.
std::vector<Case> refused_cases();

}  // namespace lockstep::conformance
