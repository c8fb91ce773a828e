// SwiGLU, rotary embeddings, and embeddings of tokens and positions.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>

#include "lockstep/nn/functional.h"
#include "lockstep/nn/on_cuda.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Gates and what they multiply, as matrices [rows, width]: two tensors, or the halves of one.
struct GateUp {
  explicit GateUp(at::Tensor both)
      : whole(std::move(both)),
        gate(whole.narrow(1, 0, whole.size(1) / 2)),
        up(whole.narrow(1, whole.size(1) / 2, whole.size(1) / 2)) {}
  GateUp(at::Tensor gates, at::Tensor ups) : gate(std::move(gates)), up(std::move(ups)) {}

  GateUp empty_like() const {
    return whole.defined() ? GateUp(at::empty_like(whole))
                           : GateUp(at::empty_like(gate), at::empty_like(up));
  }
  // Null where the kernels do not apply.
  std::unique_ptr<const detail::OnCuda> on_cuda(const at::Tensor& dout) const {
    if (gate.size(1) % 8 != 0) return nullptr;
    if (whole.defined()) return detail::OnCuda::with({whole, dout});
    return detail::OnCuda::with({gate, up, dout});
  }

  at::Tensor whole{};  // undefined where they are two tensors
  at::Tensor gate, up;
};

kernels::cuda::Swiglu arguments_of(const GateUp& in) {
  return {.gate = detail::data(in.gate),
          .up = detail::data(in.up),
          .rows = in.gate.size(0),
          .pitch = in.whole.defined() ? in.whole.size(1) : in.gate.size(1),
          .width = static_cast<int>(in.gate.size(1)),
          .type = detail::type_of(in.gate)};
}

at::Tensor swiglu_forward(const GateUp& in, at::Tensor* amax) {
  at::Tensor out;
  if (const auto cuda = in.on_cuda({})) {
    out = at::empty(in.gate.sizes(), in.gate.options());
    kernels::cuda::Swiglu args = arguments_of(in);
    args.out = detail::mutable_data(out);
    args.amax = detail::zeroed_amax(amax, out);
    cuda->check(cuda->table().swiglu_forward(args, cuda->stream()), "swiglu");
    return out;
  }
  const auto type = detail::sum_type(in.gate);
  out = (at::silu(in.gate.to(type)) * in.up.to(type)).to(in.gate.scalar_type());
  if (amax != nullptr) *amax = detail::amax_of(out);
  return out;
}

GateUp swiglu_backward(const GateUp& in, const at::Tensor& dout, at::Tensor* amax) {
  const GateUp to = in.empty_like();
  if (const auto cuda = in.on_cuda(dout)) {
    kernels::cuda::Swiglu args = arguments_of(in);
    args.dout = detail::data(dout);
    args.dgate = detail::mutable_data(to.gate);
    args.dup = detail::mutable_data(to.up);
    args.amax = detail::zeroed_amax(amax, to.gate);
    cuda->check(cuda->table().swiglu_backward(args, cuda->stream()), "swiglu backward");
    return to;
  }
  const auto type = detail::sum_type(in.gate);
  const at::Tensor gate = in.gate.to(type), dy = dout.to(type);
  to.gate.copy_(at::silu_backward(dy * in.up.to(type), gate));
  to.up.copy_(dy * at::silu(gate));
  if (amax != nullptr) *amax = at::maximum(detail::amax_of(to.gate), detail::amax_of(to.up));
  return to;
}

class SwigluFunction : public torch::autograd::Function<SwigluFunction> {
 public:
  // `up`: or_none(), where `gate` has both.
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up,
                            at::Tensor* amax, const detail::GradientAmaxPtr& to) {
    const detail::NoAutocast no_autocast;
    ctx->save_for_backward({gate, up});
    detail::save_gradient_amax(ctx, to);
    const GateUp in = matrices(gate, detail::from_none(up));
    auto shape = gate.sizes().vec();
    shape.back() = in.gate.size(1);
    return swiglu_forward(in, amax).view(shape);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const at::Tensor up = detail::from_none(saved[1]);
    const detail::GradientAmaxPtr to = detail::gradient_amax(ctx);
    const GateUp result = swiglu_backward(
        matrices(saved[0], up), detail::flat(grads[0]).contiguous(), to ? &to->value : nullptr);
    const at::Tensor first = result.whole.defined() ? result.whole : result.gate;
    return {first.view(saved[0].sizes()), up.defined() ? result.up.view(up.sizes()) : at::Tensor(),
            at::Tensor(), at::Tensor()};
  }

 private:
  static GateUp matrices(const at::Tensor& gate, const at::Tensor& up) {
    const at::Tensor first = detail::flat(gate).contiguous();
    return up.defined() ? GateUp(first, detail::flat(up).contiguous()) : GateUp(first);
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
  return SwigluFunction::apply(gate_up, or_none({}), amax, to);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up, at::Tensor* amax) {
  detail::require(gate.defined() && up.defined() && gate.dim() > 0 && gate.sizes() == up.sizes() &&
                      gate.scalar_type() == up.scalar_type(),
                  "swiglu", "gate and up must have the same shape and type", gate, up);
  return SwigluFunction::apply(gate, up, amax, detail::GradientAmaxPtr{});
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
