// The Trainer and its parts on the world's device: steps that are skipped, saves beside the
// computation, batches from a side stream, exact evaluation, agreement between ranks, memory that
// runs out.
//
//   LOCKSTEP_DEVICE=cuda:0 gpu_train FOLDER      or under lockstep run; on a CPU what makes sense
//
// Prints one line per check and ends with "gpu_train: all checks passed" on rank 0.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "lockstep/core/document.h"
#include "lockstep/lockstep.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/nn/divided.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/train/async_saver.h"
#include "lockstep/train/trainer_for_test.h"

namespace {

using namespace lockstep;
using train::flat;
using train::task_for;

constexpr std::int64_t kFeatures = 16, kClasses = 4;

void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error("check failed: " + what);
}

data::DatasetPtr dataset(std::int64_t samples, std::uint64_t seed = 1,
                         std::int64_t features = kFeatures) {
  return optim::with_seed(seed, [&] {
    const at::Tensor x = torch::randn({samples, features});
    const at::Tensor y = x.matmul(torch::randn({features, kClasses})).argmax(1);
    return std::make_shared<data::TensorDataset>(x, y);
  });
}

torch::nn::Sequential network(std::int64_t hidden = 64, std::int64_t features = kFeatures) {
  return optim::with_seed(7, [&] {
    return torch::nn::Sequential(torch::nn::Linear(features, hidden), torch::nn::ReLU(),
                                 torch::nn::Linear(hidden, hidden), torch::nn::ReLU(),
                                 torch::nn::Linear(hidden, kClasses));
  });
}

TrainingArguments arguments(const std::string& output_dir) {
  TrainingArguments a;
  a.output_dir = output_dir;
  a.learning_rate = 1e-2;
  a.logging_steps = 1;
  a.save_strategy = Interval::kNo;
  a.disable_tqdm = true;
  a.log_level = "warning";
  return a;
}

bool same_on_all(World& world, const at::Tensor& tensor) {
  bool same = true;
  for (const auto& part : world.all_gather(tensor)) same &= part.equal(tensor);
  return same;
}

std::string bytes_in(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  require(file.good(), path + " is there");
  return {std::istreambuf_iterator<char>(file), {}};
}

at::Tensor busy_matrix(c10::Device device) {
  const std::int64_t size = device.is_cpu() ? 16 : 4096;
  return torch::full({size, size}, 1.0 / static_cast<double>(size), device);
}

// Keeps the training stream so busy (3 ms each) that the host runs ahead of it.
void keep_busy(const at::Tensor& matrix, int times) {
  for (int i = 0; i < times; ++i) at::mm(matrix, matrix);
}

// ---------------------------------------------------------------- fp16

struct Weights : Observer {
  explicit Weights(torch::nn::Sequential watched) : net(std::move(watched)) {}
  void on_step_end(Event&) override { after.push_back(flat(*net)); }
  torch::nn::Sequential net;
  std::vector<at::Tensor> after;
};

void require_scaler(const std::string& folder, double scale, std::int64_t tracker) {
  const std::string text = train::Checkpoint(folder).text("scaler.json");
  const Node root = parse_json(text, folder);
  const Entry *has_scale = root.find("scale"), *has_tracker = root.find("growth_tracker");
  require(has_scale != nullptr && has_tracker != nullptr, "scaler.json holds the scale: " + text);
  require(as_real(has_scale->value, "scale") == scale, folder + "'s scale: " + text);
  require(as_integer(has_tracker->value, "tracker") == tracker, folder + "'s tracker: " + text);
}

// The last rank's gradients of the fourth step are too large for fp16.
void overflow(World& world, const std::string& folder) {
  auto net = network();
  TrainerTask task = task_for(net, dataset(64), nullptr);
  int calls = 0;
  task.loss = [&world, &calls, plain = task.loss](const data::Batch& batch) {
    const bool now = ++calls == 4 && world.rank() == world.size() - 1;
    return plain(batch).loss * (now ? 1e30 : 0.01);  // 0.01: no other step comes near
  };
  TrainingArguments a = arguments(folder);
  a.fp16 = true;
  a.max_steps = 6;
  a.per_device_train_batch_size = 4;
  a.save_strategy = Interval::kSteps;
  a.save_steps = 3;
  Trainer trainer(world, task, a);
  const auto weights = std::make_shared<Weights>(net);
  trainer.add(weights);
  trainer.train();
  const auto& after = weights->after;
  require(after.size() == 6, "six steps");
  require(after[3].equal(after[2]), "the step that overflowed changes nothing");
  require(!after[2].equal(after[1]) && !after[4].equal(after[3]), "the others do");
  require(at::isfinite(after[5]).all().item<bool>(), "weights stay finite");
  require(same_on_all(world, after[5]), "replicas are identical");
  for (const train::LogEntry& entry : trainer.state().log_history) {
    const double* skipped = train::find_metric(entry.values, "skipped_steps");
    require((skipped != nullptr) == (entry.step == 4 && train::find_metric(entry.values, "loss")),
            "the log says which step was skipped");
  }
  if (!world.is_leader()) return;
  require_scaler(folder + "/checkpoint-3", 65536, 3);
  require_scaler(folder + "/checkpoint-6", 32768, 2);
}

// ---------------------------------------------------------------- saving

train::CheckpointContents contents_of(torch::nn::Sequential net, const at::Tensor& moment,
                                      std::int64_t step) {
  train::CheckpointContents contents;
  contents.model = train::model_tensors(*net, /*copy_buffers=*/true);
  contents.optimizer["0.weight.exp_avg"] = moment;
  contents.optimizer["0.weight.step"] = (moment[0][0] * 0 + step).to(at::kDouble);
  contents.rng = {{{"cpu", at::arange(5, at::kByte)}}};
  contents.state.global_step = step;
  return contents;
}

// A save has what the device had when it began, although the device was far behind the host then,
// and although weights, buffers and memory are used again at once.
void saver(World& world, const std::string& folder) {
  const c10::Device device = world.device();
  const torch::NoGradGuard no_grad;
  torch::nn::Sequential net(torch::nn::Linear(512, 512), torch::nn::BatchNorm1d(512),
                            torch::nn::Linear(512, 512));
  net->to(device);
  at::Tensor moment = torch::randn({512, 512}, device);
  const at::Tensor busy = busy_matrix(device);
  train::AsyncSaver async({.output_dir = folder + "/async"});
  for (std::int64_t step = 1; step <= 4; ++step) {
    keep_busy(busy, 10);
    for (at::Tensor& p : net->parameters()) p.add_(static_cast<double>(step));
    moment.mul_(1.5);
    train::CheckpointContents blocking = contents_of(net, moment.clone(), step);
    for (auto& [name, tensor] : blocking.model) tensor = tensor.clone();
    async.begin(contents_of(net, moment, step));
    // The next forward: buffers change, memory comes and goes.
    for (int i = 0; i < 10; ++i) net->forward(torch::randn({64, 512}, device));
    async.wait_copied();
    for (at::Tensor& p : net->parameters()) p.mul_(-1);
    moment.mul_(-1);
    const auto outcome = async.wait();
    require(outcome && outcome->committed && outcome->alert.empty(), "the save is durable");
    const std::string other = folder + "/blocking/checkpoint-" + std::to_string(step);
    std::filesystem::create_directories(folder + "/blocking");
    train::write_checkpoint(other, blocking);
    for (const char* file : {"/model.safetensors", "/optimizer.safetensors"})
      require(bytes_in(outcome->path + file) == bytes_in(other + file),
              "a save beside the computation holds what a blocking one does: " + outcome->path);
  }
}

// ---------------------------------------------------------------- loading

// The step overwrites its batch, whose memory is soon reused.
void loader(World& world) {
  const at::Tensor rows = torch::arange(96 * 2048, torch::kFloat).view({96, 2048});
  const at::Tensor labels = torch::arange(96);
  const at::Tensor original = rows.clone();
  const at::Tensor here = rows.to(world.device());
  const at::Tensor busy = busy_matrix(world.device());
  for (const int workers : {0, 2}) {
    for (const bool pin : {true, false}) {
      auto batches = data::loader(
          std::make_shared<data::TensorDataset>(rows, labels), world,
          {.batch_size = 4, .shuffle = true, .num_workers = workers, .pin_memory = pin});
      for (int epoch = 0; epoch < 2; ++epoch) {
        at::Tensor wrong = torch::zeros({}, here.options().dtype(torch::kLong));
        at::Tensor sum = torch::zeros_like(wrong);
        std::int64_t wanted = 0;
        for (auto& batch : batches.epoch(epoch)) {
          require(batch.data.device() == world.device(), "a batch arrives on the device");
          require(batch.target.device() == world.device(), "and so do its targets");
          keep_busy(busy, 2);
          wrong += batch.data.ne(here.index_select(0, batch.target)).sum();
          sum += batch.target.sum();
          wanted += std::accumulate(batch.indices.begin(), batch.indices.end(), std::int64_t{0});
          batch.data.fill_(-1);
          batch.target.fill_(0);
        }
        require(wrong.item<std::int64_t>() == 0, "batches are what the dataset holds");
        require(sum.item<std::int64_t>() == wanted, "targets are those of the samples");
      }
    }
  }
  require(rows.equal(original), "the dataset is as it was");
}

// ---------------------------------------------------------------- evaluation

double metric(const train::Metrics& metrics, const char* name) {
  const double* value = train::find_metric(metrics, name);
  require(value != nullptr, std::string("evaluation gives ") + name);
  return *value;
}

// 37 samples do not divide by batches or ranks. The error of a sum of 37 float32 losses is well
// below 1e-5 of it; bf16 keeps 8 bits of each logit.
void evaluation(World& world, const std::string& folder) {
  auto net = network();
  const data::DatasetPtr data = dataset(37, 3);
  std::vector<std::int64_t> every(37);
  std::iota(every.begin(), every.end(), 0);
  const data::Batch all = *data->get_batch(every, {});
  const at::Tensor logits = net->forward(all.data).detach();
  const double loss = torch::cross_entropy_loss(logits.to(at::kDouble), all.target).item<double>();
  const double right = (logits.argmax(1) == all.target).sum().item<double>();
  for (const bool bf16 : {false, true}) {
    TrainingArguments a = arguments(folder);
    a.per_device_eval_batch_size = 5;
    a.dataloader_num_workers = 1;
    a.bf16 = bf16;
    Trainer trainer(world, task_for(net, nullptr, data), a);
    const train::Metrics metrics = trainer.evaluate();
    const double off = std::abs(metric(metrics, "eval_loss") - loss) / loss;
    require(off < (bf16 ? 2e-2 : 1e-5), "the mean loss, apart by " + std::to_string(off));
    require(metric(metrics, "eval_accuracy") == right / 37, "every sample is counted once");
  }
}

// ---------------------------------------------------------------- ranks

struct StopAt : Observer {
  StopAt(std::int64_t at, int by) : step(at), rank(by) {}
  void on_step_end(Event& event) override {
    event.stop = event.state.global_step == step && event.rank == rank;
  }
  std::int64_t step;
  int rank;
};

void twenty_steps(World& world, const std::string& folder) {
  auto net = network();
  TrainingArguments a = arguments(folder);
  a.max_steps = 20;
  a.gradient_accumulation_steps = 2;
  a.dataloader_num_workers = 1;
  Trainer trainer(world, task_for(net, dataset(300), nullptr), a);
  require(trainer.train().global_step == 20, "twenty steps");
  require(same_on_all(world, flat(*net)), "replicas are identical");
  const auto& log = trainer.state().log_history;
  require(metric(log[19].values, "loss") < metric(log[0].values, "loss") - 0.3, "the loss falls");
}

// A stop request is in the next step's exchange; on a GPU with several ranks the result is read one
// step later.
void agreement(World& world, const std::string& folder) {
  TrainingArguments a = arguments(folder);
  a.max_steps = 20;
  Trainer trainer(world, task_for(network(), dataset(300), nullptr), a);
  trainer.add(std::make_shared<StopAt>(5, world.size() - 1));
  const bool lags = world.size() > 1 && !world.device().is_cpu();
  const std::int64_t stopped = trainer.train().global_step;
  require(stopped == (lags ? 7 : 6), "request of step 5 ends all, at " + std::to_string(stopped));
}

// ---------------------------------------------------------------- parts

struct Split : torch::nn::Module {
  explicit Split(c10::Device where) : device(where) {
    host = register_module("host", torch::nn::Linear(8, 8));  // stays on the CPU
    near = register_module("near", torch::nn::Linear(8, 8));
    near->to(device);
  }
  at::Tensor forward(const at::Tensor& x) {
    return host(torch::tanh(near(x.to(device))).cpu()).square().mean();
  }
  c10::Device device;
  torch::nn::Linear host{nullptr}, near{nullptr};
};

// The scale and the norm are on the CPU, gradients on both devices: the result equals all on the
// CPU.
void two_devices(World& world) {
  const at::Tensor busy = busy_matrix(world.device());
  const auto run = [&](c10::Device device) {
    Split net = optim::with_seed(5, [&] { return Split(device); });
    optim::GradScaler scaler({}, {.init_scale = 1024});
    optim::SGD sgd{net.parameters(), {.lr = 0.5}};
    std::vector<double> seen;
    for (int step = 0; step < 20; ++step) {
      const at::Tensor x = at::arange(32, at::kFloat).view({4, 8}) / (16.0 + step);
      scaler.scale(net.forward(x)).backward();
      if (step == 10) net.near->weight.mutable_grad()[0][0] = INFINITY;
      keep_busy(busy, 3);
      scaler.unscale_(sgd);
      seen.push_back(optim::clip_grad_norm_(net.parameters(), 0.1).item<double>());
      scaler.step(sgd);
      scaler.update();
      sgd.zero_grad();
      seen.push_back(scaler.get_scale());
    }
    seen.push_back(net.near->weight.sum().item<double>());
    return seen;
  };
  const auto apart = run(world.device()), together = run(c10::Device(c10::kCPU));
  require(apart[21] == 512 && apart[19] == 1024, "the step with an infinite gradient is skipped");
  for (std::size_t i = 0; i < apart.size(); ++i) {
    const bool same = apart[i] == together[i] ||  // infinite, both
                      std::abs(apart[i] - together[i]) <= 1e-4 * std::abs(together[i]) + 1e-6;
    require(same, "value " + std::to_string(i) + ": " + std::to_string(apart[i]) + " and " +
                      std::to_string(together[i]));
  }
}

void random_states(World& world) {
  const auto draw = [&] { return torch::dropout(at::ones({1000}, world.device()), 0.5, true); };
  optim::seed_everything(5, world.rank());
  const optim::RngState state = optim::rng_state();
  require(state.contains(world.device().str()), "the device's generator is saved");
  const at::Tensor first = draw(), second = draw();
  require(!first.equal(second), "the generator continues");
  optim::set_rng_state(state);
  require(draw().equal(first) && draw().equal(second), "and back");
}

// The next step must not compute with the converted weights of this one.
void checkpointed_bf16(World& world) {
  const auto run = [&](bool checkpointed) {
    models::Gpt net = optim::with_seed(3, [] {
      return models::Gpt(models::GptConfig{
          .n_layer = 2, .n_head = 2, .n_embd = 32, .vocab_size = 64, .n_positions = 32});
    });
    net->to(world.device());
    if (checkpointed) net->run_blocks_with(lockstep::checkpoint);
    const at::Tensor ids = (torch::arange(128).view({4, 32}) * 7 % 64).to(world.device());
    optim::AdamW optimizer{net->parameters(), {.lr = 1e-2}};
    std::vector<double> losses;
    for (int step = 0; step < 6; ++step) {
      at::Tensor loss;
      {
        const optim::Autocast autocast(world.device(), at::kBFloat16);
        loss = models::next_token_loss(net->forward(ids), ids);
      }
      loss.backward();
      losses.push_back(loss.item<double>());
      optimizer.step();
      optimizer.zero_grad();
    }
    return losses;
  };
  const auto plain = run(false), checkpointed = run(true);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const std::string both = std::to_string(plain[i]) + " and " + std::to_string(checkpointed[i]);
    // On a GPU bf16 products may be summed in another order.
    const double bound = world.device().is_cpu() ? 0 : 3e-2;
    require(std::abs(plain[i] - checkpointed[i]) <= bound, "loss of step: " + both);
  }
  require(plain.back() < plain.front() - 0.3, "the loss falls");
}

// ---------------------------------------------------------------- offload

struct Sharded {
  std::vector<double> losses;
  std::int64_t peak = 0;        // bytes of the device in a step
  std::int64_t parameters = 0;  // bytes of the whole model
};

// Two passes a step, clipped and scaled; the last step after an evaluation and a state that was
// saved and loaded.
Sharded train_sharded(World& world, bool offload) {
  const bool on_gpu = !world.device().is_cpu();
  models::Gpt net = optim::with_seed(3, [] {
    return models::Gpt(models::GptConfig{
        .n_layer = 12, .n_head = 4, .n_embd = 192, .vocab_size = 64, .n_positions = 32});
  });
  net->to(world.device());
  net->eval();  // without dropout
  FullyShard model(*net, Mesh(world, {{"shard", -1}}), {.cpu_offload = offload});
  const auto optimizer =
      model.make_optimizer({{net->parameters(), optim::AdamWOptions{.lr = 1e-3}}});
  optim::GradScaler scaler(world, {.init_scale = 1024});
  const at::Tensor ids =
      ((torch::arange(256).view({8, 32}) * 7 + world.rank()) % 64).to(world.device());
  Sharded result;
  for (const at::Tensor& p : net->parameters()) {
    result.parameters += p.numel() * p.element_size();
    const nn::Rows* const rows = nn::rows_of(p);
    require(!on_gpu || !offload || (rows != nullptr && rows->values.is_pinned()),
            "offloaded rows are in pinned memory");
  }
  for (int step = 0; step < 5; ++step) {
    if (step == 2 && on_gpu)
      c10::getDeviceAllocator(world.device().type())->resetPeakStats(world.device().index());
    if (step == 4) {
      if (on_gpu)
        result.peak = c10::getDeviceAllocator(world.device().type())
                          ->getDeviceStats(world.device().index())
                          .allocated_bytes[0]
                          .peak;
      const torch::NoGradGuard no_grad;
      model.before_forward();
      result.losses.push_back(models::next_token_loss(net->forward(ids), ids).item<double>());
      optimizer->load_state_dict(optimizer->state_dict());
    }
    for (const bool last : {false, true}) {
      model.before_forward();
      const at::Tensor half = ids.narrow(0, last ? 4 : 0, 4);
      const at::Tensor loss = models::next_token_loss(net->forward(half), half);
      model.backward(scaler.scale(loss * 0.5), last);
      result.losses.push_back(loss.item<double>());
    }
    const auto stepped = optimizer->step({.max_grad_norm = 1.0, .scaler = &scaler});
    require(!stepped.was_skipped(), "every step is taken");
    optimizer->zero_grad();
  }
  const auto whole = model.gathered();
  result.losses.push_back(flat(*net).norm().item<double>());
  return result;
}

void offloaded(World& world) {
  const Sharded plain = train_sharded(world, false), host = train_sharded(world, true);
  for (std::size_t i = 0; i < plain.losses.size(); ++i)
    require(std::abs(host.losses[i] - plain.losses[i]) <= 1e-3 * plain.losses[i],
            "value " + std::to_string(i) + ": " + std::to_string(plain.losses[i]) + " and " +
                std::to_string(host.losses[i]));
  require(plain.losses[8] < plain.losses[0] - 0.3, "the loss falls");
  if (world.device().is_cpu()) return;
  // Parameters, two states and gradients, of which the last block's are there meanwhile.
  const auto share = static_cast<double>(plain.parameters) / world.size();
  const auto saved = static_cast<double>(plain.peak - host.peak);
  if (world.is_leader())
    std::printf("gpu_train: offload: a peak of %.1f MB instead of %.1f, rows are %.1f MB\n",
                static_cast<double>(host.peak) / 1e6, static_cast<double>(plain.peak) / 1e6,
                share / 1e6);
  require(saved > 3 * share, "rows and state are not on the device: " + std::to_string(saved));
}

// ---------------------------------------------------------------- memory

// Three GiB are left; a layer's output is one.
void out_of_memory(World& world, const std::string& folder) {
  constexpr std::int64_t kGiB = std::int64_t{1} << 30, kBatch = 1 << 18, kInputs = 64;
  std::vector<at::Tensor> ballast;
  try {
    while (ballast.size() < 4096)
      ballast.push_back(at::empty({kGiB}, at::dtype(at::kByte).device(world.device())));
  } catch (const c10::OutOfMemoryError&) {
  }
  require(ballast.size() > 4, "the GPU has some memory");
  ballast.resize(ballast.size() - 3);
  c10::getDeviceAllocator(world.device().type())->emptyCache();

  const data::DatasetPtr data = dataset(kBatch, 1, kInputs);
  TrainingArguments a = arguments(folder);
  a.per_device_train_batch_size = kBatch;
  a.max_steps = 2;
  std::string said;
  try {
    Trainer(world, task_for(network(1024, kInputs), data, nullptr), a).train();
  } catch (const Error& error) {
    said = error.what();
  }
  require(said.find("out of memory in step 1 (CUDA out of memory") != std::string::npos &&
              said.find("Try per_device_train_batch_size: 196608 (effective batch") !=
                  std::string::npos,
          "the sentence: " + said);
  a.auto_find_batch_size = true;
  Trainer finder(world, task_for(network(1024, kInputs), data, nullptr), a);
  require(finder.train().global_step == 2, "two steps with the batch that fits");
  const std::int64_t found = finder.state().train_batch_size;
  require(found < kBatch && found >= 1024, "a batch that fits: " + std::to_string(found));
  std::printf("gpu_train: a batch of %ld was halved to %ld\n", static_cast<long>(kBatch),
              static_cast<long>(found));
}

void all_checks(World& world, const std::string& folder) {
  const auto check = [&](const char* what, auto&& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (!world.is_leader()) return;
    std::printf("gpu_train: %s (%.1f s)\n", what, took.count());
    std::fflush(stdout);
  };
  check("fp16 overflow: the step is skipped, the scale halved", [&] { overflow(world, folder); });
  check("20 Trainer steps, replicas identical", [&] { twenty_steps(world, folder + "/twenty"); });
  check("a stop request ends all ranks at one step", [&] { agreement(world, folder + "/stop"); });
  check("evaluation is exact", [&] { evaluation(world, folder + "/eval"); });
  check("loader while the step mutates", [&] { loader(world); });
  check("random states", [&] { random_states(world); });
  check("rows, gradients and state in the host's memory", [&] { offloaded(world); });
  if (world.size() == 1) {
    check("a save beside the computation", [&] { saver(world, folder + "/saver"); });
    check("scaler and clipping over two devices", [&] { two_devices(world); });
    check("checkpointed blocks in bf16", [&] { checkpointed_bf16(world); });
    if (world.device().is_cpu()) {
      check("SKIPPED, needs a GPU: memory that runs out", [] {});
    } else {
      check("memory that runs out", [&] { out_of_memory(world, folder + "/memory"); });
    }
  }
  check("all checks passed", [] {});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: gpu_train FOLDER\n", stderr);
    return 2;
  }
  return lockstep::run([&](World& world) { all_checks(world, argv[1]); });
}
