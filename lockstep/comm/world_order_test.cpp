// Two worlds in the orders that a program may use them: a rank that has started an operation in
// one world may wait in another first, and every operation still ends on the ranks that wait.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

constexpr int kRanks = 3;
constexpr std::int64_t kFew = 100;
constexpr std::int64_t kMany = 700'000;  // floats: more than a chunk of shared memory

struct RankInfo {
  World& world;
  int odd;  // the rank with few elements, where ranks may differ
  int root;
  std::int64_t count;  // where they may not

  std::int64_t elements(int from, int to) const { return from == odd || to == odd ? kFew : kMany; }
  at::Tensor mine() const { return at::full({count}, world.rank() + 1.0f); }
};

// Starts an operation, and says what is left to check after its end.
using Start = std::function<std::pair<Work, std::function<bool()>>(const RankInfo&)>;

bool holds(const at::Tensor& tensor, double value) {
  return tensor.numel() == 0 || tensor.eq(value).all().item<bool>();
}

std::pair<Work, std::function<bool()>> start_all_to_all(const RankInfo& at, bool even) {
  std::vector<at::Tensor> outputs, inputs;
  for (int rank = 0; rank < kRanks; ++rank) {
    outputs.push_back(at::empty({even ? at.count : at.elements(rank, at.world.rank())}));
    inputs.push_back(
        at::full({even ? at.count : at.elements(at.world.rank(), rank)}, 1.0 * at.world.rank()));
  }
  Work work = at.world.all_to_all(outputs, inputs);
  return {work, [outputs] {
            bool right = true;
            for (int rank = 0; rank < kRanks; ++rank)
              right &= holds(outputs[static_cast<std::size_t>(rank)], rank);
            return right;
          }};
}

std::pair<Work, std::function<bool()>> start_messages(const RankInfo& at) {
  std::vector<P2p> messages;
  std::vector<at::Tensor> received;
  const int own = at.world.rank();
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == own) continue;
    messages.push_back({P2p::Kind::kSend, at::full({at.elements(own, rank)}, 1.0 * own), rank});
    received.push_back(at::empty({at.elements(rank, own)}));
    messages.push_back({P2p::Kind::kRecv, received.back(), rank});
  }
  Work work = at.world.batch_isend_irecv(messages);
  return {work, [received, own] {
            return holds(received[0], own == 0 ? 1 : 0) && holds(received[1], own == 2 ? 1 : 2);
          }};
}

std::vector<std::pair<std::string, Start>> reductions() {
  return {{"all_reduce",
           [](const RankInfo& at) {
             at::Tensor x = at.mine();
             return std::pair(at.world.all_reduce(x), [x] { return holds(x, 6); });
           }},
          {"all_reduce, staged",
           [](const RankInfo& at) {
             at::Tensor x = at::stack({at.mine(), at.mine()}, 1).select(1, 0);
             return std::pair(at.world.all_reduce(x), [x] { return holds(x, 6); });
           }},
          {"all_reduce, average of integers",
           [](const RankInfo& at) {
             at::Tensor x = at.mine().to(at::kInt);
             return std::pair(at.world.all_reduce(x, ReduceOp::kAvg), [x] { return holds(x, 2); });
           }},
          {"reduce",
           [](const RankInfo& at) {
             at::Tensor x = at.mine();
             return std::pair(at.world.reduce(x, at.root), [x, root = at.world.rank() == at.root] {
               return !root || holds(x, 6);
             });
           }},
          {"reduce_scatter", [](const RankInfo& at) {
             at::Tensor output = at::empty({at.count});
             const at::Tensor input = at::ones({kRanks, at.count});
             return std::pair(at.world.reduce_scatter(output, input),
                              [output] { return holds(output, kRanks); });
           }}};
}

std::vector<std::pair<std::string, Start>> movements() {
  return {
      {"broadcast",
       [](const RankInfo& at) {
         at::Tensor x = at.mine();
         return std::pair(at.world.broadcast(x, at.root),
                          [x, root = at.root] { return holds(x, root + 1); });
       }},
      {"all_gather",
       [](const RankInfo& at) {
         at::Tensor output = at::empty({kRanks, at.count});
         return std::pair(at.world.all_gather(output, at.mine()),
                          [output] { return holds(output[0], 1) && holds(output[2], 3); });
       }},
      {"gather",
       [](const RankInfo& at) {
         std::vector<at::Tensor> outputs;
         for (int rank = 0; at.world.rank() == at.root && rank < kRanks; ++rank)
           outputs.push_back(at::empty({at.count}));
         return std::pair(at.world.gather(outputs, at.mine(), at.root), [outputs] {
           return outputs.empty() || (holds(outputs[0], 1) && holds(outputs[2], 3));
         });
       }},
      {"scatter",
       [](const RankInfo& at) {
         std::vector<at::Tensor> inputs;
         for (int rank = 0; at.world.rank() == at.root && rank < kRanks; ++rank)
           inputs.push_back(at::full({at.count}, 1.0 * rank));
         at::Tensor output = at::empty({at.count});
         return std::pair(at.world.scatter(output, inputs, at.root),
                          [output, own = at.world.rank()] { return holds(output, own); });
       }},
      {"all_to_all, equal sizes", [](const RankInfo& at) { return start_all_to_all(at, true); }},
      {"all_to_all, sizes that differ",
       [](const RankInfo& at) { return start_all_to_all(at, false); }},
      {"messages", [](const RankInfo& at) { return start_messages(at); }}};
}

template <typename Body>
void for_all(const Body& body) {
  for (const auto& table : {reductions(), movements()})
    for (const auto& [name, start] : table)
      for (const std::int64_t count : {kFew, kMany}) body(name, start, count);
}

TEST(WorldOrder, ARankThatIsElsewhereHoldsNobodyUp) {
  testing::run_threads(kRanks, [](World& world) {
    World other = *world.split(0);
    for_all([&](const std::string& name, const Start& start, std::int64_t count) {
      for (int odd = 0; odd < kRanks; ++odd) {
        SCOPED_TRACE(name + ", rank " + std::to_string(odd) + " is elsewhere");
        auto [work, right] = start({world, odd, (odd + 1) % kRanks, count});
        if (world.rank() != odd) work.wait();
        other.barrier();
        work.wait();
        EXPECT_TRUE(right());
      }
    });
  });
}

TEST(WorldOrder, EveryOrderOfTwoWorlds) {
  testing::run_threads(kRanks, [](World& world) {
    World other = *world.split(0);
    for_all([&](const std::string& name, const Start& start, std::int64_t count) {
      for (unsigned orders = 0; orders < (1u << kRanks); ++orders) {
        SCOPED_TRACE(name + ", orders " + std::to_string(orders));
        auto [one, one_right] = start({world, 0, 0, count});
        auto [two, two_right] = start({other, 1, 1, count});
        const bool opposite = ((orders >> world.rank()) & 1u) != 0;
        (opposite ? two : one).wait();
        (opposite ? one : two).wait();
        EXPECT_TRUE(one_right() && two_right());
      }
    });
  });
}

}  // namespace
}  // namespace lockstep
