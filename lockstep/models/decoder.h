// What the families of language models share: attention over a cache, how blocks are run, and how
// parameters are made. Internal; causal_lm.h is what programs use.
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "lockstep/models/causal_lm.h"
#include "lockstep/models/linear.h"

namespace lockstep::models::detail {

// What the blocks of one forward share.
struct Pass {
  KvCache* cache = nullptr;
  bool causal = true;  // false and no mask: every token sees all of the cache
  at::Tensor mask{};   // bool [time, cache and time], where `causal` does not say it
  at::Tensor cos{};    // rotary angles [time, rotated width]
  at::Tensor sin{};
  at::ScalarType type = at::kFloat;  // in which blocks of the fused path compute
};

// The stream between blocks of the fused path: what a block adds last is added by the next norm.
struct Residual {
  at::Tensor sum;
  at::Tensor delta{};       // undefined: nothing is left to add
  at::Tensor delta_bias{};  // of the layer that made delta; optional

  // With everything added.
  at::Tensor total() const;
};

// The types of the fused path.
struct FusedTypes {
  at::ScalarType compute;   // that of autocasting on the device, otherwise `weight`'s
  at::ScalarType residual;  // of the stream between blocks
};
// The stream is float where that is asked for, and always beside float16, whose range it can leave:
// no loss scale would cure that.
FusedTypes fused_types(c10::Device device, const at::Tensor& weight, bool residual_in_fp32);

// `window`: how many tokens a token sees; 0: all before it.
Pass begin_pass(const at::Tensor& ids, KvCache* cache, std::int64_t window);

// [batch, time, heads * width] -> [batch, heads, time, width]
at::Tensor by_head(const at::Tensor& x, std::int64_t heads);

// Queries [batch, heads, time, width] over keys and values, of which several heads may share one.
// Returns [batch, time, heads * width].
at::Tensor attend(const at::Tensor& queries, at::Tensor keys, at::Tensor values, const Pass& pass,
                  std::size_t layer, double dropout);
// Without a cache, by lockstep::nn where there is no mask.
at::Tensor attend_fused(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                        const Pass& pass, double dropout);

at::Tensor activate(Activation activation, const at::Tensor& x);

class DecoderBlock : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& x, const Pass& pass) = 0;
  virtual void forward_fused(Residual& x, const Pass& pass) = 0;

  // Set by place(), where another stage of a device map begins: what run_blocks copies the input
  // to, and the output of the last block.
  std::optional<c10::Device> copy_input_to;
  std::optional<c10::Device> copy_output_to;
};

at::Tensor run_blocks(const torch::nn::ModuleListImpl& blocks, at::Tensor x, Pass pass,
                      const BlockRunner& runner);
Residual run_blocks_fused(const torch::nn::ModuleListImpl& blocks, at::Tensor x, const Pass& pass,
                          const BlockRunner& runner);

// A Linear whose tensors are drawn or left to be loaded, as `parameters` says.
Linear make_linear(LinearOptions options, const ParameterOptions& parameters);
// An embedding with unset weights, or drawn as torch draws them.
torch::nn::Embedding make_embedding(std::int64_t rows, std::int64_t width,
                                    const ParameterOptions& parameters);
void draw(at::Tensor weight, double deviation);

}  // namespace lockstep::models::detail
