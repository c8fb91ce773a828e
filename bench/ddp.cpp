// lockstep bench ddp: what the wrapper costs where there is nothing to communicate, beside PyTorch.
#include "lockstep/parallel/ddp.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>

#include "bench/bench.h"
#include "bench/harness.h"
#include "bench/processes.h"
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
  std::string device = "cpu";
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
    const auto start = Deadline::Clock::now();
    for (int step = 0; step < settings_.steps; ++step) {
      const at::Tensor logits = ddp_ ? (*ddp_)(ids_) : net_(ids_);
      const at::Tensor loss = models::next_token_loss(logits, targets_);
      loss.backward();
      optimizer_.step();
      optimizer_.zero_grad();
      last_loss_ = loss.item<float>();
    }
    return seconds_since(start);
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
  const std::string command =
      fmt::format("'{}' '{}' --blocks {} --steps {} --batch {} --time {} --threads {} --device {}",
                  python(), peer("ddp_overhead.py"), settings.blocks, settings.steps,
                  settings.batch, settings.time, settings.threads, settings.device);
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

int ddp_main(int argc, char** argv) {
  Settings settings;
  bool python = true;
  double require_ratio = 0;
  Options options("Cost of the DDP wrapper in a world of one: 4-layer GPT, alternating blocks");
  options.number("--blocks", settings.blocks, 2, 100000, "blocks in all, half of them wrapped");
  options.number("--steps", settings.steps, 1, 100000, "training steps per block");
  options.number("--batch", settings.batch, 1, 100000, "sequences per step");
  options.number("--time", settings.time, 1, 128, "tokens per sequence");
  options.number("--threads", settings.threads, 1, 1024, "of LibTorch, here and in the peer");
  options.device(settings.device);
  options.flag("!--no-python", python, "leave out the PyTorch peer");
  options.number("--require-ratio", require_ratio, 0, 1e6,
                 "fail when our median is above this; 0: never");
  if (const auto code = options.parse(argc, argv)) return *code;
  prepare_device(settings.device);
  torch::set_num_threads(settings.threads);

  Report report("ddp", "wrapped / bare, per pair of blocks");
  const auto add = [&](const char* name, const std::vector<double>& ratios) {
    // Half of the pairs lie between p25 and p75: a median means little when those are far apart.
    report.row(name).spread("", ratios, 4, "min p25 p50 p75 max").value("ratios", ratios);
    return median(ratios);
  };
  const double ours = add("Lockstep DistributedDataParallel", our_ratios(settings));
  if (python) add("PyTorch DistributedDataParallel", python_ratios(settings));
  report.publish(options);
  return Goals("ddp").at_most("the median ratio", ours, require_ratio).exit_code();
}

}  // namespace lockstep::bench
