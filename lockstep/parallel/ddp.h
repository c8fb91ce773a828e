// DistributedDataParallel: the same model on every rank, synchronized by averaging gradients.
//
//   lockstep::DistributedDataParallel model{net, world};   // after net->to(world.device())
//   loss_of(model(batch.data)).backward();   // gradients are averaged while this runs
//   optimizer.step();                   // every rank takes the same step
//
// Where several backward passes make a step, data::Window (lockstep/data/window.h) weighs them.
//
// Whether a backward synchronises is decided when backward runs, not in forward: calling the raw
// module synchronises as well, and a no_sync() guard works wherever it is opened before backward().
//
// Wraps a std::shared_ptr to a module, a TORCH_MODULE holder or a Sequential; for a plain list of
// parameters use Reducer. The wrapper shares ownership of module and world. One thread at a time.
//
// DataParallel is its Parallelism, and lockstep::hooks has ready-made communication hooks.
#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/mesh.h"
#include "lockstep/parallel/parallelism.h"
#include "lockstep/parallel/reducer.h"
#include "lockstep/parallel/reducer_types.h"

namespace lockstep {

// The whole model on every rank; gradients are averaged by a Reducer in backward.
// DistributedDataParallel makes one for its module.
//
// They are averaged over the mesh's batch axis. Ranks along its other axes must compute the same
// gradients: those of a module that divides its work among them by itself.
//
//   DataParallel parallelism(*net, world, {.bucket_cap_mb = 25});
//
// Shares the parameters; the reducer's hooks do not hold the module.
class DataParallel final : public Parallelism {
 public:
  using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

  // Collective, as Reducer's constructor.
  DataParallel(const torch::nn::Module& module, Mesh mesh, DdpOptions options = {});
  // For a list of parameters; the names are those of its optimizer's state.
  DataParallel(std::shared_ptr<Reducer> reducer, NamedParameters names)
      : DataParallel(reducer, std::move(names), reducer->world()) {}

  const std::shared_ptr<Reducer>& reducer() const { return reducer_; }

  const Mesh& mesh() const override { return mesh_; }
  std::string text() const override { return "replicated"; }
  std::unique_ptr<optim::Optimizer> make_optimizer(std::vector<optim::ParamGroup> groups) override;
  at::Tensor watch(at::Tensor output) override { return reducer_->watch(std::move(output)); }
  void backward(const at::Tensor& loss, bool last) override;
  void verify_parameters() override { reducer_->verify_parameters(); }
  void verify_buffers() override { reducer_->verify_buffers(); }
  std::string unavailable_for_capture() const override { return {}; }
  std::uint64_t layout() const override { return reducer_->layout(); }
  bool settled() const override { return reducer_->settled(); }
  std::shared_ptr<void> recording() override;

 private:
  DataParallel(std::shared_ptr<Reducer> reducer, NamedParameters names, Mesh mesh)
      : names_(std::move(names)), reducer_(std::move(reducer)), mesh_(std::move(mesh)) {}

  NamedParameters names_;
  std::shared_ptr<Reducer> reducer_;
  Mesh mesh_;
};

namespace detail {

// Makes a backward that reaches no parameter noticeable: passes every tensor of an output through
// the reducer. Outputs of other types are returned unchanged.
template <typename T>
T watch_output(Reducer& reducer, T output) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return reducer.watch(std::move(output));
  } else if constexpr (std::is_same_v<T, std::vector<at::Tensor>>) {
    for (auto& tensor : output) tensor = reducer.watch(std::move(tensor));
  }
  return output;
}

template <typename... Ts>
std::tuple<Ts...> watch_output(Reducer& reducer, std::tuple<Ts...> output) {
  std::apply([&](auto&... parts) { ((parts = watch_output(reducer, std::move(parts))), ...); },
             output);
  return output;
}

// A std::shared_ptr to a module, a TORCH_MODULE holder or a Sequential.
template <typename T>
concept PointsToModule = requires(T& pointer) {
  { *pointer } -> std::convertible_to<const torch::nn::Module&>;
};

}  // namespace detail

template <typename Module>
class DistributedDataParallel {
  static_assert(detail::PointsToModule<Module>,
                "DistributedDataParallel shares the ownership of a module: pass the "
                "std::shared_ptr or the TORCH_MODULE holder itself, as in "
                "DistributedDataParallel{net, world}, and not *net.");

 public:
  DistributedDataParallel(Module module, Mesh mesh, DdpOptions options = {})
      : module_(std::move(module)),
        parallelism_(
            std::make_shared<DataParallel>(*module_, std::move(mesh), std::move(options))) {}

  template <typename... Args>
  auto operator()(Args&&... args) {
    using Output = decltype(module_->forward(std::forward<Args>(args)...));
    if constexpr (std::is_void_v<Output>) {
      module_->forward(std::forward<Args>(args)...);
    } else {
      return detail::watch_output(reducer(), module_->forward(std::forward<Args>(args)...));
    }
  }
  template <typename... Args>
  auto forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }

  Module& module() { return module_; }
  auto operator->() { return &*module_; }
  std::vector<at::Tensor> parameters() const { return module_->parameters(); }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }

  // Runs loss.backward(). Without `last` gradients stay on this rank: more passes come before the
  // step.
  void backward(const at::Tensor& loss, bool last) { parallelism_->backward(loss, last); }
  // While the guard lives, backward accumulates locally. Guards nest.
  [[nodiscard]] NoSync no_sync() { return NoSync(reducer_ptr()); }

  // Runs `body` (a loop of steps) on ranks with different numbers of steps: a rank that has
  // finished contributes zeros to the others' reductions until all have, and then takes the model
  // of the last one. Collective.
  void join(const std::function<void()>& body, JoinOptions options = {}) {
    reducer().join(body, options);
  }

  void register_comm_hook(CommHook hook) { reducer().register_comm_hook(std::move(hook)); }

  // Throws CommError naming tensor and rank when parameters or buffers differ in any bit.
  // Collective.
  void verify_replicas() { reducer().verify_replicas(); }

  const StepTiming& last_timing() const { return reducer_ptr()->last_timing(); }
  // For CapturedStep and others that work with any Parallelism.
  const std::shared_ptr<DataParallel>& parallelism() const { return parallelism_; }
  Reducer& reducer() { return *reducer_ptr(); }
  const std::shared_ptr<Reducer>& reducer_ptr() const { return parallelism_->reducer(); }
  World& world() { return parallelism_->mesh().world(); }

 private:
  Module module_;
  std::shared_ptr<DataParallel> parallelism_;
};

}  // namespace lockstep

// Communication hooks with PyTorch's arithmetic.
//
//   model.register_comm_hook(lockstep::hooks::bf16_compress());
namespace lockstep::hooks {

CommHook all_reduce();     // what happens without a hook
CommHook fp16_compress();  // halves the bytes; float16 on the wire
CommHook bf16_compress();

}  // namespace lockstep::hooks
