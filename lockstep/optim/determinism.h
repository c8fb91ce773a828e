// Seeds, random states and the switches on which bit-identical runs depend.
//
//   seed_everything(42, world.rank());                      // dropout: seed + rank
//   auto net = with_seed(42, [] { return std::make_shared<Net>(); });   // weights: seed
//   auto loader = data::loader(dataset, world, {.seed = 42});           // order: seed
//
// Three kinds of randomness want three seeds. The sampler's order and the initial weights must be
// the same on every rank, so they use the seed as it is, however many ranks there are; dropout and
// augmentation must differ, or ranks would learn the same noise, so they use seed + rank.
//
// Generators and switches belong to the process: call these while no other thread computes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace lockstep::optim {

// Seeds the generators of the CPU and of every CUDA device with seed + rank.
void seed_everything(std::uint64_t seed, int rank = 0);

// By device: "cpu", "cuda:0", ... A checkpoint has one per rank.
using RngState = std::map<std::string, at::Tensor>;
RngState rng_state();
// Devices that do not exist are skipped (a checkpoint may come from a larger machine); an invalid
// state throws UsageError.
void set_rng_state(const RngState& state);

// While it lives, the generators are seeded with `seed`; afterwards they continue where they were.
class WithSeed {
 public:
  explicit WithSeed(std::uint64_t seed);
  ~WithSeed();
  WithSeed(const WithSeed&) = delete;
  WithSeed& operator=(const WithSeed&) = delete;

 private:
  RngState before_;
};

template <typename Body>
auto with_seed(std::uint64_t seed, Body&& body) {
  const WithSeed guard(seed);
  return std::forward<Body>(body)();
}

// TF32 for float32 matrix products and convolutions on CUDA: faster, 10 bits of mantissa.
void set_tf32(bool on);
bool tf32();

// Allows only kernels that give the same bits in every run; an operation without one throws. cuBLAS
// needs CUBLAS_WORKSPACE_CONFIG before its first use: set here unless the user has set it.
void set_deterministic(bool on);
bool deterministic();

// full_determinism of Hugging Face: seeds, deterministic kernels, no TF32.
void full_determinism(std::uint64_t seed, int rank = 0);

}  // namespace lockstep::optim
