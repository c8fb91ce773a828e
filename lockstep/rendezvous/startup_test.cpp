// The handshakes of ranks, and the contradictions that rank 0 finds in them.
#include "lockstep/rendezvous/startup.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace lockstep::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<Handshake> world_of(int size) {
  std::vector<Handshake> handshakes;
  for (int rank = 0; rank < size; ++rank) {
    handshakes.push_back({.rank = rank,
                          .place = {rank, size, 0},
                          .world_size = std::to_string(size),
                          .program = "build 1",
                          .options = "same",
                          .device = "cpu with gloo",
                          .debug = "off",
                          .host = "n0",
                          .machine = "n0/boot",
                          .gpu = "",
                          .address = "127.0.0.1"});
  }
  return handshakes;
}

std::string problem_of(const std::vector<Handshake>& handshakes, bool share = false) {
  return contradictions(handshakes, share);
}

TEST(Handshake, TravelsAsText) {
  Handshake handshake = world_of(3)[2];
  handshake.place = {-1, 0, -1};
  handshake.gpu = "GPU-1";
  handshake.refusal = "[config] there is no file x.\n  Relative paths begin at /.";
  const Handshake back = Handshake::parse(handshake.text());
  EXPECT_EQ(back.rank, 2);
  EXPECT_EQ(back.place, handshake.place);
  EXPECT_FALSE(back.place.known());
  for (const auto field :
       {&Handshake::world_size, &Handshake::program, &Handshake::options, &Handshake::device,
        &Handshake::debug, &Handshake::host, &Handshake::machine, &Handshake::gpu,
        &Handshake::address, &Handshake::refusal})
    EXPECT_EQ(back.*field, handshake.*field);
  EXPECT_EQ(Handshake::parse("").rank, 0);
}

TEST(Handshake, RanksAreNamedShortly) {
  EXPECT_EQ(name_ranks({3}), "rank 3");
  EXPECT_EQ(name_ranks({4, 1}), "ranks 1, 4");
  EXPECT_EQ(name_ranks({2, 3, 5, 6, 7, 9}), "ranks 2, 3, 5-7, 9");
  std::vector<int> odd;
  for (int rank = 1; rank < 64; rank += 2) odd.push_back(rank);
  EXPECT_EQ(name_ranks(odd), "ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19 and 22 more");
  std::vector<int> all(64);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(name_ranks(all), "ranks 0-63");
}

TEST(Handshake, EqualRanksFit) {
  EXPECT_EQ(problem_of(world_of(1)), "");
  EXPECT_EQ(problem_of(world_of(7)), "");
  EXPECT_FALSE(miscounted(world_of(7)));
}

TEST(Handshake, WhoRefusesIsNamedWithTheReasonAndNothingElse) {
  auto handshakes = world_of(8);
  // The rank does not know its options, device or place yet.
  handshakes[2] = {.rank = 2, .world_size = "8", .host = "n1", .refusal = "[config] no file x."};
  EXPECT_EQ(problem_of(handshakes), "rank 2 on n1 cannot take part: [config] no file x.");
  handshakes[0].refusal = "[config] no file x.";
  handshakes[5].refusal = "[config] 2 mistakes.";
  EXPECT_EQ(problem_of(handshakes),
            "rank 5 on n0 cannot take part: [config] 2 mistakes. And ranks 0, 2 on n0, n1 cannot "
            "take part: [config] no file x.");
  for (int rank = 0; rank < 8; ++rank)
    handshakes[static_cast<std::size_t>(rank)].refusal = fmt::format("reason {}.", rank);
  EXPECT_THAT(problem_of(handshakes),
              AllOf(HasSubstr("rank 3 on n0 cannot take part: reason 3."),
                    HasSubstr("And 4 more have other reasons."), Not(HasSubstr("reason 4."))));
}

TEST(Handshake, EveryRankThatDiffersIsNamed) {
  auto handshakes = world_of(4);
  handshakes[1].program = handshakes[3].program = "build 0";
  EXPECT_EQ(problem_of(handshakes),
            "ranks 1, 3 have program build 0, but rank 0 has build 1. Run the same build on every "
            "host.");
  handshakes[2].program = "";
  EXPECT_THAT(problem_of(handshakes), HasSubstr("ranks 1, 3 have program build 0 and rank 2 has "
                                                "program (none), but rank 0 has build 1."));
  handshakes = world_of(3);
  handshakes[1].world_size = handshakes[2].world_size = "5";
  EXPECT_THAT(problem_of(handshakes), HasSubstr("ranks 1, 2 have world size 5, but rank 0 has 3."));
  EXPECT_TRUE(miscounted(handshakes));
  // Which process came first makes no difference.
  std::swap(handshakes[0], handshakes[2]);
  EXPECT_THAT(problem_of(handshakes), HasSubstr("ranks 1, 2 have world size 5, but rank 0 has 3."));
  handshakes = world_of(4);
  handshakes[2].device = handshakes[3].device = "cuda with nccl";
  EXPECT_THAT(
      problem_of(handshakes),
      AllOf(HasSubstr("ranks 2, 3 have device cuda with nccl, but rank 0 has cpu with gloo."),
            HasSubstr("LOCKSTEP_BACKEND")));
  handshakes = world_of(3);
  handshakes[0].debug = "on";
  EXPECT_THAT(problem_of(handshakes),
              HasSubstr("ranks 1, 2 have debug mode off, but rank 0 has on."));
}

TEST(Handshake, SeveralDifferencesAreAllNamed) {
  auto handshakes = world_of(4);
  handshakes[1].program = "build 0";
  handshakes[2].options = "other";
  EXPECT_THAT(problem_of(handshakes),
              AllOf(HasSubstr("rank 1 has program build 0, but rank 0 has build 1."),
                    HasSubstr("And rank 2 has options other, but rank 0 has same.")));
}

TEST(Handshake, TheTextStaysShort) {
  auto handshakes = world_of(512);
  for (auto& handshake : handshakes) {
    if (handshake.rank > 0)
      handshake.program = std::to_string(handshake.rank % 100) + std::string(10'000, 'x');
    handshake.options = std::to_string(handshake.rank);
    handshake.gpu = "GPU";
  }
  const std::string text = problem_of(handshakes);
  EXPECT_LT(text.size(), 2000u) << text;
  EXPECT_THAT(text, HasSubstr("more ranks likewise"));
}

TEST(Handshake, RanksThatAreThereTwice) {
  auto handshakes = world_of(4);
  handshakes[2].rank = 1;
  handshakes[2].host = "n1";
  EXPECT_TRUE(miscounted(handshakes));
  EXPECT_THAT(problem_of(handshakes), HasSubstr("two processes say they are rank 1 (on n0, n1)."));
}

TEST(Handshake, GpusThatAreShared) {
  auto handshakes = world_of(5);
  for (auto& handshake : handshakes)
    handshake.gpu = handshake.rank < 4 ? fmt::format("GPU-{}", handshake.rank % 2) : "";
  EXPECT_THAT(problem_of(handshakes),
              AllOf(HasSubstr("ranks 0, 2 on n0 use the same GPU (GPU-0) and "
                              "ranks 1, 3 on n0 use the same GPU (GPU-1)."),
                    HasSubstr("LOCKSTEP_SHARE_DEVICE=1")));
  EXPECT_EQ(problem_of(handshakes, /*share=*/true), "");
  handshakes[2].host = handshakes[3].host = "n1";
  for (auto& handshake : handshakes) handshake.address = "";
  EXPECT_EQ(problem_of(handshakes), "");
}

TEST(Handshake, AddressesThatOnlyTheirOwnHostReaches) {
  auto handshakes = world_of(3);
  handshakes[2].host = "n1";
  EXPECT_THAT(problem_of(handshakes),
              AllOf(HasSubstr("ranks 0, 1 on n0 would listen on 127.0.0.1 and "
                              "rank 2 on n1 would listen on 127.0.0.1, which"),
                    HasSubstr("GLOO_SOCKET_IFNAME")));
}

// Two machines, filled alternately; nothing is known about places.
std::vector<Handshake> unplaced(int size) {
  auto handshakes = world_of(size);
  for (auto& handshake : handshakes) {
    handshake.place = {-1, 0, -1};
    handshake.machine = handshake.host = handshake.rank % 2 == 0 ? "n0" : "n1";
    handshake.address = "";
  }
  return handshakes;
}

TEST(Handshake, PlacesAreCounted) {
  const auto handshakes = unplaced(5);
  EXPECT_EQ(problem_of(handshakes), "");
  const auto places = count_ranks(handshakes);
  EXPECT_EQ(places.at(0), (RankInfo{0, 3, 0}));
  EXPECT_EQ(places.at(1), (RankInfo{0, 2, 1}));
  EXPECT_EQ(places.at(3), (RankInfo{1, 2, 1}));
  EXPECT_EQ(places.at(4), (RankInfo{2, 3, 0}));
}

TEST(Handshake, WhatWasSaidStays) {
  auto handshakes = unplaced(4);
  handshakes[3].place = {1, 0, 7};
  handshakes[2].place = {5, 6, 0};
  const auto places = count_ranks(handshakes);
  EXPECT_EQ(places.at(3), (RankInfo{1, 2, 7}));
  EXPECT_EQ(places.at(2), (RankInfo{5, 6, 0}));
}

TEST(Handshake, LocalRanksBeyondTheCount) {
  auto handshakes = unplaced(4);
  handshakes[1].place.local_rank = 2;
  handshakes[3].place.local_rank = 2;
  EXPECT_THAT(problem_of(handshakes), AllOf(HasSubstr("ranks 1, 3 have local rank 2 on n1, where 2 "
                                                      "ranks run."),
                                            HasSubstr("LOCAL_RANK"), Not(HasSubstr("n0"))));
  handshakes.erase(handshakes.begin() + 2);
  EXPECT_EQ(problem_of(handshakes), "") << "somebody is still on the way";
}

}  // namespace
}  // namespace lockstep::detail
