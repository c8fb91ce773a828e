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
constexpr std::size_t kRefusalBytes = 4096;  // of a refusal, with its end

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

// Of one size on all ranks, so that nobody has to wait for the others' to send its own.
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

std::optional<OtherLine> find_other_line(World& world, const Check& check,
                                         const std::string& text) {
  const std::uint64_t hash = fingerprint(text.data(), text.size());
  at::Tensor mine = at::empty({2}, at::kLong);
  mine.mutable_data_ptr<std::int64_t>()[0] = check.refusal ? 1 : 0;
  mine.mutable_data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(hash);
  const auto all = world.all_gather(mine);
  bool same = true;
  for (const at::Tensor& each : all) {
    const auto* texts = each.const_data_ptr<std::int64_t>();
    if (texts[0] != 0) refuse_together(world, check);
    // Ranks that see two different ones take the same way, whichever is theirs.
    same &= texts[1] == all[0].const_data_ptr<std::int64_t>()[1];
  }
  if (same) return std::nullopt;
  const auto texts = world.all_gather(text);
  const auto first = lines_of(texts[0]);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    const auto other = lines_of(texts[rank]);
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string a = i < first.size() ? first[i] : "";
      const std::string b = i < other.size() ? other[i] : "";
      if (a != b) return OtherLine{static_cast<int>(rank), b, a};
    }
  }
  LOCKSTEP_ASSERT(false && "texts differ in fingerprint only");
  return std::nullopt;
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
  if (world_.size() > 1)
    for (const auto& t : tensors)
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  for (auto& b : buffers_)
    if (b.tensor.defined() && !b.tensor.is_inference()) b.version = b.tensor._version();
}

// The kernel of BatchNorm writes running statistics past their version counter, so that a second
// graph may be alive, and so does this. A buffer that was written through its counter since the
// last time is counted once more, on every rank and the root, too: a graph that needs its old value
// is refused by all of them.
void ReducerImpl::broadcast_buffers(int root) {
  if (world_.size() == 1) return;
  broadcast_coalesced(world_, buffer_tensors(), root);
  for (auto& b : buffers_) {
    if (!b.tensor.defined() || b.tensor.is_inference()) continue;  // those have no counter
    if (b.tensor._version() != b.version) b.tensor.unsafeGetTensorImpl()->bump_version();
    b.version = b.tensor._version();
  }
}

namespace {

// How a parameter's elements follow each other, where not row by row: its gradient lies in the
// bucket likewise.
std::string show_strides(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense()) return "";
  std::vector<std::string> strides;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)  // one element has no next one
    strides.push_back(tensor.size(i) == 1 ? "-" : std::to_string(tensor.stride(i)));
  return fmt::format(", strides [{}]", fmt::join(strides, ", "));
}

}  // namespace

// Ranks that wrapped different models would mix up gradients or hang; say which parameter differs.
void ReducerImpl::check_same_model() {
  std::string lines;
  const auto refusal = refusal_ ? refusal_ : refusal_of([&] { lines = describe(); });
  const Check check{.component = "reducer", .what = "to wrap the model", .refusal = refusal};
  const auto other = find_other_line(world_, check, lines);
  if (!other) return;
  const auto show = [](const std::string& line) {
    return line.empty() ? "(no such parameter)" : line;
  };
  throw UsageError(
      "reducer",
      "the models differ between ranks: rank 0 has '{}', rank {} has '{}'. Build the "
      "same model with the same options on every rank, and change it on all identically.",
      show(other->first), other->rank, show(other->here));
}

// A line for everything that decides which collectives follow, and what lies where in them.
std::string ReducerImpl::describe() const {
  std::string text;
  for (const auto& p : parameters_) {
    const Form form = form_of(p);
    text += fmt::format("{}: shape [{}], {} on {}, requires_grad={}{}{}{}\n", p.name,
                        fmt::join(form.sizes, ", "), c10::toString(form.dtype),
                        c10::DeviceTypeName(form.device.type(), /*lower_case=*/true),
                        form.requires_grad, show_strides(p.tensor), p.sparse ? ", sparse" : "",
                        form == p.form ? "" : ", changed after wrapping");
  }
  for (const auto& b : buffers_)
    text += fmt::format(
        "{}: buffer, {}, shape [{}]\n", b.name, c10::toString(b.tensor.scalar_type()),
        b.tensor.defined() ? fmt::format("{}", fmt::join(b.tensor.sizes(), ", ")) : "none");
  const auto option = [&](const char* name, const auto& value) {
    text += fmt::format("option {}: {}\n", name, value);
  };
  const auto shown = [](const auto& optional) {
    return optional ? fmt::format("{}", *optional) : "unset";
  };
  option("bucket_cap_mb", shown(options_.bucket_cap_mb));
  option("find_unused_parameters", options_.find_unused_parameters);
  option("static_graph", options_.static_graph);
  option("broadcast_buffers", options_.broadcast_buffers);
  option("init_sync", options_.init_sync);
  option("overlap", shown(options_.overlap));
  return text;
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
