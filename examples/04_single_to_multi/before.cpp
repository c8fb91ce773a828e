// A small classifier, trained on one device.
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

void train() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  Net net;
  net->to(device);
  torch::optim::Adam optimizer(net->parameters());
  auto samples = Samples().map(Stack<>());
  auto loader = torch::data::make_data_loader<SequentialSampler>(samples, kBatch);

  for (int epoch = 0; epoch < 10; ++epoch) {
    double sum = 0;
    for (auto& batch : *loader) {
      const auto x = batch.data.to(device);
      const auto y = batch.target.to(device);
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(net->forward(x), y);
      loss.backward();
      optimizer.step();
      sum += loss.item<double>() * x.size(0);
    }
    std::printf("Epoch %d: loss %.4f\n", epoch, sum / kSamples);
  }
}

int main() {
  train();
}
