#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

void train(lockstep::World& world) {
  torch::manual_seed(42);  // the same samples on every rank, which the loader divides
  const auto x = torch::randn({2040, 20}), y = x.sum(1).gt(0).to(torch::kLong);
  const auto dataset = std::make_shared<lockstep::data::TensorDataset>(x, y);
  auto loader = lockstep::data::loader(dataset, world, {.batch_size = 32, .shuffle = true});
  torch::nn::Sequential net(torch::nn::Linear(20, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2));
  net->to(world.device());
  lockstep::DistributedDataParallel model{net, world};  // rank 0's weights go to all ranks
  lockstep::optim::AdamW optimizer{model, {.lr = 5e-3}};

  for (int epoch = 1; epoch <= 5; ++epoch) {
    at::Tensor loss;
    for (auto& window : loader.windows(epoch, {.micro_batches = 4})) {
      for (auto& micro : window) {
        loss = torch::cross_entropy_loss(model(micro.data), micro.target);
        model.backward(loss * micro.weight, micro.last);  // the last one averages over the ranks
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    if (world.is_leader()) std::printf("epoch %d: loss %.4f\n", epoch, loss.item<double>());
  }
  model.verify_replicas();  // throws, naming tensor and rank, if two ranks differ in one bit
}

int main() {
  return lockstep::run(train);
}
