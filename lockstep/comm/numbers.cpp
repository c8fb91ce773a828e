#include "lockstep/comm/numbers.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
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

int cores_of_ranks(World& world) {
  const std::vector<int> own = allowed_cpus();
  const auto end = static_cast<std::int64_t>(all_reduce(world, own.back() + 1, ReduceOp::kMax));
  at::Tensor cores = at::zeros({end}, at::kByte);
  for (const int core : own) cores[core] = 1;
  world.all_reduce(cores, ReduceOp::kMax).wait();
  const double quota =
      all_reduce(world, cgroup_quota_cores().value_or(std::numeric_limits<double>::infinity()),
                 ReduceOp::kMax);
  const auto count = cores.sum().item<double>();
  return std::max(1, static_cast<int>(std::min(count, quota)));
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

namespace {

// Encodes a rank's exception for the others: a letter for the kind, errno, the message.
std::string packed(const std::exception_ptr& error) {
  const auto pack = [](char kind, const std::exception& e, int number = 0) {
    return fmt::format("{}{} {}", kind, number, e.what());
  };
  try {
    std::rethrow_exception(error);
  } catch (const UsageError& e) {
    return pack('u', e);
  } catch (const SystemError& e) {
    return pack('s', e, e.error_number());
  } catch (const TimeoutError& e) {
    return pack('t', e);
  } catch (const CommError& e) {
    return pack('c', e);
  } catch (const InternalError& e) {
    return pack('i', e);
  } catch (const std::exception& e) {
    return pack('e', e);
  } catch (...) {
    return "e0 an exception of unknown type";
  }
}

[[noreturn]] void throw_packed(const std::string& packed, int rank) {
  using detail::PeerError;
  const std::size_t space = packed.find(' ');
  const std::string text = fmt::format("rank {}: {}", rank, packed.substr(space + 1));
  const CommContext context{.peer = rank};
  switch (packed.front()) {
    case 'u':
      throw PeerError(UsageError("world", "{}", text), rank);
    case 's':
      throw PeerError(SystemError::described("world", text, std::stoi(packed.substr(1, space - 1))),
                      rank);
    case 't':
      throw PeerError(TimeoutError("world", text, context), rank);
    case 'c':
      throw PeerError(CommError("world", text, context), rank);
    case 'i':
      throw PeerError(InternalError("world", text), rank);
    default:
      throw PeerError(Error("world", text), rank);
  }
}

}  // namespace

void leader_first(World& world, const std::function<void()>& body) {
  std::string trouble;
  std::exception_ptr error;
  if (world.is_leader()) {
    try {
      body();
    } catch (...) {
      error = std::current_exception();
      trouble = packed(error);
    }
  }
  trouble = broadcast_bytes(world, trouble);
  if (error) std::rethrow_exception(error);
  if (!trouble.empty()) throw_packed(trouble, 0);
  if (!world.is_leader()) body();
}

std::vector<std::string> detail::agree_on_texts(World& world,
                                                const std::function<std::string()>& body) {
  // How long a rank that throws waits for the others to have its message: it may end right after.
  constexpr std::chrono::seconds kLinger{10};
  std::string mine;
  std::exception_ptr error;
  try {
    mine = "+" + body();
  } catch (...) {
    error = std::current_exception();
    mine = "-" + packed(error);
  }
  std::vector<std::string> all;
  try {
    all = all_gather_bytes(world, mine);
  } catch (const CommError&) {
    if (error) std::rethrow_exception(error);  // the world broke as well; this came first
    throw;
  }
  const auto failed = std::find_if(all.begin(), all.end(),
                                   [](const std::string& text) { return text.front() == '-'; });
  if (failed == all.end()) {
    for (std::string& text : all) text.erase(0, 1);
    return all;
  }
  try {
    world.barrier(kLinger);
  } catch (const CommError&) {
    // A rank that is gone by now had the message.
  }
  if (error) std::rethrow_exception(error);
  throw_packed(failed->substr(1), static_cast<int>(failed - all.begin()));
}

}  // namespace lockstep
