// A small program of several ranks in which one stops taking part: stall_peer KIND RANK.
//
// KIND: none, busy, sigstop, loop, fifo (reads the file of $FIFO), skip, swap_worlds, swap, crash;
// steps N MS prints how long N steps of MS milliseconds took, for the cost of the instruments.
// Prints "<kind> at <seconds>" (CLOCK_MONOTONIC) when the rank begins to be bad.
#include <fcntl.h>
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/lockstep.h"

using lockstep::World;

namespace {
std::string kind;
int guilty = -1;
volatile bool forever = true;

void announce() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const std::string line =
      fmt::format("{} at {:.3f}\n", kind, std::chrono::duration<double>(now).count());
  [[maybe_unused]] const auto n = ::write(STDOUT_FILENO, line.data(), line.size());
}

void burn(std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}
}  // namespace

// Outside the unnamed namespace, and not inlined: the table must name them.
[[gnu::noinline]] void common_step(World& world) {
  world.all_reduce(torch::ones({256})).wait();
  asm volatile("");
}

[[gnu::noinline]] void call_that_is_skipped(World& world) {
  world.all_reduce(torch::ones({1024})).wait();
  asm volatile("");
}

[[gnu::noinline]] void message_instead(World& world) {
  world.recv(torch::ones({4}), 0).wait();
  asm volatile("");
}

[[gnu::noinline]] void first_of_two(World& world) {
  world.all_reduce(torch::ones({64})).wait();
  asm volatile("");
}

[[gnu::noinline]] void second_of_two(World& world) {
  world.broadcast(torch::ones({32}), 0).wait();
  asm volatile("");
}

[[gnu::noinline]] void endless_loop() {
  while (forever) {
  }
}

[[gnu::noinline]] void read_fifo() {
  const int fd = ::open(std::getenv("FIFO"), O_RDWR);
  char byte;
  [[maybe_unused]] const auto n = ::read(fd, &byte, 1);
}

namespace {

void be_bad(World& world) {
  const bool bad = world.rank() == guilty;
  if (bad) announce();
  if (kind == "sigstop" && bad) ::raise(SIGSTOP);
  if (kind == "loop" && bad) endless_loop();
  if (kind == "fifo" && bad) read_fifo();
  if (kind == "crash" && bad) ::raise(SIGKILL);
  if (kind == "busy") burn(std::chrono::milliseconds(3500));
  if (kind == "skip") {
    if (!bad) call_that_is_skipped(world);
    if (bad) message_instead(world);
    if (world.rank() == 0) world.send(torch::ones({4}), guilty).wait();
  }
  if (kind == "swap") {
    bad ? second_of_two(world) : first_of_two(world);
    bad ? first_of_two(world) : second_of_two(world);
  }
}

// Two worlds of the same ranks: each order is right, but not both at once.
void swap_worlds(World& world) {
  World left = *world.split(0, world.rank());
  World right = *world.split(0, world.rank());
  common_step(world);
  const bool bad = world.rank() == guilty;
  if (bad) announce();
  bad ? second_of_two(right) : first_of_two(left);
  bad ? first_of_two(left) : second_of_two(right);
}

void train(World& world) {
  for (int step = 0; step < 5; ++step) common_step(world);
  if (kind == "swap_worlds")
    swap_worlds(world);
  else
    be_bad(world);
  for (int step = 0; step < 3; ++step) common_step(world);
}

// The median of steps that compute and then reduce as many buckets as a middling model has.
void measure(World& world, int steps, std::chrono::milliseconds compute) {
  constexpr int kBuckets = 8;
  const std::vector<at::Tensor> buckets(kBuckets, torch::ones({1024}));
  std::vector<double> times;
  for (int step = 0; step < steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    burn(compute);
    for (const at::Tensor& bucket : buckets) world.all_reduce(bucket).wait();
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
            .count());
  }
  std::sort(times.begin(), times.end());
  if (world.is_leader()) fmt::print("median {:.4f} ms\n", times[times.size() / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 64;
  kind = argv[1];
  if (kind == "steps")
    return lockstep::run([&](World& world) {
      measure(world, std::atoi(argv[2]), std::chrono::milliseconds(std::atoi(argv[3])));
    });
  guilty = std::atoi(argv[2]);
  return lockstep::run(train);
}
