// Checksums of buffers and files: 64 bits that say whether what is read is what was written.
//
// Every step is a bijection. Bytes are dealt as 8-byte little-endian words to eight lanes, and a
// lane takes a word by s = rotl((s ^ w) * K, 29) * L with K and L odd. For a fixed word that is
// one-to-one in s, for a fixed s one-to-one in w, and the lanes are folded together by one-to-one
// steps too. So a change inside one word, hence any flipped bit, cannot be lost; cut files and
// swapped blocks go unseen by a chance of about 2^-64. (One multiplication would not do: it moves a
// word's highest bit, and nothing else, to a known place, where the next word of the lane could
// undo it.) It is not a defence against a forger.
//
//   Checksum64 sum;
//   sum.update(first); sum.update(second);      // the same as one update with both
//   manifest[name] = checksum_text(sum.value());
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lockstep::io {

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Fed by one thread at a time; owns nothing but its state.
class Checksum64 {
 public:
  Checksum64();
  void update(std::span<const std::byte> bytes);
  std::uint64_t value() const;  // of everything so far; more may follow

 private:
  static constexpr std::size_t kLanes = 8;
  static constexpr std::size_t kBlockBytes = kLanes * 8;

  void blocks(const std::byte* data, std::size_t count);

  std::array<std::uint64_t, kLanes> lanes_;
  std::array<std::byte, kBlockBytes> tail_{};
  std::size_t tail_bytes_ = 0;
  std::uint64_t total_bytes_ = 0;
};

std::uint64_t checksum64(std::span<const std::byte> bytes);
// 16 lower-case hexadecimal digits.
std::string checksum_text(std::uint64_t checksum);

// What a manifest remembers of a file.
struct FileDigest {
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
  bool operator==(const FileDigest&) const = default;
};

// CRC-32C (Castagnoli), which event records carry; for small buffers.
std::uint32_t crc32c(std::span<const std::byte> bytes);

}  // namespace lockstep::io
