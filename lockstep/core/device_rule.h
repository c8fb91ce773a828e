// Chooses a rank's device and backend, by one rule for World and for `lockstep env`.
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

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace lockstep {

// A device as the CUDA driver describes it.
struct GpuModel {
  std::string name{};  // "NVIDIA H100 80GB HBM3"
  std::uint64_t memory_bytes = 0;
  int multiprocessors = 0;
  int clock_khz = 0;
  int capability_major = 0;
  int capability_minor = 0;
};

struct DeviceRequest {
  int local_rank = 0;              // chooses the GPU; negative (not known): the first
  std::string device = {};         // cpu, cuda or cuda:N; empty: LOCKSTEP_DEVICE or the machine
  std::string backend = "auto";    // auto, shm, gloo or nccl; auto: LOCKSTEP_BACKEND or the device
  std::optional<bool> share = {};  // several local ranks on one GPU; unset: LOCKSTEP_SHARE_DEVICE
  std::function<int()> visible_gpus = {};  // called only if the rule depends on it
  std::string no_gpu = "no CUDA device is visible";
  bool cuda_built = true;  // whether this program is built to use a GPU
};

struct DeviceRule {
  int gpu = -1;         // negative: the CPU
  std::string backend;  // "shm", "gloo" or "nccl"
  // shm was not requested by name: gloo replaces it where the ranks cannot share memory.
  bool automatic = false;
  std::string reason;   // why this device, in a few words
  std::string problem;  // why a rank cannot start like this; empty when it can

  std::string device() const { return gpu < 0 ? "cpu" : "cuda:" + std::to_string(gpu); }
};

// Throws UsageError for a device or backend that does not exist.
DeviceRule apply_device_rule(const DeviceRequest& request);

// The warning for a world of one that sees several GPUs, of which it leaves all but one idle. Empty
// otherwise, and where the program named its device. `visible_gpus` is 0 for a CPU rank.
std::string idle_gpus_warning(int world_size, bool device_given, int visible_gpus);

}  // namespace lockstep
