// A model in one safetensors file or, above a size, in several with an index, named as Hugging Face
// names them: model.safetensors, or model-00001-of-00003.safetensors ... and
// model.safetensors.index.json, which says which tensor is in which file.
//
//   write_safetensors_set(dir, tensors, metadata, {.max_shard_bytes = 5'000'000'000});
//   SafetensorsSet set("checkpoint-100");
//   auto [file, entry] = set.at("wte.weight");
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lockstep/io/atomic_dir.h"
#include "lockstep/io/safetensors.h"

namespace lockstep::io {

struct ShardOptions {
  std::string stem = "model";
  // Limit on a file's tensor bytes; a single larger tensor gets a file of its own.
  std::uint64_t max_shard_bytes = 5'000'000'000;
};

// Which files there will be, and where each tensor is in them.
struct SetLayout {
  struct File {
    std::string name;
    SafetensorsLayout layout;
  };
  std::vector<File> files;
  std::string index_name, index;  // the index and its text; empty where there is one file
};

// Tensors are dealt to files in the order given.
SetLayout lay_out_safetensors_set(std::vector<TensorShape> tensors, const Metadata& metadata = {},
                                  const ShardOptions& options = {});

// As they are laid out. Returns the names of the files written.
std::vector<std::string> write_safetensors_set(AtomicDir& dir, std::vector<TensorBytes> tensors,
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
