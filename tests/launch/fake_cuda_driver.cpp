// Stands in for libcuda.so.1 in tests: two devices, or what FAKE_CUDA says.
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
bool mode_is(const char* mode) {
  const char* text = std::getenv("FAKE_CUDA");
  return text != nullptr && std::strcmp(text, mode) == 0;
}
}  // namespace

extern "C" {
int cuInit(unsigned) {
  if (mode_is("hang")) ::sleep(60);
  if (mode_is("crash")) ::abort();
  return mode_is("broken") ? 999 : 0;
}
int cuDeviceGetCount(int* count) {
  *count = mode_is("none") ? 0 : 2;
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}
int cuDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<unsigned>(size), "0000:%cA:00.0", '1' + device);
  return 0;
}
int cuDeviceGetName(char* text, int size, int) {
  std::snprintf(text, static_cast<unsigned>(size), "%s",
                mode_is("unknown card") ? "NVIDIA B300 Test" : "NVIDIA H100 80GB HBM3");
  return 0;
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int device) {
  *bytes = (std::size_t{79} << 30) + static_cast<std::size_t>(device);
  return mode_is("one without memory") && device == 1 ? 1 : 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16 ? 132 : attribute == 13 ? 1'830'000 : attribute == 75 ? 9 : 0;
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
// A device that never finishes its work; like the real one, it waits with CPU time.
int cuStreamSynchronize(void*) {
  volatile bool ended = false;
  while (!ended) {
  }
  return 0;
}
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_UNKNOWN";
  return 0;
}
}
