#include "lockstep/kernels/nf4.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

namespace lockstep::kernels {
namespace {

constexpr Nf4Numbers kNumbers = nf4_numbers();
static_assert(kNumbers.of_magnitudes[254] < 1 && kNumbers.of_magnitudes[127] == 0);

// As integers magnitudes are ordered as the floats are, and NaN is the largest.
float largest(const float* values, std::int64_t count) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < count; ++i)
    most = std::max(most, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  return std::bit_cast<float>(most);
}

// What bitsandbytes multiplies with in place of a division; of zeros it makes zeros.
float inverse(float magnitude) {
  return 1.0f / std::max(magnitude, 1e-38f);
}

// The nearest number: how many midpoints between neighbours are below. Of two equally near ones it
// is the lower.
struct Midpoints {
  constexpr Midpoints() {
    for (int i = 0; i < 15; ++i)
      of_values[i] = (kNumbers.of_values[i] + kNumbers.of_values[i + 1]) / 2;
    for (int i = 0; i < 255; ++i)
      of_magnitudes[i] = (kNumbers.of_magnitudes[i] + kNumbers.of_magnitudes[i + 1]) / 2;
  }
  float of_values[15] = {};
  float of_magnitudes[255] = {};
};
constexpr Midpoints kMidpoints;

// Returns the largest magnitude.
float encode_block(const float (&values)[kNf4Block], std::uint8_t* to) {
  const float magnitude = largest(values, kNf4Block), factor = inverse(magnitude);
  std::int32_t nearest[kNf4Block] = {};
  for (const float midpoint : kMidpoints.of_values)
    for (std::int64_t i = 0; i < kNf4Block; ++i) nearest[i] += values[i] * factor > midpoint;
  for (std::int64_t i = 0; i < kNf4Block / 2; ++i)
    to[i] = static_cast<std::uint8_t>(nearest[2 * i] << 4 | nearest[2 * i + 1]);
  return magnitude;
}

}  // namespace

void nf4_encode(const float* from, const Nf4Layout& layout, Nf4Groups groups, std::uint8_t* to,
                float* magnitudes) {
  const std::int64_t end = std::min(groups.end * kNf4Group, layout.blocks);
  for (std::int64_t block = groups.begin * kNf4Group; block < end; ++block) {
    const std::int64_t first = block * kNf4Block;
    float values[kNf4Block] = {};
    std::copy_n(from + first, std::min(kNf4Block, layout.count - first), values);
    magnitudes[block] = encode_block(values, to + first / 2);
  }
}

void nf4_encode_magnitudes(const float* magnitudes, const Nf4Layout& layout, std::uint8_t* to) {
  double sum = 0;  // in the blocks' order: the same bits everywhere
  for (std::int64_t i = 0; i < layout.blocks; ++i) sum += magnitudes[i];
  const auto mean = static_cast<float>(sum / static_cast<double>(layout.blocks));
  std::memcpy(to + layout.mean, &mean, sizeof mean);
  for (std::int64_t group = 0; group < layout.groups; ++group) {
    const std::int64_t first = group * kNf4Group;
    const std::int64_t count = std::min(kNf4Group, layout.blocks - first);
    float rest[kNf4Group] = {};
    for (std::int64_t i = 0; i < count; ++i) rest[i] = magnitudes[first + i] - mean;
    const float scale = largest(rest, count), factor = inverse(scale);
    std::memcpy(to + layout.scales + 4 * group, &scale, sizeof scale);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto* const begin = std::begin(kMidpoints.of_magnitudes);
      const auto* const above =
          std::lower_bound(begin, std::end(kMidpoints.of_magnitudes), rest[i] * factor);
      to[layout.magnitudes + first + i] = static_cast<std::uint8_t>(above - begin);
    }
  }
}

void nf4_decode(const std::uint8_t* from, const Nf4Layout& layout, Nf4Groups groups, float* to) {
  float mean = 0;
  std::memcpy(&mean, from + layout.mean, sizeof mean);
  const std::int64_t end = std::min(groups.end * kNf4Group, layout.blocks);
  for (std::int64_t block = groups.begin * kNf4Group; block < end; ++block) {
    float scale = 0;
    std::memcpy(&scale, from + layout.scales + 4 * (block / kNf4Group), sizeof scale);
    const float magnitude = kNumbers.of_magnitudes[from[layout.magnitudes + block]] * scale + mean;
    const std::int64_t first = block * kNf4Block;
    for (std::int64_t i = first; i < std::min(first + kNf4Block, layout.count); ++i)
      to[i] = kNumbers.of_values[i % 2 == 0 ? from[i / 2] >> 4 : from[i / 2] & 15] * magnitude;
  }
}

}  // namespace lockstep::kernels
