#include "lockstep/parallel/ddp.h"

#include <torch/nn/modules/embedding.h>

namespace lockstep::detail {

std::vector<NamedTensor> named_parameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> result;
  for (const auto& item : module.named_parameters()) result.push_back({item.key(), item.value()});
  return result;
}

std::vector<NamedTensor> named_buffers(const torch::nn::Module& module) {
  std::vector<NamedTensor> result;
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) result.push_back({item.key(), item.value()});
  return result;
}

DdpOptions complete(DdpOptions options, const torch::nn::Module& module) {
  const auto add = [&](const std::string& prefix, const torch::nn::Module& part, bool sparse) {
    if (!sparse) return;
    for (const auto& item : part.named_parameters(/*recurse=*/false))
      options.sparse_parameters.push_back(prefix.empty() ? item.key() : prefix + "." + item.key());
  };
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/true)) {
    const torch::nn::Module& part = *item.value();
    if (const auto* embedding = part.as<torch::nn::EmbeddingImpl>())
      add(item.key(), part, embedding->options.sparse());
    if (const auto* bag = part.as<torch::nn::EmbeddingBagImpl>())
      add(item.key(), part, bag->options.sparse());
  }
  return options;
}

}  // namespace lockstep::detail
