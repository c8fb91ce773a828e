#include "lockstep/parallel/gradient_block.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstring>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/kernels/copy.h"

namespace lockstep::parallel {
namespace {

// A block that the cache cannot hold is filled past it: the first gradients would be gone again
// when the last ones come. Small tensors among them are not worth the store's fence.
constexpr std::int64_t kCacheBytes = 4 << 20;
constexpr std::size_t kStreamedBytes = 64 << 10;
constexpr std::int64_t kGrainBytes = 1 << 20;  // for each thread

at::Tensor cut(const at::Tensor& bytes, std::int64_t offset, std::int64_t numel,
               at::ScalarType dtype) {
  const auto length = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, offset, length).view(dtype);
}

}  // namespace

void move_lines(std::byte* data, std::int64_t bytes, const std::vector<Move>& moves) {
  // Line i gets what line source[i] holds. 4 bytes a line is all the memory that is needed.
  std::vector<std::uint32_t> source(static_cast<std::size_t>(bytes / kLine));
  LOCKSTEP_ASSERT(source.size() <= UINT32_MAX);
  std::iota(source.begin(), source.end(), 0u);
  std::vector<bool> taken(source.size()), given(source.size());
  for (const Move& move : moves) {
    LOCKSTEP_ASSERT(move.from % kLine == 0 && move.to % kLine == 0 && move.bytes % kLine == 0);
    LOCKSTEP_ASSERT(move.from + move.bytes <= bytes && move.to + move.bytes <= bytes);
    for (std::int64_t line = 0; line < move.bytes / kLine; ++line) {
      const auto from = static_cast<std::size_t>(move.from / kLine + line);
      const auto to = static_cast<std::size_t>(move.to / kLine + line);
      source[to] = static_cast<std::uint32_t>(from);
      taken[from] = given[to] = true;
    }
  }
  LOCKSTEP_ASSERT(taken == given);
  const auto at = [data](std::size_t line) { return data + line * kLine; };
  std::byte held[kLine];
  for (std::size_t start = 0; start < source.size(); ++start) {
    if (source[start] == start) continue;
    // Once around the cycle: each line takes what the next one holds.
    std::memcpy(held, at(start), kLine);
    std::size_t line = start;
    while (source[line] != start) {
      const std::size_t next = source[line];
      std::memcpy(at(line), at(next), kLine);
      source[line] = static_cast<std::uint32_t>(line);
      line = next;
    }
    std::memcpy(at(line), held, kLine);
    source[line] = static_cast<std::uint32_t>(line);
  }
}

void GradientBlock::make(World& world, std::int64_t bytes) {
  mine_ = at::Tensor();
  parts_.clear();
  bytes_ = bytes;
  if (bytes == 0) return;
  try {
    parts_ = world.symmetric({bytes}, at::kByte);
  } catch (const UsageError& e) {
    // All ranks identically.
    log::warning("reducer", "gradients stay in every rank's own memory, which is slower: {}",
                 e.what());
  }
  mine_ = parts_.empty() ? at::zeros({bytes}, at::kByte)
                         : parts_[static_cast<std::size_t>(world.rank())];  // zeros already
}

bool GradientBlock::holds(const at::Tensor& tensor) const {
  // By its address: a gradient that came into being here has a storage of its own.
  if (!mine_.defined() || !tensor.is_cpu() || !tensor.has_storage()) return false;
  const auto* const begin = static_cast<const std::byte*>(mine_.const_data_ptr());
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  return data >= begin && data < begin + bytes_;
}

at::Tensor GradientBlock::mine(std::int64_t offset, std::int64_t numel,
                               at::ScalarType dtype) const {
  return cut(mine_, offset, numel, dtype);
}

std::vector<at::Tensor> GradientBlock::shared(std::int64_t offset, std::int64_t numel,
                                              at::ScalarType dtype) const {
  std::vector<at::Tensor> result;
  for (const auto& part : parts_) result.push_back(cut(part, offset, numel, dtype));
  return result;
}

void GradientBlock::fill(const at::Tensor& slot, const at::Tensor& grad) const {
  const bool same = holds(slot) && grad.is_cpu() && grad.scalar_type() == slot.scalar_type() &&
                    grad.sizes() == slot.sizes() && grad.strides() == slot.strides() &&
                    !grad.is_conj() && !grad.is_neg() && slot.is_non_overlapping_and_dense();
  if (!same || slot.numel() == 0) {
    slot.copy_(holds(grad) ? grad.clone() : grad);
    return;
  }
  const auto length = static_cast<std::int64_t>(slot.nbytes());
  auto* const to = static_cast<std::byte*>(slot.mutable_data_ptr());
  const auto* const from = static_cast<const std::byte*>(grad.const_data_ptr());
  slot.unsafeGetTensorImpl()->bump_version();  // as copy_ does
  if (from == to) return;
  const bool streams = bytes_ >= kCacheBytes && slot.nbytes() >= kStreamedBytes;
  at::parallel_for(0, length, kGrainBytes, [&](std::int64_t begin, std::int64_t end) {
    const auto bytes = static_cast<std::size_t>(end - begin);
    if (streams)
      kernels::stream_copy(to + begin, from + begin, bytes);
    else
      std::memcpy(to + begin, from + begin, bytes);
  });
}

void GradientBlock::rearrange(const std::vector<Move>& moves) {
  move_lines(static_cast<std::byte*>(mine_.mutable_data_ptr()), bytes_, moves);
}

}  // namespace lockstep::parallel
