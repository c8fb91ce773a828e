// What ranks say of themselves, and what rank 0 makes of it.
#include "lockstep/comm/hello.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace lockstep::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<Hello> crew(int size) {
  std::vector<Hello> hellos;
  for (int rank = 0; rank < size; ++rank) {
    hellos.push_back({.rank = rank,
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
  return hellos;
}

std::string problem_of(const std::vector<Hello>& hellos, bool share = false) {
  return contradictions(hellos, share);
}

TEST(Hello, TravelsAsText) {
  Hello hello = crew(3)[2];
  hello.place = {-1, 0, -1};
  hello.gpu = "GPU-1";
  hello.refusal = "[config] there is no file x.\n  Relative paths begin at /.";
  const Hello back = Hello::parse(hello.text());
  EXPECT_EQ(back.rank, 2);
  EXPECT_EQ(back.place, hello.place);
  EXPECT_FALSE(back.place.known());
  for (const auto field :
       {&Hello::world_size, &Hello::program, &Hello::options, &Hello::device, &Hello::debug,
        &Hello::host, &Hello::machine, &Hello::gpu, &Hello::address, &Hello::refusal})
    EXPECT_EQ(back.*field, hello.*field);
  EXPECT_EQ(Hello::parse("").rank, 0);
}

TEST(Hello, RanksAreNamedShortly) {
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

TEST(Hello, EqualRanksFit) {
  EXPECT_EQ(problem_of(crew(1)), "");
  EXPECT_EQ(problem_of(crew(7)), "");
  EXPECT_FALSE(miscounted(crew(7)));
}

TEST(Hello, WhoRefusesIsNamedWithTheReasonAndNothingElse) {
  auto hellos = crew(8);
  // It has not come so far as to know its options, device or place.
  hellos[2] = {.rank = 2, .world_size = "8", .host = "n1", .refusal = "[config] no file x."};
  EXPECT_EQ(problem_of(hellos), "rank 2 on n1 cannot take part: [config] no file x.");
  hellos[0].refusal = "[config] no file x.";
  hellos[5].refusal = "[config] 2 mistakes.";
  EXPECT_EQ(problem_of(hellos),
            "rank 5 on n0 cannot take part: [config] 2 mistakes. And ranks 0, 2 on n0, n1 cannot "
            "take part: [config] no file x.");
  for (int rank = 0; rank < 8; ++rank)
    hellos[static_cast<std::size_t>(rank)].refusal = fmt::format("reason {}.", rank);
  EXPECT_THAT(problem_of(hellos),
              AllOf(HasSubstr("rank 3 on n0 cannot take part: reason 3."),
                    HasSubstr("And 4 more have other reasons."), Not(HasSubstr("reason 4."))));
}

TEST(Hello, EveryRankThatDiffersIsNamed) {
  auto hellos = crew(4);
  hellos[1].program = hellos[3].program = "build 0";
  EXPECT_EQ(problem_of(hellos),
            "ranks 1, 3 have program build 0, but rank 0 has build 1. Run the same build on every "
            "host.");
  hellos[2].program = "";
  EXPECT_THAT(problem_of(hellos), HasSubstr("ranks 1, 3 have program build 0 and rank 2 has "
                                            "program (none), but rank 0 has build 1."));
  hellos = crew(3);
  hellos[1].world_size = hellos[2].world_size = "5";
  EXPECT_THAT(problem_of(hellos), HasSubstr("ranks 1, 2 have world size 5, but rank 0 has 3."));
  EXPECT_TRUE(miscounted(hellos));
  // Which process came first makes no difference.
  std::swap(hellos[0], hellos[2]);
  EXPECT_THAT(problem_of(hellos), HasSubstr("ranks 1, 2 have world size 5, but rank 0 has 3."));
  hellos = crew(4);
  hellos[2].device = hellos[3].device = "cuda with nccl";
  EXPECT_THAT(
      problem_of(hellos),
      AllOf(HasSubstr("ranks 2, 3 have device cuda with nccl, but rank 0 has cpu with gloo."),
            HasSubstr("LOCKSTEP_BACKEND")));
  hellos = crew(3);
  hellos[0].debug = "on";
  EXPECT_THAT(problem_of(hellos), HasSubstr("ranks 1, 2 have debug mode off, but rank 0 has on."));
}

TEST(Hello, SeveralDifferencesAreAllNamed) {
  auto hellos = crew(4);
  hellos[1].program = "build 0";
  hellos[2].options = "other";
  EXPECT_THAT(problem_of(hellos),
              AllOf(HasSubstr("rank 1 has program build 0, but rank 0 has build 1."),
                    HasSubstr("And rank 2 has options other, but rank 0 has same.")));
}

TEST(Hello, TheTextStaysShort) {
  auto hellos = crew(512);
  for (auto& hello : hellos) {
    if (hello.rank > 0) hello.program = std::to_string(hello.rank % 100) + std::string(10'000, 'x');
    hello.options = std::to_string(hello.rank);
    hello.gpu = "GPU";
  }
  const std::string text = problem_of(hellos);
  EXPECT_LT(text.size(), 2000u) << text;
  EXPECT_THAT(text, HasSubstr("more ranks likewise"));
}

TEST(Hello, RanksThatAreThereTwice) {
  auto hellos = crew(4);
  hellos[2].rank = 1;
  hellos[2].host = "n1";
  EXPECT_TRUE(miscounted(hellos));
  EXPECT_THAT(problem_of(hellos), HasSubstr("two processes say they are rank 1 (on n0, n1)."));
}

TEST(Hello, GpusThatAreShared) {
  auto hellos = crew(5);
  for (auto& hello : hellos)
    hello.gpu = hello.rank < 4 ? fmt::format("GPU-{}", hello.rank % 2) : "";
  EXPECT_THAT(problem_of(hellos), AllOf(HasSubstr("ranks 0, 2 on n0 use the same GPU (GPU-0) and "
                                                  "ranks 1, 3 on n0 use the same GPU (GPU-1)."),
                                        HasSubstr("LOCKSTEP_SHARE_DEVICE=1")));
  EXPECT_EQ(problem_of(hellos, /*share=*/true), "");
  hellos[2].host = hellos[3].host = "n1";
  for (auto& hello : hellos) hello.address = "";
  EXPECT_EQ(problem_of(hellos), "");
}

TEST(Hello, AddressesThatOnlyTheirOwnHostReaches) {
  auto hellos = crew(3);
  hellos[2].host = "n1";
  EXPECT_THAT(problem_of(hellos), AllOf(HasSubstr("ranks 0, 1 on n0 would listen on 127.0.0.1 and "
                                                  "rank 2 on n1 would listen on 127.0.0.1, which"),
                                        HasSubstr("GLOO_SOCKET_IFNAME")));
}

// Two machines, filled alternately; nobody has said anything about places.
std::vector<Hello> unplaced(int size) {
  auto hellos = crew(size);
  for (auto& hello : hellos) {
    hello.place = {-1, 0, -1};
    hello.machine = hello.host = hello.rank % 2 == 0 ? "n0" : "n1";
    hello.address = "";
  }
  return hellos;
}

TEST(Hello, PlacesAreCounted) {
  const auto hellos = unplaced(5);
  EXPECT_EQ(problem_of(hellos), "");
  const auto places = count_places(hellos);
  EXPECT_EQ(places.at(0), (Place{0, 3, 0}));
  EXPECT_EQ(places.at(1), (Place{0, 2, 1}));
  EXPECT_EQ(places.at(3), (Place{1, 2, 1}));
  EXPECT_EQ(places.at(4), (Place{2, 3, 0}));
}

TEST(Hello, WhatWasSaidStays) {
  auto hellos = unplaced(4);
  hellos[3].place = {1, 0, 7};
  hellos[2].place = {5, 6, 0};
  const auto places = count_places(hellos);
  EXPECT_EQ(places.at(3), (Place{1, 2, 7}));
  EXPECT_EQ(places.at(2), (Place{5, 6, 0}));
}

TEST(Hello, LocalRanksBeyondTheCount) {
  auto hellos = unplaced(4);
  hellos[1].place.local_rank = 2;
  hellos[3].place.local_rank = 2;
  EXPECT_THAT(problem_of(hellos), AllOf(HasSubstr("ranks 1, 3 have local rank 2 on n1, where 2 "
                                                  "ranks run."),
                                        HasSubstr("LOCAL_RANK"), Not(HasSubstr("n0"))));
  hellos.erase(hellos.begin() + 2);
  EXPECT_EQ(problem_of(hellos), "") << "somebody is still on the way";
}

}  // namespace
}  // namespace lockstep::detail
