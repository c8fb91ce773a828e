#include "lockstep/parallel/model_tensors.h"

#include <ATen/EmptyTensor.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/nn/divided.h"

namespace lockstep::parallel {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void check_names_exist(const std::vector<std::string>& names, const char* option,
                       const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers) {
  for (const auto& name : names) {
    const auto is_it = [&](const NamedTensor& t) { return t.name == name; };
    if (std::none_of(parameters.begin(), parameters.end(), is_it) &&
        std::none_of(buffers.begin(), buffers.end(), is_it))
      throw UsageError("reducer",
                       "{} names '{}', which the model does not have. Check the "
                       "qualified name with named_parameters().",
                       option, name);
  }
}

// Tensors of inference mode have no version counter.
bool has_version(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference();
}

}  // namespace

std::vector<NamedTensor> parameters_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> all;
  for (const auto& item : module.named_parameters()) all.push_back({item.key(), item.value()});
  return all;
}

std::vector<NamedTensor> buffers_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> all;
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) all.push_back({item.key(), item.value()});
  return all;
}

ParameterForm ModelParameter::form() const {
  return {tensor.requires_grad(), tensor.scalar_type(), tensor.device(), tensor.sizes().vec()};
}

ModelTensors::ModelTensors(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                           const DdpOptions& options) {
  check_names_exist(options.ignored_parameters, "ignored_parameters", parameters, buffers);
  check_names_exist(options.sparse_parameters, "sparse_parameters", parameters, buffers);
  if (options.static_graph && options.find_unused_parameters)
    throw UsageError("reducer",
                     "static_graph and find_unused_parameters are both set. A static "
                     "graph learns its unused parameters by itself; leave the second one off.");
  for (auto& [name, tensor] : parameters) {
    if (contains(options.ignored_parameters, name)) {
      ignored_.push_back({name, tensor});
      continue;
    }
    const bool tied = std::any_of(parameters_.begin(), parameters_.end(),
                                  [&](const auto& p) { return p.tensor.is_same(tensor); });
    if (tied) continue;  // one tensor under two names has one gradient
    if (!tensor.defined())
      throw UsageError("reducer",
                       "parameter '{}' is an undefined tensor. Give it a value before wrapping the "
                       "model, or name it in ignored_parameters.",
                       name);
    const bool sparse = contains(options.sparse_parameters, name);
    parameters_.push_back({std::move(name), std::move(tensor), sparse});
  }
  for (auto& buffer : buffers) {
    if (contains(options.ignored_parameters, buffer.name)) {
      ignored_.push_back(std::move(buffer));
      continue;
    }
    const std::int64_t version = has_version(buffer.tensor) ? buffer.tensor._version() : 0;
    buffers_.push_back({std::move(buffer.name), std::move(buffer.tensor), version});
  }
}

std::vector<at::Tensor> ModelTensors::buffer_tensors() const {
  std::vector<at::Tensor> tensors;
  for (const auto& buffer : buffers_)
    if (buffer.tensor.defined()) tensors.push_back(buffer.tensor);
  return tensors;
}

void ModelTensors::broadcast(World& world, int root) {
  std::vector<at::Tensor> tensors = buffer_tensors();
  for (const auto& p : parameters_)
    if (nn::rows_of(p.tensor) == nullptr) tensors.push_back(p.tensor);
  broadcast_coalesced(world, tensors, root);
  if (world.size() > 1)
    for (const auto& t : tensors)
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  for (auto& b : buffers_)
    if (has_version(b.tensor)) b.version = b.tensor._version();
}

// The kernel of BatchNorm writes running statistics past their version counter, so that a second
// graph may be alive, and so does this. A buffer that was written through its counter since the
// last time is counted once more, on every rank and the root, too: a graph that needs its old value
// is refused by all of them.
void ModelTensors::broadcast_buffers(World& world, int root) {
  if (world.size() == 1) return;
  broadcast_coalesced(world, buffer_tensors(), root);
  for (auto& b : buffers_) {
    if (!has_version(b.tensor)) continue;
    if (b.tensor._version() != b.version) b.tensor.unsafeGetTensorImpl()->bump_version();
    b.version = b.tensor._version();
  }
}

bool ModelTensors::has_cpu_buffers() const {
  return std::ranges::any_of(buffers_, [](const auto& b) { return b.tensor.is_cpu(); });
}

std::string ModelTensors::describe_buffers() const {
  std::string text;
  for (const auto& b : buffers_)
    text += fmt::format(
        "{}: buffer, {}, shape [{}]\n", b.name, c10::toString(b.tensor.scalar_type()),
        b.tensor.defined() ? fmt::format("{}", fmt::join(b.tensor.sizes(), ", ")) : "none");
  return text;
}

Fingerprints ModelTensors::parameter_fingerprints() const {
  Fingerprints fingerprints;
  for (const auto& p : parameters_) fingerprints.add(p.name, p.tensor);
  return fingerprints;
}

Fingerprints ModelTensors::buffer_fingerprints() const {
  Fingerprints fingerprints;
  for (const auto& b : buffers_)
    if (b.tensor.defined()) fingerprints.add(b.name, b.tensor);
  return fingerprints;
}

// The optimizer gives every parameter that it steps memory of its own: what shares memory with one
// would no longer follow it, and nothing would show it.
void ModelTensors::check_own_memory() const {
  struct Range {
    c10::Device device;
    const char* begin;
    const char* end;
    const std::string* name;
    bool moves;
  };
  std::vector<Range> ranges;
  const auto add = [&](const std::string& name, const at::Tensor& t, bool moves) {
    if (!t.defined() || !t.has_storage() || t.numel() == 0 || t.is_meta()) return;
    const auto* const begin = static_cast<const char*>(t.const_data_ptr());
    const auto bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
    ranges.push_back({t.device(), begin, begin + bytes, &name, moves});
  };
  for (const auto& p : parameters_) add(p.name, p.tensor, p.tensor.requires_grad());
  for (const auto& b : buffers_) add(b.name, b.tensor, false);
  for (const auto& i : ignored_) add(i.name, i.tensor, false);
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::tuple(a.device.type(), a.device.index(), a.begin) <
           std::tuple(b.device.type(), b.device.index(), b.begin);
  });
  // What reaches furthest, of all and of those that move.
  const Range* all = nullptr;
  const Range* moving = nullptr;
  for (const Range& range : ranges) {
    const Range* before = range.moves ? all : moving;
    if (before != nullptr && before->device == range.device && before->end > range.begin) {
      const auto [first, second] = std::minmax(*before->name, *range.name);
      throw UsageError("ShardedOptimizer",
                       "'{}' and '{}' lie in the same memory (set_data?), and each parameter that "
                       "is stepped gets memory of its own. To tie two parameters, register one "
                       "tensor under both names; otherwise clone one, or use a replicated "
                       "optimizer.",
                       first, second);
    }
    const auto reach = [&](const Range*& furthest) {
      const bool further =
          furthest == nullptr || furthest->device != range.device || furthest->end < range.end;
      if (further) furthest = &range;
    };
    reach(all);
    if (range.moves) reach(moving);
  }
}

}  // namespace lockstep::parallel
