// `lockstep-train doctor-probe DIR`, which `lockstep doctor` starts as the ranks of one host: each
// computes alone on its device, then all of them reduce, and rank 0 copies between the GPUs.
//
//   DIR/versions.json   what rank 0 has loaded; written first, as computing may fail over it
//   DIR/rank_<r>.json   what the rank has computed, before it connects to others
//   DIR/world.json      the all-reduce and the copies
#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/train_commands.h"
#include "lockstep/comm/device.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/document.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/run.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kRepetitions = 5;
constexpr std::int64_t kSquare = 512;
constexpr std::int64_t kCpuElements = 8 << 20;
constexpr std::int64_t kGpuElements = 64 << 20;
constexpr std::int64_t kCopyElements = 4 << 20;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// ------------------------------------------------------------------ what is loaded

// The file of a loaded library whose name begins like this; empty when there is none.
std::string loaded_library(const std::string& prefix) {
  std::pair<std::string, std::string> search{prefix, ""};
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        auto& [wanted, found] = *static_cast<std::pair<std::string, std::string>*>(out);
        const fs::path path = info->dlpi_name;
        if (!path.filename().string().starts_with(wanted)) return 0;
        found = path;
        return 1;
      },
      &search);
  return search.second;
}

// A function of a library that is already loaded, without its vendor's headers.
template <typename Function>
Function function_of(const std::string& library, const char* name) {
  if (library.empty()) return nullptr;
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : reinterpret_cast<Function>(::dlsym(handle, name));
}

int version_by_pointer(const std::string& library, const char* name) {
  const auto function = function_of<int (*)(int*)>(library, name);
  int version = 0;
  return function != nullptr && function(&version) == 0 ? version : 0;
}

std::int64_t compiled_cudnn() {
  try {
    return at::detail::getCUDAHooks().versionCuDNN();
  } catch (const std::exception&) {
    return 0;
  }
}

Node versions(bool cuda) {
  NodeMembers found = {{"torch", text_node(TORCH_VERSION)},
                       {"torch_library", text_node(loaded_library("libtorch_cpu.so"))}};
  if (!cuda) return map_node(std::move(found));
  const int nccl = version_by_pointer(loaded_library("libnccl.so"), "ncclGetVersion");
  const std::string cudnn = loaded_library("libcudnn.so");
  const auto cudnn_version = function_of<std::size_t (*)()>(cudnn, "cudnnGetVersion");
  found.emplace_back("cuda", integer_node(version_by_pointer(loaded_library("libcudart.so"),
                                                             "cudaRuntimeGetVersion")));
  found.emplace_back(
      "nccl", text_node(fmt::format("{}.{}.{}", nccl / 10000, nccl / 100 % 100, nccl % 100)));
  found.emplace_back(
      "cudnn",
      integer_node(cudnn_version == nullptr ? 0 : static_cast<std::int64_t>(cudnn_version())));
  found.emplace_back("cudnn_compiled", integer_node(compiled_cudnn()));
  found.emplace_back("cudnn_library", text_node(cudnn));
  return map_node(std::move(found));
}

// ------------------------------------------------------------------ one device

struct Compute {
  bool right = true;
  double ms = 0;
};

// A product and its gradient, whose values are known exactly.
Compute compute_on(c10::Device device) {
  const auto options = at::TensorOptions().device(device);
  Compute result;
  std::vector<double> times;
  for (int i = 0; i <= kRepetitions; ++i) {
    const auto start = Clock::now();
    const auto x = torch::ones({kSquare, kSquare}, options);
    const auto w = torch::ones({kSquare, kSquare}, options.requires_grad(true));
    x.mm(w).sum().backward();
    const auto wrong = w.grad().ne(static_cast<double>(kSquare)).sum().item<std::int64_t>();
    result.right = result.right && wrong == 0;
    if (i > 0) times.push_back(ms_since(start));  // the first one loads and allocates
  }
  result.ms = median(std::move(times));
  return result;
}

void compute_alone(const fs::path& folder) {
  const RankEnv me = read_rank_env();
  WorldOptions options;
  options.share_device = env::get_bool("LOCKSTEP_SHARE_DEVICE").value_or(false);
  const c10::Device device =
      detail::choose_device({.rank = me.rank, .local_rank = me.local_rank}, options).device;
  if (device.is_cuda()) load_cuda();
  if (me.rank == 0)
    write_file_atomically(folder / "versions.json", to_json(versions(device.is_cuda())));
  const Compute result = compute_on(device);
  write_file_atomically(folder / fmt::format("rank_{}.json", me.rank),
                        to_json(map_node({{"rank", integer_node(me.rank)},
                                          {"device", text_node(device.str())},
                                          {"right", bool_node(result.right)},
                                          {"compute_ms", real_node(result.ms)},
                                          {"threads", integer_node(at::get_num_threads())}})));
}

// ------------------------------------------------------------------ several

Node all_reduce(World& world) {
  const bool gpu = world.device().is_cuda();
  const std::int64_t elements = gpu ? kGpuElements : kCpuElements;
  at::Tensor x = gpu ? at::empty({elements}, world.device()) : world.symmetric_empty({elements});
  x.fill_(world.rank() + 1);
  world.all_reduce(x).wait();
  const int sum = world.size() * (world.size() + 1) / 2;
  const bool right = all_ranks(world, x.eq(sum).all().item<bool>());
  std::vector<double> times;
  for (int i = 0; i < kRepetitions; ++i) {
    world.barrier();
    const auto start = Clock::now();
    world.all_reduce(x, ReduceOp::kAvg).wait();
    x[0].item<float>();  // on a GPU wait() is for the stream, and this for the host
    times.push_back(ms_since(start));
  }
  const double ms = all_reduce(world, median(std::move(times)), ReduceOp::kMax);
  const double bytes = static_cast<double>(elements) * sizeof(float);
  const double rate = bytes / ms / 1e6;
  return map_node({{"bytes", integer_node(static_cast<std::int64_t>(bytes))},
                   {"ms", real_node(ms)},
                   {"gb_per_s", real_node(rate)},
                   {"bus_gb_per_s", real_node(rate * 2 * (world.size() - 1) / world.size())},
                   {"right", bool_node(right)}});
}

Node copy_between(int from, int to) {
  const c10::Device source(c10::kCUDA, static_cast<c10::DeviceIndex>(from));
  const c10::Device target(c10::kCUDA, static_cast<c10::DeviceIndex>(to));
  const auto values = at::arange(kCopyElements, at::TensorOptions().device(source));
  const auto expected = at::arange(kCopyElements, at::TensorOptions().device(target));
  at::Tensor copy = at::empty_like(expected);
  std::vector<double> times;
  for (int i = 0; i <= kRepetitions; ++i) {
    const auto start = Clock::now();
    copy.copy_(values);
    copy[0].item<std::int64_t>();
    if (i > 0) times.push_back(ms_since(start));
  }
  const double bytes = static_cast<double>(copy.nbytes());
  return map_node({{"from", integer_node(from)},
                   {"to", integer_node(to)},
                   {"gb_per_s", real_node(bytes / median(std::move(times)) / 1e6)},
                   {"right", bool_node(at::equal(copy, expected))}});
}

Node copies(int gpus) {
  std::vector<Node> pairs;
  for (int from = 0; from < gpus; ++from)
    for (int to = 0; to < gpus; ++to)
      if (from != to) pairs.push_back(copy_between(from, to));
  return list_node(std::move(pairs));
}

void measure(World& world, const fs::path& folder) {
  NodeMembers found = {{"backend", text_node(world.backend())},
                       {"device", text_node(world.device().str())}};
  if (world.size() > 1) found.emplace_back("all_reduce", all_reduce(world));
  if (world.device().is_cuda() && world.is_leader())
    found.emplace_back("p2p", copies(std::min(cuda_device_count(), world.local_size())));
  if (world.is_leader()) write_file_atomically(folder / "world.json", to_json(map_node(found)));
}

}  // namespace

int doctor_probe_main(int argc, char** argv) {
  if (argc != 2) throw UsageError("doctor", "doctor-probe needs a folder. Use lockstep doctor.");
  const fs::path folder = argv[1];
  return run(
      [&folder] {
        compute_alone(folder);
        return WorldOptions{};
      },
      [&folder](World& world) { measure(world, folder); });
}

}  // namespace lockstep::cli
