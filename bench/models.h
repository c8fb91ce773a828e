// The protocol of `lockstep bench train` and `recipes`: the settings with which the parent
// starts ranks (processes.h), ours and PyTorch's, and the orders that it gives them in
// turn:
//   {"do": "write"}                        ours: draws the initial weights and writes them to
//                                          `start`, from where all sides load them
//   {"do": "new", "dtype", "tf32", "mode", "lr", "ddp", "exact"}   a model with them and its
//                                          optimizer: {"parameters"}
//   {"do": "train", "steps", "batch_size", "same"}   {"losses"} of the first steps; same: on the
//                                          samples of rank 0
//   {"do": "time", "warmup", "steps", "batch_size"}   {"ms"} of each step; without batch_size: the
//                                          settings'
//   {"do": "drop"}                         gives the model's memory back
//
// The batch of a rank in step k is a function of both (model_rank.cpp, peers/model_peer.py).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace lockstep::bench {

struct ModelSettings {
  std::string kind = "gpt";  // or resnet, or pretrained: what peers/model_peer.py builds
  std::string file;          // the training file that has the model; empty: a GPT, see below
  std::vector<std::string> flags{};  // that change the file
  std::string device = "cpu";
  std::string mode = "eager";  // for our step: eager, or captured as one CUDA graph
  std::string dtype = "fp32";  // or bf16, or fp8: bf16 with linear layers in fp8
  std::int64_t batch_size = 0;
  std::int64_t sequence_length = 0;                  // for images: their height and width
  std::int64_t classes = 0;                          // of an image, or the vocabulary
  std::int64_t n_layer = 0, n_head = 0, n_embd = 0;  // without a file
  std::int64_t accumulation = 1;                     // batches per timed step, for peers
  bool ddp = true;
  // For ours with several ranks: the optimizer's state divided; ranks without any communication, or
  // only with a barrier after each step; and the memory cache of run(), if they do not call it.
  bool sharded = false, alone = false, barrier = false, cached = false;
  bool clip = true;
  int threads = 0;  // 0: LibTorch's default
  // For comparison, not timing: no dropout, and adapters that change the model at once.
  bool exact = false;
  double lr = 3e-4;
  std::string start;  // folder of the initial weights; empty: they are drawn
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModelSettings, kind, file, flags, device, mode, dtype,
                                   batch_size, sequence_length, classes, n_layer, n_head, n_embd,
                                   accumulation, ddp, sharded, alone, barrier, cached, clip,
                                   threads, exact, lr, start)

// The order for a model with the start's weights and a fresh optimizer.
inline nlohmann::json new_order(const std::string& mode, double lr, bool ddp,
                                const std::string& dtype = "fp32", bool tf32 = false) {
  return {{"do", "new"}, {"dtype", dtype}, {"tf32", tf32},  {"mode", mode},
          {"lr", lr},    {"ddp", ddp},     {"exact", false}};
}

// A GPT of 4 layers of width 256, whose head has weights of its own; one thread per rank.
inline ModelSettings small_gpt() {
  ModelSettings model;
  model.n_layer = model.n_head = 4;
  model.n_embd = 256;
  model.classes = 8192;
  model.sequence_length = 128;
  model.clip = false;
  model.threads = 1;
  return model;
}

// AdamW's settings, on all sides.
inline constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kWeightDecay = 0.1;
inline constexpr double kMaxGradNorm = 1;

}  // namespace lockstep::bench
