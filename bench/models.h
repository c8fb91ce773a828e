// What the sides of `lockstep bench gpt|llama|lora|resnet|train|recipes` agree on: the settings
// that the parent starts ranks with (crew.h), ours and PyTorch's, and the orders that it gives them
// in turn:
//
//   {"do": "write"}                        ours: draws the initial weights and writes them to
//                                          `start`, from where all sides load them
//   {"do": "new", "dtype", "tf32", "mode", "lr", "ddp", "exact"}   a model with them and its
//                                          optimizer: {"parameters", "trainable", "flops",
//                                          "device"}, flops being those of a step
//   {"do": "train", "steps", "batch_size", "same"}   {"losses"} of the first steps; same: on the
//                                          samples of rank 0
//   {"do": "time", "warmup", "steps", "batch_size"}   {"ms"} of each step, {"peak_bytes",
//                                          "reserved_bytes"} since "new"; without batch_size: the
//                                          settings'
//   {"do": "drop"}                         gives the model's memory back
//   {"do": "breakdown", "steps"}           {"forward_ms", "backward_ms", "optimizer_ms"}
//   {"do": "kernels", "steps"}             {"kernels"}: name, count and ms in a step of each
//   {"do": "save", "folder", "saves"}      {"stalls"}: of asynchronous saves during steps
//
// What a rank trains on in step k is a function of both (model_rank.cpp, peers/peer_loop.py).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace lockstep::bench {

struct ModelSettings {
  std::string kind;   // gpt, llama, lora or resnet
  std::string model;  // a preset's name
  std::string device = "cpu";
  std::string mode = "eager";  // for our step: one of kModes
  std::string dtype = "bf16";  // or fp32, or fp8: bf16 with linear layers in fp8
  std::string fp8_recipe = "tensorwise";
  std::int64_t batch_size = 0;
  std::int64_t sequence_length = 0;  // for resnet: the height and width of an image
  std::int64_t vocab_size = 50257;   // for gpt
  // For the gpt "small", and whether its head has the weights of the embedding.
  std::int64_t n_layer = 0, n_head = 0, n_embd = 0;
  bool tied = false;
  std::int64_t accumulation = 1;  // batches per timed step, for peers
  bool residual_in_fp32 = false;  // for ours, like the Trainer's key
  bool ddp = true;
  bool force_reducer = false;
  // For ours with several ranks: a ShardedOptimizer; ranks that do not communicate at all, or only
  // by a barrier after each step; and the memory cache of run(), where they do not call it.
  bool sharded = false, alone = false, barrier = false, cached = false;
  bool clip = true;
  int threads = 0;  // 0: LibTorch's default
  // For comparison, not timing: no dropout, and adapters that change the model at once.
  bool exact = false;
  double lr = 3e-4;
  double lora_dropout = 0.05;
  bool peft = true;   // the peer of lora may use transformers and PEFT
  std::string start;  // folder of the initial weights; empty: they are drawn
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModelSettings, kind, model, device, mode, dtype, fp8_recipe,
                                   batch_size, sequence_length, vocab_size, n_layer, n_head, n_embd,
                                   tied, accumulation, residual_in_fp32, ddp, force_reducer,
                                   sharded, alone, barrier, cached, clip, threads, exact, lr,
                                   lora_dropout, peft, start)

// The order for a model with the start's weights and a fresh optimizer.
inline nlohmann::json new_order(const std::string& mode, double lr, bool ddp,
                                const std::string& dtype = "fp32", bool tf32 = false) {
  return {{"do", "new"}, {"dtype", dtype}, {"tf32", tf32},  {"mode", mode},
          {"lr", lr},    {"ddp", ddp},     {"exact", false}};
}

// Whose losses are compared before anything is timed.
inline constexpr int kVerifiedSteps = 3;

// How our side takes a step: as one CUDA graph, as it is written, or without fused operations.
inline constexpr const char* kModes[] = {"captured", "eager", "plain"};

// The "small" one: 4 layers of width 256, one thread per rank.
inline ModelSettings small_gpt() {
  ModelSettings model;
  model.kind = "gpt";
  model.model = "small";
  model.n_layer = model.n_head = 4;
  model.n_embd = 256;
  model.vocab_size = 8192;
  model.sequence_length = 128;
  model.clip = false;
  model.threads = 1;
  return model;
}

struct ModelPreset {
  const char* kind;
  const char* name;
  std::int64_t batch_size, sequence_length;
  // Of a language model; keys: heads for keys and values, 0: as many as for queries. The vocabulary
  // of a gpt is the settings', but for `tiny`.
  std::int64_t layers = 0, heads = 0, width = 0, inner = 0, keys = 0, vocabulary = 0;
};
// The first of each kind is the default on a GPU, `tiny` on a CPU. Llamas are those of Llama 3.
inline constexpr ModelPreset kPresets[] = {
    {"gpt", "124m", 64, 1024, 12, 12, 768},
    {"gpt", "350m", 32, 1024, 24, 16, 1024},
    {"gpt", "774m", 16, 1024, 36, 20, 1280},
    {"gpt", "1.3b", 8, 2048, 24, 16, 2048},
    {"gpt", "tiny", 4, 32, 2, 4, 32, 0, 0, 128},
    {"lora", "phi3-mini", 16, 512, 32, 32, 3072, 8192, 0, 32064},
    {"lora", "llama3-8b", 4, 2048, 32, 32, 4096, 14336, 8, 128256},
    {"lora", "tiny", 4, 32, 2, 4, 32, 48, 2, 128},
    {"llama", "3b", 4, 2048, 28, 24, 3072, 8192, 8, 128256},
    {"llama", "1b", 8, 2048, 16, 32, 2048, 8192, 8, 128256},
    {"llama", "tiny", 4, 32, 2, 4, 32, 48, 2, 128},
    {"resnet", "resnet50", 256, 224},
    {"resnet", "resnet18", 256, 224},
    {"resnet", "tiny", 8, 64},
};

// AdamW's settings, on all sides.
inline constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kWeightDecay = 0.1;
inline constexpr double kMaxGradNorm = 1;

}  // namespace lockstep::bench
