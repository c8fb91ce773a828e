// A small classifier, trained on one device.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

using torch::data::samplers::SequentialSampler;
using torch::data::transforms::Stack;

constexpr std::int64_t kSamples = 4096, kFeatures = 20, kClasses = 10, kBatch = 32;

struct Samples : torch::data::datasets::Dataset<Samples> {
  Samples() {
    data = torch::randn({kSamples, kFeatures});
    target = data.matmul(torch::randn({kFeatures, kClasses})).argmax(1);
  }
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {data[i], target[i]};
  }
  torch::optional<std::size_t> size() const override { return kSamples; }
  torch::Tensor data, target;
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("hidden", hidden);
    register_module("output", output);
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::relu(hidden(x))); }
  torch::nn::Linear hidden{kFeatures, 64}, output{64, kClasses};
};
TORCH_MODULE(Net);

void train(lockstep::World& world) {
  torch::manual_seed(0);
  const torch::Device device = world.device();
  Net net;
  net->to(device);
  // From here on backward() averages the gradients over the ranks.
  lockstep::DistributedDataParallel model{net, world};
  torch::optim::Adam optimizer(net->parameters());
  auto samples = Samples().map(Stack<>());
  auto loader = lockstep::data::loader(samples, world, {.batch_size = kBatch});

  for (int epoch = 0; epoch < 10; ++epoch) {
    double sum = 0;
    for (auto& batch : loader.epoch(epoch)) {
      const auto x = batch.data.to(device);
      const auto y = batch.target.to(device);
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(net->forward(x), y);
      loss.backward();
      optimizer.step();
      sum += loss.item<double>() * x.size(0);
    }
    sum = lockstep::all_reduce(world, sum);
    if (!world.is_leader()) continue;
    std::printf("Epoch %d: loss %.4f\n", epoch, sum / kSamples);
  }
}

int main() {
  return lockstep::run(train);
}
