// A rank of `lockstep bench train` in C++, with communication or without.
#include <fmt/format.h>
#include <time.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/train.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/memory/cpu_cache.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/sharded_optimizer.h"
#include "lockstep/run.h"

namespace lockstep::bench {
namespace {

class Block : public torch::nn::Module {
 public:
  explicit Block(const GptShape& s)
      : heads_(s.heads),
        norm_1_(torch::nn::LayerNormOptions({s.width})),
        qkv_(s.width, 3 * s.width),
        out_(s.width, s.width),
        norm_2_(torch::nn::LayerNormOptions({s.width})),
        up_(s.width, 4 * s.width),
        down_(4 * s.width, s.width) {
    register_module("norm_1", norm_1_);
    register_module("qkv", qkv_);
    register_module("out", out_);
    register_module("norm_2", norm_2_);
    register_module("up", up_);
    register_module("down", down_);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto batch = x.size(0), tokens = x.size(1), width = x.size(2);
    const auto parts = linear(qkv_, norm_1_(x)).split(width, 2);
    const auto by_head = [&](const at::Tensor& part) {
      return part.view({batch, tokens, heads_, width / heads_}).transpose(1, 2);
    };
    const auto mixed =
        torch::scaled_dot_product_attention(by_head(parts[0]), by_head(parts[1]), by_head(parts[2]),
                                            /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
    const auto y = x + linear(out_, mixed.transpose(1, 2).reshape({batch, tokens, width}));
    return y + linear(down_, torch::gelu(linear(up_, norm_2_(y)), "tanh"));
  }

 private:
  // Like Python's: LinearImpl::forward multiplies and adds in two passes when there are three
  // dimensions.
  static at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
    return torch::linear(x, layer->weight, layer->bias);
  }

  std::int64_t heads_;
  torch::nn::LayerNorm norm_1_;
  torch::nn::Linear qkv_, out_;
  torch::nn::LayerNorm norm_2_;
  torch::nn::Linear up_, down_;
};

}  // namespace

SmallGpt::SmallGpt(const GptShape& shape)
    : tokens_(shape.vocab, shape.width),
      positions_(shape.tokens, shape.width),
      norm_(torch::nn::LayerNormOptions({shape.width})),
      head_(torch::nn::LinearOptions(shape.width, shape.vocab).bias(false)) {
  register_module("tokens", tokens_);
  register_module("positions", positions_);
  register_module("blocks", blocks_);
  for (std::int64_t i = 0; i < shape.layers; ++i)
    blocks_->push_back(std::make_shared<Block>(shape));
  register_module("norm", norm_);
  register_module("head", head_);
}

at::Tensor SmallGpt::forward(const at::Tensor& ids, const at::Tensor& targets) {
  auto x = tokens_(ids) + positions_->weight;
  for (const auto& block : *blocks_) x = std::static_pointer_cast<Block>(block)->forward(x);
  const auto logits = torch::linear(norm_(x), head_->weight);
  return torch::cross_entropy_loss(logits.view({-1, logits.size(-1)}), targets.view({-1}));
}

namespace {

using Clock = std::chrono::steady_clock;

struct RankSettings {
  std::string contender, weights, tokens, orders;
  GptShape shape;
  std::int64_t max_batch = 1;  // sequences per rank in the file of tokens
  double lr = kLearningRate;
};

template <typename T>
at::Tensor read_tensor(const std::string& path, std::int64_t offset, at::IntArrayRef sizes) {
  at::Tensor tensor = at::empty(sizes, c10::CppTypeToScalarType<T>::value);
  std::ifstream file(path, std::ios::binary);
  file.seekg(offset * static_cast<std::int64_t>(sizeof(T)));
  file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  if (!file) throw Error("bench", fmt::format("'{}' is too short", path));
  return tensor;
}

struct Sequences {
  at::Tensor ids, targets;  // [max_batch, tokens]
};

Sequences sequences_of(const RankSettings& settings, int rank) {
  const std::int64_t each = settings.max_batch * settings.shape.tokens;
  const auto read = [&](std::int64_t which) {
    return read_tensor<std::int64_t>(settings.tokens, (2 * rank + which) * each,
                                     {settings.max_batch, settings.shape.tokens});
  };
  return {read(0), read(1)};
}

// One model with its optimizer: in a world when there is one, otherwise on its own; or on its own
// but in step with the others.
class Trainee {
 public:
  Trainee(const RankSettings& settings, const std::optional<World>& world)
      : net_(std::make_shared<SmallGpt>(settings.shape)) {
    load(settings);
    if (settings.contender == kMet) barrier_world_ = world;
    if (world && !barrier_world_) {
      model_.emplace(net_, *world);
      sharded_ =
          std::make_unique<ShardedOptimizer>(*model_, optim::AdamWOptions{.lr = settings.lr});
    } else {
      own_ = std::make_unique<optim::AdamW>(net_->parameters(),
                                            optim::AdamWOptions{.lr = settings.lr});
    }
  }

  at::Tensor step(const at::Tensor& ids, const at::Tensor& targets) {
    const at::Tensor loss = model_ ? (*model_)(ids, targets) : net_->forward(ids, targets);
    loss.backward();
    if (sharded_) {
      sharded_->step();
      sharded_->zero_grad();
    } else {
      own_->step();
      own_->zero_grad();
      if (barrier_world_) barrier_world_->barrier();
    }
    return loss.detach();
  }

 private:
  void load(const RankSettings& settings) {
    const torch::NoGradGuard no_grad;
    std::int64_t offset = 0;
    for (auto& parameter : net_->parameters()) {
      parameter.copy_(read_tensor<float>(settings.weights, offset, parameter.sizes()));
      offset += parameter.numel();
    }
  }

  std::optional<World> barrier_world_;
  std::shared_ptr<SmallGpt> net_;
  std::optional<DistributedDataParallel<std::shared_ptr<SmallGpt>>> model_;
  std::unique_ptr<ShardedOptimizer> sharded_;
  std::unique_ptr<optim::AdamW> own_;
};

double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// "SECONDS LOSS LOSS ..."
std::string run_block(Trainee& trainee, const Sequences& sequences, std::int64_t batch, int steps) {
  const at::Tensor ids = sequences.ids.narrow(0, 0, batch);
  const at::Tensor targets = sequences.targets.narrow(0, 0, batch);
  std::vector<at::Tensor> losses;
  const auto start = Clock::now();
  for (int i = 0; i < steps; ++i) losses.push_back(trainee.step(ids, targets));
  std::string text = fmt::format("{:.6f}", since(start));
  for (const auto& loss : losses) text += fmt::format(" {:.9g}", loss.item<float>());
  return text;
}

void serve(const RankSettings& settings, const std::optional<World>& world, int rank) {
  const Sequences own = sequences_of(settings, rank), same = sequences_of(settings, 0);
  std::unique_ptr<Trainee> trainee;
  Orders orders(settings.orders, rank);
  auto idle_since = Clock::now();
  double idle_cpu = cpu_seconds();
  for (std::string line; orders.next(line);) {
    const double idle = since(idle_since), cpu = cpu_seconds() - idle_cpu;
    std::istringstream fields(line);
    std::string what, whose, answer = "ok";
    std::int64_t batch = 0;
    int steps = 0;
    fields >> what >> batch >> steps >> whose;
    if (what == "new") {
      trainee.reset();
      trainee = std::make_unique<Trainee>(settings, world);
    } else {
      LOCKSTEP_ASSERT(what == "run" && trainee && batch >= 1 && batch <= settings.max_batch);
      answer = run_block(*trainee, whose == "own" ? own : same, batch, steps);
      answer.insert(answer.find(' '), fmt::format(" {:.6f} {:.6f}", cpu, idle));
    }
    orders.answer(answer);
    idle_since = Clock::now();
    idle_cpu = cpu_seconds();
  }
}

}  // namespace

int train_rank_main(int argc, char** argv) {
  RankSettings settings;
  CLI::App app{"a rank of lockstep bench train"};
  app.add_option("--contender", settings.contender);
  app.add_option("--weights", settings.weights);
  app.add_option("--sequences", settings.tokens);
  app.add_option("--max-batch", settings.max_batch);
  app.add_option("--layers", settings.shape.layers);
  app.add_option("--heads", settings.shape.heads);
  app.add_option("--width", settings.shape.width);
  app.add_option("--vocab", settings.shape.vocab);
  app.add_option("--tokens", settings.shape.tokens);
  app.add_option("--lr", settings.lr);
  app.add_option("--orders", settings.orders);
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  torch::set_num_threads(1);
  if (settings.contender == kCached || settings.contender == kMet) cache_cpu_memory();
  if (settings.contender == kSilent || settings.contender == kCached) {
    serve(settings, std::nullopt, std::stoi(env::get("RANK").value_or("0")));
    return 0;
  }
  return run([&](World& world) { serve(settings, world, world.rank()); }, {.backend = "shm"});
}

}  // namespace lockstep::bench
