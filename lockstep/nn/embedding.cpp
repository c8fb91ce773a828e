// Token and position embeddings in the dtype that the blocks compute in.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/nn/functional.h"
#include "lockstep/nn/on_cuda.h"
#include "lockstep/nn/products.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
    ctx->saved_data["tokens_type"] = static_cast<std::int64_t>(tokens.scalar_type());
    ctx->saved_data["positions_type"] = static_cast<std::int64_t>(positions.scalar_type());
    at::Tensor x = at::embedding(tokens, ids);
    if (const at::Tensor places = detail::from_none(positions); places.defined())
      x += places.narrow(0, 0, ids.size(1));
    return x.to(dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const at::Tensor ids = ctx->get_saved_variables()[0];
    const auto type = [&](const char* name) {
      return static_cast<at::ScalarType>(ctx->saved_data[name].toInt());
    };
    const at::Tensor dx = grads[0].contiguous();
    at::Tensor dtokens, dpositions;
    if (ctx->needs_input_grad(1)) {
      // Many rows may add to one token, so the sums are in float.
      dtokens = at::embedding_dense_backward(
                    dx.to(detail::sum_type(dx)), ids, ctx->saved_data["rows"].toInt(),
                    ctx->saved_data["padding_index"].toInt(), /*scale_grad_by_freq=*/false)
                    .to(type("tokens_type"));
    }
    const std::int64_t places = ctx->saved_data["positions"].toInt();
    if (places > 0 && ctx->needs_input_grad(2)) {
      dpositions = at::sum(dx, {0}, /*keepdim=*/false, detail::sum_type(dx));
      if (places > ids.size(1))
        dpositions = at::constant_pad_nd(dpositions, {0, 0, 0, places - ids.size(1)});
      dpositions = dpositions.to(type("positions_type"));
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
