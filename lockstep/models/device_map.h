// Device maps: the device of each part of a language model, without torch. Names are those of
// Hugging Face's device_map; place() in causal_lm.h moves a model.
//
//   device_map: balanced                  # blocks over all GPUs of the process; auto is the same
//   device_map: {model.embed_tokens: 0, model.layers.0-15: 0, model.layers.16-31: 1,
//                model.norm: 1, lm_head: 1}
//   device_map: {"": cuda:0, lm_head: cpu}
//
// A name holds for all modules below it, and the longest matching one decides. A number is a GPU's.
// A block is on one device, and so are the embeddings (and a head that shares their weight). cpu:1,
// cpu:2 and so on are separate stages in the CPU's memory, to try a map without a GPU.
//
// Values and functions that only read; call from any thread.
#pragma once

#include <string>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/models/hugging_face.h"

namespace lockstep::models {

struct DeviceMap {
  struct Part {
    std::string name;    // "model.layers.3"
    std::string device;  // "cuda:0", "cpu", "cpu:1"
  };
  // All parts of a model, in the order of the forward pass: embeddings, blocks, norm, lm_head.
  std::vector<Part> parts{};

  std::vector<std::string> devices() const;  // each once, in that order
};

// `devices`: those over which auto and balanced spread the blocks. UsageError with the line for an
// unknown name, a part without a device, and an invalid device.
DeviceMap read_device_map(const Node& node, const CausalLmConfig& config,
                          const std::vector<std::string>& devices);

// Assigns consecutive parts to each device, with about as many bytes on each.
DeviceMap balanced_device_map(const CausalLmConfig& config,
                              const std::vector<std::string>& devices);

}  // namespace lockstep::models
