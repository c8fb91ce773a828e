// Runs with something wrong in them, for planted_test.py.
//
//   planted_peer train [--key value...]     the Trainer on an MLP, as the keys say
//   planted_peer loop FOLDER UPDATES PASSES   a loop of its own that averages gradients in each of
//                                             PASSES backward passes before an update
//   planted_peer gpus FOLDER SAMPLES          samples the GPUs of this host
//
// In the environment: PLANT_SLEEP=RANK:MS (or all:MS), its loader takes so long for a batch;
// PLANT_LOG=MS, rank 0 takes so long for a line of its log; PLANT_STARVE=RANK, that rank trains at
// low priority on a core where loops never end; PLANT_THREADS, every rank computes with so many
// threads (more than there are cores, which MKL does not take from OMP_NUM_THREADS); PLANT_HIDDEN,
// the size of the MLP.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/host.h"
#include "lockstep/models/resnet.h"
#include "lockstep/monitor/rank_recorder.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/run.h"
#include "lockstep/train/config.h"
#include "lockstep/train/trainer.h"

namespace {

using namespace lockstep;

std::string variable(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

int own_rank() {
  return std::atoi(variable("RANK", "0").c_str());
}

// ------------------------------------------------------------------ what is wrong

class SlowDataset : public data::TensorDataset {
 public:
  SlowDataset(at::Tensor data, at::Tensor targets, int sleep_ms)
      : TensorDataset(std::move(data), std::move(targets)), sleep_ms_(sleep_ms) {}
  std::optional<data::Batch> get_batch(data::Indices indices,
                                       const data::RandomKey& key) const override {
    std::this_thread::sleep_for(std::chrono::milliseconds(sleep_ms_));
    return TensorDataset::get_batch(indices, key);
  }

 private:
  int sleep_ms_;
};

int sleep_of_this_rank() {
  const std::string text = variable("PLANT_SLEEP", "none:0");
  const std::string who = text.substr(0, text.find(':'));
  const bool here = who == "all" || who == std::to_string(own_rank());
  return here ? std::atoi(text.c_str() + text.find(':') + 1) : 0;
}

void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(cpu), &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0) std::perror("sched_setaffinity");
}

// Gives every rank a core of its own. Call it before any thread starts.
void pin_rank() {
  if (variable("PLANT_STARVE", "").empty()) return;
  const auto cpus = allowed_cpus();
  pin_to(cpus[static_cast<std::size_t>(own_rank()) % cpus.size()]);
}

// Ends with the thread that started it, however that ends.
[[noreturn]] void loop_forever() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::setsid();  // the kernel divides a core among sessions: the ranks must not pay for this one
  for (std::atomic<unsigned> i{0};;) i.fetch_add(1);
}

class Plants : public Observer {
 public:
  // The training thread of one rank then has a tenth of its core, or a fifth where the kernel
  // divides a core among sessions: less than other programs leave to the other ranks. Starting up
  // and ending take whole cores.
  void on_train_begin(Event& event) override {
    if (variable("PLANT_STARVE", "") != std::to_string(event.rank)) return;
    for (int i = 0; i < 4; ++i) {
      const pid_t child = ::fork();
      if (child == 0) loop_forever();
      if (child > 0) loops_.push_back(child);
    }
    constexpr int kLowPriority = 6;
    if (::setpriority(PRIO_PROCESS, 0, kLowPriority) != 0) std::perror("setpriority");
  }
  void on_train_end(Event&) override {
    for (const pid_t loop : loops_) {
      ::kill(loop, SIGKILL);
      ::waitpid(loop, nullptr, 0);
    }
  }
  // Like an observer that sends its lines over a network.
  void on_log(Event& event) override {
    if (event.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(sleep_ms_));
  }

 private:
  const int sleep_ms_ = std::atoi(variable("PLANT_LOG", "0").c_str());
  std::vector<pid_t> loops_;
};

// ------------------------------------------------------------------ the runs

constexpr std::int64_t kFeatures = 64;
constexpr std::int64_t kClasses = 10;

models::Mlp make_net() {
  return models::Mlp(models::MlpConfig{.inputs = kFeatures,
                                       .hidden = std::atoi(variable("PLANT_HIDDEN", "256").c_str()),
                                       .layers = 3,
                                       .outputs = kClasses});
}

int run_trainer(const std::vector<std::string>& flags) {
  const train::Config config = train::load_config("", flags);
  at::set_num_threads(std::atoi(variable("PLANT_THREADS", "1").c_str()));
  return run([&](World& world) {
    torch::manual_seed(3);
    models::Mlp net = make_net();
    const std::int64_t samples = 1 << 16;
    TrainerTask task;
    task.module = net.ptr();
    task.train_data =
        std::make_shared<SlowDataset>(torch::randn({samples, kFeatures}),
                                      torch::randint(kClasses, {samples}), sleep_of_this_rank());
    task.loss = [&](const data::Batch& batch) {
      return torch::cross_entropy_loss(net(batch.data), batch.target);
    };
    Trainer trainer(world, task, config.arguments);
    trainer.add(std::make_shared<Plants>());
    return trainer.train().exit_code();
  });
}

int run_loop(const std::string& folder, int updates, int passes) {
  return run([&](World& world) {
    torch::manual_seed(3);
    DistributedDataParallel<models::Mlp> model{make_net(), world};
    optim::SGD optimizer{model.parameters(), {.lr = 0.01}};
    if (world.is_leader()) {
      monitor::RunFacts facts;
      facts.world_size = facts.ranks_on_host = world.size();
      facts.device = "cpu";
      facts.backend = world.backend();
      monitor::write_facts(folder, facts);
    }
    world.barrier();
    const monitor::RankRecorder recorder({.directory = folder, .rank = world.rank()});
    for (int update = 0; update < updates; ++update) {
      for (int pass = 0; pass < passes; ++pass)
        model(torch::randn({32, kFeatures})).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

int sample_gpus(const std::string& folder, int samples) {
  constexpr auto kInterval = std::chrono::milliseconds(100);
  monitor::RunFacts facts;
  facts.program = "./train --batch_size 16";
  monitor::write_facts(folder, facts);
  const monitor::RankRecorder recorder({.directory = folder, .gpus = true, .interval = kInterval});
  std::this_thread::sleep_for((samples + 2) * kInterval);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  pin_rank();
  if (!args.empty() && args[0] == "train") return run_trainer({args.begin() + 1, args.end()});
  if (args.size() == 4 && args[0] == "loop")
    return run_loop(args[1], std::stoi(args[2]), std::stoi(args[3]));
  if (args.size() == 3 && args[0] == "gpus") return sample_gpus(args[1], std::stoi(args[2]));
  std::fputs("usage: see planted_peer.cpp\n", stderr);
  return 2;
}
