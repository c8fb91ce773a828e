// Uses a symbol of c10_cuda and one of torch_cuda; works without a GPU.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <lockstep/comm/world.h>

#include <cstdio>

int main() {
  const int devices = c10::cuda::device_count();
  if (devices > 0) at::cuda::getCurrentDeviceProperties();
  const lockstep::World world;
  std::printf(
      "devices: %d, stream type %d, ranks %d\n", devices,
      static_cast<int>(c10::cuda::CUDAStream::unpack3(0, 0, c10::DeviceType::CUDA).device_type()),
      world.size());
}
