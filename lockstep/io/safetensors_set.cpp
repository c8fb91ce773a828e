#include "lockstep/io/safetensors_set.h"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lockstep/core/json.h"

namespace lockstep::io {
namespace {

constexpr std::size_t kMaxIndexBytes = 100'000'000;

// Tensor name to file name, sorted by tensor.
using WeightMap = std::map<std::string, std::string>;

std::string index_name(const std::string& stem) {
  return stem + ".safetensors.index.json";
}

std::string single_name(const std::string& stem) {
  return stem + ".safetensors";
}

bool file_exists(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0;
}

[[noreturn]] void bad_index(const std::string& index, const std::string& what) {
  throw UsageError("safetensors",
                   "{}: {}. The index does not belong to these files, or one is missing. Copy the "
                   "whole directory again.",
                   index, what);
}

WeightMap parse_weight_map(JsonReader& json, const std::string& index) {
  WeightMap map;
  std::string name;
  json.enter_object();
  while (json.next_key(name))
    if (!map.emplace(name, json.string()).second)
      bad_index(index, fmt::format("tensor {} appears twice", json_quote(name)));
  return map;
}

WeightMap parse_index(const std::string& text, const std::string& index) {
  WeightMap map;
  bool found = false;
  try {
    JsonReader json(text);
    std::string key;
    json.enter_object();
    while (json.next_key(key)) {
      // The sizes under "metadata" are for people: tools that merge models leave them wrong.
      if (key != "weight_map") {
        json.skip();
        continue;
      }
      if (std::exchange(found, true)) bad_index(index, "weight_map appears twice");
      map = parse_weight_map(json, index);
    }
    json.end();
  } catch (const JsonError& e) {
    bad_index(index,
              fmt::format("it is not what it should be at byte {}: {}", e.offset(), e.what()));
  }
  if (!found) bad_index(index, "it has no weight_map");
  return map;
}

std::string index_text(const WeightMap& map, std::uint64_t total_bytes) {
  std::string text = fmt::format(
      "{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{", total_bytes);
  for (const auto& [tensor, file] : map) {
    if (text.back() != '{') text += ',';
    text += fmt::format("\n    {}: {}", json_quote(tensor), json_quote(file));
  }
  return text + "\n  }\n}\n";
}

// Consecutive runs of tensors, each within the limit (or one tensor that is not).
std::vector<std::vector<TensorShape>> deal(std::vector<TensorShape> tensors,
                                           std::uint64_t max_bytes, std::uint64_t& total_bytes) {
  std::vector<std::vector<TensorShape>> shards(1);
  std::uint64_t bytes = 0;
  for (TensorShape& tensor : tensors) {
    const std::uint64_t size = tensor_bytes(tensor.dtype, tensor.shape).value_or(0);
    if (!shards.back().empty() && (size > max_bytes || bytes > max_bytes - size)) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += size;
    total_bytes += size;
    shards.back().push_back(std::move(tensor));
  }
  return shards;
}

}  // namespace

SetLayout lay_out_safetensors_set(std::vector<TensorShape> tensors, const Metadata& metadata,
                                  const ShardOptions& options) {
  std::uint64_t total_bytes = 0;
  auto shards = deal(std::move(tensors), options.max_shard_bytes, total_bytes);
  SetLayout set;
  WeightMap map;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shards.size() == 1 ? single_name(options.stem)
                                                : fmt::format("{}-{:05}-of-{:05}.safetensors",
                                                              options.stem, i + 1, shards.size());
    for (const TensorShape& tensor : shards[i])
      if (!map.emplace(tensor.name, name).second)
        throw UsageError("safetensors", "tensor {} cannot be written: the name appears twice.",
                         json_quote(tensor.name));
    set.files.push_back({name, lay_out_safetensors(std::move(shards[i]), metadata)});
  }
  if (set.files.size() == 1) return set;
  set.index_name = index_name(options.stem);
  set.index = index_text(map, total_bytes);
  return set;
}

std::vector<std::string> write_safetensors_set(AtomicDir& dir, std::vector<TensorBytes> tensors,
                                               const Metadata& metadata,
                                               const ShardOptions& options) {
  std::vector<TensorShape> shapes;
  std::unordered_map<std::string, TensorBytes> by_name;
  for (TensorBytes& tensor : tensors) {
    shapes.push_back({tensor.name, tensor.dtype, tensor.shape});
    by_name.emplace(tensor.name, std::move(tensor));
  }
  const SetLayout set = lay_out_safetensors_set(std::move(shapes), metadata, options);
  std::vector<std::string> names;
  for (const SetLayout::File& each : set.files) {
    std::vector<TensorBytes> its;
    for (const TensorEntry& tensor : each.layout.tensors)
      its.push_back(std::move(by_name.at(tensor.name)));
    dir.write(each.name,
              [&](FileWriter& file) { write_safetensors(file, std::move(its), metadata); });
    names.push_back(each.name);
  }
  // Written last, so that every file it names exists as soon as the index does.
  if (!set.index.empty()) {
    dir.write(set.index_name, set.index);
    names.push_back(set.index_name);
  }
  return names;
}

bool SafetensorsSet::exists(const std::string& directory, const std::string& stem) {
  return file_exists(directory + "/" + single_name(stem)) ||
         file_exists(directory + "/" + index_name(stem));
}

SafetensorsSet::SafetensorsSet(const std::string& directory, const std::string& stem)
    : place_(directory) {
  const std::string index = directory + "/" + index_name(stem);
  const std::string single = directory + "/" + single_name(stem);
  if (file_exists(index)) {
    read_index(directory, index);
    return;
  }
  if (!file_exists(single))
    throw UsageError("safetensors",
                     "{} has neither {}.safetensors nor {}. Is it the directory of a model?",
                     directory, stem, index_name(stem));
  files_.push_back(std::make_unique<SafetensorsFile>(single));
  for (const TensorEntry& entry : files_.front()->tensors()) {
    names_.push_back(entry.name);
    found_.emplace(entry.name, Found{files_.front().get(), &entry});
  }
  std::ranges::sort(names_);
}

void SafetensorsSet::read_index(const std::string& directory, const std::string& index) {
  std::map<std::string, const SafetensorsFile*> open;
  for (const auto& [tensor, file] : parse_index(read_file(index, kMaxIndexBytes), index)) {
    if (file.empty() || file.find('/') != std::string::npos || file == "." || file == "..")
      bad_index(index, fmt::format("{} is not the name of a file beside it", json_quote(file)));
    const SafetensorsFile*& shard = open[file];
    if (shard == nullptr) {
      const std::string path = directory + "/" + file;
      if (!file_exists(path))
        bad_index(index, fmt::format("it names {}, which is not there", json_quote(file)));
      files_.push_back(std::make_unique<SafetensorsFile>(path));
      shard = files_.back().get();
    }
    const TensorEntry* entry = shard->find(tensor);
    if (entry == nullptr)
      bad_index(index, fmt::format("tensor {} is not in {}", json_quote(tensor), file));
    names_.push_back(tensor);
    found_.emplace(tensor, Found{shard, entry});
  }
}

SafetensorsSet::Found SafetensorsSet::find(std::string_view name) const {
  const auto found = found_.find(std::string(name));
  return found == found_.end() ? Found{} : found->second;
}

SafetensorsSet::Found SafetensorsSet::at(std::string_view name) const {
  const Found found = find(name);
  if (found.entry == nullptr)
    throw UsageError("safetensors",
                     "{} has no tensor {} ({} tensors, the first is {}). Is it the weights of "
                     "another model?",
                     place_, json_quote(name), names_.size(),
                     names_.empty() ? "none" : json_quote(names_.front()));
  return found;
}

}  // namespace lockstep::io
