// safetensors files: tensors by name, as 8 bytes of header length, a JSON header and raw bytes.
// Read as strictly as the format's own package does, and stricter where its text says so: no key
// appears twice, and the tensors cover the rest of the file. Written byte for byte as that package
// writes. No torch in here: a tensor is (name, dtype, shape, bytes); tensors.h is the bridge.
//
//   SafetensorsFile file("model.safetensors");
//   const TensorEntry& entry = file.at("wte.weight");
//   use(entry.dtype, entry.shape, file.bytes(entry));
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"

namespace lockstep::io {

// In the order the format gives them: tensors of a later type are written first, so that every
// tensor is aligned to its element.
enum class DType : std::uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

std::string_view dtype_name(DType dtype);  // "BF16"
std::optional<DType> dtype_of(std::string_view name);
int dtype_bits(DType dtype);

// Bytes of a tensor, or nothing when the count overflows, a dimension is negative, or elements
// smaller than a byte do not fill the last one.
std::optional<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape);

using Metadata = std::map<std::string, std::string>;

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // in the data part
  std::uint64_t end = 0;
};

// A tensor's name, type and shape, without its bytes.
struct TensorShape {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;

  bool operator==(const TensorShape&) const = default;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  // in the order of their bytes
  Metadata metadata;
  std::uint64_t data_offset = 0;  // of the data part in the file
};

// `contents` is the whole file; `file` is its name in errors (UsageError).
SafetensorsHeader parse_safetensors(std::span<const std::byte> contents, std::string_view file);

// A mapped file. Opened by one thread, then read by any number; spans live as long as it does.
class SafetensorsFile {
 public:
  // SystemError when it cannot be opened, UsageError when it is not a valid file.
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  const std::vector<TensorEntry>& tensors() const { return header_.tensors; }
  const Metadata& metadata() const { return header_.metadata; }
  const TensorEntry* find(std::string_view name) const;  // nullptr when it is not there
  const TensorEntry& at(std::string_view name) const;    // UsageError
  std::span<const std::byte> bytes(const TensorEntry& entry) const;

 private:
  std::string path_;
  MappedFile map_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, std::size_t> by_name_;  // views into header_
};

// A tensor to be written; the bytes stay the caller's.
struct TensorBytes {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

// The position of each tensor in a file, computed before there are any bytes: several processes
// need it to write one file together.
struct SafetensorsLayout {
  std::string head;                  // the file's first bytes, which the data part follows
  std::vector<TensorEntry> tensors;  // in the order of their bytes
  std::uint64_t bytes() const { return head.size() + (tensors.empty() ? 0 : tensors.back().end); }
};

// Puts the tensors into the format's order. UsageError for a name that appears twice or is not
// UTF-8, and for a shape that no tensor can have.
SafetensorsLayout lay_out_safetensors(std::vector<TensorShape> tensors,
                                      const Metadata& metadata = {});

// As above; also UsageError, before anything is written, for bytes of the wrong size.
void write_safetensors(FileWriter& file, const std::vector<TensorBytes>& tensors,
                       const Metadata& metadata = {});

// ---------------------------------------------------------------- models in several files
//
// A model in one safetensors file or, above a size, in several with an index, named as Hugging Face
// names them: model.safetensors, or model-00001-of-00003.safetensors ... and
// model.safetensors.index.json, which says which tensor is in which file.
//
//   write_safetensors_set(dir, tensors, metadata, {.max_shard_bytes = 5'000'000'000});
//   SafetensorsSet set("checkpoint-100");
//   auto [file, entry] = set.at("wte.weight");
struct ShardOptions {
  std::string stem = "model";
  // Limit on a file's tensor bytes; a single larger tensor gets a file of its own.
  std::uint64_t max_shard_bytes = 5'000'000'000;
};

// The files of a set, and the position of each tensor in them.
struct SetLayout {
  struct File {
    std::string name;
    SafetensorsLayout layout;
  };
  std::vector<File> files;
  std::string index_name, index;  // the index and its text; empty where there is one file
};

// Distributes the tensors over files in the order given.
SetLayout lay_out_safetensors_set(std::vector<TensorShape> tensors, const Metadata& metadata = {},
                                  const ShardOptions& options = {});

// Writes that layout. Returns the names of the files written.
std::vector<std::string> write_safetensors_set(AtomicDir& dir,
                                               const std::vector<TensorBytes>& tensors,
                                               const Metadata& metadata = {},
                                               const ShardOptions& options = {});

// Opened by one thread, then read by any number; owns its mappings.
class SafetensorsSet {
 public:
  struct Found {
    const SafetensorsFile* file = nullptr;
    const TensorEntry* entry = nullptr;
    std::span<const std::byte> bytes() const { return file->bytes(*entry); }
  };

  // The index when there is one, else the single file. UsageError for an index that names a file or
  // a tensor that is not there, or a file outside of the directory.
  explicit SafetensorsSet(const std::string& directory, const std::string& stem = "model");

  static bool exists(const std::string& directory, const std::string& stem = "model");

  const std::vector<std::string>& names() const { return names_; }  // sorted
  Found find(std::string_view name) const;  // null pointers when it is not there
  Found at(std::string_view name) const;    // UsageError
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }

 private:
  void read_index(const std::string& directory, const std::string& index);

  std::string place_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, Found> found_;
};

}  // namespace lockstep::io
