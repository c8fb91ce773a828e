// Attention through ATen, which has cuDNN's and flash attention; this file makes sure that a fast
// one is used.
#include <ATen/ATen.h>

#include <atomic>

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

// ATen uses cuDNN's attention on GPUs where it is the fastest, and silently another one where the
// loaded cuDNN lacks it, as a system cuDNN found before LibTorch's own does. Checked once per
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
    // Fused kernels that do not support fewer key heads do take repeated ones.
    const std::int64_t times = query.size(1) / key.size(1);
    return attention(query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1),
                     options);
  }
  if (on_cuda) say_without_cudnn(call);
  return at::scaled_dot_product_attention(query, key, value, {}, options.dropout, options.causal,
                                          options.scale, call.grouped);
}

}  // namespace lockstep::nn
