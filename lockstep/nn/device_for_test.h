// The device that LOCKSTEP_DEVICE asks a test program to use. The first call opens the CUDA
// plug-in: LibTorch decides at the first question about CUDA whether the process has it.
#pragma once

#include <c10/core/Device.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "lockstep/kernels/cuda/table.h"

namespace lockstep::nn {

inline c10::Device test_device() {
  static const c10::Device device = [] {
    const char* const asked = std::getenv("LOCKSTEP_DEVICE");
    if (asked == nullptr || !std::string_view(asked).starts_with("cuda"))
      return c10::Device(c10::kCPU);
    if (kernels::cuda::table() == nullptr) {
      std::fprintf(stderr, "no CUDA kernels: %s\n", kernels::cuda::unavailable_reason());
      std::abort();
    }
    return c10::Device(c10::kCUDA, 0);
  }();
  return device;
}

inline const c10::Device kOpenedEarly = test_device();

}  // namespace lockstep::nn
