// ModelTensors: the parameters and buffers that a reducer keeps equal on all ranks. ChangeDetector:
// detects that they no longer match the layout of its buckets.
//
//   ModelTensors model(named_parameters, named_buffers, options);
//   model.broadcast(world, 0);
//   model[3].name;                  // the fourth parameter
//
// One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "lockstep/parallel/reducer_types.h"
#include "lockstep/parallel/replicas.h"

namespace torch::nn {
class Module;
}

namespace lockstep::parallel {

// The properties of a parameter that its place in a bucket depends on.
struct ParameterForm {
  bool requires_grad = false;
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
  std::vector<std::int64_t> sizes;
  bool operator==(const ParameterForm&) const = default;
};

struct ModelParameter {
  std::string name;
  at::Tensor tensor;
  bool sparse = false;
  ParameterForm form() const;  // as it is now
};

// By name, as the module lists them; without undefined buffers.
std::vector<NamedTensor> parameters_of(const torch::nn::Module& module);
std::vector<NamedTensor> buffers_of(const torch::nn::Module& module);
// The names of the weights of embeddings that were made with sparse(true).
std::vector<std::string> sparse_embeddings(const torch::nn::Module& module);

// Tied parameters appear once, ignored ones not at all.
class ModelTensors {
 public:
  ModelTensors() = default;
  // Throws UsageError for what cannot be wrapped.
  ModelTensors(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
               const DdpOptions& options);

  std::size_t size() const { return parameters_.size(); }
  const ModelParameter& operator[](std::size_t index) const { return parameters_[index]; }
  const std::vector<ModelParameter>& parameters() const { return parameters_; }

  // Collective.
  void broadcast(World& world, int root);
  void broadcast_buffers(World& world, int root);

  std::string describe_buffers() const;  // a line each
  bool has_cpu_buffers() const;
  Fingerprints parameter_fingerprints() const;
  Fingerprints buffer_fingerprints() const;
  // Throws UsageError naming a trained parameter and what it shares memory with, if anything.
  void check_own_memory() const;

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor;
    std::int64_t version = 0;  // after the last broadcast
  };
  std::vector<at::Tensor> buffer_tensors() const;

  std::vector<ModelParameter> parameters_;
  std::vector<Buffer> buffers_;
  std::vector<NamedTensor> ignored_;
};

// Whether the model is still what its buckets were laid out for, here and on the other ranks.
// Parameters may have been frozen, unfrozen, reshaped, moved to another dtype or device, replaced
// or added. Such a model is refused on all ranks, with the parameter's name; the user wraps it
// again.
//
//   if (changes.look()) ...            // at the beginning of a pass
//   changes.send_flag(buckets.flag()); // with the first bucket
//   changes.flag();                    // at its end: not zero where some rank's model has changed
//   changes.refuse();                  // then, on every rank
//
// A rank whose model changed does not know whether the others' did, and an exchange in every step
// would cost too much. So it joins one more pass that the others may be in, with buckets of zeros
// and a change flag behind the first one's gradients. Every rank reads the flag when that pass
// ends, and then all exchange what has changed.
class ChangeDetector {
 public:
  ChangeDetector(World& world, const ModelTensors& model, const DdpOptions& options)
      : world_(world), model_(model), options_(options) {}

  void accept();  // buckets are laid out for the model as it is now
  const std::vector<ParameterForm>& forms() const { return forms_; }
  bool trained(std::size_t parameter) const { return forms_[parameter].requires_grad; }

  // Watches for trained parameters that the module gets from now on, while it lives.
  void follow(const torch::nn::Module& module);
  // Each as "parameter 'b.weight' was added". Walks over the module, and is cheap while it finds
  // none.
  std::vector<std::string> new_parameters() const;

  bool changed() const;  // a parameter that was there
  // In the forward of a pass: whether there are new ones. If not, its look() does not walk again.
  bool look_for_new() { return !(none_new_ = new_parameters().empty()); }
  bool look();
  void look_at_known();                  // in a pass that does not synchronise
  bool stale() const { return stale_; }  // what the last look found

  // Throws UsageError on all ranks where the models differ, or where one has a refusal. Collective.
  void check_same_model(std::exception_ptr refusal = {}) const;
  // Throws UsageError on all ranks, with what has changed on which of them. Collective.
  [[noreturn]] void refuse() const;

  // `carrier` is one element that is reduced along with other data; undefined: sends a separate
  // message, collectively.
  void send_flag(at::Tensor carrier);
  const at::Tensor& flag();  // waits for that message; a carrier was waited for by the caller

 private:
  std::string describe() const;
  std::string change_of(std::size_t parameter) const;  // such as frozen; empty: none

  World& world_;
  const ModelTensors& model_;
  const DdpOptions& options_;
  std::vector<ParameterForm> forms_;  // by parameter
  std::weak_ptr<const torch::nn::Module> module_;
  // The module's parameters when it was wrapped; the model and its options keep them alive.
  std::unordered_set<const at::TensorImpl*> followed_;
  bool stale_ = false;
  bool none_new_ = false;  // in the forward of the pass that begins
  at::Tensor flag_;
  Work flag_work_;
};

}  // namespace lockstep::parallel
