// Mesh: the ranks of a world along named axes, each of which is a world of its own.
//
//   lockstep::Mesh mesh(world, {{"data", 2}, {"shard", 2}});   // ranks 0 1 | 2 3
//   mesh["shard"].all_reduce(x).wait();        // over 0 and 1, and over 2 and 3
//   mesh["data"].all_reduce(x).wait();         // over 0 and 2, and over 1 and 3
//   auto loader = lockstep::data::loader(dataset, mesh.batch(), {.batch_size = 32});
//
// The axes, as in torchtitan: ranks along "data" hold copies of the model and see other samples,
// ranks along "shard" hold parts of it and see other samples, and those along "pipeline" (stages)
// and "tensor" (parts of layers) hold parts of it and see the same samples. Hence batch() is data
// x shard: samplers, sample counts and means of losses are taken over it, and not over the world,
// where a sample would count once for every rank that sees it.
//
// Rank numbers run through the last axis first, as in PyTorch's DeviceMesh. A World is a mesh with
// the one axis "data". A copyable handle; thread safety is that of World.
#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep {

struct MeshAxis {
  // Accepts any integer type. A value outside int's range becomes 0, which the mesh refuses.
  MeshAxis(std::string axis, std::integral auto ranks)
      : name(std::move(axis)), size(std::in_range<int>(ranks) ? static_cast<int>(ranks) : 0) {}

  std::string name;
  int size;  // -1, for one axis: as many as the other axes leave

  bool operator==(const MeshAxis&) const = default;
};

class Mesh {
 public:
  Mesh() : Mesh(World()) {}
  Mesh(World world);  // one axis "data"; no communication
  // Collective. UsageError on every rank for axes that do not divide the world, or that differ over
  // ranks; nothing has been connected then.
  Mesh(World world, std::vector<MeshAxis> axes);

  World& world() const;  // all ranks of it
  const std::vector<MeshAxis>& axes() const;

  // The ranks that differ from this one along that axis alone. An axis that the mesh does not have
  // has one rank; a name that is no axis is a UsageError. No communication.
  World& operator[](std::string_view axis) const;
  int size(std::string_view axis) const { return (*this)[axis].size(); }
  int rank(std::string_view axis) const { return (*this)[axis].rank(); }

  // Several axes as one: the ranks that differ from this one along these alone, in rank order.
  // Collective when it is asked for the first time.
  World& flatten(const std::vector<std::string>& axes) const;
  // data x shard: ranks that see different samples. No communication.
  World& batch() const;

  std::string text() const;  // "data 2 x shard 2"

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

namespace detail {
// A loader calls it with each batch that it hands to this thread: its samples were divided over
// `ranks`.
void note_samples(const World& ranks);
// UsageError if this thread's last batch is of a loader over all ranks of the mesh, though those
// along "pipeline" and "tensor" must see the same samples. No communication.
void check_samples(const Mesh& mesh, const char* component);
}  // namespace detail

}  // namespace lockstep
