// How rows are divided: as FSDP2 does it.
#include "lockstep/parallel/shard_unit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "lockstep/testing/matchers.h"

namespace lockstep::parallel {
namespace {

using ::testing::ElementsAre;

TEST(RowCuts, AreThoseOfFsdp2) {
  const auto counts = [](at::IntArrayRef sizes, int ranks) {
    std::vector<std::int64_t> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(cut_rows(sizes, ranks).count(rank));
    return all;
  };
  // torch.chunk: the last parts are shorter, or missing.
  EXPECT_THAT(counts({10, 3}, 4), ElementsAre(3, 3, 3, 1));
  EXPECT_THAT(counts({5}, 4), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(counts({}, 3), ElementsAre(1, 0, 0));
  EXPECT_THAT(counts({0, 4}, 2), ElementsAre(0, 0));
  for (const std::int64_t rows : {1, 4, 5, 9}) {
    const at::Tensor whole = at::arange(2 * rows, at::kFloat).view({rows, 2});
    const auto cut = cut_rows(whole.sizes(), 4);
    const at::Tensor parts = at::zeros({4, cut.padded()});
    copy_to_parts(cut, whole, parts);
    at::Tensor back = at::empty_like(whole);
    copy_from_parts(cut, parts, back);
    EXPECT_TENSOR_EQ(back, whole);
    const auto chunks = whole.chunk(4);
    for (std::size_t r = 0; r < chunks.size(); ++r)
      EXPECT_TENSOR_EQ(parts[static_cast<std::int64_t>(r)].narrow(0, 0, chunks[r].numel()),
                       chunks[r].flatten());
  }
}

}  // namespace
}  // namespace lockstep::parallel
