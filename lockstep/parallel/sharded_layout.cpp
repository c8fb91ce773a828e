#include "lockstep/parallel/sharded_layout.h"

#include <algorithm>
#include <numeric>

namespace lockstep::parallel {

std::vector<std::vector<Piece>> cut_into_shares(const std::vector<std::int64_t>& sizes,
                                                int shares) {
  const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  std::vector<std::vector<Piece>> owned(static_cast<std::size_t>(shares));
  std::int64_t passed = 0;  // elements of earlier pieces
  std::int64_t share = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    for (std::int64_t begin = 0; begin < sizes[i];) {
      // Where this share ought to end; a cut may come a little later, at the next block.
      std::int64_t goal = total * (share + 1) / shares;
      while (passed >= goal && share + 1 < shares) {
        ++share;
        goal = total * (share + 1) / shares;
      }
      const std::int64_t left = sizes[i] - begin;
      const std::int64_t wanted = (goal - passed + kBlock - 1) / kBlock * kBlock;
      const std::int64_t count = share + 1 == shares ? left : std::min(left, wanted);
      owned[static_cast<std::size_t>(share)].push_back({i, begin, count});
      begin += count;
      passed += count;
    }
  }
  return owned;
}

std::vector<std::vector<Piece>> deal_tensors(const std::vector<std::int64_t>& sizes,
                                             const std::vector<double>& costs, int shares) {
  std::vector<std::vector<Piece>> owned(static_cast<std::size_t>(shares));
  std::vector<double> spent(static_cast<std::size_t>(shares), 0);
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return costs[a] > costs[b]; });
  for (const std::size_t i : order) {
    if (sizes[i] == 0) continue;
    const auto least = std::min_element(spent.begin(), spent.end());
    owned[static_cast<std::size_t>(least - spent.begin())].push_back({i, 0, sizes[i]});
    *least += costs[i];
  }
  return owned;
}

PartOffsets spread_over_parts(const std::vector<std::int64_t>& sizes, int parts) {
  PartOffsets offsets;
  offsets.places.resize(sizes.size());
  std::vector<std::int64_t> filled(static_cast<std::size_t>(parts), 0);
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // The largest first, each into the emptiest part.
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  for (const std::size_t i : order) {
    const auto emptiest = std::min_element(filled.begin(), filled.end());
    offsets.places[i] = {static_cast<int>(emptiest - filled.begin()), *emptiest};
    *emptiest += sizes[i];
  }
  for (const std::int64_t size : filled) offsets.part_size = std::max(offsets.part_size, size);
  return offsets;
}

}  // namespace lockstep::parallel
