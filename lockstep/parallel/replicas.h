// Functions that compare ranks' tensors and settings, and make them equal.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::parallel {

// The fingerprint of a tensor's bytes.
std::uint64_t fingerprint(const at::Tensor& tensor);
using lockstep::fingerprint;

// Tensors by name, each reduced to a 64-bit fingerprint.
struct Fingerprints {
  std::vector<std::string> names;
  std::vector<std::uint64_t> values;
  void add(std::string name, const at::Tensor& tensor);
};

// The subject of a check that all ranks pass before any continues.
struct Check {
  std::string component;
  std::string what;                 // "this step": "rank 1 refused this step"
  std::exception_ptr refusal = {};  // this rank's own, if it has one
};
template <typename Body>
std::exception_ptr refusal_of(const Body& body) {
  try {
    body();
  } catch (const UsageError&) {
    return std::current_exception();
  } catch (const c10::Error&) {  // of a tensor that cannot be looked at
    return std::current_exception();
  }
  return nullptr;
}

// The refusals of all ranks, while they are being gathered.
struct RefusalTexts {
  at::Tensor all;  // a row per rank
  Work work;
};
// Does not wait. Collective with the other ranks' refuse_together().
RefusalTexts gather_refusals(World& world, const std::exception_ptr& refusal);
// Throws its own refusal on a rank that has one, and UsageError with their message on the others.
[[noreturn]] void refuse_with(const Check& check, RefusalTexts words);
// Both, for a rank that knows of a refusal by some rank. Collective.
[[noreturn]] void refuse_together(World& world, const Check& check);

// Compares texts that must be identical line by line: the first line that differs from rank 0's;
// nothing when all are equal. If one rank refuses, all do. Collective: one small exchange if all
// are equal.
struct LineDifference {
  int rank = 0;
  std::string here, first;  // on that rank and on rank 0; empty where there is no such line
};
std::optional<LineDifference> find_other_line(World& world, const Check& check,
                                              const std::string& text);

// The first name whose tensor differs on some ranks from rank 0's; nothing when all are equal. If
// one rank refuses, all do. Collective.
struct TensorDifference {
  std::string name;
  std::vector<int> ranks;
};
std::optional<TensorDifference> find_difference(World& world, const Check& check,
                                                const Fingerprints& fingerprints);

// "rank 1", "ranks 1, 2"
std::string show_ranks(const std::vector<int>& ranks);

// Broadcasts many tensors in few messages. The caller updates their version counters.
void broadcast_coalesced(World& world, const std::vector<at::Tensor>& tensors, int root);

// The sum over ranks of a sparse gradient divided by `divisor`: gathered and summed by its indices,
// in rank order. Undefined: this rank adds nothing. Collective.
at::Tensor sum_sparse(World& world, const at::Tensor& parameter, const at::Tensor& gradient,
                      double divisor);

}  // namespace lockstep::parallel
