// Runs the table's cases on one rank of a world and reports failures.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::conformance {

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
