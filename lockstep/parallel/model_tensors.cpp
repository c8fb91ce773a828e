#include "lockstep/parallel/model_tensors.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "lockstep/comm/numbers.h"
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

std::vector<std::string> sparse_embeddings(const torch::nn::Module& module) {
  std::vector<std::string> names;
  const auto look = [&](const std::string& prefix, const torch::nn::Module& part) {
    const auto* const embedding = part.as<torch::nn::EmbeddingImpl>();
    const auto* const bag = part.as<torch::nn::EmbeddingBagImpl>();
    if (!(embedding != nullptr && embedding->options.sparse()) &&
        !(bag != nullptr && bag->options.sparse()))
      return;
    for (const auto& item : part.named_parameters(/*recurse=*/false))
      names.push_back(prefix.empty() ? item.key() : prefix + "." + item.key());
  };
  look("", module);  // named_modules() lists it only where a shared pointer holds it
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    look(item.key(), *item.value());
  return names;
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

// BatchNorm's kernel writes running statistics without counting a version, so that a second graph
// may be alive, and so does this broadcast. A buffer whose version was counted up since the last
// broadcast is counted up once more, on every rank including the root: a graph that needs its old
// value is then refused by all of them.
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
    if (nn::rows_of(t) != nullptr) return;  // divided while it was made
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
  // The range that reaches furthest so far: of all, and of those that the optimizer moves.
  const Range* all = nullptr;
  const Range* moving = nullptr;
  for (const Range& range : ranges) {
    const Range* before = range.moves ? all : moving;
    if (before != nullptr && before->device == range.device && before->end > range.begin) {
      const auto [first, second] = std::minmax(*before->name, *range.name);
      throw UsageError("fully_shard",
                       "'{}' and '{}' lie in the same memory (set_data?), and each parameter that "
                       "is stepped gets memory of its own. To tie two parameters, register one "
                       "tensor under both names; otherwise clone one, or use "
                       "DistributedDataParallel (shard_optimizer: false).",
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

namespace {

// How a parameter's elements follow each other, where not row by row: its gradient lies in the
// bucket in the same order.
std::string show_strides(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense()) return "";
  std::vector<std::string> strides;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)  // one element has no next one
    strides.push_back(tensor.size(i) == 1 ? "-" : std::to_string(tensor.stride(i)));
  return fmt::format(", strides [{}]", fmt::join(strides, ", "));
}

}  // namespace

void ChangeDetector::accept() {
  forms_.clear();
  for (const auto& p : model_.parameters()) forms_.push_back(p.form());
  stale_ = false;
}

namespace {

// Reads a module's own parameters in place: named_parameters() copies tensors and names, and this
// runs in every pass.
struct OwnParameters : torch::nn::Module {
  static const auto& of(const torch::nn::Module& module) {
    return module.*(&OwnParameters::parameters_);
  }
};

template <typename Visit>
void for_each_parameter(const torch::nn::Module& module, const Visit& visit) {
  for (const auto& own : OwnParameters::of(module)) visit(own.value());
  for (const auto& child : module.children()) for_each_parameter(*child, visit);
}

}  // namespace

void ChangeDetector::follow(const torch::nn::Module& module) {
  module_ = module.weak_from_this();
  followed_.clear();
  for_each_parameter(
      module, [&](const at::Tensor& tensor) { followed_.insert(tensor.unsafeGetTensorImpl()); });
}

bool ChangeDetector::look() {
  const bool none_new = std::exchange(none_new_, false) || new_parameters().empty();
  return stale_ = changed() || !none_new;
}

void ChangeDetector::look_at_known() {
  none_new_ = false;
  stale_ = changed();
}

std::vector<std::string> ChangeDetector::new_parameters() const {
  std::vector<std::string> found;
  const auto module = module_.lock();
  if (!module) return found;
  // One that is not trained has no gradient that could be missed.
  const auto may_miss = [&](const at::Tensor& tensor) {
    return tensor.requires_grad() && !followed_.contains(tensor.unsafeGetTensorImpl());
  };
  bool any = false;
  for_each_parameter(*module, [&](const at::Tensor& tensor) { any = any || may_miss(tensor); });
  if (!any) return found;
  std::unordered_set<std::string> names;
  for (const ModelParameter& p : model_.parameters()) names.insert(p.name);
  for (const auto& item : module->named_parameters()) {
    const std::string& name = item.key();
    if (!may_miss(item.value()) || contains(options_.ignored_parameters, name)) continue;
    found.push_back(
        fmt::format("parameter '{}' was {}", name, names.contains(name) ? "replaced" : "added"));
  }
  return found;
}

// As forms() != accepted ones, but without an allocation: it runs in every pass.
bool ChangeDetector::changed() const {
  for (std::size_t i = 0; i < forms_.size(); ++i) {
    const at::Tensor& t = model_[i].tensor;
    const ParameterForm& form = forms_[i];
    if (t.requires_grad() != form.requires_grad || t.scalar_type() != form.dtype ||
        t.device() != form.device || t.sizes() != form.sizes)
      return true;
  }
  return false;
}

// Ranks with different models would mix up gradients or hang; say which parameter differs.
void ChangeDetector::check_same_model(std::exception_ptr refusal) const {
  std::string lines;
  if (!refusal) refusal = refusal_of([&] { lines = describe(); });
  const Check check{.component = "reducer", .what = "to wrap the model", .refusal = refusal};
  const auto other = find_other_line(world_, check, lines);
  if (!other) return;
  // Parameters come before buffers and options: a line of a later kind is what follows after the
  // last parameter (or buffer) of a rank that lacks the other's.
  const auto kind = [](const std::string& line) {
    if (line.empty()) return 3;
    return line.starts_with("option ") ? 2 : line.find(": buffer, ") != std::string::npos ? 1 : 0;
  };
  const int earlier = std::min(kind(other->first), kind(other->here));
  const auto show = [&](const std::string& line) -> std::string {
    if (kind(line) == earlier) return line;
    return earlier == 1 ? "(no such buffer)" : "(no such parameter)";
  };
  throw UsageError("reducer",
                   "the models differ between ranks: rank 0 has '{}', rank {} has '{}'. Build the "
                   "same model with the same options on every rank.",
                   show(other->first), other->rank, show(other->here));
}

// A line for everything that decides which collectives follow, and what lies where in them.
std::string ChangeDetector::describe() const {
  std::string text;
  for (std::size_t i = 0; i < model_.size(); ++i) {
    const ModelParameter& p = model_[i];
    const ParameterForm form = p.form();
    text += fmt::format("{}: shape [{}], {} on {}, requires_grad={}{}{}\n", p.name,
                        fmt::join(form.sizes, ", "), c10::toString(form.dtype),
                        c10::DeviceTypeName(form.device.type(), /*lower_case=*/true),
                        form.requires_grad, show_strides(p.tensor), p.sparse ? ", sparse" : "");
  }
  text += model_.describe_buffers();
  const auto option = [&](const char* name, const auto& value) {
    text += fmt::format("option {}: {}\n", name, value);
  };
  const auto shown = [](const auto& optional) {
    return optional ? fmt::format("{}", *optional) : "unset";
  };
  option("bucket_cap_mb", shown(options_.bucket_cap_mb));
  option("find_unused_parameters", options_.find_unused_parameters);
  option("static_graph", options_.static_graph);
  option("broadcast_buffers", options_.broadcast_buffers);
  option("init_sync", options_.init_sync);
  option("overlap", shown(options_.overlap));
  return text;
}

std::string ChangeDetector::change_of(std::size_t parameter) const {
  const ParameterForm now = model_[parameter].form();
  const ParameterForm& then = forms_[parameter];
  if (now.requires_grad != then.requires_grad) return now.requires_grad ? "unfrozen" : "frozen";
  if (now.dtype != then.dtype) return fmt::format("moved to {}", c10::toString(now.dtype));
  if (now.device != then.device) return "moved to " + now.device.str();
  if (now.sizes == then.sizes) return "";
  return fmt::format("given the shape [{}]", fmt::join(now.sizes, ", "));
}

void ChangeDetector::refuse() const {
  constexpr std::size_t kShown = 4;
  std::vector<std::string> changes;
  for (std::size_t i = 0; i < forms_.size(); ++i)
    if (const std::string change = change_of(i); !change.empty())
      changes.push_back(fmt::format("parameter '{}' was {}", model_[i].name, change));
  for (std::string& found : new_parameters()) changes.push_back(std::move(found));
  const std::size_t more = changes.size() > kShown ? changes.size() - kShown : 0;
  changes.resize(changes.size() - more);
  std::string mine = fmt::format("{}", fmt::join(changes, ", "));
  if (more > 0) mine += fmt::format(" and {} more were changed", more);
  // Ranks with the same changes share a line.
  std::map<std::string, std::vector<int>> ranks;
  const std::vector<std::string> all = all_gather_bytes(world_, mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) ranks[all[rank]].push_back(static_cast<int>(rank));
  std::vector<std::string> lines;
  for (const auto& [change, which] : ranks)
    lines.push_back(fmt::format("on {} {}", show_ranks(which), change));
  throw UsageError("reducer",
                   "the model was changed after it was wrapped: {}. What ranks exchange is laid "
                   "out for the model as it was. Make the change on every rank, and wrap the model "
                   "again.",
                   fmt::join(lines, "; "));
}

void ChangeDetector::send_flag(at::Tensor carrier) {
  flag_ = std::move(carrier);
  flag_work_ = Work();
  if (flag_.defined()) {
    flag_.fill_(stale_ ? 1 : 0);
    return;
  }
  flag_ = at::full({1}, stale_ ? 1 : 0, at::kLong);
  flag_work_ = world_.all_reduce(flag_);
}

const at::Tensor& ChangeDetector::flag() {
  flag_work_.wait();
  return flag_;
}

}  // namespace lockstep::parallel
