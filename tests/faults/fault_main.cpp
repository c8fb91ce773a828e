// A small training program in which one rank does something bad: faults KIND RANK PHASE.
// KIND: none exception abort segfault kill exit silent other_model leave _leave all_leave
// other_shape other_call other_op uneven; PHASE: startup step exit.
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/lockstep.h"

// In epoch.cpp, which is compiled with debug information.
void for_each_batch(int batches, const std::function<void()>& step);

volatile std::uintptr_t nowhere = 8;  // read at run time: a constant the compiler may reason away

// Outside the anonymous namespace, so that the report's stack can name it.
[[gnu::noinline]] void crash_here() {
  *reinterpret_cast<volatile int*>(nowhere) = 1;
}

namespace {

std::string kind;
int guilty = -1;
std::string phase;

// An exception needs run() around it; everything else also happens before and after run().
bool within_run(const std::string& now) {
  return kind == "exception" || now == "step";
}

void maybe_fail(int rank, const std::string& now) {
  if (rank != guilty || phase != now) return;
  if (kind == "exception") throw std::runtime_error("planted exception");
  if (kind == "abort") std::abort();
  if (kind == "segfault") crash_here();
  if (kind == "kill") ::raise(SIGKILL);
  if (kind == "exit") ::_exit(3);
  if (kind == "leave") std::exit(0);
  if (kind == "_leave") ::_exit(0);
  if (kind == "silent") std::this_thread::sleep_for(std::chrono::minutes(10));
}

// Collectives that do not match those of the other ranks.
void maybe_differ(lockstep::World& world) {
  const bool differs = world.rank() == guilty;
  if (kind == "other_shape") world.all_reduce(torch::ones({differs ? 4096 : 4})).wait();
  if (kind == "other_call" && differs) world.all_reduce(torch::ones({1 << 16})).wait();
}

void train(lockstep::World& world) {
  if (within_run("startup")) maybe_fail(world.rank(), "startup");
  const int width = kind == "other_model" && world.rank() == guilty ? 7 : 8;
  torch::nn::Sequential net(torch::nn::Linear(4, width), torch::nn::ReLU(),
                            torch::nn::Linear(width, 1));
  lockstep::DistributedDataParallel model{net, world, {.bucket_cap_mb = 0.0001}};
  lockstep::optim::SGD optimizer{model.parameters(), {.lr = 0.01}};
  for (int step = 0; step < 20; ++step) {
    const auto loss = model(torch::randn({4, 4})).square().mean();
    if (step == 5) maybe_fail(world.rank(), "step");
    if (step == 5) maybe_differ(world);
    if (step == 5 && kind == "other_op" && world.rank() == guilty)
      world.broadcast(torch::zeros({3}), 0).wait();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  model.verify_replicas();
  if (within_run("exit")) maybe_fail(world.rank(), "exit");
  if (kind == "all_leave") {
    world.barrier();
    ::_exit(0);
  }
}

// One rank has fewer batches than the others, and no join() around the loop.
void train_unevenly(lockstep::World& world) {
  torch::nn::Linear net(4, 1);
  lockstep::DistributedDataParallel model{net, world};
  lockstep::optim::SGD optimizer{model.parameters(), {.lr = 0.01}};
  for_each_batch(world.rank() == guilty ? 3 : 4, [&] {
    model(torch::randn({4, 4})).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 64;
  kind = argv[1];
  guilty = std::atoi(argv[2]);
  phase = argv[3];
  const char* text = std::getenv("RANK");
  const int rank = text != nullptr ? std::atoi(text) : 0;
  if (!within_run("startup")) maybe_fail(rank, "startup");
  const int code = lockstep::run(kind == "uneven" ? train_unevenly : train);
  if (!within_run("exit")) maybe_fail(rank, "exit");
  return code;
}
