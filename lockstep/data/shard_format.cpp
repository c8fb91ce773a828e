#include "lockstep/data/shard_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/io/file.h"

namespace lockstep::data {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr std::size_t kHeaderWords = 256;
constexpr std::size_t kHeaderBytes = kHeaderWords * sizeof(std::int32_t);

struct Kind {
  TokenFormat format;
  std::string_view name;
  std::size_t token_bytes;
  std::int32_t magic;  // 0: no header
  std::int32_t version;
};
constexpr std::array<Kind, 3> kKinds{{
    {TokenFormat::kLlmc16, "llmc16", 2, 20240520, 1},
    {TokenFormat::kLlmc32, "llmc32", 4, 20240801, 7},
    {TokenFormat::kNanogpt, "nanogpt", 2, 0, 0},
}};

const Kind& kind_of(TokenFormat format) {
  for (const Kind& kind : kKinds)
    if (kind.format == format) return kind;
  throw UsageError("shards", "a file must be written in one format; 'auto' is for reading.");
}

const Kind* kind_of_magic(std::int32_t magic) {
  for (const Kind& kind : kKinds)
    if (kind.magic != 0 && kind.magic == magic) return &kind;
  return nullptr;
}

std::int32_t header_word(std::span<const std::byte> contents, std::size_t index) {
  std::int32_t word = 0;
  std::memcpy(&word, contents.data() + index * sizeof(word), sizeof(word));
  return word;
}

// A file without a header could be anything, so only nanoGPT's file names are accepted.
bool has_nanogpt_name(const std::string& path) {
  const std::string file = std::filesystem::path(path).filename().string();
  return file == "train.bin" || file == "val.bin" || file == "test.bin";
}

TokenLayout raw_layout(std::uint64_t file_bytes, const std::string& path) {
  if (file_bytes % 2 != 0)
    throw UsageError("shards",
                     "{} has {} bytes, and tokens of 2 bytes need an even number. The file was "
                     "probably cut off, or it is not one of tokens.",
                     path, file_bytes);
  return {TokenFormat::kNanogpt, 2, 0, file_bytes / 2};
}

TokenLayout headed_layout(const Kind& kind, std::span<const std::byte> contents,
                          std::uint64_t file_bytes, const std::string& path) {
  if (contents.size() < kHeaderBytes)
    throw UsageError("shards",
                     "{} has {} bytes, and its header alone needs {}. The file was probably cut "
                     "off; copy or make it again.",
                     path, contents.size(), kHeaderBytes);
  const std::int32_t version = header_word(contents, 1);
  if (version != kind.version)
    throw UsageError(
        "shards",
        "{} has version {} with the magic number {}; {} files have version {}. A newer "
        "program probably wrote it.",
        path, version, kind.magic, kind.name, kind.version);
  const std::int32_t count = header_word(contents, 2);
  if (count < 0)
    throw UsageError("shards", "{} says that it holds {} tokens. Its header is damaged.", path,
                     count);
  const std::uint64_t wanted = kHeaderBytes + static_cast<std::uint64_t>(count) * kind.token_bytes;
  if (wanted != file_bytes)
    throw UsageError(
        "shards",
        "{} has {} bytes, and its header says {} tokens, which make {} bytes. The file "
        "was probably {}; copy or make it again.",
        path, file_bytes, count, wanted, file_bytes < wanted ? "cut off" : "written twice");
  return {kind.format, kind.token_bytes, kHeaderBytes, static_cast<std::uint64_t>(count)};
}

// Calls `use` with the tokens in memory, in their type.
template <typename Use>
auto with_tokens(const std::byte* from, std::size_t token_bytes, const Use& use) {
  return token_bytes == 2 ? use(reinterpret_cast<const std::uint16_t*>(from))
                          : use(reinterpret_cast<const std::uint32_t*>(from));
}

// inputs[i] = tokens[i] and targets[i] = tokens[i + 1], for i below n: the one loop of building a
// batch, which must run at memory speed. Each variant below compiles it with its own instructions.
template <typename Token>
[[gnu::always_inline]] inline void widen_shifted(const Token* __restrict tokens,
                                                 std::int64_t* __restrict inputs,
                                                 std::int64_t* __restrict targets, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    inputs[i] = tokens[i];
    targets[i] = tokens[i + 1];
  }
}

template <typename Token>
using WidenShifted = void (*)(const Token* tokens, std::int64_t* inputs, std::int64_t* targets,
                              std::size_t n);

template <typename Token>
void widen_plain(const Token* tokens, std::int64_t* inputs, std::int64_t* targets, std::size_t n) {
  widen_shifted(tokens, inputs, targets, n);
}

#if defined(__x86_64__)
// Stores of AVX2 and AVX-512 are twice and four times as wide as what every x86-64 has.
template <typename Token>
[[gnu::target("avx2")]] void widen_avx2(const Token* tokens, std::int64_t* inputs,
                                        std::int64_t* targets, std::size_t n) {
  widen_shifted(tokens, inputs, targets, n);
}

template <typename Token>
[[gnu::target("avx512f,avx512bw,avx512vl,prefer-vector-width=512")]] void widen_avx512(
    const Token* tokens, std::int64_t* inputs, std::int64_t* targets, std::size_t n) {
  widen_shifted(tokens, inputs, targets, n);
}

// What the processor has.
template <typename Token>
WidenShifted<Token> choose_widen() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return widen_avx512<Token>;
  return __builtin_cpu_supports("avx2") ? widen_avx2<Token> : widen_plain<Token>;
}
#else
template <typename Token>
WidenShifted<Token> choose_widen() {
  return widen_plain<Token>;
}
#endif

template <typename Token>
void widen_pair(const Token* tokens, std::span<std::int64_t> inputs,
                std::span<std::int64_t> targets) {
  static const WidenShifted<Token> chosen = choose_widen<Token>();
  chosen(tokens, inputs.data(), targets.data(), inputs.size());
}

}  // namespace

std::string_view name(TokenFormat format) {
  return format == TokenFormat::kAuto ? "auto" : kind_of(format).name;
}

TokenFormat token_format(std::string_view text) {
  if (text == "auto") return TokenFormat::kAuto;
  for (const Kind& kind : kKinds)
    if (kind.name == text) return kind.format;
  throw UsageError("shards", "there is no token format '{}'. Use llmc16, llmc32 or nanogpt.", text);
}

TokenLayout parse_token_file(std::span<const std::byte> contents, std::uint64_t file_bytes,
                             const std::string& path, TokenFormat format) {
  const bool any = format == TokenFormat::kAuto;
  if (format == TokenFormat::kNanogpt) return raw_layout(file_bytes, path);
  const Kind* found =
      contents.size() >= sizeof(std::int32_t) ? kind_of_magic(header_word(contents, 0)) : nullptr;
  if (found != nullptr && (any || found->format == format))
    return headed_layout(*found, contents, file_bytes, path);
  if (any && has_nanogpt_name(path)) return raw_layout(file_bytes, path);
  if (found != nullptr)
    throw UsageError("shards", "{} is a {} file, and {} was asked for.", path, found->name,
                     name(format));
  const std::string starts = contents.size() < sizeof(std::int32_t)
                                 ? fmt::format("has {} bytes", contents.size())
                                 : fmt::format("begins with {}", header_word(contents, 0));
  throw UsageError("shards",
                   "{} {}, which is not a magic number of a token file (20240520 for uint16, "
                   "20240801 for uint32). If it holds nanoGPT's bare uint16 tokens, say so with "
                   "format nanogpt; otherwise make it with 'lockstep data tokenize'.",
                   path, starts);
}

std::string token_header(TokenFormat format, std::uint64_t count) {
  const Kind& kind = kind_of(format);
  if (kind.magic == 0) return {};
  if (count > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max()))
    throw UsageError("shards",
                     "{} tokens do not fit into one {} file, whose header counts up to {}. Write "
                     "several shards.",
                     count, kind.name, std::numeric_limits<std::int32_t>::max());
  std::array<std::int32_t, kHeaderWords> fields{kind.magic, kind.version,
                                                static_cast<std::int32_t>(count)};
  std::string bytes(kHeaderBytes, '\0');
  std::memcpy(bytes.data(), fields.data(), kHeaderBytes);
  return bytes;
}

TokenFile::TokenFile(std::string path, TokenFormat format)
    : path_(std::move(path)),
      map_(std::make_shared<const io::MappedFile>(path_)),
      layout_(parse_token_file(map_->bytes(), map_->bytes().size(), path_, format)) {}

std::uint32_t TokenFile::operator[](std::uint64_t at) const {
  LOCKSTEP_ASSERT(at < layout_.count);
  const std::byte* from = map_->bytes().data() + layout_.data_offset + at * layout_.token_bytes;
  std::uint32_t token = 0;
  std::memcpy(&token, from, layout_.token_bytes);
  return token;
}

void TokenFile::copy(std::uint64_t first, std::span<std::int64_t> out) const {
  LOCKSTEP_ASSERT(first <= layout_.count && out.size() <= layout_.count - first);
  const std::byte* from = map_->bytes().data() + layout_.data_offset + first * layout_.token_bytes;
  with_tokens(from, layout_.token_bytes, [&](const auto* tokens) {
    std::int64_t* to = out.data();
    for (std::size_t i = 0, n = out.size(); i < n; ++i) to[i] = tokens[i];
  });
}

void TokenFile::copy_shifted(std::uint64_t first, std::span<std::int64_t> inputs,
                             std::span<std::int64_t> targets) const {
  LOCKSTEP_ASSERT(inputs.size() == targets.size());
  LOCKSTEP_ASSERT(first < layout_.count && inputs.size() < layout_.count - first);
  const std::byte* from = map_->bytes().data() + layout_.data_offset + first * layout_.token_bytes;
  with_tokens(from, layout_.token_bytes,
              [&](const auto* tokens) { widen_pair(tokens, inputs, targets); });
}

std::uint32_t TokenFile::largest_token() const {
  const std::byte* from = map_->bytes().data() + layout_.data_offset;
  return with_tokens(from, layout_.token_bytes, [&](const auto* tokens) {
    std::remove_cvref_t<decltype(*tokens)> most = 0;
    for (std::uint64_t i = 0; i < layout_.count; ++i) most = std::max(most, tokens[i]);
    return std::uint32_t{most};
  });
}

namespace {

// The last part that names a split decides: pretrain_val_000000.bin is for validation, and so is
// train_val_000000.bin, which `data tokenize --name train` writes.
bool is_of_split(std::string_view file, std::string_view split) {
  if (split.empty()) return true;
  constexpr std::string_view kSplits[] = {"train", "val", "valid", "validation", "test"};
  bool found = false;
  while (!file.empty()) {
    const std::size_t end = std::min(file.find_first_of("_-."), file.size());
    const std::string_view part = file.substr(0, end);
    file.remove_prefix(std::min(end + 1, file.size()));
    // train0.bin is a shard of the split too.
    const std::string_view word = part.substr(0, part.find_last_not_of("0123456789") + 1);
    if (part == split || word == split)
      found = true;
    else if (std::find(std::begin(kSplits), std::end(kSplits), word) != std::end(kSplits))
      found = false;
  }
  return found;
}

}  // namespace

std::vector<std::string> token_files(const std::string& folder, const std::string& split) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  std::vector<std::string> files;
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string file = entries->path().filename().string();
    if (file.ends_with(".bin") && is_of_split(file, split))
      files.push_back(entries->path().string());
  }
  if (error)
    throw UsageError("shards",
                     "{} cannot be listed ({}). Name a folder of token files; 'lockstep data "
                     "tokenize --output {} TEXT...' makes one.",
                     folder, error.message(), folder);
  if (files.empty())
    throw UsageError("shards",
                     "{} has no file whose name ends in .bin{}. Make some with 'lockstep data "
                     "tokenize'.",
                     folder, split.empty() ? "" : fmt::format(" and has '{}' as a part", split));
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace lockstep::data
