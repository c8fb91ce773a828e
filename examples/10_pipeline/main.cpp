// Pipeline: a GPT split over ranks by blocks, through which the micro-batches of a step flow, with
// bf16 and an evaluation. With more ranks than stages, copies of the pipeline see other samples.
#include <lockstep/lockstep.h>
#include <lockstep/models/causal_lm.h>
#include <lockstep/parallel/pipeline.h>
#include <torch/torch.h>

#include <cstdio>

namespace {

namespace data = lockstep::data;
namespace models = lockstep::models;
namespace optim = lockstep::optim;

constexpr std::uint64_t kSeed = 1;
constexpr std::int64_t kVocabulary = 32, kLength = 16, kBatch = 4, kMicroBatches = 4, kEpochs = 3;

// Sequences that count upwards by 1, 2 or 3.
data::DatasetPtr make_dataset(std::int64_t samples) {
  const auto step = torch::randint(1, 4, {samples, 1}, torch::kLong);
  const auto first = torch::randint(kVocabulary, {samples, 1}, torch::kLong);
  const auto tokens = (first + step * torch::arange(kLength + 1)).remainder(kVocabulary);
  return std::make_shared<data::TensorDataset>(tokens.slice(1, 0, kLength), tokens.slice(1, 1));
}

void train(lockstep::World& world) {
  const int stages = world.size() > 1 ? 2 : 1;
  const lockstep::Mesh mesh(world, {{"pipeline", stages}, {"data", -1}});
  const auto train_data = optim::with_seed(kSeed, [] { return make_dataset(768); });
  const auto eval_data = optim::with_seed(kSeed + 1, [] { return make_dataset(96); });
  const models::GptConfig config{
      .n_layer = 4, .n_head = 2, .n_embd = 64, .vocab_size = kVocabulary, .n_positions = kLength};
  auto net = optim::with_seed(kSeed, [&] { return models::Gpt(config); });
  const auto model = std::make_shared<lockstep::Pipeline>(*net, mesh);  // the schedule is 1F1B
  const optim::AdamWOptions adamw{.lr = 3e-3};
  const auto optimizer = model->make_optimizer({{net->parameters(), adamw}});
  // Ranks of one pipeline see the same samples.
  auto loader = data::loader(train_data, mesh.batch(),
                             {.batch_size = kBatch, .shuffle = true, .seed = kSeed});
  auto eval_loader =
      data::loader(eval_data, mesh.batch(), {.batch_size = kBatch, .evaluation = true});

  // Called for each stage of this rank: the last one returns the loss, others what the next takes.
  const auto loss_of = [&](const data::Batch& batch) {
    const optim::Autocast autocast{world.device(), at::kBFloat16};
    return net->loss(batch.data, batch.target);
  };
  const auto evaluate = [&] {
    const torch::NoGradGuard no_grad;
    std::vector<lockstep::Parallelism::Pass> passes;
    for (auto& batch : eval_loader.epoch(0))
      passes.push_back({.forward = [&loss_of, batch] { return loss_of(batch); }, .weigh = {}});
    // On every rank; without gradients there is no backward.
    const at::Tensor losses = at::stack(model->run_window(passes));
    return lockstep::all_reduce(mesh.batch(), losses.mean().item<double>(),
                                lockstep::ReduceOp::kAvg);
  };
  for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (auto& window : loader.windows(epoch, {.micro_batches = kMicroBatches})) {
      model->run_window(lockstep::passes_of(window, loss_of));
      optimizer->step({.max_grad_norm = 1.0});
      optimizer->zero_grad();
    }
    const double loss = evaluate();
    if (world.is_leader())
      std::printf("epoch %lld: validation loss %.3f\n", static_cast<long long>(epoch), loss);
  }
  std::printf("rank %d: %s, %zu of %zu parameters\n", world.rank(), mesh.text().c_str(),
              model->parameter_names().size(), net->parameters().size());
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return lockstep::run(train);
}
