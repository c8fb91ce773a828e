// FullyShard (PyTorch's FSDP2): a GPT whose parameters, gradients and optimizer state are divided
// over the ranks, with accumulation, bf16 and an evaluation.
#include <lockstep/lockstep.h>
#include <lockstep/models/causal_lm.h>
#include <lockstep/parallel/fully_shard.h>
#include <torch/torch.h>

#include <cstdio>

namespace {

namespace data = lockstep::data;
namespace models = lockstep::models;
namespace optim = lockstep::optim;

constexpr std::uint64_t kSeed = 1;
constexpr std::int64_t kVocabulary = 32, kLength = 16, kBatch = 8, kAccumulate = 2, kEpochs = 3;

// Sequences that count upwards by 1, 2 or 3.
data::DatasetPtr make_dataset(std::int64_t samples) {
  const auto step = torch::randint(1, 4, {samples, 1}, torch::kLong);
  const auto first = torch::randint(kVocabulary, {samples, 1}, torch::kLong);
  const auto tokens = (first + step * torch::arange(kLength + 1)).remainder(kVocabulary);
  return std::make_shared<data::TensorDataset>(tokens.slice(1, 0, kLength), tokens.slice(1, 1));
}

void train(lockstep::World& world) {
  const lockstep::Mesh mesh(world, {{"shard", -1}});
  const auto train_data = optim::with_seed(kSeed, [] { return make_dataset(1536); });
  const auto eval_data = optim::with_seed(kSeed + 1, [] { return make_dataset(96); });
  // Each block is divided when it is made: no rank ever holds the whole model.
  auto net = optim::with_seed(kSeed, [&] {
    const lockstep::ShardedConstruction divided(mesh);
    return models::Gpt(models::GptConfig{.n_layer = 4,
                                         .n_head = 2,
                                         .n_embd = 64,
                                         .vocab_size = kVocabulary,
                                         .n_positions = kLength});
  });
  const auto model = std::make_shared<lockstep::FullyShard>(*net, mesh);
  const optim::AdamWOptions adamw{.lr = 3e-3};
  const auto optimizer = model->make_optimizer({{net->parameters(), adamw}});
  auto loader = data::loader(train_data, mesh.batch(),
                             {.batch_size = kBatch, .shuffle = true, .seed = kSeed});
  auto eval_loader =
      data::loader(eval_data, mesh.batch(), {.batch_size = kBatch, .evaluation = true});

  const auto loss_of = [&](const data::Batch& batch) {
    const optim::Autocast autocast{world.device(), at::kBFloat16};
    model->before_forward();  // gathers what is outside of blocks
    return net->loss(batch.data, batch.target);
  };
  // A forward gathers, so all ranks run equally many: the samples divide by ranks and batches.
  const auto evaluate = [&] {
    const torch::NoGradGuard no_grad;
    double sum = 0;
    for (auto& batch : eval_loader.epoch(0)) sum += loss_of(batch).item<double>();
    const auto batches = static_cast<double>(eval_loader.batches_per_epoch());
    return lockstep::all_reduce(mesh.batch(), sum / batches, lockstep::ReduceOp::kAvg);
  };
  for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (auto& window : loader.windows(epoch, {.micro_batches = kAccumulate})) {
      for (auto& micro : window) model->backward(loss_of(micro) * micro.weight, micro.last);
      optimizer->step({.max_grad_norm = 1.0});
      optimizer->zero_grad();
    }
    const double loss = evaluate();
    if (world.is_leader())
      std::printf("epoch %lld: validation loss %.3f\n", static_cast<long long>(epoch), loss);
  }
  std::printf("rank %d: %s, %zu units\n", world.rank(), mesh.text().c_str(), model->units().size());
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return lockstep::run(train);
}
