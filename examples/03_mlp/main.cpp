// A whole training program in one file: a small network, random data, several ranks.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

namespace {

constexpr int kSeed = 42;
constexpr std::int64_t kSamples = 10'000, kFeatures = 20, kClasses = 10;

struct Flags {
  int epochs = 10;
  int batch_size = 32;  // per rank
};

struct SimpleModelImpl : torch::nn::Module {
  SimpleModelImpl() { register_module("net", net); }
  at::Tensor forward(const at::Tensor& x) { return net->forward(x); }
  torch::nn::Sequential net{torch::nn::Linear(kFeatures, 64), torch::nn::ReLU(),
                            torch::nn::Linear(64, kClasses)};
};
TORCH_MODULE(SimpleModel);

// Noise with random labels: there is nothing to learn but the samples themselves.
lockstep::data::DatasetPtr random_dataset() {
  return std::make_shared<lockstep::data::TensorDataset>(
      torch::randn({kSamples, kFeatures}), torch::randint(kClasses, {kSamples}, torch::kLong));
}

void train(lockstep::World& world, const Flags& flags) {
  std::printf("Running on rank %d of %d (%s)\n", world.rank(), world.size(),
              world.device().str().c_str());
  torch::manual_seed(kSeed);  // every rank makes the same data
  // Every rank gets its part of the samples, in an order that all ranks agree on, made by two
  // threads ahead of the training loop.
  auto loader = lockstep::data::loader(random_dataset(), world,
                                       {.batch_size = flags.batch_size,
                                        .shuffle = true,
                                        .seed = kSeed,
                                        .num_workers = 2,
                                        .pin_memory = true,
                                        .persistent_workers = true});
  SimpleModel net;
  net->to(world.device());
  lockstep::DistributedDataParallel model{net, world};
  lockstep::optim::AdamW optimizer{model.parameters(), {.lr = 0.001, .weight_decay = 0}};

  for (int epoch = 0; epoch < flags.epochs; ++epoch) {
    const auto batches = static_cast<int>(loader.batches_per_epoch());
    double loss_sum = 0, samples = 0;
    int i = 0;
    for (auto& batch : loader.epoch(epoch)) {  // on the device already
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();

      const auto value = loss.item<double>();
      loss_sum += value * static_cast<double>(batch.samples());
      samples += static_cast<double>(batch.samples());
      if (i % 10 == 0 && world.is_leader()) {
        std::printf("Epoch %d [%d/%d] Loss: %.4f\n", epoch, i, batches, value);
      }
      ++i;
    }
    // Over the samples of all ranks, not only of this one.
    const double mean =
        lockstep::all_reduce(world, loss_sum) / lockstep::all_reduce(world, samples);
    if (world.is_leader()) std::printf("Epoch %d completed, Average Loss: %.4f\n", epoch, mean);
  }
  model.verify_replicas();  // throws unless all ranks hold the same bits
  if (world.is_leader()) std::printf("replicas identical\n");
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a line is seen when it is printed, in a pipe too
  Flags flags;
  CLI::App app{"Trains a 20-64-10 network on random data."};
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return std::string("03_mlp: ") + error.what() + ". --help lists the flags.\n";
  });
  app.add_option("--epochs", flags.epochs, "Passes over the data")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--batch-size", flags.batch_size, "Samples per rank and step")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;  // 0 after --help; CLI11's own codes go beyond 100
  }
  return lockstep::run([&](lockstep::World& world) { train(world, flags); });
}
