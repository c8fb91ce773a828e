// Finds the kernels in the CUDA plug-in.
#include <dlfcn.h>

#include <string>

#include "lockstep/core/env.h"
#include "lockstep/kernels/cuda/table.h"

namespace lockstep::kernels::cuda {
namespace {

struct Found {
  const Table* table = nullptr;
  std::string unavailable_reason;
};

// A program with a CUDA device has opened the plug-in globally (comm/nccl); one that itself links
// libtorch_cuda may not have.
void* find_entry() {
  if (void* const entry = ::dlsym(RTLD_DEFAULT, kTableEntry)) return entry;
  const std::string path = env::get("LOCKSTEP_CUDA_PLUGIN").value_or("liblockstep_cuda.so");
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  return library != nullptr ? ::dlsym(library, kTableEntry) : nullptr;
}

Found find() {
  Found found;
  const auto entry = reinterpret_cast<const Table* (*)()>(find_entry());
  if (entry == nullptr) {
    const char* const error = ::dlerror();
    found.unavailable_reason = error != nullptr ? error : "the plug-in has no kernels";
    return found;
  }
  if (entry()->version == kTableVersion) {
    found.table = entry();
  } else {
    found.unavailable_reason = "the plug-in belongs to another build of Lockstep";
  }
  return found;
}

const Found& found() {
  static const Found result = find();
  return result;
}

}  // namespace

const Table* table() {
  return found().table;
}

const char* unavailable_reason() {
  return found().unavailable_reason.c_str();
}

}  // namespace lockstep::kernels::cuda
