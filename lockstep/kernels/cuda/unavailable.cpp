#include "lockstep/kernels/cuda/table.h"

namespace lockstep::kernels::cuda {

const Table* table() {
  return nullptr;
}

const char* unavailable_reason() {
  return "this build has no CUDA kernels (it was configured without nvcc or with a CPU LibTorch)";
}

}  // namespace lockstep::kernels::cuda
