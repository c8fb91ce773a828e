// Casting to fp8, and products of what was cast.
#include "lockstep/nn/fp8.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "lockstep/core/error.h"
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

}  // namespace lockstep::nn
