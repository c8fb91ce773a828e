// What makes replicas equal at the start, and proves it later.
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <cstring>
#include <map>
#include <sstream>
#include <tuple>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/parallel/reducer_impl.h"

namespace lockstep::parallel {
namespace {

constexpr std::int64_t kMessageBytes = 64 << 20;

std::uint64_t mix(std::uint64_t hash, std::uint64_t word) {
  hash ^= word * 0x9e3779b97f4a7c15ull;
  hash = (hash << 29) | (hash >> 35);
  return hash * 0xd6e8feb86659fd93ull;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::uint64_t fingerprint(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  // Four lanes, so that the multiplications overlap.
  std::uint64_t lanes[4] = {1, 2, 3, bytes};
  std::uint64_t words[4];
  for (; bytes >= sizeof words; bytes -= sizeof words, p += sizeof words) {
    std::memcpy(words, p, sizeof words);
    for (int i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  std::memset(words, 0, sizeof words);
  std::memcpy(words, p, bytes);
  for (int i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], words[i]);
  return mix(mix(mix(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

std::uint64_t fingerprint(const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().cpu().contiguous();
  return fingerprint(host.const_data_ptr(), host.nbytes());
}

void Prints::add(std::string name, const at::Tensor& tensor) {
  names.push_back(std::move(name));
  values.push_back(fingerprint(tensor));
}

std::string show_ranks(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

void refuse_together(World& world, const Check& check) {
  std::string words;
  try {
    if (check.refusal) std::rethrow_exception(check.refusal);
  } catch (const std::exception& e) {
    words = e.what();
  }
  const auto all = world.all_gather(words);
  if (check.refusal) std::rethrow_exception(check.refusal);
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) ranks.push_back(static_cast<int>(rank));
  LOCKSTEP_ASSERT(!ranks.empty());
  throw UsageError(check.component, "{} refused {}. {}: {}", show_ranks(ranks), check.what,
                   ranks.size() == 1 ? "Its words" : fmt::format("The words of rank {}", ranks[0]),
                   all[static_cast<std::size_t>(ranks[0])]);
}

std::optional<Difference> find_difference(World& world, const Check& check, const Prints& prints) {
  const auto bytes_of = [](std::uint64_t value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
  };
  std::string mine(1, check.refusal ? 1 : 0);
  for (const std::uint64_t value : prints.values) mine += bytes_of(value);
  const auto all = world.all_gather(mine);
  for (const std::string& each : all)
    if (each.front() != 0) refuse_together(world, check);
  // A rank with other names has other prints, or another number of them.
  const auto print_at = [&](std::size_t rank, std::size_t i) {
    const std::size_t begin = 1 + i * sizeof(std::uint64_t);
    return begin < all[rank].size() ? all[rank].substr(begin, sizeof(std::uint64_t)) : "";
  };
  Difference found;
  for (std::size_t i = 0; i < prints.names.size() && found.ranks.empty(); ++i) {
    found.name = prints.names[i];
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
    kinds[{t.scalar_type(), t.device().type(), t.device().index()}].push_back(t.detach());
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

std::vector<at::Tensor> ReducerImpl::buffer_tensors() const {
  std::vector<at::Tensor> tensors;
  for (const auto& buffer : buffers_)
    if (buffer.tensor.defined()) tensors.push_back(buffer.tensor);
  return tensors;
}

void ReducerImpl::broadcast_model(int root) {
  std::vector<at::Tensor> tensors = buffer_tensors();
  for (const auto& p : parameters_) tensors.push_back(p.tensor);
  broadcast_coalesced(world_, tensors, root);
}

// Ranks that wrapped different models would mix up gradients or hang; say which parameter differs.
void ReducerImpl::check_same_model() {
  std::string text;
  for (const auto& p : parameters_) {
    const Form form = form_of(p);
    text += fmt::format("{}: shape [{}], {} on {}, requires_grad={}{}\n", p.name,
                        fmt::join(form.sizes, ", "), c10::toString(form.dtype),
                        c10::DeviceTypeName(form.device.type(), /*lower_case=*/true),
                        form.requires_grad, form == p.form ? "" : ", changed after wrapping");
  }
  for (const auto& b : buffers_)
    text += fmt::format(
        "{}: buffer, {}, shape [{}]\n", b.name, c10::toString(b.tensor.scalar_type()),
        b.tensor.defined() ? fmt::format("{}", fmt::join(b.tensor.sizes(), ", ")) : "none");
  // What decides which collectives follow must be equal, too.
  text += fmt::format(
      "options: bucket_cap_mb={}, find_unused_parameters={}, static_graph={}, "
      "broadcast_buffers={}, init_sync={}, overlap={}\n",
      options_.bucket_cap_mb.value_or(0), options_.find_unused_parameters, options_.static_graph,
      options_.broadcast_buffers, options_.init_sync,
      options_.overlap ? fmt::format("{}", *options_.overlap) : "unset");
  const std::uint64_t hash = fingerprint(text.data(), text.size());
  bool same = true;
  for (const auto& other : world_.all_gather(fmt::format("{:016x}", hash)))
    same &= other == fmt::format("{:016x}", hash);
  // Every rank must take the same way from here on.
  if (world_.all(same)) return;
  const auto texts = world_.all_gather(text);
  const auto first = lines_of(texts[0]);
  for (int rank = 1; rank < world_.size(); ++rank) {
    const auto other = lines_of(texts[static_cast<std::size_t>(rank)]);
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string a = i < first.size() ? first[i] : "(no such parameter)";
      const std::string b = i < other.size() ? other[i] : "(no such parameter)";
      if (a == b) continue;
      throw UsageError("reducer",
                       "the models differ between ranks: rank 0 has '{}', rank {} has "
                       "'{}'. Build the same model on every rank, and change it on all alike.",
                       a, rank, b);
    }
  }
  LOCKSTEP_ASSERT(false && "models differ in fingerprint only");
}

void ReducerImpl::verify_replicas() {
  Check check{.component = "ddp", .what = "verify_replicas()"};
  // Memory that all ranks map is always equal, whoever wrote it.
  if (owner_.check_written) check.refusal = refusal_of(owner_.check_written);
  Prints prints;
  for (const auto& p : parameters_) prints.add(p.name, p.tensor);
  for (const auto& b : buffers_)
    if (b.tensor.defined()) prints.add(b.name, b.tensor);
  const auto difference = find_difference(world_, check, prints);
  if (!difference) return;
  throw CommError(
      "ddp",
      fmt::format("replicas differ: '{}' on {} is not what it is on rank 0. Something changed it "
                  "outside the synchronised step, or ranks took different steps.",
                  difference->name, show_ranks(difference->ranks)),
      {.rank = world_.rank(), .peer = difference->ranks[0], .operation = "verify_replicas"});
}

}  // namespace lockstep::parallel
