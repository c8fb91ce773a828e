// An update rule of your own: Tiger, which steps by the sign of its momentum. Everything else
// (several ranks, sharding, clipping, schedules, checkpoints) works for it as for AdamW.
#include <lockstep/lockstep.h>
#include <lockstep/optim/rule.h>
#include <lockstep/parallel/parallelize.h>
#include <torch/torch.h>

#include <cstdio>

namespace {

namespace optim = lockstep::optim;

struct TigerOptions {
  static constexpr std::string_view kName = "Tiger";
  double lr = 1e-3, beta = 0.9;
  void each(const optim::OptionVisitor& option) {
    option("lr", lr);
    option("beta", beta, {.below = 1});
  }
};
std::unique_ptr<optim::UpdateRule> make_rule(const TigerOptions& options);

class TigerRule final : public optim::RuleOf<TigerOptions> {
 public:
  using RuleOf::RuleOf;
  std::vector<optim::StateSpec> state(at::IntArrayRef sizes) const override {
    return {{"exp_avg", sizes.vec()}};
  }
  void update(const std::vector<optim::StepItem>& items, const at::Tensor&) const override {
    for (const optim::StepItem& item : items) {
      item.state[0].lerp_(item.grad, 1 - options.beta);
      item.param.add_(item.state[0].sign(), -options.lr);
    }
  }
};

std::unique_ptr<optim::UpdateRule> make_rule(const TigerOptions& options) {
  return std::make_unique<TigerRule>(options);
}

void train(lockstep::World& world) {
  optim::seed_everything(1);
  torch::nn::Linear net(8, 1);
  const auto truth = torch::randn({1, 8});
  // Its state is divided over the ranks.
  const auto model = lockstep::parallelize(*net, world, {.shard_optimizer = true});
  const auto optimizer = model->make_optimizer({{net->parameters(), TigerOptions{.lr = 0.02}}});
  optim::seed_everything(2, world.rank());
  for (int step = 0; step < 200; ++step) {
    const auto x = torch::randn({32, 8});
    model->before_forward();
    const auto loss = model->watch(torch::mse_loss(net(x), x.matmul(truth.t())));
    model->backward(loss, /*last=*/true);
    optimizer->set_lr(0.02 * (1 - step / 200.0));
    optimizer->step({.max_grad_norm = 1.0});
    optimizer->zero_grad();
    if (world.is_leader() && step % 50 == 0)
      std::printf("step %d: loss %.3f\n", step, loss.item<double>());
  }
  model->verify_parameters();
  if (world.is_leader())
    std::printf("state on this rank: %lld bytes\n",
                static_cast<long long>(optimizer->state_bytes()));
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return lockstep::run(train);
}
