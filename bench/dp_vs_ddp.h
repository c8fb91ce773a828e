// What the sides of `lockstep bench dp-vs-ddp` agree on. The parent starts both as ranks (crew.h):
// DataParallel as one process, DistributedDataParallel as several. Orders and their answers:
//
//   new TYPE             a model with the start's weights and a fresh Adam: "ok PARAMETERS". TYPE:
//                        float64 or float32, to compare weights (Adam has a large epsilon), or
//                        tf32, to measure: float32 that may use TF32 on a GPU
//   save PATH            rank 0 writes the weights as doubles, one after the other: "ok"
//   run FIRST STEPS      trains on the batches of these steps: "SECONDS LOSS"
//   parts STEPS          milliseconds of each of kDpParts, medians: "0.1 2.3 ..."; -1: has none
//
// What step k trains on is a function of k; a rank takes its part of the batch.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace lockstep::bench {

inline constexpr const char* kDp = "dp";
inline constexpr const char* kDdp = "ddp";

struct DpSettings {
  std::string contender;
  std::string model;  // mlp, resnet18 or resnet50
  std::string device = "cpu";
  int ranks = 2;                 // or replicas
  int threads = 1;               // per rank or replica, on the CPU
  std::int64_t batch_size = 64;  // over all of them
  std::int64_t image_size = 32;
  double lr = 1e-3;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DpSettings, contender, model, device, ranks, threads, batch_size,
                                   image_size, lr)

inline constexpr const char* kDpParts[] = {"scatter", "replicate", "forward",   "gather",
                                           "loss",    "backward",  "gradients", "update"};

}  // namespace lockstep::bench
