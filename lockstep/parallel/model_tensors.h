// ModelTensors: the parameters and buffers that a reducer keeps equal on all ranks.
//
//   ModelTensors model(named_parameters, named_buffers, options);
//   model.broadcast(world, 0);
//   model[3].name;                  // the fourth parameter
//
// Tied parameters appear once, ignored ones not at all. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel/options.h"
#include "lockstep/parallel/reducer_types.h"
#include "lockstep/parallel/replicas.h"

namespace torch::nn {
class Module;
}

namespace lockstep::parallel {

// What buckets are laid out for.
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

}  // namespace lockstep::parallel
