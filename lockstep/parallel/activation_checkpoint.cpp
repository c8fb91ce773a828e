#include "lockstep/parallel/activation_checkpoint.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <optional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/parallel/backward_hooks.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The state that the second run must share with the first.
struct Surroundings {
  at::Tensor cpu_random_state;
  std::vector<std::pair<c10::DeviceIndex, at::Tensor>> cuda_random_states;
  bool autocast_cpu = false;
  bool autocast_cuda = false;
  at::ScalarType autocast_cpu_dtype = at::kBFloat16;
  at::ScalarType autocast_cuda_dtype = at::kHalf;
  std::optional<nn::Fp8Recipe> fp8{};
};

at::Tensor random_state_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(at::Generator generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

Surroundings surroundings_now(const std::vector<at::Tensor>& inputs) {
  Surroundings now;
  now.cpu_random_state = random_state_of(at::detail::getDefaultCPUGenerator());
  for (const auto& input : inputs) {
    if (!input.defined() || !input.is_cuda()) continue;
    const auto index = input.device().index();
    bool known = false;
    for (const auto& [other, state] : now.cuda_random_states) known |= other == index;
    if (known) continue;
    now.cuda_random_states.emplace_back(
        index, random_state_of(at::globalContext().defaultGenerator(input.device())));
  }
  now.autocast_cpu = at::autocast::is_autocast_enabled(at::kCPU);
  now.autocast_cuda = at::autocast::is_autocast_enabled(at::kCUDA);
  now.autocast_cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU);
  now.autocast_cuda_dtype = at::autocast::get_autocast_dtype(at::kCUDA);
  now.fp8 = nn::Fp8Autocast::current();
  return now;
}

void apply_surroundings(const Surroundings& then) {
  set_random_state(at::detail::getDefaultCPUGenerator(), then.cpu_random_state);
  for (const auto& [index, state] : then.cuda_random_states)
    set_random_state(at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, index)), state);
  at::autocast::set_autocast_enabled(at::kCPU, then.autocast_cpu);
  at::autocast::set_autocast_enabled(at::kCUDA, then.autocast_cuda);
  at::autocast::set_autocast_dtype(at::kCPU, then.autocast_cpu_dtype);
  at::autocast::set_autocast_dtype(at::kCUDA, then.autocast_cuda_dtype);
  nn::Fp8Autocast::set(then.fp8);
}

// Restores what the caller had, however the block leaves.
class Restore {
 public:
  explicit Restore(const std::vector<at::Tensor>& inputs) : before_(surroundings_now(inputs)) {}
  ~Restore() { apply_surroundings(before_); }

 private:
  Surroundings before_;
};

// Runs a block without autocasting's cache of converted weights. Weights converted in the first run
// have no graph and must not be reused where one is needed; those of the second run would stay
// cached until after the step, when the weights have changed.
at::Tensor run_uncached(const CheckpointBlock& block, const std::vector<at::Tensor>& inputs) {
  struct Uncached {
    const bool before = at::autocast::is_autocast_cache_enabled();
    Uncached() { at::autocast::set_autocast_cache_enabled(false); }
    ~Uncached() { at::autocast::set_autocast_cache_enabled(before); }
  };
  const Uncached uncached;
  return block(inputs);
}

// The second run has a graph of its own, which ends with this backward and reaches the parameters
// of the block whether they were asked for or not.
void refuse_partial_backward() {
  if (torch::GradMode::is_enabled())
    throw UsageError("checkpoint",
                     "backward with create_graph = true reached a checkpointed block, whose "
                     "gradients cannot be differentiated again. Call the block without "
                     "checkpoint() where a second derivative (a gradient penalty) is needed.");
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen != nullptr && !chosen->empty())
    throw UsageError("checkpoint",
                     "torch::autograd::grad, or backward with a list of inputs, reached a "
                     "checkpointed block. It would add to .grad of all the block's parameters. "
                     "Call backward() without inputs, or the block without checkpoint().");
}

struct Saved : torch::CustomClassHolder {
  CheckpointBlock block;
  Surroundings surroundings;
};

class CheckpointFunction : public torch::autograd::Function<CheckpointFunction> {
 public:
  // `anchor` always requires a gradient, so that a block whose inputs do not still gets a backward
  // for its parameters.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<Saved>& saved, at::TensorList inputs) {
    const std::vector<at::Tensor> list = inputs.vec();
    saved->surroundings = surroundings_now(list);
    context->saved_data["saved"] = c10::IValue::make_capsule(saved);
    context->save_for_backward(list);
    at::Tensor output = run_uncached(saved->block, list);
    // An output that is one of the inputs (or a view) must not be taken for it.
    return output.requires_grad() ? output.detach() : output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_partial_backward();
    const auto saved =
        c10::static_intrusive_pointer_cast<Saved>(context->saved_data["saved"].toCapsule());
    const variable_list originals = context->get_saved_variables();
    std::vector<at::Tensor> inputs;
    for (const auto& original : originals) {
      at::Tensor copy = original.defined() ? original.detach() : original;
      if (copy.defined()) copy.set_requires_grad(original.requires_grad());
      inputs.push_back(std::move(copy));
    }
    at::Tensor output;
    {
      Restore restore(inputs);
      apply_surroundings(saved->surroundings);
      torch::AutoGradMode with_gradient(true);
      output = run_uncached(saved->block, inputs);
    }
    if (output.requires_grad()) {
      parallel::NestedBackward nested;
      torch::autograd::backward({output}, {gradients[0]});
    }
    variable_list result{at::Tensor(), at::Tensor()};
    for (const auto& input : inputs) result.push_back(input.defined() ? input.grad() : input);
    return result;
  }
};

}  // namespace

namespace parallel {

bool is_checkpoint_node(const torch::autograd::Node& node) {
  return dynamic_cast<const torch::autograd::CppNode<CheckpointFunction>*>(&node) != nullptr;
}

}  // namespace parallel

at::Tensor checkpoint(CheckpointBlock block, std::vector<at::Tensor> inputs) {
  if (!torch::GradMode::is_enabled()) return block(inputs);
  auto saved = c10::make_intrusive<Saved>();
  saved->block = std::move(block);
  const at::Tensor anchor = at::empty({0}).set_requires_grad(true);
  return CheckpointFunction::apply(anchor, saved, at::TensorList(inputs));
}

at::Tensor checkpoint_sequential(const std::vector<SequentialBlock>& blocks, std::size_t segments,
                                 at::Tensor input) {
  if (segments == 0 || segments > blocks.size())
    throw UsageError("checkpoint_sequential",
                     "{} segments of {} blocks. Each segment needs a block. Use 1 to {}.", segments,
                     blocks.size(), blocks.size());
  const auto run = [&](std::size_t begin, std::size_t end) {
    // By value: backward runs it again when the caller's list may be gone.
    return [part = std::vector(blocks.begin() + static_cast<std::ptrdiff_t>(begin),
                               blocks.begin() + static_cast<std::ptrdiff_t>(end))](
               const std::vector<at::Tensor>& in) {
      at::Tensor x = in[0];
      for (const auto& block : part) x = block(x);
      return x;
    };
  };
  const std::size_t length = blocks.size() / segments;
  std::size_t begin = 0;
  for (std::size_t segment = 0; segment + 1 < segments; ++segment, begin += length)
    input = checkpoint(run(begin, begin + length), {input});
  return run(begin, blocks.size())({input});
}

}  // namespace lockstep
