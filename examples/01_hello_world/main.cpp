// The smallest distributed program: every rank prints its rank.
#include <lockstep/run.h>

#include <cstdio>

void hello(lockstep::World& world) {
  // One call per line: lines of different ranks are then never torn.
  std::printf("hello from rank %d of %d: local rank %d, device %s, backend %s\n", world.rank(),
              world.size(), world.local_rank(), world.device().str().c_str(),
              world.backend().c_str());
}

int main() {
  return lockstep::run(hello);
}
