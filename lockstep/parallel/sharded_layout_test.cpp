#include "lockstep/parallel/sharded_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace lockstep::parallel {
namespace {

TEST(ShardedLayout, SharesCoverEveryElementOnceAndAreCutAtBlocks) {
  const std::vector<std::vector<std::int64_t>> models{
      {1}, {0, 5}, {kBlock * 10 + 3}, {7, kBlock * 3, 1, 1, 100'000, 64, kBlock - 1}};
  for (const auto& sizes : models) {
    for (const int shares : {1, 2, 3, 4, 7, 64}) {
      const auto owned = cut_into_shares(sizes, shares);
      ASSERT_EQ(owned.size(), static_cast<std::size_t>(shares));
      std::vector<std::int64_t> reached(sizes.size(), 0);
      for (const auto& share : owned) {
        for (const Piece& piece : share) {
          EXPECT_EQ(piece.begin, reached[piece.parameter]);
          EXPECT_EQ(piece.begin % kBlock, 0);
          EXPECT_GT(piece.count, 0);
          reached[piece.parameter] += piece.count;
        }
      }
      EXPECT_EQ(reached, sizes);
    }
  }
}

TEST(ShardedLayout, SharesAreEven) {
  const std::vector<std::int64_t> sizes{1'000'000, 1000, 1000, 500'000};
  const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  for (const int shares : {2, 3, 7}) {
    for (const auto& share : cut_into_shares(sizes, shares)) {
      std::int64_t count = 0;
      for (const Piece& piece : share) count += piece.count;
      EXPECT_NEAR(static_cast<double>(count), static_cast<double>(total) / shares, kBlock + 1000);
    }
  }
}

TEST(ShardedLayout, OffsetsDoNotOverlap) {
  const std::vector<std::int64_t> sizes{100, 30, 30, 30, 5, 0};
  const auto offsets = spread_over_parts(sizes, 2);
  EXPECT_EQ(offsets.part_size, 100);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_LE(offsets.places[i].offset + sizes[i], offsets.part_size);
    for (std::size_t j = 0; j < i; ++j) {
      const auto &a = offsets.places[i], &b = offsets.places[j];
      const bool apart =
          a.part != b.part || a.offset >= b.offset + sizes[j] || b.offset >= a.offset + sizes[i];
      EXPECT_TRUE(apart) << i << " and " << j;
    }
  }
}

}  // namespace
}  // namespace lockstep::parallel
