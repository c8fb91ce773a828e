// A frozen model between two modules that train. Only what trains is wrapped: the frozen model is
// moved to the device, takes part in forward and backward, and costs no communication.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

namespace {

constexpr std::uint64_t kSeed = 5;
constexpr std::int64_t kSamples = 512, kBatch = 16, kWidth = 32, kClasses = 4;

// What is trained and saved, in one module, so that one checkpoint has both parts.
struct TrainedImpl : torch::nn::Module {
  TrainedImpl() {
    register_module("encoder", encoder);
    register_module("head", head);
  }
  torch::nn::Sequential encoder{torch::nn::Linear(8, kWidth), torch::nn::Tanh()};
  torch::nn::Sequential head{torch::nn::Linear(kWidth, kClasses)};
};
TORCH_MODULE(Trained);

// Stands for a large model whose weights come from a file.
torch::nn::Sequential make_frozen() {
  torch::nn::Sequential net(torch::nn::Linear(kWidth, kWidth), torch::nn::ReLU(),
                            torch::nn::Linear(kWidth, kWidth));
  for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
  net->eval();
  return net;
}

lockstep::data::DatasetPtr make_dataset() {
  const auto x = torch::randn({kSamples, 8});
  return std::make_shared<lockstep::data::TensorDataset>(
      x, x.matmul(torch::randn({8, kClasses})).argmax(1));
}

double sum_of(const torch::nn::Module& module) {
  double sum = 0;
  for (const auto& parameter : module.parameters()) sum += parameter.sum().item<double>();
  return sum;
}

void train(lockstep::World& world) {
  // Nobody broadcasts the frozen weights: every rank makes, or loads, the same.
  auto frozen = lockstep::optim::with_seed(kSeed, make_frozen);
  const auto dataset = lockstep::optim::with_seed(kSeed, make_dataset);
  Trained trained;
  frozen->to(world.device());
  trained->to(world.device());
  lockstep::DistributedDataParallel encoder{trained->encoder, world};
  lockstep::DistributedDataParallel head{trained->head, world};
  lockstep::optim::AdamW optimizer{trained->parameters(), {.lr = 5e-3}};
  auto loader = lockstep::data::loader(
      dataset, world, {.batch_size = kBatch, .shuffle = true, .drop_last = true, .seed = kSeed});
  const double before = sum_of(*frozen);

  std::int64_t step = 0;
  for (std::int64_t epoch = 0; epoch < 5; ++epoch) {
    double sum = 0;
    for (auto& batch : loader.epoch(epoch)) {
      const auto logits = head(frozen->forward(encoder(batch.data)));
      const auto loss = torch::cross_entropy_loss(logits, batch.target);
      loss.backward();  // through the frozen model, into the encoder
      optimizer.step();
      optimizer.zero_grad();
      sum += loss.item<double>();
      ++step;
    }
    const double mean = lockstep::all_reduce(
        world, sum / static_cast<double>(loader.batches_per_epoch()), lockstep::ReduceOp::kAvg);
    if (world.is_leader()) std::printf("epoch %d: loss %.4f\n", static_cast<int>(epoch), mean);
  }
  encoder.verify_replicas();
  head.verify_replicas();
  lockstep::save_checkpoint("out/frozen_model", world,
                            {.module = trained.get(), .optimizer = &optimizer},
                            {.step = step, .overwrite_output_dir = true});
  if (world.is_leader())
    std::printf("replicas identical, frozen model %s\n",
                sum_of(*frozen) == before ? "unchanged" : "changed");
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return lockstep::run(train);
}
