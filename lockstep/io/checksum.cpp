#include "lockstep/io/checksum.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <array>

#include "lockstep/core/error.h"

namespace lockstep::io {
namespace {

void must(bool done) {
  if (!done)
    throw UsageError("io",
                     "OpenSSL cannot compute SHA-256. Check its configuration "
                     "(OPENSSL_CONF).");
}

}  // namespace

void Sha256::Free::operator()(evp_md_ctx_st* context) const {
  ::EVP_MD_CTX_free(context);
}

Sha256::Sha256() : context_(::EVP_MD_CTX_new()) {
  must(context_ && ::EVP_DigestInit_ex(context_.get(), ::EVP_sha256(), nullptr) == 1);
}

void Sha256::update(std::span<const std::byte> bytes) {
  must(::EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
}

std::string Sha256::finish() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  must(::EVP_DigestFinal_ex(context_.get(), digest.data(), &size) == 1);
  std::string text;
  for (unsigned i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

std::string sha256(std::span<const std::byte> bytes) {
  Sha256 sum;
  sum.update(bytes);
  return sum.finish();
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
