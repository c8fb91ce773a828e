#include "lockstep/rendezvous/world_layout.h"

#include <cstdint>

#include "lockstep/core/error.h"

namespace lockstep {

WorldLayout layout_of(const std::vector<NodeShare>& nodes, int node_rank) {
  const auto own = static_cast<std::size_t>(node_rank);
  if (node_rank < 0 || own >= nodes.size())
    throw UsageError("launch", "node rank {} is not one of {} nodes.", node_rank, nodes.size());
  WorldLayout layout{.world_size = 0, .role_world_size = 0};
  std::int64_t world_size = 0;
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    const NodeShare& share = nodes[node];
    world_size += share.nproc;
    if (share.nproc < 1 || world_size > kMaxWorldSize)
      throw UsageError("launch", "{} ranks on node {} make a world of {}; it has 1 to {}.",
                       share.nproc, node, world_size, kMaxWorldSize);
    const bool same_role = share.role == nodes[own].role;
    if (node < own) layout.first_rank += share.nproc;
    if (node < own && same_role) layout.first_role_rank += share.nproc;
    if (same_role) layout.role_world_size += share.nproc;
  }
  layout.world_size = static_cast<int>(world_size);
  return layout;
}

}  // namespace lockstep
