// Stands in for libcuda.so.1 in tests: two devices, or what FAKE_CUDA says.
#include <unistd.h>

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
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_UNKNOWN";
  return 0;
}
}
