// Accelerate's YAML file (default_config.yaml), turned into this launcher's own flags.
//
// It is a pure translation. The file becomes the arguments that a user could have typed in front of
// the program and the variables that `accelerate launch` would have set, so that parse_flags()
// stays the only place that knows what they mean, and real flags, coming later, win.
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
  std::vector<std::string> flags;                  // to be read before those of the command line
  std::map<std::string, std::string> environment;  // for the ranks, unless it is set already
  std::vector<std::string> notes;                  // keys that have no effect here
  std::string gpu_key;  // "acc.yaml:3:19: distributed_type is MULTI_GPU": ranks need GPUs
};

// Throws UsageError with every mistake on a line of its own: unknown keys with the nearest name,
// keys of the training file with where they belong, wrong types and ranges, and what this launcher
// does not do (DeepSpeed, TPUs, SageMaker, fp8).
// `training_keys`: the keys of the training file, whose layer this one does not know; without them
// such a key counts as unknown. `problems`: what load_document() has found.
AccelerateLaunch read_accelerate_config(const Node& document,
                                        const std::vector<std::string>& training_keys = {},
                                        Problems problems = {});
// The file at `path`, read and translated.
AccelerateLaunch load_accelerate_config(const std::string& path,
                                        const std::vector<std::string>& training_keys = {});

// Every key that it reads.
std::vector<std::string> launcher_keys();

}  // namespace lockstep::launch
