// NF4: weights in 4 bits with double quantisation, as bitsandbytes defines them (load_in_4bit,
// bnb_4bit_quant_type nf4, bnb_4bit_use_double_quant).
//
// 64 values are a block: its largest magnitude, and for each value the nearest of 16 numbers times
// it. 256 blocks are a group: their magnitudes, less the mean of all of them, are stored in 8 bits,
// as the nearest of 256 numbers times the group's largest.
//
//   const Nf4Layout layout(count);                  // bytes has layout.bytes of them
//   nf4_encode(values, layout, {0, layout.groups}, bytes, magnitudes);   // [layout.blocks] of them
//   nf4_encode_magnitudes(magnitudes, layout, bytes);
//   nf4_decode(bytes, layout, {0, layout.groups}, values);
//
// One array of bytes has all of it: the 4-bit numbers of whole blocks, the first of two in the
// upper half of a byte; the 8-bit numbers of whole groups; the floats of the groups; the mean.
//
// Pure functions on the caller's memory: any thread may call them, even several at once on other
// groups. The bits do not depend on the processor.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

inline constexpr std::int64_t kNf4Block = 64, kNf4Group = 256;

struct Nf4Layout {
  constexpr explicit Nf4Layout(std::int64_t values)
      : count(values),
        blocks((count + kNf4Block - 1) / kNf4Block),
        groups((blocks + kNf4Group - 1) / kNf4Group),
        magnitudes(groups * kNf4Group * kNf4Block / 2),
        scales(magnitudes + groups * kNf4Group),
        mean(scales + 4 * groups),
        bytes(mean + 4) {}

  std::int64_t count, blocks, groups;
  std::int64_t magnitudes, scales, mean;  // where these begin
  std::int64_t bytes;
};

struct Nf4Groups {
  std::int64_t begin, end;
};

void nf4_encode(const float* from, const Nf4Layout& layout, Nf4Groups groups, std::uint8_t* to,
                float* magnitudes);
// All groups. NaN and infinite values make the mean NaN or infinite.
void nf4_encode_magnitudes(const float* magnitudes, const Nf4Layout& layout, std::uint8_t* to);
void nf4_decode(const std::uint8_t* from, const Nf4Layout& layout, Nf4Groups groups, float* to);

// ---------------------------------------------------------------- the numbers, also for CUDA

struct Nf4Numbers {
  float of_values[16];       // quantiles of a normal distribution, from -1 to 1, and zero
  float of_magnitudes[256];  // bitsandbytes' signed dynamic map
};

// The dynamic map has values of seven powers of ten, each with twice as many as the smaller one:
// the midpoints of equal steps from 0.1 to 1, times the power. It also has their negatives, 0, 1.
// torch.linspace, which bitsandbytes makes it with, rounds differently from processor to processor;
// these are the bits of its plain loop.
constexpr Nf4Numbers nf4_numbers() {
  Nf4Numbers all{
      {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
       -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
       0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
       0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
      {}};
  constexpr float kPowers[] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
  int at = 128;
  for (int i = 0; i < 7; ++i) {
    const int steps = 1 << i;
    const float step = (1.0f - 0.1f) / static_cast<float>(steps);
    float edges[65] = {};
    for (int k = 0; k <= steps; ++k)
      edges[k] = k < (steps + 1) / 2 ? 0.1f + step * static_cast<float>(k)
                                     : 1.0f - step * static_cast<float>(steps - k);
    for (int k = 0; k < steps; ++k, ++at) {
      all.of_magnitudes[at] = (edges[k] + edges[k + 1]) / 2.0f * kPowers[i];
      all.of_magnitudes[254 - at] = -all.of_magnitudes[at];
    }
  }
  all.of_magnitudes[255] = 1;
  return all;
}

}  // namespace lockstep::kernels
