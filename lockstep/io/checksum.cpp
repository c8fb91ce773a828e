#include "lockstep/io/checksum.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace lockstep::io {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

// The first 64 bits of the fractions of the square roots of 3, 7, 5 and 2: without a pattern, and
// those that multiply are odd, so that multiplication modulo 2^64 is one-to-one.
constexpr std::uint64_t kStep = 0xbb67ae8584caa73bu;
constexpr std::uint64_t kSpread = 0xa54ff53a5f1d36f1u;
constexpr std::uint64_t kFold = 0x3c6ef372fe94f82bu;
constexpr std::uint64_t kSeed = 0x6a09e667f3bcc908u;

inline std::uint64_t load(const std::byte* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

inline std::uint64_t step(std::uint64_t state, std::uint64_t word) {
  return std::rotl((state ^ word) * kStep, 29) * kSpread;
}

inline std::uint64_t fold(std::uint64_t state, std::uint64_t word) {
  state = (state ^ word) * kFold;
  return state ^ (state >> 32);
}

}  // namespace

Checksum64::Checksum64() {
  // Different starts: the same word in two lanes must not mean the same.
  for (std::size_t i = 0; i < kLanes; ++i) lanes_[i] = fold(kSeed, i);
}

void Checksum64::blocks(const std::byte* data, std::size_t count) {
  // Eight independent chains, all in registers, hide the latency of the multiplications.
  auto lanes = lanes_;
  const auto one = [&lanes]<std::size_t... i>(const std::byte* block, std::index_sequence<i...>) {
    ((lanes[i] = step(lanes[i], load(block + 8 * i))), ...);
  };
  for (std::size_t b = 0; b < count; ++b, data += kBlockBytes)
    one(data, std::make_index_sequence<kLanes>());
  lanes_ = lanes;
}

void Checksum64::update(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  total_bytes_ += bytes.size();
  if (tail_bytes_ > 0) {
    const std::size_t n = std::min(kBlockBytes - tail_bytes_, bytes.size());
    std::memcpy(tail_.data() + tail_bytes_, bytes.data(), n);
    tail_bytes_ += n;
    bytes = bytes.subspan(n);
    if (tail_bytes_ < kBlockBytes) return;
    blocks(tail_.data(), 1);
    tail_bytes_ = 0;
  }
  const std::size_t count = bytes.size() / kBlockBytes;
  blocks(bytes.data(), count);
  bytes = bytes.subspan(count * kBlockBytes);
  if (!bytes.empty()) std::memcpy(tail_.data(), bytes.data(), bytes.size());
  tail_bytes_ = bytes.size();
}

std::uint64_t Checksum64::value() const {
  // The rest is filled up with zeros; the length, folded in last, distinguishes them from real
  // ones.
  std::array<std::byte, kBlockBytes> rest{};
  std::copy_n(tail_.begin(), tail_bytes_, rest.begin());
  std::uint64_t sum = kSeed;
  for (std::size_t i = 0; i < kLanes; ++i)
    sum = fold(sum, step(lanes_[i], load(rest.data() + 8 * i)));
  return fold(fold(sum, total_bytes_), kSeed);
}

std::uint64_t checksum64(std::span<const std::byte> bytes) {
  Checksum64 sum;
  sum.update(bytes);
  return sum.value();
}

std::string checksum_text(std::uint64_t checksum) {
  return fmt::format("{:016x}", checksum);
}

std::uint32_t crc32c(std::span<const std::byte> bytes) {
  // 0x82f63b78 is the Castagnoli polynomial with its bits reversed.
  static constexpr auto kTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < table.size(); ++i) {
      std::uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
      table[i] = crc;
    }
    return table;
  }();
  std::uint32_t crc = ~0u;
  for (const std::byte b : bytes)
    crc = (crc >> 8) ^ kTable[(crc ^ std::to_integer<std::uint32_t>(b)) & 0xffu];
  return ~crc;
}

}  // namespace lockstep::io
