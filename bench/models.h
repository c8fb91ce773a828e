// What the sides of `lockstep bench gpt|lora|resnet` agree on. The parent starts ours and PyTorch's
// as ranks (crew.h), each with a file of these settings as JSON, and gives them orders in turn, one
// object per line. The answer is an object; {"error": TEXT} from a peer that cannot continue.
//
//   {"do": "write"}                        ours: draws the initial weights and writes them to
//                                          `start`, from where all sides load them
//   {"do": "new", "dtype", "tf32", "mode", "lr", "ddp", "exact"}   a model with them and its
//                                          optimizer: {"parameters", "trainable", "flops",
//                                          "device"}, flops being those of a step
//   {"do": "train", "first", "steps", "batch_size"}   {"losses"}: of steps `first` and following
//   {"do": "time", "warmup", "steps"}      {"ms"} of each step, {"peak_bytes", "reserved_bytes"}
//                                          since "new"
//   {"do": "breakdown", "steps"}           {"forward_ms", "backward_ms", "optimizer_ms"}
//   {"do": "kernels", "steps"}             {"kernels"}: name, count and ms in a step of each
//   {"do": "save", "folder", "saves"}      {"stalls"}: of asynchronous saves during steps
//
// What step k trains on is a function of k (model_step.h, peers/peer_loop.py).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace lockstep::bench {

struct ModelSettings {
  std::string kind;   // gpt, lora or resnet
  std::string model;  // a preset's name
  std::string device = "cpu";
  std::string mode = "eager";  // for our step: one of kModes
  std::string dtype = "bf16";  // or fp32
  std::int64_t batch_size = 0;
  std::int64_t sequence_length = 0;  // for resnet: the height and width of an image
  std::int64_t vocab_size = 50257;   // for gpt
  std::int64_t accumulation = 1;     // batches per timed step, for peers
  bool residual_in_fp32 = false;     // for ours, like the Trainer's key
  bool ddp = true;
  bool force_reducer = false;
  // For comparison, not timing: no dropout, and adapters that change the model at once.
  bool exact = false;
  double lr = 3e-4;
  double lora_dropout = 0.05;
  bool peft = true;   // the peer of lora may use transformers and PEFT
  std::string start;  // folder of the initial weights; empty: they are drawn
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModelSettings, kind, model, device, mode, dtype, batch_size,
                                   sequence_length, vocab_size, accumulation, residual_in_fp32, ddp,
                                   force_reducer, exact, lr, lora_dropout, peft, start)

// How our side takes a step: as one CUDA graph, as it is written, or without fused operations.
inline constexpr const char* kModes[] = {"captured", "eager", "plain"};

struct ModelPreset {
  const char* kind;
  const char* name;
  std::int64_t batch_size, sequence_length;
};
// The first of each kind is the default on a GPU, `tiny` on a CPU.
inline constexpr ModelPreset kPresets[] = {
    {"gpt", "124m", 64, 1024}, {"gpt", "350m", 32, 1024},        {"gpt", "774m", 16, 1024},
    {"gpt", "1.3b", 8, 2048},  {"gpt", "tiny", 4, 32},           {"lora", "phi3-mini", 16, 512},
    {"lora", "tiny", 4, 32},   {"resnet", "resnet50", 256, 224}, {"resnet", "resnet18", 256, 224},
    {"resnet", "tiny", 8, 64},
};

// AdamW's settings, on all sides.
inline constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kWeightDecay = 0.1;
inline constexpr double kMaxGradNorm = 1;

}  // namespace lockstep::bench
