#include "lockstep/comm/graph.h"

#include "lockstep/comm/world_impl.h"
#include "lockstep/core/ledger.h"

namespace lockstep {

bool recording(const World& world) {
  return detail::Access::impl(world)->recording();
}

Work after_stream(World& world, const char* name) {
  const ledger::CallSite here;
  detail::WorldImpl& impl = *detail::Access::impl(world);
  const auto state = impl.start({.name = name, .elements = -1}, [] { return std::string(); });
  if (impl.alone() || !impl.accelerator) {
    state->complete();
  } else {
    impl.launch(state, [&] { impl.accelerator->after_stream(state); });
  }
  return Work(state);
}

}  // namespace lockstep
