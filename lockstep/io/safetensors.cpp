#include "lockstep/io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "lockstep/core/fd.h"
#include "lockstep/core/json.h"
#include "lockstep/core/text.h"

namespace lockstep::io {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::string_view kMetadataKey = "__metadata__";

struct DTypeFacts {
  std::string_view name;
  int bits;
};

// By the value of DType.
constexpr DTypeFacts kDTypes[] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};
static_assert(std::size(kDTypes) == static_cast<std::size_t>(DType::kU64) + 1);

[[noreturn]] void damaged(std::string_view file, std::string_view what) {
  throw UsageError("safetensors",
                   "{}: {}. The file is damaged, cut short, or not a safetensors file. Copy or "
                   "write it again.",
                   file, what);
}

// A name from a file, for a message: one line, and not a long one.
std::string shown(std::string_view name) {
  constexpr std::size_t kLongest = 100;
  return json_quote(name.substr(0, kLongest)) + (name.size() > kLongest ? "..." : "");
}

std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// Reads one file's header; lives for one call.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, std::string_view file) : json_(text), file_(file) {}

  void parse(SafetensorsHeader& header) {
    json_.enter_object();
    std::unordered_set<std::string> seen;
    std::string key;
    while (json_.next_key(key)) {
      if (!seen.insert(key).second) damaged(file_, fmt::format("{} appears twice", shown(key)));
      if (key == kMetadataKey)
        metadata(header.metadata);
      else
        header.tensors.push_back(tensor(key));
    }
    json_.end();
  }

 private:
  void metadata(Metadata& values) {
    json_.enter_object();
    std::string key;
    while (json_.next_key(key))
      if (!values.emplace(key, json_.string()).second)
        damaged(file_, fmt::format("{} appears twice in {}", shown(key), kMetadataKey));
  }

  TensorEntry tensor(const std::string& name) {
    TensorEntry entry;
    entry.name = name;
    constexpr std::string_view kKeys[] = {"dtype", "shape", "data_offsets"};
    bool seen[std::size(kKeys)] = {};
    std::string key;
    json_.enter_object();
    while (json_.next_key(key)) {
      const auto known = static_cast<std::size_t>(std::ranges::find(kKeys, key) - kKeys);
      if (known < std::size(kKeys) && std::exchange(seen[known], true))
        damaged(file_, fmt::format("tensor {} has {} twice", shown(name), key));
      // Fields that a later version of the format may add are skipped, as its package does.
      if (key == "dtype")
        entry.dtype = dtype(name);
      else if (key == "shape")
        entry.shape = shape(name);
      else if (key == "data_offsets")
        offsets(entry);
      else
        json_.skip();
    }
    for (std::size_t i = 0; i < std::size(kKeys); ++i)
      if (!seen[i]) damaged(file_, fmt::format("tensor {} has no {}", shown(name), kKeys[i]));
    return entry;
  }

  DType dtype(const std::string& name) {
    const std::string text = json_.string();
    const auto found = dtype_of(text);
    if (!found)
      damaged(file_, fmt::format("tensor {} has the unknown dtype {}", shown(name), shown(text)));
    return *found;
  }

  std::vector<std::int64_t> shape(const std::string& name) {
    std::vector<std::int64_t> sizes;
    json_.enter_array();
    while (json_.next_element()) {
      const std::uint64_t size = json_.unsigned_integer();
      if (size > static_cast<std::uint64_t>(INT64_MAX))
        damaged(file_, fmt::format("tensor {} has a dimension of {}", shown(name), size));
      sizes.push_back(static_cast<std::int64_t>(size));
    }
    return sizes;
  }

  void offsets(TensorEntry& entry) {
    std::vector<std::uint64_t> values;
    json_.enter_array();
    while (json_.next_element()) {
      values.push_back(json_.unsigned_integer());
      if (values.size() > 2) break;
    }
    if (values.size() != 2)
      damaged(file_, fmt::format("tensor {} has not two data_offsets", shown(entry.name)));
    entry.begin = values[0];
    entry.end = values[1];
  }

  JsonReader json_;
  std::string_view file_;
};

// The tensors, in the order of their bytes, cover [0, data_bytes) exactly.
void check_layout(const SafetensorsHeader& header, std::uint64_t data_bytes,
                  std::string_view file) {
  std::uint64_t at = 0;
  const std::string* previous = nullptr;
  for (const TensorEntry& entry : header.tensors) {
    const auto wrong = [&](const std::string& what) {
      damaged(file, fmt::format("tensor {} {}", shown(entry.name), what));
    };
    if (entry.end < entry.begin)
      wrong(fmt::format("ends at {}, before it begins at {}", entry.end, entry.begin));
    if (entry.begin < at) wrong(fmt::format("overlaps {} at {}", shown(*previous), entry.begin));
    if (entry.begin > at) wrong(fmt::format("leaves a hole from {} to {}", at, entry.begin));
    if (entry.end > data_bytes)
      wrong(fmt::format("ends at {}, but the file has {} bytes of data", entry.end, data_bytes));
    const auto bytes = tensor_bytes(entry.dtype, entry.shape);
    if (!bytes)
      wrong(fmt::format("has an impossible size ({} of {})", dtype_name(entry.dtype),
                        shape_text(entry.shape)));
    else if (*bytes != entry.end - entry.begin)
      wrong(fmt::format("has {} bytes, but {} of {} needs {}", entry.end - entry.begin,
                        dtype_name(entry.dtype), shape_text(entry.shape), *bytes));
    at = entry.end;
    previous = &entry.name;
  }
  if (at != data_bytes)
    damaged(file, fmt::format("{} bytes follow the last tensor", data_bytes - at));
}

[[noreturn]] void refuse_to_write(std::string_view name, std::string_view what) {
  throw UsageError("safetensors", "tensor {} cannot be written: {}.", shown(name), what);
}

void check_tensors(const std::vector<TensorShape>& tensors) {
  std::unordered_set<std::string_view> seen;
  for (const TensorShape& tensor : tensors) {
    const auto refuse = [&](std::string_view what) { refuse_to_write(tensor.name, what); };
    if (tensor.name == kMetadataKey) refuse("the format keeps that name for itself");
    if (invalid_utf8(tensor.name)) refuse("its name is not valid UTF-8");
    if (!seen.insert(tensor.name).second) refuse("the name appears twice");
    if (!tensor_bytes(tensor.dtype, tensor.shape))
      refuse(fmt::format("there is no tensor of {} and shape {}", dtype_name(tensor.dtype),
                         shape_text(tensor.shape)));
  }
}

std::string header_text(const std::vector<TensorEntry>& tensors, const Metadata& metadata) {
  std::string text = "{";
  if (!metadata.empty()) {
    text += json_quote(kMetadataKey) + ":{";
    for (const auto& [key, value] : metadata) {
      if (invalid_utf8(key) || invalid_utf8(value))
        throw UsageError("safetensors", "metadata {} is not valid UTF-8.", shown(key));
      if (text.back() != '{') text += ',';
      text += json_quote(key) + ":" + json_quote(value);
    }
    text += '}';
  }
  for (const TensorEntry& tensor : tensors) {
    if (text.size() > 1) text += ',';
    text += fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                        json_quote(tensor.name), dtype_name(tensor.dtype),
                        fmt::join(tensor.shape, ","), tensor.begin, tensor.end);
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');  // the data part is aligned to 8 bytes
  if (text.size() > kMaxHeaderBytes)
    throw UsageError("safetensors",
                     "the header would have {} bytes (limit {}). Write fewer tensors "
                     "or less metadata into one file.",
                     text.size(), kMaxHeaderBytes);
  return text;
}

}  // namespace

std::string_view dtype_name(DType dtype) {
  return kDTypes[static_cast<std::size_t>(dtype)].name;
}

int dtype_bits(DType dtype) {
  return kDTypes[static_cast<std::size_t>(dtype)].bits;
}

std::optional<DType> dtype_of(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kDTypes); ++i)
    if (kDTypes[i].name == name) return static_cast<DType>(i);
  return std::nullopt;
}

std::optional<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape) {
  std::uint64_t bits = 1;
  for (const std::int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits))
      return std::nullopt;
  if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(dtype_bits(dtype)), &bits) ||
      bits % 8 != 0)
    return std::nullopt;
  return bits / 8;
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> contents, std::string_view file) {
  if (contents.size() < kLengthBytes)
    damaged(file, fmt::format("it has {} bytes, and 8 are the least", contents.size()));
  std::uint64_t length = 0;
  static_assert(std::endian::native == std::endian::little);
  std::memcpy(&length, contents.data(), kLengthBytes);
  if (length > kMaxHeaderBytes)
    damaged(file, fmt::format("it says that its header has {} bytes (limit {})", length,
                              kMaxHeaderBytes));
  if (length > contents.size() - kLengthBytes)
    damaged(file, fmt::format("it says that its header has {} bytes, but has {} bytes in all",
                              length, contents.size()));
  const std::string_view text(reinterpret_cast<const char*>(contents.data()) + kLengthBytes,
                              static_cast<std::size_t>(length));
  if (!text.starts_with('{')) damaged(file, "its header does not start with '{'");
  SafetensorsHeader header;
  header.data_offset = kLengthBytes + length;
  try {
    HeaderParser(text, file).parse(header);
  } catch (const JsonError& e) {
    damaged(file, fmt::format("its header is not valid at byte {}: {}", kLengthBytes + e.offset(),
                              e.what()));
  }
  std::ranges::sort(header.tensors, {}, [](const TensorEntry& entry) {
    return std::tie(entry.begin, entry.end, entry.name);
  });
  check_layout(header, contents.size() - header.data_offset, file);
  return header;
}

SafetensorsFile::SafetensorsFile(std::string path)
    : path_(std::move(path)), map_(path_), header_(parse_safetensors(map_.bytes(), path_)) {
  by_name_.reserve(header_.tensors.size());
  for (std::size_t i = 0; i < header_.tensors.size(); ++i)
    by_name_.emplace(header_.tensors[i].name, i);
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

const TensorEntry& SafetensorsFile::at(std::string_view name) const {
  if (const TensorEntry* entry = find(name)) return *entry;
  throw UsageError("safetensors",
                   "{} has no tensor {} ({} tensors, the first is {}). Is it the weights of "
                   "another model?",
                   path_, shown(name), header_.tensors.size(),
                   header_.tensors.empty() ? "none" : shown(header_.tensors.front().name));
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& entry) const {
  return map_.bytes().subspan(header_.data_offset + entry.begin, entry.end - entry.begin);
}

SafetensorsLayout lay_out_safetensors(std::vector<TensorShape> tensors, const Metadata& metadata) {
  check_tensors(tensors);
  std::ranges::sort(tensors, [](const TensorShape& a, const TensorShape& b) {
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  SafetensorsLayout layout;
  std::uint64_t at = 0;
  for (TensorShape& tensor : tensors) {
    const std::uint64_t end = at + *tensor_bytes(tensor.dtype, tensor.shape);
    layout.tensors.push_back(
        {std::move(tensor.name), tensor.dtype, std::move(tensor.shape), at, end});
    at = end;
  }
  const std::string header = header_text(layout.tensors, metadata);
  const std::uint64_t length = header.size();
  layout.head.resize(kLengthBytes);
  std::memcpy(layout.head.data(), &length, kLengthBytes);
  layout.head += header;
  return layout;
}

namespace {

using BytesByName = std::unordered_map<std::string_view, std::span<const std::byte>>;

// UsageError for bytes of the wrong size.
std::vector<TensorShape> shapes_of(const std::vector<TensorBytes>& tensors, BytesByName& bytes) {
  std::vector<TensorShape> shapes;
  for (const TensorBytes& tensor : tensors) {
    shapes.push_back({tensor.name, tensor.dtype, tensor.shape});
    bytes.emplace(tensor.name, tensor.bytes);
    const auto size = tensor_bytes(tensor.dtype, tensor.shape);
    if (!size || *size != tensor.bytes.size())
      refuse_to_write(tensor.name,
                      fmt::format("it has {} bytes, which is not {} of {}", tensor.bytes.size(),
                                  dtype_name(tensor.dtype), shape_text(tensor.shape)));
  }
  return shapes;
}

void write_laid_out(FileWriter& file, const SafetensorsLayout& layout, const BytesByName& bytes) {
  file.append(layout.head);
  for (const TensorEntry& tensor : layout.tensors) file.append(bytes.at(tensor.name));
}

}  // namespace

void write_safetensors(FileWriter& file, const std::vector<TensorBytes>& tensors,
                       const Metadata& metadata) {
  BytesByName bytes;
  write_laid_out(file, lay_out_safetensors(shapes_of(tensors, bytes), metadata), bytes);
}

// ---------------------------------------------------------------- models in several files

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
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
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
      // The sizes under "metadata" are informative only: tools that merge models leave them wrong.
      if (key != "weight_map") {
        json.skip();
        continue;
      }
      if (std::exchange(found, true)) bad_index(index, "weight_map appears twice");
      map = parse_weight_map(json, index);
    }
    json.end();
  } catch (const JsonError& e) {
    bad_index(index, fmt::format("it is not valid at byte {}: {}", e.offset(), e.what()));
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

std::vector<std::string> write_safetensors_set(AtomicDir& dir,
                                               const std::vector<TensorBytes>& tensors,
                                               const Metadata& metadata,
                                               const ShardOptions& options) {
  BytesByName bytes;
  const SetLayout set = lay_out_safetensors_set(shapes_of(tensors, bytes), metadata, options);
  std::vector<std::string> names;
  for (const SetLayout::File& each : set.files) {
    dir.write(each.name, [&](FileWriter& file) { write_laid_out(file, each.layout, bytes); });
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
                     "{} has neither {}.safetensors nor {}. Is it the directory of a model?{}",
                     directory, stem, index_name(stem), link_advice(single));
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
      if (const std::string link = link_advice(path); !link.empty())
        throw UsageError("safetensors", "{} cannot be used.{}", index, link);
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
