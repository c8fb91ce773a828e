// A rank without torch for live_test.py: `live_peer STEPS SLOW_RANK MILLISECONDS FILE`.
//
// Each step loads, computes and waits for the other ranks at a barrier in FILE, and notes that on
// its ledger as DistributedDataParallel does. On one rank loading takes some milliseconds longer.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include "lockstep/core/ledger.h"

namespace {

namespace ledger = lockstep::ledger;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Counts arrivals of all ranks and steps; a file of zeros is one.
struct Barrier {
  std::atomic<std::uint64_t> arrived;
};

Barrier* open_barrier(const char* path) {
  const int fd = ::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ::ftruncate(fd, sizeof(Barrier)) != 0) return nullptr;
  void* const place = ::mmap(nullptr, sizeof(Barrier), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return place == MAP_FAILED ? nullptr : static_cast<Barrier*>(place);
}

void burn(milliseconds time) {
  const auto end = steady_clock::now() + time;
  while (steady_clock::now() < end) {
  }
}

bool wait_for_all(Barrier& barrier, std::uint64_t arrivals) {
  const auto end = steady_clock::now() + std::chrono::seconds(60);
  barrier.arrived.fetch_add(1);
  while (barrier.arrived.load() < arrivals) {
    if (steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 || !ledger::open()) return 2;
  Barrier* const barrier = open_barrier(argv[4]);
  if (barrier == nullptr) return 1;
  const int steps = std::atoi(argv[1]);
  const bool slow = std::atoi(std::getenv("RANK")) == std::atoi(argv[2]);
  const milliseconds delay(slow ? std::atoi(argv[3]) : 0);
  const auto ranks = static_cast<std::uint64_t>(std::atoi(std::getenv("WORLD_SIZE")));
  for (int step = 1; step <= steps; ++step) {
    {
      const ledger::PhaseScope data(ledger::Phase::kData);
      std::this_thread::sleep_for(delay);
      ledger::add(ledger::Counter::kBatches);
    }
    {
      const ledger::PhaseScope forward(ledger::Phase::kForward);
      burn(milliseconds(2));
    }
    {
      const ledger::PhaseScope backward(ledger::Phase::kBackward);
      ledger::add(ledger::Counter::kMicroBatches);
      ledger::add(ledger::Counter::kSynchronisedPasses);
      burn(milliseconds(3));
      ledger::set_phase(ledger::Phase::kCommunication);
      const ledger::Ticket ticket = ledger::post(
          {.name = "all_reduce", .sequence = static_cast<std::uint64_t>(step), .bytes = 1 << 20});
      if (!wait_for_all(*barrier, ranks * static_cast<std::uint64_t>(step))) return 1;
      ledger::ended(ticket, ledger::End::kFinished);
    }
    ledger::set_step(step);
  }
  ledger::set_phase(ledger::Phase::kEnded);
  return 0;
}
