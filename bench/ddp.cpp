// lockstep bench ddp: what the wrapper costs where there is nothing to communicate, beside PyTorch.
#include "lockstep/parallel/ddp.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "bench/bench.h"
#include "bench/stats.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/models/gpt.h"
#include "lockstep/optim/adamw.h"

namespace lockstep::bench {
namespace {

struct Settings {
  int blocks = 30;
  int steps = 10;
  int batch = 8;
  int time = 128;
  int threads = 1;
  bool python = true;
  double require_ratio = 0;
  std::string device = "cpu";
  std::string csv;
};

const models::GptConfig kSmallGpt{
    .n_layer = 4, .n_head = 4, .n_embd = 256, .vocab_size = 8192, .n_positions = 128};

// One model with its optimizer, trained in blocks of steps.
class Trainee {
 public:
  Trainee(bool wrapped, const Settings& settings, const at::Tensor& ids, const at::Tensor& targets)
      : settings_(settings),
        ids_(ids),
        targets_(targets),
        net_(seeded()),
        optimizer_(net_->parameters(), {.lr = 3e-4}) {
    net_->to(torch::Device(settings.device));
    if (wrapped) ddp_.emplace(net_, World(), DdpOptions{.force_reducer = true});
  }

  double block_seconds() {
    const auto start = std::chrono::steady_clock::now();
    for (int step = 0; step < settings_.steps; ++step) {
      const at::Tensor logits = ddp_ ? (*ddp_)(ids_) : net_(ids_);
      const at::Tensor loss = models::next_token_loss(logits, targets_);
      loss.backward();
      optimizer_.step();
      optimizer_.zero_grad();
      last_loss_ = loss.item<float>();
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  float last_loss() const { return last_loss_; }

 private:
  static models::Gpt seeded() {
    torch::manual_seed(0);
    return models::Gpt(kSmallGpt);
  }

  const Settings& settings_;
  at::Tensor ids_, targets_;
  models::Gpt net_;
  optim::AdamW optimizer_;
  std::optional<DistributedDataParallel<models::Gpt>> ddp_;
  float last_loss_ = 0;
};

std::vector<double> our_ratios(const Settings& settings) {
  torch::manual_seed(1);
  const auto draw = [&] {
    return torch::randint(kSmallGpt.vocab_size, {settings.batch, settings.time})
        .to(torch::Device(settings.device));
  };
  const auto ids = draw();
  const auto targets = draw();
  Trainee bare(false, settings, ids, targets);
  Trainee wrapped(true, settings, ids, targets);
  bare.block_seconds();
  wrapped.block_seconds();
  // Verified before timed: the wrapper must not change a bit.
  if (bare.last_loss() != wrapped.last_loss())
    throw Error("bench", fmt::format("the wrapped model's loss {} is not the bare one's {}",
                                     wrapped.last_loss(), bare.last_loss()));
  std::vector<double> ratios;
  for (int pair = 0; pair < settings.blocks / 2; ++pair) {
    // The order alternates too: what drifts over time must not favour one side.
    const bool bare_first = pair % 2 == 0;
    double times[2];
    times[bare_first ? 0 : 1] = (bare_first ? bare : wrapped).block_seconds();
    times[bare_first ? 1 : 0] = (bare_first ? wrapped : bare).block_seconds();
    ratios.push_back(times[1] / times[0]);
    fmt::print(stderr, "lockstep {}/{}: bare {:.1f} ms/step, wrapped {:.1f}, ratio {:.4f}\n",
               pair + 1, settings.blocks / 2, times[0] / settings.steps * 1e3,
               times[1] / settings.steps * 1e3, ratios.back());
  }
  return ratios;
}

std::vector<double> python_ratios(const Settings& settings) {
  const std::string python = env::get("LOCKSTEP_PYTHON").value_or(default_python());
  const std::string command =
      fmt::format("'{}' '{}' --blocks {} --steps {} --batch {} --time {} --threads {} --device {}",
                  python, peer("ddp_overhead.py"), settings.blocks, settings.steps, settings.batch,
                  settings.time, settings.threads, settings.device);
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) throw SystemError("bench", "cannot start a shell", errno);
  std::vector<double> ratios;
  char line[256];
  while (std::fgets(line, sizeof line, pipe) != nullptr) {
    double ratio = 0;
    if (std::sscanf(line, "ratio %lf", &ratio) == 1) ratios.push_back(ratio);
  }
  if (::pclose(pipe) != 0 || ratios.empty())
    throw Error("bench", "the Python peer failed: " + command);
  return ratios;
}

}  // namespace

void prepare_device(const std::string& device) {
  const torch::Device wanted(device);
  if (!wanted.is_cuda()) return;
  const int visible = cuda_device_count();
  // Read from the text: torch keeps the number in 8 bits.
  const auto colon = device.find(':');
  if ((colon == std::string::npos ? 0 : std::stoll(device.substr(colon + 1))) >= visible)
    throw UsageError("bench", "--device {}: {} CUDA device{} visible. Use --device cpu{}.", device,
                     visible, visible == 1 ? " is" : "s are",
                     visible > 0 ? ", or a smaller number" : "");
  load_cuda();
}

int ddp_main(int argc, char** argv) {
  Settings settings;
  CLI::App app{"Cost of the DDP wrapper in a world of one: 4-layer GPT, alternating blocks"};
  app.add_option("--blocks", settings.blocks, "blocks in all, half of them wrapped")
      ->check(CLI::Range(2, 100000));
  app.add_option("--steps", settings.steps, "training steps per block")
      ->check(CLI::Range(1, 100000));
  app.add_option("--batch", settings.batch, "sequences per step")->check(CLI::Range(1, 100000));
  app.add_option("--time", settings.time, "tokens per sequence")->check(CLI::Range(1, 128));
  app.add_option("--threads", settings.threads, "of LibTorch, here and in the peer")
      ->check(CLI::Range(1, 1024));
  app.add_option("--device", settings.device, "cpu, cuda or cuda:N")->check(device_problem);
  app.add_flag("!--no-python", settings.python, "leave out the PyTorch peer");
  app.add_option("--require-ratio", settings.require_ratio,
                 "fail when our median is above this; 0: never");
  app.add_option("--csv", settings.csv, "also write the table to this file");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  prepare_device(settings.device);
  torch::set_num_threads(settings.threads);

  // Half of the pairs lie between p25 and p75: a median means little when those are far apart.
  Table table({"wrapped / bare, per pair of blocks", "min", "p25", "p50", "p75", "max"});
  const auto add = [&](const char* name, const std::vector<double>& ratios) {
    const Summary s = summarize(ratios);
    std::vector<std::string> cells{name};
    for (const double ratio : {s.min, s.p25, s.p50, s.p75, s.max})
      cells.push_back(fmt::format("{:.4f}", ratio));
    table.add(std::move(cells));
    return s.p50;
  };
  const double ours = add("Lockstep DistributedDataParallel", our_ratios(settings));
  if (settings.python) add("PyTorch DistributedDataParallel", python_ratios(settings));
  publish(table, settings.csv);
  if (settings.require_ratio <= 0 || ours <= settings.require_ratio) return 0;
  fmt::print(stderr, "ddp: the median ratio is {:.4f}, at most {} required\n", ours,
             settings.require_ratio);
  return 1;
}

}  // namespace lockstep::bench
