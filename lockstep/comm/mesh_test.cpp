// Mesh, over real processes and both backends of the CPU.
#include "lockstep/comm/mesh.h"

#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

// The ranks of the mesh's world that are in `part`, in their order there.
std::vector<int> members(const Mesh& mesh, World& part) {
  std::vector<int> ranks;
  for (const at::Tensor& rank : part.all_gather(at::tensor({mesh.world().rank()})))
    ranks.push_back(rank.item<int>());
  return ranks;
}

using Ranks = std::vector<int>;

class MeshTest : public ::testing::TestWithParam<const char*> {
 protected:
  static void on_processes(int size, const std::function<void(World&)>& body) {
    const auto ranks =
        testing::run_processes(size, body, {.env = {{"LOCKSTEP_BACKEND", GetParam()}}});
    for (const auto& rank : ranks) EXPECT_EQ(rank.exit_code, 0) << rank.output;
  }
};

TEST_P(MeshTest, OneRankHasEveryAxis) {
  on_processes(1, [](World& world) {
    const Mesh mesh(world, {{"data", 1}, {"tensor", -1}});
    for (const char* axis : {"data", "shard", "pipeline", "tensor"}) {
      EXPECT_EQ(mesh.size(axis), 1) << axis;
      EXPECT_EQ(mesh.rank(axis), 0) << axis;
    }
    EXPECT_EQ(all_reduce(mesh.batch(), 2), 2);
    EXPECT_EQ(mesh.text(), "data 1 x tensor 1");
  });
}

TEST_P(MeshTest, WorldIsAMeshOfData) {
  on_processes(3, [](World& world) {
    const Mesh mesh = world;
    EXPECT_EQ(mesh.text(), "data 3");
    EXPECT_EQ(mesh.size("data"), 3);
    EXPECT_EQ(mesh.rank("data"), world.rank());
    EXPECT_EQ(all_reduce(mesh.batch(), 1), 3);
    EXPECT_EQ(all_reduce(mesh["tensor"], 1), 1);
    EXPECT_EQ(mesh["tensor"].device(), world.device());
    EXPECT_EQ(mesh.flatten({"pipeline", "tensor"}).size(), 1);
  });
}

TEST_P(MeshTest, OneAxisOfAnyNameIsTheWorldItself) {
  on_processes(2, [](World& world) {
    const Mesh mesh(world, {{"tensor", 2}});
    EXPECT_EQ(members(mesh, mesh["tensor"]), (Ranks{0, 1}));
    EXPECT_EQ(members(mesh, mesh.batch()), Ranks{world.rank()});
    EXPECT_EQ(mesh.size("data"), 1);
  });
}

TEST_P(MeshTest, RanksRunThroughTheLastAxisFirst) {
  on_processes(4, [](World& world) {
    const int rank = world.rank();
    const Mesh mesh(world, {{"data", 2}, {"shard", -1}});
    EXPECT_EQ(mesh.text(), "data 2 x shard 2");
    EXPECT_EQ(members(mesh, mesh["data"]), rank % 2 == 0 ? (Ranks{0, 2}) : (Ranks{1, 3}));
    EXPECT_EQ(members(mesh, mesh["shard"]), rank < 2 ? (Ranks{0, 1}) : (Ranks{2, 3}));
    EXPECT_EQ(mesh.rank("data"), rank / 2);
    EXPECT_EQ(mesh.rank("shard"), rank % 2);
    EXPECT_EQ(members(mesh, mesh.batch()), (Ranks{0, 1, 2, 3}));
  });
}

TEST_P(MeshTest, BatchHasTheRanksThatSeeOtherSamples) {
  on_processes(4, [](World& world) {
    const int rank = world.rank();
    const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
    EXPECT_EQ(members(mesh, mesh.batch()), rank % 2 == 0 ? (Ranks{0, 2}) : (Ranks{1, 3}));
    EXPECT_EQ(mesh.batch().rank(), rank / 2);
    // Every sample once: two ranks of "tensor" have the same one.
    EXPECT_EQ(all_reduce(mesh.batch(), 10 + mesh.rank("data")), 21);
    const Mesh outside(world, {{"tensor", 2}, {"data", 2}});
    EXPECT_EQ(members(outside, outside.batch()), rank < 2 ? (Ranks{0, 1}) : (Ranks{2, 3}));
  });
}

TEST_P(MeshTest, FlattensAxesThatAreNotNeighbours) {
  on_processes(4, [](World& world) {
    const Mesh mesh(world, {{"data", 2}, {"pipeline", 1}, {"tensor", 2}});
    EXPECT_EQ(members(mesh, mesh.flatten({"tensor", "data"})), (Ranks{0, 1, 2, 3}));
    const Mesh three(world, {{"shard", 1}, {"pipeline", 2}, {"tensor", 2}});
    World& parts = three.flatten({"shard", "tensor"});
    EXPECT_EQ(members(three, parts), world.rank() < 2 ? (Ranks{0, 1}) : (Ranks{2, 3}));
    EXPECT_EQ(&parts, &three.flatten({"tensor"}));  // not made again
    EXPECT_EQ(three.batch().size(), 1);
  });
}

TEST_P(MeshTest, RefusesAxesThatDifferOverRanks) {
  on_processes(2, [](World& world) {
    const std::vector<MeshAxis> axes{{world.rank() == 0 ? "data" : "shard", 2}};
    EXPECT_THAT(message_of([&] { Mesh(world, axes); }),
                HasSubstr("rank 1 makes a mesh of shard 2, but rank 0 one of data 2"));
    EXPECT_EQ(all_reduce(world, 1), 2);  // the world is unharmed
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, MeshTest, ::testing::Values("shm", "gloo"),
                         [](const auto& backend) { return std::string(backend.param); });

std::string refusal(std::vector<MeshAxis> axes, int ranks) {
  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  testing::run_threads(ranks, [&](World& world) {
    try {
      const Mesh mesh(world, axes);
    } catch (const UsageError& e) {
      texts[static_cast<std::size_t>(world.rank())] = e.what();
    }
  });
  for (const std::string& text : texts) EXPECT_EQ(text.empty(), texts[0].empty());
  return texts[0];
}

TEST(MeshRefusals, NameTheAxis) {
  EXPECT_THAT(refusal({{"data", 2}, {"shard", 2}}, 3),
              HasSubstr("a mesh of data 2 x shard 2 does not fit a world of 3 ranks"));
  EXPECT_THAT(refusal({{"data", -1}, {"shard", 2}}, 3), HasSubstr("does not fit"));
  EXPECT_THAT(refusal({{"data", 4}}, 2), HasSubstr("does not fit a world of 2 ranks"));
  EXPECT_THAT(refusal({{"data", -1}, {"shard", -1}}, 2), HasSubstr("'shard' cannot have -1"));
  EXPECT_THAT(refusal({{"data", 0}}, 1), HasSubstr("'data' cannot have 0 ranks"));
  EXPECT_THAT(refusal({{"data", 2}, {"data", 1}}, 2), HasSubstr("'data' is there twice"));
  EXPECT_THAT(refusal({{"dp", 2}}, 2),
              HasSubstr("'dp' is not an axis. The axes are data, shard, pipeline, tensor."));
  EXPECT_THAT(refusal({}, 1), HasSubstr("there are no axes"));
}

TEST(MeshRefusals, SizesMayBeIntegersOfAnyType) {
  const std::int64_t degree = 1;
  const std::size_t devices = 1;
  EXPECT_EQ(Mesh(World(), {{"pipeline", degree}, {"tensor", devices}}).text(),
            "pipeline 1 x tensor 1");
  EXPECT_THAT(refusal({{"data", std::int64_t{1} << 40}}, 1), HasSubstr("'data' cannot have 0"));
}

TEST(MeshRefusals, UnknownAxisOfAMesh) {
  const Mesh mesh;
  EXPECT_THROW(mesh["rows"], UsageError);
  EXPECT_THROW(mesh.flatten({"data", "rows"}), UsageError);
  EXPECT_EQ(mesh["shard"].size(), 1);
}

}  // namespace
}  // namespace lockstep
