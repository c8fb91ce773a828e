// Binary files of tokens in the formats of llm.c and nanoGPT, without torch.
//
//   format      header                                            tokens
//   llmc16      256 int32: 20240520, 1, count, zeros              count x uint16
//   llmc32      256 int32: 20240801, 7, count, zeros              count x uint32
//   nanogpt     none                                              all of the file, uint16
//
// All little-endian. A file is checked before it is used: magic, version, and that its size is what
// the header says, so that a download that was cut off is not trained on.
//
//   TokenFile file("data/train_000001.bin");
//   file.copy(1000, tokens);           // std::span<std::int64_t>
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::io {
class MappedFile;
}

namespace lockstep::data {

enum class TokenFormat { kAuto, kLlmc16, kLlmc32, kNanogpt };

std::string_view name(TokenFormat format);
TokenFormat token_format(std::string_view name);  // UsageError naming the known ones

struct TokenLayout {
  TokenFormat format = TokenFormat::kNanogpt;
  std::size_t token_bytes = 2;
  std::uint64_t data_offset = 0;
  std::uint64_t count = 0;
};

// Parses `contents` (the file's first 1024 bytes, or all of it) and checks the file's size. With
// kAuto a file without a magic number is nanoGPT's if it is called train.bin, val.bin or test.bin,
// and refused otherwise. UsageError with the fault, the values and a remedy.
TokenLayout parse_token_file(std::span<const std::byte> contents, std::uint64_t file_bytes,
                             const std::string& path, TokenFormat format = TokenFormat::kAuto);

// The 1024 bytes before the tokens; empty for nanogpt. UsageError when `count` does not fit.
std::string token_header(TokenFormat format, std::uint64_t count);

// Memory-mapped and read-only. Any number of threads may read.
class TokenFile {
 public:
  explicit TokenFile(std::string path, TokenFormat format = TokenFormat::kAuto);

  const std::string& path() const { return path_; }
  const TokenLayout& layout() const { return layout_; }
  std::uint64_t size() const { return layout_.count; }
  std::uint32_t operator[](std::uint64_t at) const;
  // out.size() tokens from `first` on; all must exist.
  void copy(std::uint64_t first, std::span<std::int64_t> out) const;
  // The same for two outputs in one pass: inputs from `first` on, targets from `first` + 1 on.
  void copy_shifted(std::uint64_t first, std::span<std::int64_t> inputs,
                    std::span<std::int64_t> targets) const;
  std::uint32_t largest_token() const;

 private:
  std::string path_;
  std::shared_ptr<const io::MappedFile> map_;
  TokenLayout layout_;
};

// The files of a folder that hold `split` ("train", "val"; empty: all), by name: those that end in
// .bin and have the split as a part of their name, between `_`, `-` and `.`; where several parts
// are splits, the last counts. UsageError for a folder without any.
std::vector<std::string> token_files(const std::string& folder, const std::string& split);

}  // namespace lockstep::data
