// A model split over devices: blocks stay where a device map puts them, and activations and
// gradients are copied where one device's blocks end and another's begin.
//
//   auto model = lockstep::models::load_pretrained("Phi-3-mini");
//   lockstep::models::place(*model, balanced_device_map(model->config(), {"cuda:0", "cuda:1"}));
//   auto loss = next_token_loss(model->forward(ids), targets);   // ids and targets on any device
//
// The devices work one after the other, so this is for models that do not fit one of them; where
// the model fits, data parallel ranks are faster. Names, checkpoints and, on one kind of device,
// results are those of the undivided model. One thread at a time.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "lockstep/models/causal_lm.h"
#include "lockstep/models/device_map.h"

namespace lockstep::models {

// The device of a part: "cpu:1" is the CPU. UsageError for a GPU that the process does not have.
c10::Device device_of(const std::string& device);

// Moves the parts. Call it before optimizers are made; adapters may be added before or after. A
// later model.to(device) does not move the parts. UsageError for a map of another model.
void place(CausalLm& model, const DeviceMap& map);

}  // namespace lockstep::models
