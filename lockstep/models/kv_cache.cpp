#include "lockstep/models/kv_cache.h"

#include <torch/torch.h>

#include <algorithm>

namespace lockstep::models {

std::pair<at::Tensor, at::Tensor> KvCache::append(std::size_t layer, const at::Tensor& keys,
                                                  const at::Tensor& values) {
  const torch::NoGradGuard no_grad;
  if (layers_.size() <= layer) layers_.resize(layer + 1);
  Layer& held = layers_[layer];
  const std::int64_t time = keys.size(2);
  const std::int64_t total = held.length + time;
  const auto put = [&](at::Tensor& all, const at::Tensor& more) {
    if (!all.defined() || all.size(2) < total) {
      auto shape = more.sizes().vec();
      shape[2] = all.defined() ? std::max(total, 2 * all.size(2)) : std::max(total, capacity_);
      const at::Tensor larger = torch::empty(shape, more.options());
      if (held.length > 0) larger.narrow(2, 0, held.length).copy_(all.narrow(2, 0, held.length));
      all = larger;
    }
    all.narrow(2, held.length, time).copy_(more);
  };
  put(held.keys, keys);
  put(held.values, values);
  held.length = total;
  return {held.keys.narrow(2, 0, total), held.values.narrow(2, 0, total)};
}

}  // namespace lockstep::models
