// Block: a part of a model that is computed as a unit, and that FullyShard gathers and frees.
//
//   struct LayerImpl : torch::nn::Module, lockstep::nn::Block {
//     at::Tensor forward(const at::Tensor& x) {
//       return run([this](const auto& in) { return x_plus_mlp(in[0]); }, {x});
//     }
//   };
//
// LibTorch's modules have no forward hooks, so a block calls its runner; without one, run() is a
// plain call. A module of another library becomes a block by deriving from it, and its parameters
// keep their names:
//
//   using Layer = lockstep::nn::BlockOf<torch::nn::LinearImpl>;
//   auto layer = register_module("layer", std::make_shared<Layer>(8, 8));
//
// A constructor reports each complete block, so that a model need never be in memory as a whole
// (ShardedConstruction in lockstep/parallel/fully_shard.h):
//
//   layers->push_back(lockstep::nn::made(std::make_shared<LayerImpl>()));
//
// One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep::nn {

class Block {
 public:
  // Tensors that a gradient flows through are arguments; everything else is captured.
  using Body = std::function<at::Tensor(const std::vector<at::Tensor>&)>;
  using Runner = std::function<at::Tensor(const Body& body, std::vector<at::Tensor> inputs)>;

  virtual ~Block() = default;

  at::Tensor run(const Body& body, std::vector<at::Tensor> inputs) {
    return runner_ ? runner_(body, std::move(inputs)) : body(inputs);
  }
  // The weights of the block's matrix products, which are computed in autocasting's type, or in fp8
  // under Fp8Autocast with one scale for each list. FullyShard gathers these weights in the type of
  // the product: the product would cast them anyway.
  virtual std::vector<std::vector<at::Tensor>> products() const { return {}; }
  // Null: run() calls the body.
  void run_with(Runner runner) { runner_ = std::move(runner); }
  bool has_runner() const { return runner_ != nullptr; }
  const Runner& runner() const { return runner_; }

 private:
  Runner runner_;
};

// A module whose forward takes tensors and returns one.
template <typename Module>
class BlockOf : public Module, public Block {
 public:
  using Module::Module;

  template <typename... Tensors>
  at::Tensor forward(const Tensors&... inputs) {
    return forward_all(std::index_sequence_for<Tensors...>{}, {inputs...});
  }

 private:
  template <std::size_t... Index>
  at::Tensor forward_all(std::index_sequence<Index...>, std::vector<at::Tensor> inputs) {
    return run([this](const std::vector<at::Tensor>& in) { return Module::forward(in[Index]...); },
               std::move(inputs));
  }
};

// An observer is called with each block that this thread makes; null: none is set. observe_blocks()
// returns the previous one.
using BlockObserver = std::function<void(torch::nn::Module& block)>;
BlockObserver observe_blocks(BlockObserver observer);
void report_made(torch::nn::Module& block);

template <typename Module>
std::shared_ptr<Module> made(std::shared_ptr<Module> block) {
  report_made(*block);
  return block;
}

// Staged: a model whose forward can begin and end between two blocks, so that each rank computes a
// stage of it (lockstep/parallel/pipeline.h).
//
//   struct Net : torch::nn::Module, lockstep::nn::Staged {
//     at::Tensor forward(const at::Tensor& ids) {
//       at::Tensor x = stage().first ? embed->forward(ids) : stage().input;
//       for (std::size_t i = stage().begin; i < stage().end_of(layers.size()); ++i)
//         x = layers[i]->forward(x);
//       return stage().last ? head->forward(x) : x;
//     }
//     Parts parts() const override;
//   };
//
// As torchtitan's models, it skips what a stage does not have. By default the stage is the whole
// model. One thread at a time.

class Staged {
 public:
  // The parameters that each part of the forward reads. A weight that two parts share (a head tied
  // to the embedding) is in both.
  struct Parts {
    std::vector<at::Tensor> first{};                // before the blocks: embeddings
    std::vector<std::vector<at::Tensor>> blocks{};  // in the order of the forward
    std::vector<at::Tensor> last{};                 // after the blocks: norm, head, loss
  };

  // The blocks [begin, end); `first` and `last` add what comes before and after all blocks.
  struct Stage {
    std::size_t begin = 0;
    std::size_t end = std::numeric_limits<std::size_t>::max();
    bool first = true;
    bool last = true;
    at::Tensor input{};  // the previous stage's output, if this is not the first

    std::size_t end_of(std::size_t blocks) const { return std::min(end, blocks); }
  };

  virtual ~Staged() = default;

  virtual Parts parts() const = 0;

  const Stage& stage() const { return stage_; }
  void set_stage(Stage stage) { stage_ = std::move(stage); }

 private:
  Stage stage_;
};

}  // namespace lockstep::nn
