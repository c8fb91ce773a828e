#include "lockstep/comm/numbers.h"

#include <ATen/ATen.h>

#include <cstring>

#include "lockstep/core/ledger.h"

namespace lockstep {

namespace {

at::Tensor bytes_tensor(const std::string& bytes) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}
std::string string_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

}  // namespace

double all_reduce(World& world, double value, ReduceOp op) {
  const ledger::CallSite here;
  const bool mean = op == ReduceOp::kAvg;
  at::Tensor tensor = at::scalar_tensor(value, at::kDouble);
  world.all_reduce(tensor, mean ? ReduceOp::kSum : op).wait();
  return mean ? tensor.item<double>() / world.size() : tensor.item<double>();
}

bool any_rank(World& world, bool value) {
  const ledger::CallSite here;
  return all_reduce(world, value ? 1 : 0, ReduceOp::kMax) != 0;
}

bool all_ranks(World& world, bool value) {
  const ledger::CallSite here;
  return all_reduce(world, value ? 1 : 0, ReduceOp::kMin) != 0;
}

std::string broadcast_bytes(World& world, const std::string& bytes, int root) {
  const ledger::CallSite here;
  at::Tensor length = at::scalar_tensor(static_cast<int64_t>(bytes.size()), at::kLong);
  world.broadcast(length, root).wait();
  at::Tensor data =
      world.rank() == root ? bytes_tensor(bytes) : at::empty({length.item<int64_t>()}, at::kByte);
  world.broadcast(data, root).wait();
  return string_of(data);
}

std::vector<std::string> all_gather_bytes(World& world, const std::string& bytes) {
  const ledger::CallSite here;
  std::vector<std::string> result;
  for (const auto& each : world.all_gather_v(bytes_tensor(bytes)))
    result.push_back(string_of(each));
  return result;
}

}  // namespace lockstep
