// The arguments of the CUDA kernels: pointers and sizes, without CUDA's own headers. Every tensor
// is contiguous, begins at a multiple of 16 bytes and is not empty, unless a comment says
// otherwise. table.h has the functions.
#pragma once

#include <cstdint>

namespace lockstep::kernels::cuda {

enum class Type : int { kBfloat16, kHalf, kFloat };

// residual + delta, then LayerNorm or RMSNorm (without mean and bias).
struct NormForward {
  const void* residual;    // [rows, columns], in residual_type
  const void* delta;       // [rows, columns], or null: x is the residual itself
  const void* delta_bias;  // [columns], in weight_type, or null
  const void* weight;      // [columns], in weight_type
  const void* bias;        // the same, or null
  void* x;                 // as residual: the sum; not written when delta is null
  void* normed;            // [rows, columns]
  std::uint32_t* amax;     // raised to the largest magnitude of normed, as in Fp8Amax; or null
  float* mean;             // [rows]; not written by RMSNorm
  float* rstd;             // [rows]
  std::int64_t rows;
  int columns;  // see norm_covers()
  float eps;
  Type type, residual_type, weight_type;  // residual_type is `type` or float
  bool rms;
};

struct NormBackward {
  const void* dnormed;    // [rows, columns]
  const void* dresidual;  // as x: the gradient of x that bypasses the norm; or null
  const void* x;          // [rows, columns], in residual_type
  const void* weight;
  const float* mean;
  const float* rstd;
  void* dx;      // as x: the gradient of the residual; may be dresidual
  void* ddelta;  // as dnormed: dx in delta's type, where it is another than the residual's; or null
  float* dweight;
  float* dbias;        // not written by RMSNorm
  float* ddelta_bias;  // [columns]: the sum of dx over the rows; or null
  float* partials;     // norm_partials() floats
  std::int64_t rows;
  int columns;
  Type type, residual_type, weight_type;
  bool rms;
};

// Loss and gradient in one pass over the logits.
struct CrossEntropy {
  void* logits;                 // [rows, columns]; replaced by the gradient
  const std::int64_t* targets;  // [rows]; ignore_index, or in [0, classes)
  float* losses;                // [rows]; 0 where ignored, NaN where the target is out of range
  const float* scale;           // on the device: the gradient of each row's loss
  unsigned* next_row;           // on the device, scratch
  std::int64_t rows, ignore_index;
  int columns;  // a multiple of 8
  int classes;  // at most columns; the columns after them are padding
  Type type;
};

// The sum of [rows, columns] over the rows, columns a multiple of 8.
struct ColumnSum {
  const void* from;
  float* to;
  float* partials;  // column_sum_partials() floats
  std::int64_t rows;
  int columns;
  Type type;
};

// out [rows, width] = silu(gate) up, width a multiple of 8. Gate, up and their gradients are
// matrices of their own, or the halves of one: `pitch` is what lies between their rows.
struct Swiglu {
  const void* gate;
  const void* up;
  void* out = nullptr;         // only for forward
  const void* dout = nullptr;  // the others only for backward
  void* dgate = nullptr;
  void* dup = nullptr;
  std::uint32_t* amax = nullptr;  // raised to the largest magnitude of what is written; or null
  std::int64_t rows;
  std::int64_t pitch;  // in elements, a multiple of 8
  int width;
  Type type;
};

// One of query and key. Strides in elements; the elements of a head lie side by side.
struct RopePart {
  const void* from;
  void* to;
  std::int64_t heads;
  std::int64_t from_batch, from_head, from_time, to_batch, to_head, to_time;
};
struct Rope {
  RopePart query, key;
  const float* cos;  // [batch or 1, time, half]
  const float* sin;
  std::int64_t angles_batch;  // elements from one batch to the next; 0: the same for all
  std::int64_t batch, time;
  int half, width;  // multiples of 8; 2 half <= width
  bool inverse;     // the gradient
  Type type;
};

// Dropout of an adapter's input: a bit of [rows, columns / 8] is 1 where an element is kept, times
// scale. Columns are a multiple of 32, the rank is 8 or 16, types have 16 bits (lora_covers).
struct DroppedInput {
  const void* x;             // [rows, columns]
  const void* low;           // [rank, columns]
  const std::int64_t* seed;  // on the device: the seed of the bits
  std::uint8_t* bits;        // written
  void* narrow;              // [rows, rank] = the dropped x times the transpose of low
  std::int64_t rows;
  int columns, rank;
  float keep, scale;  // keep: the share of elements that are kept
  Type type;
};
struct DroppedProduct {
  const void* narrow;  // [rows, rank]
  const void* low;     // [rank, columns]
  const std::uint8_t* bits;
  void* to;  // [rows, columns] = narrow low, dropped out
  std::int64_t rows;
  int columns, rank;
  float scale;
  Type type;
};
struct DroppedGradient {
  const void* narrow;  // [rows, rank]
  const void* x;       // [rows, columns]
  const std::uint8_t* bits;
  float* to;        // [rank, columns] = the transpose of narrow times the dropped x
  float* partials;  // dropped_gradient_partials() floats
  std::int64_t rows;
  int columns, rank;
  float scale;
  Type type;
};

// A weight in 4 bits, of Nf4Layout (lockstep/kernels/nf4.h).
struct Nf4Decode {
  const std::uint8_t* from;
  void* to;  // [count]
  std::int64_t count;
  Type type;
};

// One AdamW step over many tensors in one pass, after the norm of their gradients.
struct AdamTensor {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  float* step;  // this parameter's step number
  std::int64_t size;
  std::int64_t begin;       // of these elements in the parameter
  std::uint32_t parameter;  // identifies it, for stochastic rounding
  std::int32_t group;
  // 1 or 0. aligned: every pointer is a multiple of 16; the others: bfloat16 and not float.
  std::int32_t aligned, bf16_param, bf16_state;
};
struct AdamGroup {
  float lr, beta1, beta2, eps, weight_decay;
};
struct AdamChunk {
  std::int32_t tensor;
  std::int32_t first;  // in units of kAdamChunk
};
constexpr std::int64_t kAdamChunk = 16384;
struct AdamFactors {
  float step_size, root_correction2, decay;
  std::uint64_t key;  // of the step's random bits
};
struct AdamStep {  // all pointers are device pointers
  const AdamTensor* tensors;
  const AdamGroup* groups;
  const AdamChunk* chunks;
  float* partials;        // [chunk_count]
  AdamFactors* factors;   // [tensor_count]
  const float* max_norm;  // null, or not above zero: no clipping
  float* norm;            // written: the norm of the gradients
  float* found_inf;       // written: 1 when the norm is not finite
  const float* skip;      // for adamw_update: nothing is changed where it is not 0; or null
  float* clip;            // scratch
  int tensor_count, chunk_count;
};

}  // namespace lockstep::kernels::cuda
