// One device. The exercise: make it train on all of them.
#include <torch/torch.h>

#include <cstdio>

constexpr std::int64_t kSamples = 4096, kBatch = 32;

void train() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Sequential net(torch::nn::Linear(20, 64), torch::nn::ReLU(),
                            torch::nn::Linear(64, 10));
  net->to(device);
  torch::optim::Adam optimizer(net->parameters());
  const auto data = torch::randn({kSamples, 20});
  const auto target = data.matmul(torch::randn({20, 10})).argmax(1);

  for (int epoch = 0; epoch < 10; ++epoch) {
    double loss_sum = 0;
    const auto order = torch::randperm(kSamples);
    for (const auto& batch : order.split(kBatch)) {
      const auto x = data.index_select(0, batch).to(device);
      const auto y = target.index_select(0, batch).to(device);
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(net->forward(x), y);
      loss.backward();
      optimizer.step();
      loss_sum += loss.item<double>() * x.size(0);
    }
    std::printf("Epoch %d: loss %.4f\n", epoch, loss_sum / order.size(0));
  }
}

int main() {
  train();
}
