// SwiGLU, rotary embeddings, and embeddings of tokens and positions.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/nn/functional.h"
#include "lockstep/nn/on_cuda.h"
#include "lockstep/nn/products.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// `dout` undefined: forward; otherwise the gradient of gate_up.
at::Tensor run_swiglu(const at::Tensor& gate_up, const at::Tensor& dout, at::Tensor* amax) {
  const std::int64_t width = gate_up.size(1) / 2;
  const bool forward = !dout.defined();
  if (const auto cuda = detail::OnCuda::with({gate_up, dout}); cuda && width % 8 == 0) {
    const at::Tensor out =
        at::empty({gate_up.size(0), forward ? width : 2 * width}, gate_up.options());
    const auto& table = cuda->table();
    cuda->check((forward ? table.swiglu_forward : table.swiglu_backward)(
                    {.gate_up = detail::data(gate_up),
                     .dout = detail::data(dout),
                     .out = detail::mutable_data(out),
                     .amax = detail::zeroed_amax(amax, out),
                     .rows = gate_up.size(0),
                     .width = static_cast<int>(width),
                     .type = detail::type_of(gate_up)},
                    cuda->stream()),
                forward ? "swiglu" : "swiglu backward");
    return out;
  }
  const auto type = detail::sum_type(gate_up);
  const auto halves = gate_up.to(type).chunk(2, 1);
  const at::Tensor silu = at::silu(halves[0]);
  at::Tensor out;
  if (forward) {
    out = silu * halves[1];
  } else {
    const at::Tensor dy = dout.to(type);
    out = at::cat({at::silu_backward(dy * halves[1], halves[0]), dy * silu}, 1);
  }
  out = out.to(gate_up.scalar_type());
  if (amax != nullptr) *amax = detail::amax_of(out);
  return out;
}

class SwigluFunction : public torch::autograd::Function<SwigluFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up, at::Tensor* amax,
                            const detail::GradientAmaxPtr& to) {
    const detail::NoAutocast no_autocast;
    ctx->save_for_backward({gate_up});
    detail::save_gradient_amax(ctx, to);
    auto shape = gate_up.sizes().vec();
    shape.back() /= 2;
    return run_swiglu(detail::flat(gate_up).contiguous(), {}, amax).view(shape);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const at::Tensor gate_up = ctx->get_saved_variables()[0];
    const detail::GradientAmaxPtr to = detail::gradient_amax(ctx);
    return {run_swiglu(detail::flat(gate_up).contiguous(), detail::flat(grads[0]).contiguous(),
                       to ? &to->value : nullptr)
                .view(gate_up.sizes()),
            at::Tensor(), at::Tensor()};
  }
};

// ---------------------------------------------------------------- rotary embeddings

at::Tensor rotate_aten(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                       bool inverse) {
  const std::int64_t half = cos.size(-1);
  const auto type = detail::sum_type(x);
  // [batch or 1, 1, time, half]: the same for all heads.
  const at::Tensor c = (cos.dim() == 2 ? cos.unsqueeze(0) : cos).unsqueeze(1).to(type);
  at::Tensor s = (sin.dim() == 2 ? sin.unsqueeze(0) : sin).unsqueeze(1).to(type);
  if (inverse) s = -s;
  const at::Tensor low = x.narrow(3, 0, half).to(type), high = x.narrow(3, half, half).to(type);
  return at::cat(
      {(low * c - high * s).to(x.scalar_type()), (high * c + low * s).to(x.scalar_type()),
       x.narrow(3, 2 * half, x.size(3) - 2 * half)},
      3);
}

// Laid out like x: heads side by side, as a projection gives them, or one after the other.
at::Tensor empty_for(const at::Tensor& x) {
  if (x.stride(1) >= x.stride(2)) return at::empty(x.sizes(), x.options());
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

// May be a slice, but its vectors of eight begin at multiples of 16 bytes.
bool has_vectors(const at::Tensor& x) {
  const auto stride_fits = [&](int i) { return x.size(i) == 1 || x.stride(i) % 8 == 0; };
  return x.stride(3) == 1 && x.size(3) % 8 == 0 && stride_fits(0) && stride_fits(1) &&
         stride_fits(2) && reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

kernels::cuda::RopePart rope_part(const at::Tensor& from, const at::Tensor& to) {
  return {detail::data(from), detail::mutable_data(to), from.size(1), from.stride(0),
          from.stride(1),     from.stride(2),           to.stride(0), to.stride(1),
          to.stride(2)};
}

std::pair<at::Tensor, at::Tensor> rotate(const at::Tensor& query, const at::Tensor& key,
                                         const at::Tensor& cos, const at::Tensor& sin,
                                         bool inverse) {
  const auto cuda = detail::OnCuda::with({cos, sin});
  if (!cuda || !query.is_cuda() || !key.is_cuda() || query.numel() == 0 || key.numel() == 0 ||
      query.scalar_type() == at::kDouble || cos.size(-1) % 8 != 0 || !has_vectors(query) ||
      !has_vectors(key))
    return {rotate_aten(query, cos, sin, inverse), rotate_aten(key, cos, sin, inverse)};
  const at::Tensor to_query = empty_for(query), to_key = empty_for(key);
  const std::int64_t half = cos.size(-1);
  cuda->check(
      cuda->table().rope({.query = rope_part(query, to_query),
                          .key = rope_part(key, to_key),
                          .cos = cos.const_data_ptr<float>(),
                          .sin = sin.const_data_ptr<float>(),
                          .angles_batch = cos.dim() == 3 && cos.size(0) > 1 ? cos.stride(0) : 0,
                          .batch = query.size(0),
                          .time = query.size(2),
                          .half = static_cast<int>(half),
                          .width = static_cast<int>(query.size(3)),
                          .inverse = inverse,
                          .type = detail::type_of(query)},
                         cuda->stream()),
      "rope");
  return {to_query, to_key};
}

class RopeFunction : public torch::autograd::Function<RopeFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& cos, const at::Tensor& sin) {
    const detail::NoAutocast no_autocast;
    ctx->save_for_backward({cos, sin});
    auto [q, k] = rotate(query, key, cos, sin, false);
    return {q, k};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    auto [q, k] = rotate(grads[0], grads[1], saved[0], saved[1], true);
    return {q, k, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up, at::Tensor* amax) {
  return detail::swiglu(gate_up, amax, {});
}

at::Tensor detail::swiglu(const at::Tensor& gate_up, at::Tensor* amax, const GradientAmaxPtr& to) {
  detail::require(
      gate_up.defined() && gate_up.dim() > 0 && gate_up.size(-1) % 2 == 0 && gate_up.size(-1) > 0,
      "swiglu", "the last dimension must have two halves", gate_up);
  return SwigluFunction::apply(gate_up, amax, to);
}

void detail::save_gradient_amax(AutogradContext* ctx, const GradientAmaxPtr& amax) {
  if (amax) ctx->saved_data["amax"] = c10::IValue::make_capsule(amax);
}

detail::GradientAmaxPtr detail::gradient_amax(AutogradContext* ctx) {
  const auto found = ctx->saved_data.find("amax");
  if (found == ctx->saved_data.end()) return {};
  return c10::static_intrusive_pointer_cast<GradientAmax>(found->second.toCapsule());
}

std::pair<at::Tensor, at::Tensor> rope(const at::Tensor& query, const at::Tensor& key,
                                       const at::Tensor& cos, const at::Tensor& sin) {
  constexpr const char* kWho = "rope";
  detail::require(query.defined() && key.defined() && query.dim() == 4 && key.dim() == 4 &&
                      query.size(0) == key.size(0) && query.size(2) == key.size(2) &&
                      query.size(3) == key.size(3) && query.scalar_type() == key.scalar_type(),
                  kWho, "query and key must be [batch, heads, time, width]", query, key);
  detail::require(cos.defined() && sin.defined() && cos.sizes() == sin.sizes() &&
                      (cos.dim() == 2 || cos.dim() == 3) && cos.size(-2) == query.size(2) &&
                      (cos.dim() == 2 || cos.size(0) == 1 || cos.size(0) == query.size(0)) &&
                      2 * cos.size(-1) <= query.size(3),
                  kWho, "cos and sin must be [time, w] or [batch, time, w] with 2w <= width", query,
                  cos);
  const auto angles = [](const at::Tensor& t) {
    return (t.scalar_type() == at::kDouble ? t : t.to(at::kFloat)).contiguous().detach();
  };
  auto out = RopeFunction::apply(query, key, angles(cos), angles(sin));
  return {out[0], out[1]};
}

// ---------------------------------------------------------------- embeddings

namespace {

class EmbeddingFunction : public torch::autograd::Function<EmbeddingFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& ids, const at::Tensor& tokens,
                            const at::Tensor& positions, at::ScalarType dtype,
                            std::int64_t padding_index) {
    const detail::NoAutocast no_autocast;
    ctx->save_for_backward({ids});
    ctx->saved_data["rows"] = tokens.size(0);
    ctx->saved_data["positions"] = detail::from_none(positions).defined() ? positions.size(0) : 0;
    ctx->saved_data["padding_index"] = padding_index;
    detail::save_type(ctx, "tokens_type", tokens);
    detail::save_type(ctx, "positions_type", positions);
    at::Tensor x = at::embedding(tokens, ids);
    if (const at::Tensor places = detail::from_none(positions); places.defined())
      x += places.narrow(0, 0, ids.size(1));
    return x.to(dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const at::Tensor ids = ctx->get_saved_variables()[0];
    const at::Tensor dx = grads[0].contiguous();
    at::Tensor dtokens, dpositions;
    if (ctx->needs_input_grad(1)) {
      // Many rows may add to one token, so the sums are in float.
      dtokens = at::embedding_dense_backward(
                    dx.to(detail::sum_type(dx)), ids, ctx->saved_data["rows"].toInt(),
                    ctx->saved_data["padding_index"].toInt(), /*scale_grad_by_freq=*/false)
                    .to(detail::saved_type(ctx, "tokens_type"));
    }
    const std::int64_t places = ctx->saved_data["positions"].toInt();
    if (places > 0 && ctx->needs_input_grad(2)) {
      dpositions = at::sum(dx, {0}, /*keepdim=*/false, detail::sum_type(dx));
      if (places > ids.size(1))
        dpositions = at::constant_pad_nd(dpositions, {0, 0, 0, places - ids.size(1)});
      dpositions = dpositions.to(detail::saved_type(ctx, "positions_type"));
    }
    return {at::Tensor(), dtokens, dpositions, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& tokens, const at::Tensor& positions,
                     const EmbeddingOptions& options) {
  constexpr const char* kWho = "embedding";
  detail::require(ids.defined() && ids.dim() == 2 && ids.scalar_type() == at::kLong &&
                      tokens.defined() && tokens.dim() == 2,
                  kWho, "ids must be int64 [batch, time] and tokens [vocabulary, width]", ids,
                  tokens);
  detail::require(
      !positions.defined() || (positions.dim() == 2 && positions.size(0) >= ids.size(1) &&
                               positions.size(1) == tokens.size(1)),
      kWho, "positions must be [time or more, width]", ids, positions);
  return EmbeddingFunction::apply(ids, tokens, detail::or_none(positions),
                                  options.dtype.value_or(tokens.scalar_type()),
                                  options.padding_index);
}

}  // namespace lockstep::nn
