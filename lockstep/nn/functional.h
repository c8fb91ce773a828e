// Fused operations for the modules of a model. Each is differentiable, runs on the CPU and on CUDA,
// and takes float, bfloat16 and float16 tensors of the shapes that its comment allows.
//
//   auto [x, y] = nn::add_layer_norm(residual, delta, proj_bias, weight, bias);
//   const auto h = nn::gelu_mlp(y, fc_weight, fc_bias, out_weight, out_bias);
//   const auto loss = nn::linear_cross_entropy(h, head_weight, targets, {.columns = 50257});
//
// On CUDA our kernels are used where they support the arguments (docs/optimisation.md), and ATen's
// operations otherwise; results agree within the rounding of the dtype. Sums are in float, or
// double for double tensors. at::Tensor() stands for an omitted optional tensor. Autocast does not
// apply inside: pass tensors in the dtype to compute in. Wrong shapes are a UsageError.
//
// Stateless; callable from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::nn {

// ---------------------------------------------------------------- norms over the last dimension

struct NormedSum {
  at::Tensor sum;     // residual + delta + delta_bias: the next residual
  at::Tensor normed;  // its norm
};

// `delta_bias` [columns] is the bias of the linear layer that made delta without it; optional.
// Weights may be float where the rest is bfloat16 or float16; layer_norm's bias is optional. The
// residual may be float too; then so is the sum, while the norm has delta's dtype. `amax`, if it is
// given, becomes the largest magnitude of the norm as it is stored, float [1] on its device: what
// fp8_linear() (fp8.h) would otherwise read the norm for.
NormedSum add_layer_norm(const at::Tensor& residual, const at::Tensor& delta,
                         const at::Tensor& delta_bias, const at::Tensor& weight,
                         const at::Tensor& bias, double eps = 1e-5, at::Tensor* amax = nullptr);
NormedSum add_rms_norm(const at::Tensor& residual, const at::Tensor& delta,
                       const at::Tensor& delta_bias, const at::Tensor& weight, double eps = 1e-6,
                       at::Tensor* amax = nullptr);
// `dtype` of the result: x's by default; another one is possible for a float x.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps = 1e-5, std::optional<at::ScalarType> dtype = {},
                      at::Tensor* amax = nullptr);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps = 1e-6,
                    std::optional<at::ScalarType> dtype = {}, at::Tensor* amax = nullptr);

// ---------------------------------------------------------------- losses

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  std::int64_t columns = 0;  // the real vocabulary, where the last dimension is padded; 0: all
};

// The mean over the targets that are not ignored: nan where all are, as in PyTorch. With a gradient
// to compute, the logits [..., vocabulary] are consumed: their memory then holds the gradient. So
// backward can run only once, and other readers of the logits must come first.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});

struct LinearCrossEntropyOptions {
  std::int64_t ignore_index = -100;
  std::int64_t columns = 0;
  std::int64_t chunk_rows = 0;  // 0: chosen so that the logits of a chunk take about 512 MiB
};

// cross_entropy(hidden weight^T): the head and the loss of a language model. At most chunk_rows
// rows of logits exist at a time, in hidden's dtype; the gradients are computed with them in
// forward, so backward only hands them over and can run only once. On CUDA a vocabulary of any size
// has the speed of a multiple of 64: the products have rows of zeros below the weight.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

// ---------------------------------------------------------------- linear layers

// A float weight with an input in bfloat16 or float16 is converted to the input's dtype in each
// call, and its gradient is computed in float. On a GPU the product adds it to a .grad that is
// there, unless a hook waits for it. A frozen weight in 4 bits (nf4.h) is taken by linear() and
// lora_linear().

// x weight^T + bias, weight [out, in]; pass weight.t() for one that is stored [in, out].
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
// Several layers of one input as one product; their outputs and their biases are side by side.
at::Tensor linear(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                  const at::Tensor& bias);

// gelu(x fc_weight^T + fc_bias) out_weight^T + out_bias with the tanh form of GELU. `out_bias` is
// optional: add_layer_norm can add it.
at::Tensor gelu_mlp(const at::Tensor& x, const at::Tensor& fc_weight, const at::Tensor& fc_bias,
                    const at::Tensor& out_weight, const at::Tensor& out_bias);

// silu(gate) * up, where gate and up are the halves of the last dimension; `amax` as for the norms.
at::Tensor swiglu(const at::Tensor& gate_up, at::Tensor* amax = nullptr);
// The same of two tensors.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up, at::Tensor* amax = nullptr);

struct LoraOptions {
  double scaling = 1;  // lora_alpha / r
  double dropout = 0;  // for the adapter's input; 0 in evaluation
};

// x weight^T + bias + scaling dropout(x) a^T b^T with a [r, in] and b [out, r]: the second product
// is accumulated into the first. The adapter may be float where the rest is bfloat16 or float16.
at::Tensor lora_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& a, const at::Tensor& b, const LoraOptions& options = {});

struct GroupedLinearOptions {
  // Unset: on CUDA in bfloat16, with widths that are multiples of 8.
  std::optional<bool> one_product{};
};

// Linear layers of groups of rows, as a mixture of experts has them: rows that are sorted by
// expert, and a weight for each expert.
//
// x [rows, in], weights [out, in] each. `ends` is int32 [groups] on x's device: the row after the
// last one of each group, in ascending order, up to the number of rows. A group may be empty; the
// gradient of its weight is then zero, and not undefined, so that every rank of a data-parallel run
// has the same gradients to reduce.
//
// Weights of another dtype than x are converted to it in each call. One product for all groups
// never waits for the device; it uses a copy of the weights in one tensor, unless they already lie
// in one (place_together), and its gradients are rounded to x's dtype. One product for each group
// waits for `ends`, and gradients of float weights are computed in float.
at::Tensor grouped_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                          const at::Tensor& ends, const GroupedLinearOptions& options = {});

// Moves weights of one shape and dtype into one allocation, in order, unless they are in one
// already. For frozen weights: views made of their memory before no longer share it.
void place_together(const std::vector<at::Tensor>& weights);

// ---------------------------------------------------------------- embeddings

struct EmbeddingOptions {
  std::optional<at::ScalarType> dtype{};  // of the result; default: that of `tokens`
  std::int64_t padding_index = -1;        // a token without a gradient; -1: none
};

// Rows of `tokens` [vocabulary, width] for ids [batch, time], plus the first rows of `positions`
// [time or more, width]; optional. They are added in the tensors' own dtype and rounded to `dtype`
// once. Gradients are summed in float.
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& tokens,
                     const at::Tensor& positions = {}, const EmbeddingOptions& options = {});

// ---------------------------------------------------------------- attention

// Rotates query and key [batch, heads, time, width] by the angles of their positions, as Llama
// does: element i is paired with i + w, where cos and sin are float [time, w] or [batch, time, w];
// elements from 2w on stay.
std::pair<at::Tensor, at::Tensor> rope(const at::Tensor& query, const at::Tensor& key,
                                       const at::Tensor& cos, const at::Tensor& sin);

struct AttentionOptions {
  bool causal = true;
  double dropout = 0;
  std::optional<double> scale{};  // default: 1 / sqrt(width)
};

// softmax(query key^T) value, [batch, heads, time, width]. Key and value may have fewer heads, a
// divisor of the query's (grouped-query attention).
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options = {});

struct CappedAttentionOptions {
  double cap = 50;
  double scale = 1;
  at::Tensor mask{};            // bool [time, keys]: what a query sees; undefined: everything
  std::int64_t chunk_rows = 0;  // queries at a time; 0: so that their scores take about 64 MiB
};

// Attention whose scores have a soft cap, as Gemma 2 has it: softmax(cap * tanh(score / cap)) times
// the values. There is no kernel for it in ATen. Scores exist for a part of the queries at a time,
// and backward computes them again: what is saved is query, key and value.
//
// query [batch, heads, time, width]; key and value [batch, heads or a divisor, keys, width]. The
// result has the query's shape and dtype; softmax is computed in float.
at::Tensor capped_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const CappedAttentionOptions& options);

}  // namespace lockstep::nn
