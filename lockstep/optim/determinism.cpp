#include "lockstep/optim/determinism.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <torch/cuda.h>
#include <torch/utils.h>

#include <cstdlib>
#include <mutex>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::optim {
namespace {

constexpr const char* kRandomState = "determinism";
constexpr const char* kWorkspace = "CUBLAS_WORKSPACE_CONFIG";

// Every generator a model may draw from, by its device's name.
std::map<std::string, at::Generator> generators() {
  std::map<std::string, at::Generator> all{{"cpu", at::detail::getDefaultCPUGenerator()}};
  if (!torch::cuda::is_available()) return all;
  at::globalContext().lazyInitDevice(at::kCUDA);
  for (c10::DeviceIndex i = 0; i < torch::cuda::device_count(); ++i) {
    const c10::Device device(c10::kCUDA, i);
    all.emplace(device.str(), at::globalContext().defaultGenerator(device));
  }
  return all;
}

}  // namespace

void seed_everything(std::uint64_t seed, int rank) {
  for (auto& [name, generator] : generators()) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed + static_cast<std::uint64_t>(rank));
  }
}

RngState rng_state() {
  RngState state;
  for (auto& [name, generator] : generators()) {
    const std::lock_guard lock(generator.mutex());
    state[name] = generator.get_state();
  }
  return state;
}

void set_rng_state(const RngState& state) {
  if (!state.contains("cpu"))
    throw UsageError(kRandomState,
                     "the random state has no 'cpu'. It is probably of something else.");
  auto all = generators();
  for (const auto& [name, saved] : state) {
    const auto found = all.find(name);
    if (found == all.end()) continue;
    const std::lock_guard lock(found->second.mutex());
    try {
      found->second.set_state(saved);
    } catch (const c10::Error& e) {
      throw UsageError(kRandomState,
                       "the random state of {} cannot be used ({}). It was probably saved by "
                       "another version of LibTorch, or damaged. Seed again instead.",
                       name, e.what_without_backtrace());
    }
  }
}

WithSeed::WithSeed(std::uint64_t seed) : before_(rng_state()) {
  seed_everything(seed);
}

WithSeed::~WithSeed() {
  try {
    set_rng_state(before_);
  } catch (const std::exception& e) {
    log::warning(kRandomState, "the random state could not be put back: {}", e.what());
  }
}

void set_tf32(bool on) {
  at::globalContext().setAllowTF32CuBLAS(on);
  at::globalContext().setAllowTF32CuDNN(on);
}

bool tf32() {
  return at::globalContext().allowTF32CuBLAS() && at::globalContext().allowTF32CuDNN();
}

void set_deterministic(bool on) {
  // Read when cuBLAS makes its first handle. A value that the user set is kept.
  if (on) ::setenv(kWorkspace, ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/false);
  at::globalContext().setDeterministicCuDNN(on);
  // Timing which convolution is fastest may choose another one in the next run.
  if (on) at::globalContext().setBenchmarkCuDNN(false);
}

bool deterministic() {
  return at::globalContext().deterministicAlgorithms();
}

void full_determinism(std::uint64_t seed, int rank) {
  set_deterministic(true);
  set_tf32(false);
  seed_everything(seed, rank);
}

}  // namespace lockstep::optim
