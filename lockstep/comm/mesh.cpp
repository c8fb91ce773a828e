#include "lockstep/comm/mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/comm/world_impl.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr const char* kMesh = "Mesh";
constexpr std::array<std::string_view, 4> kAxes{"data", "shard", "pipeline", "tensor"};

std::size_t index_of(std::string_view name) {
  const auto found = std::find(kAxes.begin(), kAxes.end(), name);
  if (found == kAxes.end())
    throw UsageError(kMesh, "'{}' is not an axis. The axes are {}.", name, fmt::join(kAxes, ", "));
  return static_cast<std::size_t>(found - kAxes.begin());
}

std::string text_of(const std::vector<MeshAxis>& axes) {
  std::vector<std::string> parts;
  for (const MeshAxis& axis : axes) parts.push_back(fmt::format("{} {}", axis.name, axis.size));
  return fmt::format("{}", fmt::join(parts, " x "));
}

// Fills in the size -1. Throws UsageError where the axes do not divide a world of `ranks`.
std::vector<MeshAxis> complete(std::vector<MeshAxis> axes, int ranks) {
  if (axes.empty())
    throw UsageError(kMesh, "there are no axes. Name at least one: {{{{\"data\", -1}}}}.");
  std::array<bool, kAxes.size()> seen{};
  MeshAxis* open = nullptr;
  std::int64_t product = 1;
  for (MeshAxis& axis : axes) {
    if (std::exchange(seen[index_of(axis.name)], true))
      throw UsageError(kMesh, "axis '{}' is there twice.", axis.name);
    if (axis.size == 0 || axis.size < -1 || (axis.size == -1 && open != nullptr))
      throw UsageError(kMesh,
                       "axis '{}' cannot have {} ranks in a mesh of {}. Give the number of ranks, "
                       "and -1 to one axis at most.",
                       axis.name, axis.size, text_of(axes));
    if (axis.size == -1) open = &axis;
    if (axis.size > 0) product *= axis.size;
  }
  const std::int64_t left = ranks / product;
  if (product * (open != nullptr ? left : 1) != ranks)
    throw UsageError(kMesh,
                     "a mesh of {} does not fit a world of {} rank{}. The product of the sizes "
                     "must be the number of ranks.",
                     text_of(axes), ranks, ranks == 1 ? "" : "s");
  if (open != nullptr) open->size = static_cast<int>(left);
  return axes;
}

World world_of_one(const World& world) {
  detail::WorldImpl& impl = *detail::Access::impl(world);
  if (impl.alone()) return world;
  Identity identity = impl.identity;
  identity.rank = 0;
  identity.size = 1;
  return detail::connect_child(impl, identity, "");
}

}  // namespace

struct Mesh::Impl {
  World world;
  World one;
  std::vector<MeshAxis> axes;
  std::array<World*, kAxes.size()> by_axis{};
  World* batch = nullptr;
  // Worlds that are already made, by their axes in the mesh's order (axes of size 1 left out).
  std::map<std::vector<std::string>, World> made{};

  World& flatten(const std::vector<std::string>& names) {
    for (const std::string& name : names) index_of(name);
    std::vector<std::string> wanted;
    int base = 0;  // this rank's number with the coordinates along `wanted` set to zero
    int stride = world.size(), size = 1;
    for (const MeshAxis& axis : axes) {
      stride /= axis.size;
      const int coordinate = world.rank() / stride % axis.size;
      const bool chosen = std::find(names.begin(), names.end(), axis.name) != names.end();
      if (!chosen) base += coordinate * stride;
      if (!chosen || axis.size == 1) continue;
      wanted.push_back(axis.name);
      size *= axis.size;
    }
    if (size == 1) return one;
    if (size == world.size()) return world;
    const auto found = made.find(wanted);
    if (found != made.end()) return found->second;
    return made.emplace(wanted, *world.split(base)).first->second;
  }
};

Mesh::Mesh(World world)
    : impl_(std::make_shared<Impl>(Impl{world, world_of_one(world), {{"data", world.size()}}})) {
  impl_->by_axis.fill(&impl_->one);
  impl_->by_axis[index_of("data")] = impl_->batch = &impl_->world;
}

Mesh::Mesh(World world, std::vector<MeshAxis> axes) : impl_(std::make_shared<Impl>()) {
  const std::vector<std::string> all = agree(world, [&] {
    axes = complete(std::move(axes), world.size());
    return text_of(axes);
  });
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      throw UsageError(kMesh, "rank {} makes a mesh of {}, but rank 0 one of {}.", rank, all[rank],
                       all[0]);
  impl_->one = world_of_one(world);
  impl_->world = std::move(world);
  impl_->axes = std::move(axes);
  for (std::size_t i = 0; i < kAxes.size(); ++i)
    impl_->by_axis[i] = &impl_->flatten({std::string(kAxes[i])});
  impl_->batch = &impl_->flatten({"data", "shard"});
}

World& Mesh::world() const {
  return impl_->world;
}

const std::vector<MeshAxis>& Mesh::axes() const {
  return impl_->axes;
}

World& Mesh::operator[](std::string_view axis) const {
  return *impl_->by_axis[index_of(axis)];
}

World& Mesh::flatten(const std::vector<std::string>& axes) const {
  return impl_->flatten(axes);
}

World& Mesh::batch() const {
  return *impl_->batch;
}

std::string Mesh::text() const {
  return text_of(impl_->axes);
}

namespace detail {
namespace {
// Held weakly: another world may get the address of one that is gone.
thread_local std::weak_ptr<WorldImpl> samples_divided_over;
}  // namespace

void note_samples(const World& ranks) {
  samples_divided_over = Access::impl(ranks);
}

void check_samples(const Mesh& mesh, const char* component) {
  const int all = mesh.world().size(), batch = mesh.batch().size();
  if (all == batch || samples_divided_over.lock() != Access::impl(mesh.world())) return;
  throw UsageError(component,
                   "the loader divides its samples over {} ranks, and the model over {} (its mesh "
                   "is {}): ranks along 'pipeline' and 'tensor' must see the same samples. Make "
                   "the loader with mesh.batch().",
                   all, batch, mesh.text());
}

}  // namespace detail

}  // namespace lockstep
