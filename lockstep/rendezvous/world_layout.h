// Which ranks a node has: nodes may bring different numbers of ranks and different roles.
//
// As torchrun counts: the ranks of node 0 come first, then those of node 1, and so on; within a
// role they are numbered in the same order.
//
//   WorldLayout layout = layout_of({{.nproc = 2}, {.nproc = 3}}, 1);   // first_rank 2 of 5
#pragma once

#include <string>
#include <vector>

namespace lockstep {

constexpr int kMaxWorldSize = 1'000'000;  // far above any real world, far below overflow

// What a node brings to the world.
struct NodeShare {
  int nproc = 1;
  std::string role = "default";
  std::string program = {};  // which one its ranks run, to be compared; empty: not known
  bool operator==(const NodeShare&) const = default;
};

// Where the ranks of one node are in it.
struct WorldLayout {
  int first_rank = 0;
  int world_size = 1;
  int first_role_rank = 0;
  int role_world_size = 1;
};

// `nodes` by node rank. Throws UsageError when `node_rank` is not one of them, a node has no rank,
// or there are more than kMaxWorldSize.
WorldLayout layout_of(const std::vector<NodeShare>& nodes, int node_rank);

}  // namespace lockstep
