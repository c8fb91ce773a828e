// Two ranks that do not agree: rank 0 calls all_reduce, the others do not. Every rank must get out
// of it at our own deadline, with TimeoutError on rank 0.
//
//   LOCKSTEP_TIMEOUT_S=5 lockstep run --nproc-per-node=2 build/bin/tests/desync
//
// Exit code 0 when it ended as it must. `stream` as an argument waits on the stream first, so that
// the host hangs in the device instead of in our wait, as a training loop would.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <cstdio>
#include <string_view>
#include <thread>

#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"

int main(int argc, char** argv) {
  const bool stream = argc > 1 && std::string_view(argv[1]) == "stream";
  lockstep::World world = lockstep::World::from_env();
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  at::Tensor x = at::ones({1024}, world.device());
  // All ranks are connected before the short deadline counts.
  constexpr std::chrono::seconds kLongTimeout{60};
  world.barrier(kLongTimeout);
  world.all_reduce(x).synchronize(kLongTimeout);
  int code = 1;
  if (world.rank() != 0) {
    // Stays, silent, until rank 0 has given up and closes its connections. Its own operation has a
    // deadline too, which must not come first on a machine that holds rank 0 up.
    std::this_thread::sleep_for(2 * world.timeout());
    try {
      world.recv(at::zeros({1}), 0).synchronize(world.timeout() + kLongTimeout);
    } catch (const lockstep::CommError&) {
    }
    code = 0;
  } else {
    try {
      lockstep::Work work = world.all_reduce(x);
      if (stream) {
        work.wait();
        std::printf("sum %f\n", x.sum().item<double>());  // blocks until the watcher gives up
      }
      work.synchronize();
      std::printf("rank 0: the operation ended without an error\n");
    } catch (const lockstep::TimeoutError& e) {
      std::printf("rank 0: TimeoutError after %.1f s on %s: %s\n", seconds(),
                  world.backend().c_str(), e.what());
      code = 0;
    } catch (const std::exception& e) {
      std::printf("rank 0: another error: %s\n", e.what());
    }
  }
  std::fflush(stdout);
  return code;
}
