// Attention through ATen, which has cuDNN's and flash attention, making sure that a fast one is
// used; and attention with a soft cap, which ATen has no kernel for.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "lockstep/core/log.h"
#include "lockstep/nn/functional.h"
#include "lockstep/nn/on_cuda.h"

namespace lockstep::nn {
namespace {

// at::SDPBackend, whose header is not installed everywhere.
enum SdpBackend : std::int64_t { kMath = 0, kFlash = 1, kEfficient = 2, kCudnn = 3 };

const char* name_of(std::int64_t backend) {
  switch (backend) {
    case kMath:
      return "plain matrix products";
    case kFlash:
      return "flash attention";
    case kEfficient:
      return "memory-efficient attention";
    default:
      return "another backend";
  }
}

struct SdpCall {
  const at::Tensor &query, &key, &value;
  const AttentionOptions& options;
  bool grouped;
};

std::int64_t choice_for(const SdpCall& call) {
  return at::_fused_sdp_choice(call.query, call.key, call.value, {}, call.options.dropout,
                               call.options.causal, call.options.scale, call.grouped);
}

// ATen uses cuDNN's attention on GPUs where it is the fastest, and silently another one if the
// loaded cuDNN lacks it (a system cuDNN may be found before LibTorch's own). Checked once per
// process.
void say_without_cudnn(const SdpCall& call) {
  static std::atomic<bool> asked{false};
  const auto type = call.query.scalar_type();
  const bool reduced = type == at::kBFloat16 || type == at::kHalf;
  if (!reduced || asked.exchange(true)) return;
  const std::int64_t backend = choice_for(call);
  if (backend == kCudnn) return;
  log::info("attention",
            "{} is used for {} tensors of width {}, not cuDNN's attention. On H100 and later "
            "cuDNN's is faster; if it should be there, check that LD_LIBRARY_PATH finds no other "
            "libcudnn.so.9 than LibTorch's.",
            name_of(backend), c10::toString(type), call.query.size(3));
}

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const AttentionOptions& options) {
  constexpr const char* kWho = "attention";
  detail::require(query.defined() && key.defined() && query.dim() == 4 && key.dim() == 4 &&
                      query.size(0) == key.size(0) && query.size(3) == key.size(3) &&
                      key.size(1) > 0 && query.size(1) % key.size(1) == 0,
                  kWho,
                  "query and key must be [batch, heads, time, width], and key's heads a divisor of "
                  "query's",
                  query, key);
  detail::require(value.defined() && value.dim() == 4 && value.size(0) == key.size(0) &&
                      value.size(1) == key.size(1) && value.size(2) == key.size(2),
                  kWho, "value must have the shape of key but for the width", key, value);
  const SdpCall call{query, key, value, options, query.size(1) != key.size(1)};
  const bool on_cuda = query.is_cuda() && query.numel() > 0 && key.numel() > 0;
  if (on_cuda && call.grouped && choice_for(call) == kMath) {
    // Fused kernels that need as many key heads as query heads get repeated ones.
    const std::int64_t times = query.size(1) / key.size(1);
    return attention(query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1),
                     options);
  }
  if (on_cuda) say_without_cudnn(call);
  return at::scaled_dot_product_attention(query, key, value, {}, options.dropout, options.causal,
                                          options.scale, call.grouped);
}

// ---------------------------------------------------------------- with a soft cap

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kScoreBytes = std::int64_t{64} << 20;

struct Scores {
  at::Tensor tangents;  // tanh(score / cap)
  at::Tensor shares;    // softmax of cap times these, in float
};

// Queries of one chunk [batch, groups, heads of a group * rows, width], where all heads of a group
// share keys and values [batch, groups, keys, width].
class Chunks {
 public:
  Chunks(const at::Tensor& query, const at::Tensor& key, CappedAttentionOptions options)
      : groups_(key.size(1)), heads_(query.size(1) / key.size(1)), options_(std::move(options)) {}

  // [batch, heads, time, width] -> the rows of a chunk, and back.
  at::Tensor rows(const at::Tensor& x, std::int64_t from, std::int64_t count) const {
    return x.narrow(2, from, count).reshape({x.size(0), groups_, heads_ * count, x.size(3)});
  }
  void put(const at::Tensor& to, std::int64_t from, std::int64_t count, const at::Tensor& x) const {
    to.narrow(2, from, count).copy_(x.view({to.size(0), to.size(1), count, to.size(3)}));
  }

  Scores scores(const at::Tensor& rows, const at::Tensor& key, std::int64_t from,
                std::int64_t count) const {
    const at::Tensor products = at::matmul(rows, key.transpose(2, 3)).mul_(options_.scale);
    Scores all{.tangents = products.div_(options_.cap).tanh_(), .shares = {}};
    at::Tensor capped = (all.tangents * options_.cap).to(detail::sum_type(all.tangents));
    if (options_.mask.defined()) {
      const at::Tensor hidden = options_.mask.narrow(0, from, count).logical_not();
      capped.view({rows.size(0), groups_, heads_, count, key.size(2)})
          .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
    }
    all.shares = at::softmax(capped, -1);
    return all;
  }

  // The gradient of the rows' products with keys, from that of the shares.
  at::Tensor backward(const Scores& scores, const at::Tensor& dshares) const {
    const at::Tensor wide = dshares.to(scores.shares.scalar_type());
    const at::Tensor dcapped =
        at::_softmax_backward_data(wide, scores.shares, -1, scores.shares.scalar_type());
    return at::tanh_backward(dcapped.to(scores.tangents.scalar_type()), scores.tangents)
        .mul_(options_.scale);
  }

 private:
  std::int64_t groups_, heads_;
  CappedAttentionOptions options_;
};

class CappedAttentionFunction : public torch::autograd::Function<CappedAttentionFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& mask_or_none, double cap,
                            double scale, std::int64_t chunk) {
    const detail::NoAutocast no_autocast;
    const Chunks chunks(q, k,
                        {.cap = cap, .scale = scale, .mask = detail::from_none(mask_or_none)});
    // Heads are beside each other, as the layer after it reads them.
    const at::Tensor out =
        at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
    for (std::int64_t from = 0; from < q.size(2); from += chunk) {
      const std::int64_t count = std::min(chunk, q.size(2) - from);
      const Scores scores = chunks.scores(chunks.rows(q, from, count), k, from, count);
      chunks.put(out, from, count, at::matmul(scores.shares.to(v.scalar_type()), v));
    }
    ctx->save_for_backward({q, k, v, mask_or_none});
    ctx->saved_data["cap"] = cap;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["chunk"] = chunk;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &dy = grads[0];
    const Chunks chunks(q, k,
                        {.cap = ctx->saved_data["cap"].toDouble(),
                         .scale = ctx->saved_data["scale"].toDouble(),
                         .mask = detail::from_none(saved[3])});
    const std::int64_t chunk = ctx->saved_data["chunk"].toInt();
    const auto type = detail::sum_type(q);
    const at::Tensor dq = at::empty(q.sizes(), q.options());
    at::Tensor dk = at::zeros(k.sizes(), k.options().dtype(type));
    at::Tensor dv = at::zeros(v.sizes(), v.options().dtype(type));
    for (std::int64_t from = 0; from < q.size(2); from += chunk) {
      const std::int64_t count = std::min(chunk, q.size(2) - from);
      const at::Tensor rows = chunks.rows(q, from, count), drows = chunks.rows(dy, from, count);
      const Scores scores = chunks.scores(rows, k, from, count);
      dv.add_(at::matmul(scores.shares.to(v.scalar_type()).transpose(2, 3), drows));
      const at::Tensor dscores = chunks.backward(scores, at::matmul(drows, v.transpose(2, 3)));
      dk.add_(at::matmul(dscores.transpose(2, 3), rows));
      chunks.put(dq, from, count, at::matmul(dscores, k));
    }
    return {dq, dk.to(k.scalar_type()), dv.to(v.scalar_type()), {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor capped_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const CappedAttentionOptions& o) {
  constexpr const char* kWho = "capped_attention";
  detail::require(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && k.size(1) > 0 &&
                      q.size(1) % k.size(1) == 0 && q.size(3) == k.size(3),
                  kWho, "keys must have the queries' width and as many heads or a divisor", q, k);
  detail::require(q.dtype() == k.dtype() && q.dtype() == v.dtype(), kWho, "all must have one dtype",
                  q, v);
  detail::require(k.size(1) == v.size(1) && k.size(2) == v.size(2), kWho,
                  "values must have the keys' heads and length", k, v);
  detail::require(!o.mask.defined() || (o.mask.dim() == 2 && o.mask.size(0) == q.size(2) &&
                                        o.mask.size(1) == k.size(2)),
                  kWho, "the mask must be [time, keys]", q, o.mask);
  const std::int64_t row = std::max<std::int64_t>(
      1, q.size(0) * q.size(1) * k.size(2) * static_cast<std::int64_t>(sizeof(float)));
  const std::int64_t chunk =
      o.chunk_rows > 0 ? o.chunk_rows : std::max<std::int64_t>(1, kScoreBytes / row);
  return CappedAttentionFunction::apply(q, k, v, detail::or_none(o.mask), o.cap, o.scale, chunk);
}

}  // namespace lockstep::nn
