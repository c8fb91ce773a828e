// Translates Accelerate's YAML file (default_config.yaml) into flags of this launcher.
//
// The file becomes the flags that a user could have typed, and the variables that `accelerate
// launch` would have set. So only parse_flags() interprets them, and flags on the command line take
// precedence.
//
//   AccelerateLaunch launch = load_accelerate_config("ddp_config.yaml");
//   // launch.flags: {"--nproc-per-node=2"}; launch.environment: ACCELERATE_MIXED_PRECISION=bf16
//
// Pure; call from any thread.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/core/problems.h"

namespace lockstep::launch {

struct AccelerateLaunch {
  std::vector<std::string> flags;                  // those of the command line take precedence
  std::map<std::string, std::string> environment;  // of the ranks, unless already set
  std::vector<std::string> notes;                  // about keys that have no effect here
  std::string gpu_key;  // "acc.yaml:3:19: distributed_type is MULTI_GPU": ranks need GPUs
};

// Throws UsageError with every mistake on a line of its own: unknown keys with the nearest name,
// keys that belong in the training file, wrong types and ranges, and what this launcher does not
// support (DeepSpeed, TPUs, SageMaker, fp8).
// `training_keys`: the keys of the training file, which this layer cannot include; without them
// such a key is unknown. `problems`: those of load_document().
AccelerateLaunch read_accelerate_config(const Node& document,
                                        const std::vector<std::string>& training_keys = {},
                                        Problems problems = {});
// The file at `path`, read and translated.
AccelerateLaunch load_accelerate_config(const std::string& path,
                                        const std::vector<std::string>& training_keys = {});

// All keys of the file.
std::vector<std::string> launcher_keys();

}  // namespace lockstep::launch
