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
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

namespace lockstep::nn {

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
