#include "lockstep/models/place.h"

#include <torch/torch.h>

#include <optional>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/models/decoder.h"

namespace lockstep::models {

c10::Device device_of(const std::string& device) {
  if (device.starts_with("cpu")) return c10::kCPU;
  const c10::Device gpu(device);
  const auto gpus = static_cast<int>(torch::cuda::device_count());
  if (!gpu.is_cuda() || gpu.index() < 0 || gpu.index() >= gpus)
    throw UsageError("models",
                     "the device map names {}, and this process sees {} GPU{}. Check "
                     "CUDA_VISIBLE_DEVICES, or write cpu.",
                     device, gpus, gpus == 1 ? "" : "s");
  return gpu;
}

void place(CausalLm& model, const DeviceMap& map) {
  const auto modules = model.named_modules("", /*include_self=*/false);
  std::size_t blocks = 0;
  std::vector<c10::Device> devices;  // all of them are there before anything is moved
  for (const DeviceMap::Part& part : map.parts) {
    devices.push_back(device_of(part.device));
    const auto* module = modules.find(part.name);
    blocks += module != nullptr && (*module)->as<detail::DecoderBlock>() != nullptr;
    const bool tied_head = &part == &map.parts.back() && model.config().tied();
    if (module == nullptr && !tied_head)
      throw UsageError("models", "the device map names {}, which the model does not have.",
                       part.name);
  }
  if (blocks != static_cast<std::size_t>(model.config().layers()))
    throw UsageError("models", "the device map has {} blocks, and the model {}.", blocks,
                     model.config().layers());
  CausalLm::Placement placement{.input = devices.front()};
  detail::DecoderBlock* last = nullptr;
  for (std::size_t i = 0; i < map.parts.size(); ++i) {
    const bool border = i > 0 && map.parts[i].device != map.parts[i - 1].device;
    const auto copy_to = border ? std::optional(devices[i]) : std::nullopt;
    const auto* module = modules.find(map.parts[i].name);
    if (module != nullptr) (*module)->to(devices[i]);
    auto* block = module != nullptr ? (*module)->as<detail::DecoderBlock>() : nullptr;
    if (block != nullptr) {
      block->copy_input_to = copy_to;
      block->copy_output_to.reset();
      last = block;
    } else if (i + 1 == map.parts.size()) {
      placement.copy_to_head = copy_to;
    } else if (last != nullptr) {  // the norm
      last->copy_output_to = copy_to;
    }
  }
  model.placement_ = placement;
}

}  // namespace lockstep::models
