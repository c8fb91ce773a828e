// Linear layers in 8-bit floating point: inputs and weights in e4m3, gradients in e5m2, each with
// scales computed in every call, on the device, from its own largest magnitudes.
//
//   const nn::Fp8Autocast fp8(nn::Fp8Recipe::kTensorwise);      // around the forward of our models
//   const at::Tensor loss = model->loss(ids, targets);
//
//   const at::Tensor y = nn::fp8_linear(x, {weight}, bias);     // in a module of your own
//   const at::Tensor gate_up = nn::fp8_linear(x, {gate, up}, {});   // one product of both
//
// A GPU needs compute capability 8.9 (Ada, Hopper, Blackwell). The CPU computes the same by
// definition: it casts, multiplies in float, and saves nothing. docs/optimisation.md says where it
// pays. fp8_linear and to_fp8 are stateless and callable from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/nn/functional.h"

namespace lockstep::nn {

// One scale for a tensor, or one for each row of an operand. The names are torchao's.
enum class Fp8Recipe : int { kTensorwise, kRowwise };
// "tensorwise" or "rowwise"; UsageError for another.
Fp8Recipe fp8_recipe_of(std::string_view name);

// While the guard lives, linear layers in the blocks of our language models compute in fp8. Guards
// nest; an empty one turns fp8 off. Thread-local, like autocasting; recomputation in backward uses
// its forward's setting.
class Fp8Autocast {
 public:
  explicit Fp8Autocast(std::optional<Fp8Recipe> recipe);
  ~Fp8Autocast();
  Fp8Autocast(const Fp8Autocast&) = delete;
  Fp8Autocast& operator=(const Fp8Autocast&) = delete;

  static std::optional<Fp8Recipe> current();
  static void set(std::optional<Fp8Recipe> recipe);  // without a guard

 private:
  std::optional<Fp8Recipe> before_;
};

// A matrix is values * scale.
struct Fp8Matrix {
  at::Tensor values;  // [rows, columns]
  at::Tensor scale;   // float [1], or [rows, 1]

  bool defined() const { return values.defined(); }
};
// The transpose has a memory of its own, since tensor cores read both sides of a product along
// the dimension that is summed. Its rows are padded with zeros to a multiple of 16; by row it has
// scales of its own.
struct Fp8Pair {
  Fp8Matrix matrix, transposed;
};
struct Fp8Wanted {
  bool matrix = true, transposed = true;
};

// Several matrices [rows, columns] of one width become one, below each other; tensorwise they have
// one scale. `type` is kFloat8_e4m3fn or kFloat8_e5m2. A matrix with an inf or nan becomes nan as a
// whole, or row by row: a step that skips non-finite gradients sees it. `amax` as in Fp8Input.
Fp8Pair to_fp8(const std::vector<at::Tensor>& matrices, at::ScalarType type, Fp8Recipe recipe,
               const Fp8Wanted& wanted = {}, const at::Tensor& amax = {});
// The matrix in float again.
at::Tensor from_fp8(const Fp8Matrix& matrix);
// For a matrix that is sent in parts. part_to_fp8() casts a part to e4m3; `amax` is the largest
// magnitude of the whole matrix (float, on its device). scale_part_from_fp8() takes such a part
// after a copy to a wider type, and scales it in place to the values of the matrix. Casting all of
// these parts with to_fp8() gives the same bytes and scale.
at::Tensor part_to_fp8(const at::Tensor& part, const at::Tensor& amax);
void scale_part_from_fp8(const at::Tensor& part, const at::Tensor& amax);

// An input, with its largest magnitude if its producer has computed that (the norms, swiglu()).
// Tensorwise, the values are then read once, for the cast; rowwise it is not used.
//
//   at::Tensor amax;
//   const at::Tensor normed = nn::rms_norm(x, weight, 1e-6, {}, &amax);
//   const at::Tensor y = nn::fp8_linear({normed, amax}, {w}, bias);
struct Fp8Input {
  Fp8Input(at::Tensor of, at::Tensor largest = {},  // a tensor is an input
           std::function<at::Tensor()> how = {})
      : values(std::move(of)), amax(std::move(largest)), again(std::move(how)) {}

  at::Tensor values;
  at::Tensor amax;  // float [1] on the device of the values, exactly the largest; optional
  // Makes the values again in backward (make_again() in divided.h): a layer then keeps them, which
  // costs nothing, and casts them again. Optional.
  std::function<at::Tensor()> again;
};

// x [weights]^T + bias: the products of x with all weights [out, in] side by side, in x's dtype;
// bias [all out] is optional. Weights may be float and are cast in each call, once for all. Their
// gradients are float, or of their dtype. Where a size is no multiple of 16 the layer is computed
// in x's dtype, and one line in the log says so. UsageError for a GPU without fp8.
at::Tensor fp8_linear(const Fp8Input& x, const std::vector<at::Tensor>& weights,
                      const at::Tensor& bias, Fp8Recipe recipe = Fp8Recipe::kTensorwise);
// swiglu() of that product, as the next layer's input, with `again`. Tensorwise, the product's
// gradient is not read for its largest magnitude either.
Fp8Input fp8_swiglu(const Fp8Input& x, const std::vector<at::Tensor>& weights,
                    const at::Tensor& bias, Fp8Recipe recipe = Fp8Recipe::kTensorwise);

// Whether fp8 supports the sizes of these weights.
bool fp8_covers(const std::vector<at::Tensor>& weights);

// Logs that a layer is not computed in fp8, and why; once for each size.
void warn_not_in_fp8(std::int64_t inputs, std::int64_t outputs, std::string_view why);

// lora_linear() with a frozen base in fp8: to_fp8 of its weight [out, in].
at::Tensor fp8_lora_linear(const Fp8Input& x, const Fp8Pair& base, const at::Tensor& bias,
                           const at::Tensor& a, const at::Tensor& b,
                           const LoraOptions& options = {});

}  // namespace lockstep::nn
