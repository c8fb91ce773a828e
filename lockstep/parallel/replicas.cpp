// What makes replicas equal at the start, and proves it later.
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <cstring>
#include <map>
#include <sstream>
#include <tuple>

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
  std::vector<std::string> names;
  std::vector<std::int64_t> prints;
  for (const auto& p : parameters_) {
    names.push_back(p.name);
    prints.push_back(static_cast<std::int64_t>(fingerprint(p.tensor)));
  }
  for (const auto& b : buffers_) {
    if (!b.tensor.defined()) continue;
    names.push_back(b.name);
    prints.push_back(static_cast<std::int64_t>(fingerprint(b.tensor)));
  }
  const auto all = world_.all_gather(at::tensor(prints, at::kLong));
  const at::Tensor& first = all[0];
  for (int rank = 1; rank < world_.size(); ++rank) {
    const at::Tensor& other = all[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (first.data_ptr<std::int64_t>()[i] == other.data_ptr<std::int64_t>()[i]) continue;
      throw CommError(
          "ddp",
          fmt::format(
              "replicas differ: '{}' on rank {} is not what it is on rank 0. Something changed it "
              "outside the synchronised step, or ranks took different steps.",
              names[i], rank),
          {.rank = world_.rank(), .peer = rank, .operation = "verify_replicas"});
    }
  }
}

}  // namespace lockstep::parallel
