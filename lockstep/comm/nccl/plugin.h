// The boundary between Lockstep and its CUDA plug-in (liblockstep_cuda.so).
//
// The plug-in is the only part that is linked to libtorch_cuda. It is opened at run time and gives
// a table of functions; it needs no symbol of ours, only LibTorch's.
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail::nccl {

// Raised with every change below: a plug-in of another build must not be used.
constexpr int kPluginVersion = 3;
constexpr const char* kPluginFile = "liblockstep_cuda.so";
constexpr const char* kPluginEntry = "lockstep_cuda_plugin";

struct GroupOptions {
  c10::intrusive_ptr<c10d::Store> store = {};
  int rank = 0;
  int size = 1;
  int device = 0;
  std::chrono::milliseconds timeout{0};
};

struct PluginTable {
  int version = kPluginVersion;
  void (*set_device)(int index) = nullptr;
  // Creates the process group and its communicator; blocks until every rank has joined.
  c10::intrusive_ptr<c10d::Backend> (*make_group)(const GroupOptions& options) = nullptr;
  // Whether the current stream is being recorded into a CUDA graph.
  bool (*capturing)() = nullptr;
};

using PluginEntry = const PluginTable* (*)();

}  // namespace lockstep::detail::nccl
