// Which device and which backend a rank takes: the one rule, for a World and for `lockstep env`.
//
// What the program asks for wins over LOCKSTEP_DEVICE and LOCKSTEP_BACKEND, and those over what the
// machine has. The rule knows numbers and names, not drivers: the caller says how many GPUs there
// are.
//
//   DeviceRule rule = apply_device_rule({.local_rank = 1, .visible_gpus = [] { return 2; }});
//   // rule.device() == "cuda:1", rule.backend == "nccl"
//
// Free function without state; call it from any thread that does not race with setenv().
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace lockstep {

struct DeviceRequest {
  int local_rank = 0;              // chooses the GPU; negative (not known): the first
  std::string device = {};         // cpu, cuda or cuda:N; empty: LOCKSTEP_DEVICE or the machine
  std::string backend = "auto";    // auto, shm, gloo or nccl; auto: LOCKSTEP_BACKEND or the device
  std::optional<bool> share = {};  // several local ranks on one GPU; unset: LOCKSTEP_SHARE_DEVICE
  std::function<int()> visible_gpus = {};  // asked only where the answer matters
  std::string no_gpu = "no CUDA device is visible";
  bool cuda_built = true;  // this program can use a GPU at all
};

struct DeviceRule {
  int gpu = -1;         // negative: the CPU
  std::string backend;  // "shm", "gloo" or "nccl"
  // Nobody asked for shm by name: gloo takes over where the ranks cannot share memory.
  bool automatic = false;
  std::string reason;   // for the device, in short
  std::string problem;  // why a rank cannot start like this; empty when it can

  std::string device() const { return gpu < 0 ? "cpu" : "cuda:" + std::to_string(gpu); }
};

// Throws UsageError for a device or backend that does not exist.
DeviceRule apply_device_rule(const DeviceRequest& request);

// The warning of a rank that is alone on a GPU beside GPUs that nobody uses. Empty: they are used,
// or the program named its device. `visible_gpus` is 0 for a rank on the CPU.
std::string idle_gpus_warning(int world_size, bool device_given, int visible_gpus);

}  // namespace lockstep
