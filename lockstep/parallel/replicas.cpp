#include "lockstep/parallel/replicas.h"

#include <fmt/ranges.h>
#include <torch/torch.h>

#include <cstring>
#include <map>
#include <sstream>
#include <tuple>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

constexpr std::int64_t kMessageBytes = 64 << 20;
constexpr std::size_t kRefusalBytes = 4096;  // of a refusal, with its end

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::uint64_t fingerprint(const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().cpu().contiguous();
  return fingerprint(host.const_data_ptr(), host.nbytes());
}

void Fingerprints::add(std::string name, const at::Tensor& tensor) {
  names.push_back(std::move(name));
  values.push_back(fingerprint(tensor));
}

std::string show_ranks(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

// Texts have one size on all ranks, so that no rank waits for another's size before it sends.
RefusalTexts gather_refusals(World& world, const std::exception_ptr& refusal) {
  std::string words;
  try {
    if (refusal) std::rethrow_exception(refusal);
  } catch (const std::exception& e) {
    words = e.what();
  }
  constexpr const char* kCut = "...";
  if (words.size() >= kRefusalBytes)
    words.replace(kRefusalBytes - 1 - std::strlen(kCut), std::string::npos, kCut);
  const at::Tensor mine = at::zeros({static_cast<std::int64_t>(kRefusalBytes)}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), words.data(), words.size());
  RefusalTexts texts{at::zeros({world.size(), mine.numel()}, at::kByte), {}};
  texts.work = world.all_gather(texts.all, mine);
  return texts;
}

void refuse_with(const Check& check, RefusalTexts words) {
  words.work.wait();
  if (check.refusal) std::rethrow_exception(check.refusal);
  std::vector<int> ranks;
  for (std::int64_t rank = 0; rank < words.all.size(0); ++rank)
    if (words.all[rank][0].item<int>() != 0) ranks.push_back(static_cast<int>(rank));
  LOCKSTEP_ASSERT(!ranks.empty());
  throw UsageError(
      check.component, "{} refused {}. {}: {}", show_ranks(ranks), check.what,
      ranks.size() == 1 ? "Its message" : fmt::format("The message of rank {}", ranks[0]),
      static_cast<const char*>(words.all[ranks[0]].const_data_ptr()));
}

void refuse_together(World& world, const Check& check) {
  refuse_with(check, gather_refusals(world, check.refusal));
}

std::optional<LineDifference> find_other_line(World& world, const Check& check,
                                              const std::string& text) {
  const std::uint64_t hash = fingerprint(text.data(), text.size());
  at::Tensor mine = at::empty({2}, at::kLong);
  mine.mutable_data_ptr<std::int64_t>()[0] = check.refusal ? 1 : 0;
  mine.mutable_data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(hash);
  const auto all = world.all_gather(mine);
  bool same = true;
  for (const at::Tensor& each : all) {
    const auto* entry = each.const_data_ptr<std::int64_t>();
    if (entry[0] != 0) refuse_together(world, check);
    // Ranks that see two different ones take the same way, whichever is theirs.
    same &= entry[1] == all[0].const_data_ptr<std::int64_t>()[1];
  }
  if (same) return std::nullopt;
  const auto texts = all_gather_bytes(world, text);
  const auto first = lines_of(texts[0]);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    const auto other = lines_of(texts[rank]);
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string a = i < first.size() ? first[i] : "";
      const std::string b = i < other.size() ? other[i] : "";
      if (a != b) return LineDifference{static_cast<int>(rank), b, a};
    }
  }
  LOCKSTEP_ASSERT(false && "texts differ in fingerprint only");
  return std::nullopt;
}

std::optional<TensorDifference> find_difference(World& world, const Check& check,
                                                const Fingerprints& fingerprints) {
  const auto bytes_of = [](std::uint64_t value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
  };
  std::string mine(1, check.refusal ? 1 : 0);
  for (const std::uint64_t value : fingerprints.values) mine += bytes_of(value);
  const auto all = all_gather_bytes(world, mine);
  for (const std::string& each : all)
    if (each.front() != 0) refuse_together(world, check);
  // A rank with other names has other fingerprints, or another number of them.
  const auto print_at = [&](std::size_t rank, std::size_t i) {
    const std::size_t begin = 1 + i * sizeof(std::uint64_t);
    return begin < all[rank].size() ? all[rank].substr(begin, sizeof(std::uint64_t)) : "";
  };
  TensorDifference found;
  for (std::size_t i = 0; i < fingerprints.names.size() && found.ranks.empty(); ++i) {
    found.name = fingerprints.names[i];
    for (std::size_t rank = 1; rank < all.size(); ++rank)
      if (print_at(rank, i) != print_at(0, i)) found.ranks.push_back(static_cast<int>(rank));
  }
  if (found.ranks.empty()) return std::nullopt;
  return found;
}

void broadcast_coalesced(World& world, const std::vector<at::Tensor>& tensors, int root) {
  if (world.size() == 1 || tensors.empty()) return;
  torch::NoGradGuard no_grad;
  using Kind = std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  std::map<Kind, std::vector<at::Tensor>> kinds;
  for (const auto& t : tensors)
    kinds[{t.scalar_type(), t.device().type(), t.device().index()}].push_back(t.variable_data());
  for (auto& [kind, group] : kinds) {
    for (std::size_t begin = 0; begin < group.size();) {
      std::vector<at::Tensor> flats;
      std::int64_t bytes = 0;
      std::size_t end = begin;
      for (; end < group.size() && (end == begin || bytes < kMessageBytes); ++end) {
        flats.push_back(group[end].reshape({-1}));
        bytes += static_cast<std::int64_t>(group[end].nbytes());
      }
      at::Tensor message = at::cat(flats);
      world.broadcast(message, root).wait();
      if (world.rank() != root) {
        std::int64_t offset = 0;
        for (std::size_t i = begin; i < end; ++i) {
          group[i].copy_(message.narrow(0, offset, group[i].numel()).view(group[i].sizes()));
          offset += group[i].numel();
        }
      }
      begin = end;
    }
  }
}

at::Tensor sum_sparse(World& world, const at::Tensor& parameter, const at::Tensor& gradient,
                      double divisor) {
  at::Tensor indices = at::empty({0, 1}, parameter.options().dtype(at::kLong));
  auto rows = parameter.sizes().vec();
  rows[0] = 0;
  at::Tensor values = at::empty(rows, parameter.options());
  if (gradient.defined()) {
    const at::Tensor local = gradient.coalesce();
    indices = local.indices().t().contiguous();
    values = local.values().div(divisor);
  }
  const auto all_indices = world.all_gather_v(indices);
  const auto all_values = world.all_gather_v(values);
  return at::sparse_coo_tensor(at::cat(all_indices).t(), at::cat(all_values), parameter.sizes())
      .coalesce();
}

}  // namespace lockstep::parallel
