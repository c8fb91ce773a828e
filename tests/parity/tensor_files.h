// Tensors as raw files beside an index.txt, as oracle.py writes and reads them.
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace parity {

inline at::ScalarType dtype_of(const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "int64") return at::kLong;
  throw std::runtime_error("dtype " + name);
}

inline const char* name_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return "float32";
  if (dtype == at::kLong) return "int64";
  throw std::runtime_error(std::string("dtype ") + c10::toString(dtype));
}

using Tensors = std::map<std::string, at::Tensor>;

inline Tensors read_tensors(const std::filesystem::path& directory) {
  std::ifstream index(directory / "index.txt");
  Tensors tensors;
  for (std::string line; std::getline(index, line);) {
    std::istringstream fields(line);
    std::string name, dtype;
    fields >> name >> dtype;
    std::vector<std::int64_t> sizes;
    for (std::int64_t size = 0; fields >> size;) sizes.push_back(size);
    auto tensor = torch::empty(sizes, dtype_of(dtype));
    std::ifstream file(directory / (name + ".bin"), std::ios::binary);
    file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
    if (!file) throw std::runtime_error("cannot read " + name);
    tensors[name] = tensor;
  }
  if (tensors.empty()) throw std::runtime_error("no tensors in " + directory.string());
  return tensors;
}

inline void write_tensors(const std::filesystem::path& directory, const Tensors& tensors) {
  std::filesystem::create_directories(directory);
  std::ofstream index(directory / "index.txt");
  for (const auto& [name, tensor] : tensors) {
    const auto data = tensor.detach().cpu().contiguous();
    index << name << ' ' << name_of(data.scalar_type());
    for (const auto size : data.sizes()) index << ' ' << size;
    index << '\n';
    std::ofstream file(directory / (name + ".bin"), std::ios::binary);
    file.write(static_cast<const char*>(data.data_ptr()),
               static_cast<std::streamsize>(data.nbytes()));
    if (!file) throw std::runtime_error("cannot write " + name);
  }
  index.flush();
  if (!index) throw std::runtime_error("cannot write the index in " + directory.string());
}

}  // namespace parity
