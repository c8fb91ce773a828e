// Digests of buffers and files: whether what is read is what was written.
//
//   Sha256 sum;
//   sum.update(first); sum.update(second);      // the same as one update with both
//   const std::string digest = sum.finish();    // as `sha256sum` prints it
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct evp_md_ctx_st;  // OpenSSL's

namespace lockstep::io {

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Fed by one thread at a time.
class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  std::string finish();  // 64 lower-case hexadecimal digits; nothing may follow

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

std::string sha256(std::span<const std::byte> bytes);

// What a manifest remembers of a file.
struct FileDigest {
  std::uint64_t bytes = 0;
  std::string sha256{};  // empty: not known (folders of earlier versions)
  bool operator==(const FileDigest&) const = default;
};

// CRC-32C (Castagnoli), which event records carry; for small buffers.
std::uint32_t crc32c(std::span<const std::byte> bytes);

}  // namespace lockstep::io
