#include "lockstep/comm/backend.h"

namespace lockstep::detail::nccl {

bool built() {
  return false;
}

void load() {
  throw UsageError("nccl",
                   "this build has no CUDA plug-in (it was configured without nvcc or with a "
                   "CPU LibTorch). Build again on a machine with the CUDA toolkit, or set "
                   "LOCKSTEP_DEVICE=cpu and use backend shm or gloo.");
}

void set_device(c10::Device) {
  load();
}

std::unique_ptr<Backend> make(const Options&) {
  load();
  return nullptr;
}

}  // namespace lockstep::detail::nccl
