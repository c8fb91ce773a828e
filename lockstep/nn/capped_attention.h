// Attention whose scores have a soft cap, as Gemma 2 has it: softmax(cap * tanh(score / cap)) times
// the values.
//
//   const auto y = nn::capped_attention(q, k, v, {.cap = 50, .scale = 1.0 / 16, .mask = mask});
//
// There is no kernel for it in ATen. Scores exist for a part of the queries at a time, and backward
// computes them again: what is saved is query, key and value.
//
// Stateless; callable from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep::nn {

struct CappedAttentionOptions {
  double cap = 50;
  double scale = 1;
  at::Tensor mask{};            // bool [time, keys]: what a query sees; undefined: everything
  std::int64_t chunk_rows = 0;  // queries at a time; 0: so that their scores take about 64 MiB
};

// query [batch, heads, time, width]; key and value [batch, heads or a divisor, keys, width]. The
// result has the query's shape and dtype; softmax is computed in float.
at::Tensor capped_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const CappedAttentionOptions& options);

}  // namespace lockstep::nn
