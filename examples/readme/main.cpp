#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

void train(lockstep::World& world) {
  torch::manual_seed(42 + world.rank());  // every rank draws samples of its own
  torch::nn::Sequential net(torch::nn::Linear(20, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2));
  net->to(world.device());
  lockstep::DistributedDataParallel model{net, world};  // rank 0's weights go to all ranks
  lockstep::optim::AdamW optimizer{model, {.lr = 1e-2}};

  for (int step = 1; step <= 100; ++step) {
    const auto x = torch::randn({32, 20}, world.device());
    const auto loss = torch::cross_entropy_loss(model(x), x.sum(1).gt(0).to(torch::kLong));
    loss.backward();  // gradients are averaged over the ranks while this runs
    optimizer.step();
    optimizer.zero_grad();
    const double mean = lockstep::all_reduce(world, loss.item<double>(), lockstep::ReduceOp::kAvg);
    if (step % 20 == 0 && world.is_leader()) std::printf("step %3d: loss %.4f\n", step, mean);
  }
  model.verify_replicas();  // throws, naming tensor and rank, if two ranks differ in one bit
}

int main() {
  return lockstep::run(train);
}
