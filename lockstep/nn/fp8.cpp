// Casts to fp8, products of fp8 matrices, and the linear layer in fp8 with its gradients.
#include "lockstep/nn/fp8.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/nn/on_cuda.h"

namespace lockstep::nn {
namespace {

constexpr std::int64_t kMultiple = 16;  // of sizes that tensor cores take
constexpr double kSmallest = 1e-30;     // its scale and the inverse are normal floats

thread_local std::optional<Fp8Recipe> current_recipe;

double largest(at::ScalarType type) {
  return type == at::kFloat8_e4m3fn ? 448 : 57344;
}

std::int64_t padded(std::int64_t rows) {
  return (rows + kMultiple - 1) / kMultiple * kMultiple;
}

// ---------------------------------------------------------------- the cast in ATen's operations

Fp8Matrix cast_with(const at::Tensor& matrix, const at::Tensor& amax, at::ScalarType type) {
  const at::Tensor scale = at::full({}, largest(type), amax.options()) / amax.clamp_min(kSmallest);
  const at::Tensor values =
      (matrix.to(at::kFloat) * scale).clamp(-largest(type), largest(type)).to(type);
  return {values, scale.reciprocal()};
}

Fp8Pair cast_aten(const std::vector<at::Tensor>& matrices, at::ScalarType type, Fp8Recipe recipe,
                  const Fp8Wanted& wanted, const at::Tensor& amax) {
  const at::Tensor all = matrices.size() == 1 ? matrices.front() : at::cat(matrices, 0);
  const auto transposed_of = [&](Fp8Matrix cast) {
    const std::int64_t rows = all.size(0);
    const at::Tensor to = at::zeros({all.size(1), padded(rows)}, cast.values.options());
    to.narrow(1, 0, rows).copy_(cast.values.t());
    return Fp8Matrix{to, cast.scale};
  };
  Fp8Pair pair;
  if (recipe == Fp8Recipe::kTensorwise) {
    const Fp8Matrix cast = cast_with(all, amax.defined() ? amax : detail::amax_of(all), type);
    if (wanted.matrix) pair.matrix = cast;
    if (wanted.transposed) pair.transposed = transposed_of(cast);
    return pair;
  }
  const at::Tensor size = all.abs();
  if (wanted.matrix) pair.matrix = cast_with(all, size.amax(1, true).to(at::kFloat), type);
  if (wanted.transposed) {
    const Fp8Matrix cast = cast_with(all, size.amax(0, true).to(at::kFloat), type);
    pair.transposed = transposed_of({cast.values, cast.scale.t().contiguous()});
  }
  return pair;
}

// ---------------------------------------------------------------- the cast by our kernels

// Where the first of two matrices ends, the second begins.
struct CastTo {
  Fp8Pair pair;
  at::Tensor amax, by_column;  // bits of floats
};

// `amax`: the largest magnitude, where known.
CastTo room_for(const at::Tensor& like, std::int64_t rows, at::ScalarType type, Fp8Recipe recipe,
                const Fp8Wanted& wanted, const at::Tensor& amax) {
  const bool by_row = recipe == Fp8Recipe::kRowwise;
  const std::int64_t columns = like.size(1);
  const auto floats = like.options().dtype(at::kFloat);
  const auto bits = like.options().dtype(at::kInt);
  CastTo to;
  to.amax = amax.defined() ? amax : at::zeros({by_row ? rows : 1}, bits);
  if (by_row) to.by_column = at::zeros({columns}, bits);
  const at::Tensor scale = by_row ? at::empty({rows, 1}, floats) : at::empty({1}, floats);
  if (wanted.matrix)
    to.pair.matrix = {at::empty({rows, columns}, like.options().dtype(type)), scale};
  if (wanted.transposed)
    to.pair.transposed = {at::empty({columns, padded(rows)}, like.options().dtype(type)),
                          by_row ? at::empty({columns, 1}, floats) : scale};
  return to;
}

template <typename T>
T* at_row(const at::Tensor& tensor, std::int64_t row, std::int64_t stride) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) + row * stride : nullptr;
}

// An undefined result where the kernels do not apply.
std::optional<Fp8Pair> cast_on_cuda(const std::vector<at::Tensor>& matrices, at::ScalarType type,
                                    Fp8Recipe recipe, const Fp8Wanted& wanted,
                                    const at::Tensor& amax) {
  std::int64_t rows = 0;
  for (const at::Tensor& matrix : matrices) {
    if (!detail::OnCuda::with({matrix}) || matrix.size(1) % 8 != 0) return std::nullopt;
    // Each begins at a multiple of 16 in the transpose.
    if (rows % kMultiple != 0) return std::nullopt;
    rows += matrix.size(0);
  }
  const auto cuda = detail::OnCuda::with({matrices.front()});
  const bool by_row = recipe == Fp8Recipe::kRowwise;
  const CastTo to = room_for(matrices.front(), rows, type, recipe, wanted, amax);
  const auto columns = matrices.front().size(1);
  std::int64_t row = 0;
  for (const at::Tensor& matrix : matrices) {
    if (amax.defined()) break;
    cuda->check(cuda->table().fp8_amax({.from = detail::data(matrix),
                                        .amax = at_row<std::uint32_t>(to.amax, by_row ? row : 0, 1),
                                        .by_column = at_row<std::uint32_t>(to.by_column, 0, 0),
                                        .rows = matrix.size(0),
                                        .columns = static_cast<int>(columns),
                                        .type = detail::type_of(matrix)},
                                       cuda->stream()),
                "fp8_amax");
    row += matrix.size(0);
  }
  row = 0;
  const auto& [straight, transposed] = to.pair;
  const at::Tensor& scale = straight.defined() ? straight.scale : transposed.scale;
  for (const at::Tensor& matrix : matrices) {
    const bool last = row + matrix.size(0) == rows;
    const bool has_scale = !by_row || straight.defined();
    cuda->check(cuda->table().fp8_cast(
                    {.from = detail::data(matrix),
                     .amax = at_row<std::uint32_t>(to.amax, by_row ? row : 0, 1),
                     .by_column = at_row<std::uint32_t>(to.by_column, 0, 0),
                     .to = at_row<char>(straight.values, row, columns),
                     .transposed = at_row<char>(transposed.values, row, 1),
                     .scale = has_scale ? at_row<float>(scale, by_row ? row : 0, 1) : nullptr,
                     .transposed_scale = by_row ? at_row<float>(transposed.scale, 0, 0) : nullptr,
                     .rows = matrix.size(0),
                     .padded_rows = last ? padded(matrix.size(0)) : matrix.size(0),
                     .stride = padded(rows),
                     .columns = static_cast<int>(columns),
                     .type = detail::type_of(matrix),
                     .fp8 = detail::fp8_kind(type)},
                    cuda->stream()),
                "fp8_cast");
    row += matrix.size(0);
  }
  return to.pair;
}

}  // namespace

Fp8Recipe fp8_recipe_of(std::string_view name) {
  if (name == "tensorwise") return Fp8Recipe::kTensorwise;
  if (name == "rowwise") return Fp8Recipe::kRowwise;
  throw UsageError("fp8", "there is no recipe '{}'. Use tensorwise or rowwise.", name);
}

Fp8Autocast::Fp8Autocast(std::optional<Fp8Recipe> recipe) : before_(current_recipe) {
  current_recipe = recipe;
}

Fp8Autocast::~Fp8Autocast() {
  current_recipe = before_;
}

void Fp8Autocast::set(std::optional<Fp8Recipe> recipe) {
  current_recipe = recipe;
}

std::optional<Fp8Recipe> Fp8Autocast::current() {
  return current_recipe;
}

Fp8Pair to_fp8(const std::vector<at::Tensor>& matrices, at::ScalarType type, Fp8Recipe recipe,
               const Fp8Wanted& wanted, const at::Tensor& amax) {
  const c10::NoGradGuard no_grad;
  const detail::NoAutocast no_autocast;
  if (type != at::kFloat8_e4m3fn && type != at::kFloat8_e5m2)
    throw UsageError("to_fp8",
                     "{} is not a supported 8-bit type. Use kFloat8_e4m3fn "
                     "or kFloat8_e5m2.",
                     c10::toString(type));
  for (const at::Tensor& matrix : matrices)
    detail::require(
        matrix.dim() == 2 && matrix.numel() > 0 && matrix.size(1) == matrices.front().size(1),
        "to_fp8", "matrices must be of one width and not empty", matrices.front(), matrix);
  const at::Tensor& first = matrices.front();
  detail::require(!amax.defined() || (amax.scalar_type() == at::kFloat && amax.numel() == 1 &&
                                      amax.device() == first.device()),
                  "to_fp8", "amax must be one float on the device of the matrices", first, amax);
  // A matrix that is stored transposed is read in its storage order.
  if (matrices.size() == 1 && !first.is_contiguous() && first.t().is_contiguous() &&
      first.size(0) % kMultiple == 0 && first.size(1) % kMultiple == 0) {
    Fp8Pair turned = to_fp8({first.t()}, type, recipe, {wanted.transposed, wanted.matrix}, amax);
    return {turned.transposed, turned.matrix};
  }
  std::vector<at::Tensor> rows;
  for (const at::Tensor& matrix : matrices) rows.push_back(matrix.detach().contiguous());
  const at::Tensor known = recipe == Fp8Recipe::kTensorwise ? amax : at::Tensor();
  if (const auto pair = cast_on_cuda(rows, type, recipe, wanted, known)) return *pair;
  return cast_aten(rows, type, recipe, wanted, known);
}

at::Tensor from_fp8(const Fp8Matrix& matrix) {
  return matrix.values.to(at::kFloat) * matrix.scale;
}

at::Tensor part_to_fp8(const at::Tensor& part, const at::Tensor& amax) {
  return cast_with(part, amax, at::kFloat8_e4m3fn).values;
}

// The format's largest value becomes 1 and then exactly `amax`: 448 times the float nearest to 1 /
// 448 is 1.
void scale_part_from_fp8(const at::Tensor& part, const at::Tensor& amax) {
  part.mul_(1 / largest(at::kFloat8_e4m3fn)).mul_(amax.clamp_min(kSmallest));
}

bool fp8_covers(const std::vector<at::Tensor>& weights) {
  return std::ranges::all_of(weights, [](const at::Tensor& weight) {
    return weight.dim() == 2 && weight.size(0) % kMultiple == 0 && weight.size(1) % kMultiple == 0;
  });
}

// ---------------------------------------------------------------- products and the linear layer

namespace {

// With cuBLASLt, which can accumulate into its output and write float; tensorwise only.
bool product_on_cuda(const Fp8Matrix& a, const Fp8Matrix& b, const at::Tensor& to,
                     const detail::Fp8Extras& extras) {
  const auto cuda = detail::OnCuda::with({to, extras.bias});
  if (!cuda || a.scale.numel() != 1 || b.scale.numel() != 1) return false;
  const at::Tensor workspace = cuda->bytes(detail::kWorkspaceBytes);
  int status = 0;
  const bool covered = cuda->table().gemm(
      {.a = {detail::data(a.values), a.values.size(1), false,
             detail::fp8_kind(a.values.scalar_type()), a.scale.const_data_ptr<float>()},
       .b = {detail::data(b.values), b.values.size(1), true,
             detail::fp8_kind(b.values.scalar_type()), b.scale.const_data_ptr<float>()},
       .d = detail::mutable_data(to),
       .bias = detail::data(extras.bias),
       .aux = nullptr,
       .workspace = detail::mutable_data(workspace),
       .workspace_bytes = static_cast<std::size_t>(detail::kWorkspaceBytes),
       .m = a.values.size(0),
       .n = b.values.size(0),
       .k = a.values.size(1),
       .beta = extras.add ? 1.0f : 0.0f,
       .epilogue =
           extras.bias.defined() ? kernels::cuda::Epilogue::kBias : kernels::cuda::Epilogue::kNone,
       .type = detail::type_of(to),
       .d_type = detail::type_of(to),
       .fast_accumulation = extras.fast},
      cuda->stream(), &status);
  if (covered) cuda->check(status, "an fp8 product");
  return covered;
}

// With the bias. By row a GPU's product is bfloat16: the library has no other.
at::Tensor product_aten(const Fp8Matrix& a, const Fp8Matrix& b, at::ScalarType type,
                        const detail::Fp8Extras& extras) {
  const at::Tensor& bias = extras.bias;
  if (a.values.is_cuda()) {
    const bool by_row = a.scale.numel() != 1 || b.scale.numel() != 1;
    const at::ScalarType made = by_row ? at::kBFloat16 : type;
    const at::Tensor product = at::_scaled_mm(
        a.values, b.values.t(), a.scale, by_row ? b.scale.t() : b.scale, {}, {}, made, extras.fast);
    return bias.defined() ? (product + bias).to(type) : product.to(type);
  }
  // The products of values are exact in float.
  at::Tensor sums = at::mm(a.values.to(at::kFloat), b.values.to(at::kFloat).t());
  sums.mul_(a.scale * b.scale.t());
  if (bias.defined()) sums.add_(bias);
  return sums.to(type);
}

bool has_fp8(c10::Device device) {
  static std::mutex mutex;
  static std::map<int, int> capabilities;
  const auto* const table = kernels::cuda::table();
  if (table == nullptr) return true;  // ATen says what it cannot do
  const std::lock_guard lock(mutex);
  const auto [at, fresh] = capabilities.try_emplace(device.index(), 0);
  if (fresh) at->second = table->compute_capability(device.index());
  return at->second >= 89;
}

}  // namespace

namespace detail {

void fp8_product(const Fp8Matrix& a, const Fp8Matrix& b, at::Tensor to, const Fp8Extras& extras) {
  if (to.numel() == 0) return;
  if (a.values.numel() != 0 && product_on_cuda(a, b, to, extras)) return;
  const at::Tensor product = product_aten(a, b, to.scalar_type(), extras);
  if (extras.add)
    to.add_(product);
  else
    to.copy_(product);
}

void check_fp8_device(const char* who, const at::Tensor& x) {
  if (x.is_cuda()) {
    if (has_fp8(x.device())) return;
    throw UsageError(who,
                     "{} has no fp8 arithmetic: it begins with compute capability 8.9 (Ada, "
                     "Hopper, Blackwell). Use mixed_precision: bf16.",
                     x.device().str());
  }
  static const bool once = [] {
    log::info("fp8",
              "fp8 on the CPU is computed in float by its definition: it saves neither time nor "
              "memory");
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace detail

// ---------------------------------------------------------------- the layer

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Fp8Matrix rows_of(const Fp8Matrix& all, std::int64_t first, std::int64_t count) {
  return {all.values.narrow(0, first, count),
          all.scale.numel() == 1 ? all.scale : all.scale.narrow(0, first, count)};
}

bool stored_transposed(const at::Tensor& pattern) {
  return !pattern.is_contiguous() && pattern.t().is_contiguous();
}

// dy^T x for dy^T [out, rows] and x^T [in, rows], in the memory layout of the weight; undefined
// when it was added to `accumulated`.
at::Tensor weight_gradient(const Fp8Matrix& dy, const Fp8Matrix& x, at::ScalarType type,
                           bool transposed, at::Tensor accumulated) {
  // Rowwise, the library accepts e5m2 on the left only.
  const bool turns = transposed && dy.scale.numel() == 1;
  const Fp8Matrix &a = turns ? x : dy, &b = turns ? dy : x;
  const auto placed = [&](const at::Tensor& t) { return turns ? t.t() : t; };
  if (accumulated.defined() && placed(accumulated).is_contiguous()) {
    detail::fp8_product(a, b, placed(accumulated), {.add = true});
    return {};
  }
  const auto options = x.scale.options().dtype(accumulated.defined() ? at::kFloat : type);
  const at::Tensor fresh = at::empty({a.values.size(0), b.values.size(0)}, options);
  detail::fp8_product(a, b, fresh, {});
  if (!accumulated.defined()) return placed(fresh);
  accumulated.add_(placed(fresh));
  return {};
}

struct Fp8LinearOptions {
  Fp8Recipe recipe;
  at::Tensor amax;                      // of x; optional
  detail::GradientAmaxPtr output_amax;  // of the gradient of the output; or null
  bool casts_again = false;             // x for the weights' gradients, in backward
  bool dx = false, dweight = false;     // which gradients may be asked for
};

class Fp8LinearFunction : public torch::autograd::Function<Fp8LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList weights,
                            const at::Tensor& bias_or_none, const Fp8LinearOptions& options) {
    const detail::NoAutocast no_autocast;
    const at::Tensor bias = detail::from_none(bias_or_none);
    const at::Tensor rows = detail::flat(x).contiguous();
    std::vector<std::int64_t> widths, types, transposed;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      detail::remember_leaf(ctx, detail::leaf_name(i), weights[i]);
      widths.push_back(weights[i].size(0));
      types.push_back(static_cast<std::int64_t>(weights[i].scalar_type()));
      transposed.push_back(stored_transposed(weights[i]));
    }
    const std::int64_t out = std::accumulate(widths.begin(), widths.end(), std::int64_t{0});
    ctx->saved_data["widths"] = widths;
    ctx->saved_data["types"] = types;
    ctx->saved_data["transposed"] = transposed;
    ctx->saved_data["shape"] = x.sizes().vec();
    ctx->saved_data["recipe"] = static_cast<std::int64_t>(options.recipe);
    detail::save_type(ctx, "bias_type", bias);
    const at::Tensor y = at::empty({rows.size(0), out}, x.options());
    Fp8Pair in, weight;
    const bool casts_again = options.casts_again && options.dweight;
    if (rows.numel() > 0) {
      in = to_fp8({rows}, at::kFloat8_e4m3fn, options.recipe,
                  {.transposed = options.dweight && !casts_again}, options.amax);
      weight =
          to_fp8(weights.vec(), at::kFloat8_e4m3fn, options.recipe, {.transposed = options.dx});
      detail::fp8_product(
          in.matrix, weight.matrix, y,
          {.fast = true, .bias = bias.defined() ? bias.detach().to(x.scalar_type()) : bias});
    }
    detail::save_gradient_amax(ctx, options.output_amax);
    ctx->saved_data["casts_again"] = casts_again;
    ctx->save_for_backward({casts_again ? rows : in.transposed.values,
                            casts_again ? options.amax : in.transposed.scale,
                            weight.transposed.values, weight.transposed.scale});
    auto shape = x.sizes().vec();
    shape.back() = out;
    return y.view(shape);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const at::Tensor dy = detail::flat(grads[0]).contiguous();
    const auto widths = ctx->saved_data["widths"].toIntVector();
    const auto shape = ctx->saved_data["shape"].toIntVector();
    const bool wants_dx = ctx->needs_input_grad(0);
    bool wants_dweight = false;
    for (std::size_t i = 0; i < widths.size(); ++i) wants_dweight |= ctx->needs_input_grad(1 + i);
    Fp8Pair grad;
    const auto recipe = static_cast<Fp8Recipe>(ctx->saved_data["recipe"].toInt());
    if (dy.numel() > 0 && (wants_dx || wants_dweight))
      grad = to_fp8({dy}, at::kFloat8_e5m2, recipe, {wants_dx, wants_dweight},
                    taken(detail::gradient_amax(ctx)));
    variable_list result(1);
    if (wants_dx) {
      result[0] = at::empty({dy.size(0), shape.back()}, dy.options());
      if (dy.numel() > 0) detail::fp8_product(grad.matrix, {saved[2], saved[3]}, result[0], {});
      result[0] = result[0].view(shape);
    }
    Fp8Matrix x{saved[0], saved[1]};
    if (wants_dweight && dy.numel() > 0 && ctx->saved_data["casts_again"].toBool())
      x = to_fp8({saved[0]}, at::kFloat8_e4m3fn, recipe, {.matrix = false}, saved[1]).transposed;
    add_weight_gradients(ctx, x, grad.transposed, dy, result);
    const bool wants_dbias = ctx->needs_input_grad(1 + widths.size());
    result.push_back(wants_dbias ? detail::column_sum(dy).to(detail::saved_type(ctx, "bias_type"))
                                 : at::Tensor());
    result.emplace_back();
    return result;
  }

 private:
  // A value is of one backward.
  static at::Tensor taken(const detail::GradientAmaxPtr& amax) {
    return amax ? std::exchange(amax->value, {}) : at::Tensor();
  }

  static void add_weight_gradients(AutogradContext* ctx, const Fp8Matrix& x, const Fp8Matrix& grad,
                                   const at::Tensor& dy, variable_list& result) {
    const auto widths = ctx->saved_data["widths"].toIntVector();
    const auto types = ctx->saved_data["types"].toIntVector();
    const auto transposed = ctx->saved_data["transposed"].toIntVector();
    const std::int64_t in = ctx->saved_data["shape"].toIntVector().back();
    std::int64_t first = 0;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const auto type = static_cast<at::ScalarType>(types[i]);
      at::Tensor dweight;
      if (ctx->needs_input_grad(1 + i)) {
        dweight =
            dy.numel() == 0
                ? at::zeros({widths[i], in}, dy.options().dtype(type))
                : weight_gradient(rows_of(grad, first, widths[i]), x, type, transposed[i] != 0,
                                  detail::accumulation_target(ctx, detail::leaf_name(i)));
      }
      result.push_back(dweight);
      first += widths[i];
    }
  }
};

at::Tensor not_covered(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                       const at::Tensor& bias) {
  std::vector<at::Tensor> parts;
  std::int64_t first = 0;
  for (const at::Tensor& weight : weights) {
    if (!fp8_covers({weight}))
      warn_not_in_fp8(weight.size(1), weight.size(0), "which needs multiples of 16");
    const at::Tensor own =
        bias.defined() && weights.size() > 1 ? bias.narrow(0, first, weight.size(0)) : bias;
    parts.push_back(linear(x, weight, own));
    first += weight.size(0);
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts, -1);
}

at::Tensor fp8_layer(const char* who, const at::Tensor& x, const std::vector<at::Tensor>& weights,
                     const at::Tensor& bias, Fp8LinearOptions options) {
  detail::require(!weights.empty() && x.defined() && x.dim() > 0, who,
                  "an input and a weight are needed", x);
  std::int64_t out = 0;
  bool trained = false;
  for (const at::Tensor& weight : weights) {
    detail::require(weight.defined() && weight.dim() == 2 && weight.size(1) == x.size(-1), who,
                    "weight must be [out, in], where in is the input's last dimension", x, weight);
    detail::require(weight.is_floating_point() && weight.itemsize() > 1, who,
                    "a weight must have the input's dtype or be float", x, weight);
    out += weight.size(0);
    trained |= weight.requires_grad();
  }
  detail::require(!bias.defined() || (bias.dim() == 1 && bias.size(0) == out), who,
                  "bias must be [out] of all weights", weights.front(), bias);
  detail::check_fp8_device(who, x);
  if (!fp8_covers(weights)) return not_covered(x, weights, bias);
  const bool differentiates = at::GradMode::is_enabled();
  options.dx = differentiates && x.requires_grad();
  options.dweight = differentiates && trained;
  return Fp8LinearFunction::apply(x, at::TensorList(weights), detail::or_none(bias), options);
}

}  // namespace

void warn_not_in_fp8(std::int64_t inputs, std::int64_t outputs, std::string_view why) {
  static std::mutex mutex;
  static std::set<std::pair<std::int64_t, std::int64_t>> said;
  const std::lock_guard lock(mutex);
  if (said.insert({inputs, outputs}).second)
    log::warning("fp8", "a linear layer of {} inputs and {} outputs is not computed in fp8, {}",
                 inputs, outputs, why);
}

at::Tensor fp8_linear(const Fp8Input& x, const std::vector<at::Tensor>& weights,
                      const at::Tensor& bias, Fp8Recipe recipe) {
  return fp8_layer("fp8_linear", x.values, weights, bias, {recipe, x.amax, {}, x.again != nullptr});
}

Fp8Input fp8_swiglu(const Fp8Input& x, const std::vector<at::Tensor>& weights,
                    const at::Tensor& bias, Fp8Recipe recipe) {
  constexpr const char* kWho = "fp8_swiglu";
  const bool scales_rows = recipe == Fp8Recipe::kRowwise;
  const auto gradient =
      scales_rows ? detail::GradientAmaxPtr() : c10::make_intrusive<detail::GradientAmax>();
  const at::Tensor both =
      fp8_layer(kWho, x.values, weights, bias,
                {recipe, scales_rows ? at::Tensor() : x.amax, gradient, x.again != nullptr});
  at::Tensor amax;
  const at::Tensor y = detail::swiglu(both, scales_rows ? nullptr : &amax, gradient);
  return {y, amax, [both = both.detach()] { return swiglu(both); }};
}

}  // namespace lockstep::nn
