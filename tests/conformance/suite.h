// What every backend must be able to do, and the suite that runs it on one rank of a world.
//
// The cases (operation x reduction x dtype) are written down by hand, not computed from the
// library's own idea of what is supported. The suite fails when fewer of them ran, so an operation
// or a dtype cannot get lost silently.
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

struct Report {
  int ran = 0;      // cases of the table that were carried out and compared
  int refused = 0;  // pairs without a meaning that were refused as they must be
  int extra = 0;    // example values, numbers, bytes, structure
  std::vector<std::string> failures;
};

struct SuiteOptions {
  int64_t large = 20'011;  // elements of the large shape
  bool every_case = true;  // false: each (operation, dtype) once or twice, for a quick look
};

// Every rank calls it with the same options. Tensors are made on `device`.
Report run_suite(World& world, c10::Device device, const SuiteOptions& options = {});

// How many cases run_suite has to carry out for these options.
int cases_due(const SuiteOptions& options);

}  // namespace lockstep::conformance
