// A small program of several ranks in which one stops taking part: stall_peer KIND RANK.
//
// KIND: none, busy, sigstop, loop, fifo (reads the file of $FIFO), skip, swap_worlds, swap, crash,
// save (a checkpoint in the folder of $FOLDER);
// enqueued and stuck, where all ranks have left an operation to a device: they compute, or wait in
// the CUDA library of $CUDA_LIBRARY;
// train N DIR 0|1 prints the processor time of a step of a Trainer of N steps, which records into
// DIR or does not; calls DIR what the parts of the instruments take that cannot be switched off,
// and a line of the record.
// Prints "<kind> at <seconds>" (CLOCK_MONOTONIC) when the rank begins to be bad.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "lockstep/core/fd.h"
#include "lockstep/core/ledger.h"
#include "lockstep/lockstep.h"
#include "lockstep/monitor/rank_recorder.h"

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

// Nanoseconds that the threads of this process have had a core.
std::int64_t processor_ns() {
  timespec used{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return used.tv_sec * 1'000'000'000LL + used.tv_nsec;
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

[[gnu::noinline]] void wait_for_device() {
  void* const library = ::dlopen(std::getenv("CUDA_LIBRARY"), RTLD_NOW);
  const auto wait = reinterpret_cast<int (*)(void*)>(::dlsym(library, "cuStreamSynchronize"));
  wait(nullptr);
  asm volatile("");
}

namespace {

// As the nccl backend leaves it on the ledger. Its number follows the common steps.
void enqueue() {
  using namespace lockstep;
  ledger::ended(ledger::post({.name = "all_reduce", .dtype = "Float", .sequence = 6, .bytes = 64}),
                ledger::End::kReleased);
}

void be_bad(World& world) {
  const bool bad = world.rank() == guilty;
  if (bad) announce();
  if (kind == "sigstop" && bad) ::raise(SIGSTOP);
  if (kind == "loop" && bad) endless_loop();
  if (kind == "fifo" && bad) read_fifo();
  if (kind == "crash" && bad) ::raise(SIGKILL);
  if (kind == "enqueued" || kind == "stuck") enqueue();
  if (kind == "save" && bad) {
    torch::nn::Linear net(4, 4);
    lockstep::save_checkpoint(std::getenv("FOLDER"), world, {.module = net.get()}, {.step = 5});
  }
  if (kind == "busy" || kind == "enqueued") burn(std::chrono::milliseconds(3500));
  if (kind == "stuck") wait_for_device();
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

// Two worlds of the same ranks: either order is right, but not both at once.
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

// Of all threads of this process, from the end of the first step on.
class StepCost : public lockstep::Observer {
 public:
  void on_step_end(lockstep::Event&) override {
    last_ns_ = processor_ns();
    if (steps_++ == 0) first_ns_ = last_ns_;
  }
  double mean_ms() const { return 1e-6 * static_cast<double>(last_ns_ - first_ns_) / (steps_ - 1); }

 private:
  std::int64_t first_ns_ = 0, last_ns_ = 0;
  int steps_ = 0;
};

// A Trainer of a model that costs little, with the exchanges, phases and logs of a real step.
void measure_trainer(World& world, char** argv) {
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Linear(64, 4));
  lockstep::TrainerTask task;
  task.module = net.ptr();
  task.loss = [&](const lockstep::data::Batch& batch) {
    return torch::cross_entropy_loss(net->forward(batch.data), batch.target);
  };
  task.train_data = std::make_shared<lockstep::data::TensorDataset>(
      torch::randn({256, 16}), torch::randint(4, {256}, torch::kLong));
  lockstep::TrainingArguments a;
  a.output_dir = argv[3];
  a.max_steps = std::atoi(argv[2]);
  a.logging_steps = 20;
  a.save_strategy = lockstep::Interval::kNo;
  a.disable_tqdm = true;
  a.use_cpu = true;
  a.record_run = std::atoi(argv[4]) != 0;
  const auto cost = std::make_shared<StepCost>();
  lockstep::Trainer trainer(world, std::move(task), a);
  trainer.add(cost);
  trainer.train();
  if (world.is_leader()) fmt::print("mean {:.4f} ms\n", cost->mean_ms());
}

double milliseconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

void measure_calls(World& world, const std::string& folder) {
  namespace ledger = lockstep::ledger;
  constexpr int kCalls = 20'000;
  const auto phases = [] {
    for (int i = 0; i < kCalls; ++i) {
      const ledger::PhaseScope forward(ledger::Phase::kForward);
      ledger::add(ledger::Counter::kMicroBatches);
    }
  };
  const auto sums = [] {
    std::uint64_t steps = 0;
    for (int i = 0; i < kCalls; ++i) steps += ledger::totals().steps;
    if (steps != 0) fmt::print("\n");
  };
  double scope_ms = 1e9;
  double sums_ms = 1e9;
  for (int i = 0; i < 10; ++i) {
    scope_ms = std::min(scope_ms, milliseconds_of(phases) / kCalls);
    sums_ms = std::min(sums_ms, milliseconds_of(sums) / kCalls);
  }
  // As fast as it can: the CPU time of the process is that of its lines.
  const auto before = lockstep::monitor::read_process(::getpid());
  {
    const lockstep::monitor::RankRecorder recorder(
        {.directory = folder, .rank = world.rank(), .interval = std::chrono::milliseconds(1)});
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  const auto after = lockstep::monitor::read_process(::getpid());
  const std::string file = fmt::format("{}/monitor/rank_{}.jsonl", folder, world.rank());
  const std::string text = lockstep::read_file(file);
  const double cpu_ms = 1e3 * (after->user_s + after->system_s - before->user_s - before->system_s);
  const auto lines = static_cast<double>(std::count(text.begin(), text.end(), '\n'));
  if (world.is_leader())
    fmt::print("scope {:.7f} ms, sums {:.7f} ms, line {:.4f} ms\n", scope_ms, sums_ms,
               cpu_ms / lines);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 64;
  kind = argv[1];
  if (kind == "train") return lockstep::run([&](World& world) { measure_trainer(world, argv); });
  if (kind == "calls") return lockstep::run([&](World& world) { measure_calls(world, argv[2]); });
  guilty = std::atoi(argv[2]);
  return lockstep::run(train);
}
