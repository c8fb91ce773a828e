// DistributedDataParallel on CUDA tensors over nccl: every check compares ranks, or CUDA with CPU.
// Prints one line per check and ends with "gpu: all checks passed" on rank 0.
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string_view>
#include <thread>

#include "lockstep/comm/device.h"
#include "lockstep/core/ledger.h"
#include "lockstep/lockstep.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/monitor/gpu_memory.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/sync_batch_norm.h"

namespace {

using lockstep::World;

void require(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string("check failed: ") + what);
}

void said(const World& world, const char* what) {
  if (!world.is_leader()) return;
  std::printf("gpu: %s\n", what);
  std::fflush(stdout);
}

bool same_on_all(World& world, const at::Tensor& t) {
  bool same = true;
  const auto parts = world.all_gather(t);
  for (const auto& part : parts) same &= part.equal(parts[0]);
  return same;
}

void train_gpt(World& world, bool checkpointed) {
  torch::manual_seed(world.rank());
  lockstep::models::Gpt net(lockstep::models::GptConfig{
      .n_layer = 3, .n_head = 4, .n_embd = 128, .vocab_size = 512, .n_positions = 64});
  net->to(world.device());
  if (checkpointed) net->run_blocks_with(lockstep::checkpoint);
  lockstep::DistributedDataParallel model{
      net, world, {.bucket_cap_mb = 0.5, .force_reducer = true}};
  lockstep::optim::AdamW optimizer{model.parameters(), {.lr = 1e-3}};
  const auto ids = torch::randint(512, {4, 64}, torch::dtype(torch::kLong).device(world.device()));
  double first = 0, last = 0;
  for (int step = 0; step < 30; ++step) {
    std::optional<lockstep::NoSync> guard;
    if (step % 3 == 1) guard.emplace(model.no_sync());
    const auto loss = lockstep::models::next_token_loss(model(ids), ids);
    loss.backward();
    if (guard) continue;
    optimizer.step();
    optimizer.zero_grad();
    last = all_reduce(world, loss.item<double>(), lockstep::ReduceOp::kAvg);
    if (step == 0) first = last;
  }
  require(last < first - 0.1, "the loss falls");
  model.verify_replicas();
  said(world, checkpointed ? "checkpointed GPT trains, replicas identical"
                           : "GPT trains, replicas identical");
}

struct Branches : torch::nn::Module {
  Branches() {
    left = register_module("left", torch::nn::Linear(8, 8));
    right = register_module("right", torch::nn::Linear(8, 8));
    host = register_module("host", torch::nn::Linear(8, 8));  // stays on the CPU
  }
  at::Tensor forward(const at::Tensor& x, bool to_left) {
    const auto h = to_left ? left(x) : right(x);
    return host(h.cpu());
  }
  torch::nn::Linear left{nullptr}, right{nullptr}, host{nullptr};
};

void unused_and_mixed_devices(World& world) {
  auto net = std::make_shared<Branches>();
  net->left->to(world.device());
  net->right->to(world.device());
  lockstep::DistributedDataParallel model{
      net, world, {.find_unused_parameters = true, .force_reducer = true}};
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    model(torch::ones({2, 8}, world.device()), world.rank() == 0).sum().backward();
    require(same_on_all(world, net->left->weight.grad()), "left gradient");
    require(same_on_all(world, net->host->weight.grad()), "CPU parameter's gradient");
    require(net->right->weight.grad().defined() == (world.size() > 1), "right gradient");
  }
  said(world, "unused parameters and parameters on two devices");
}

// Wrapped on the CPU, moved afterwards.
void moved_after_wrapping(World& world) {
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::Tanh(), torch::nn::Linear(16, 2));
  lockstep::DistributedDataParallel model{net, world, {.force_reducer = true}};
  net->to(world.device());
  std::string said_of_it;
  try {
    model(torch::ones({4, 8}, world.device())).sum().backward();
  } catch (const lockstep::UsageError& e) {
    said_of_it = e.what();
  }
  require(said_of_it.find("parameter '0.weight' was moved to cuda") != std::string::npos,
          "a model that is moved to the GPU after wrapping is refused by name");
  said(world, "a model that is moved to the GPU after wrapping");
}

// gpu_test.py looks for the line.
void memory_line(World& world) {
  const auto gib = torch::empty({1 << 30}, torch::dtype(torch::kByte).device(world.device()));
  lockstep::log_gpu_memory(std::chrono::milliseconds(0));
  said(world, "log_gpu_memory() with a tensor of 1 GiB");
}

void sync_batch_norm(World& world) {
  torch::manual_seed(3);
  const auto whole = (torch::randn({2 * world.size(), 4, 5}) * 2 + 3).set_requires_grad(true);
  const auto weights = torch::randn({2 * world.size(), 4, 5});
  torch::nn::BatchNorm1d plain(4);
  const auto all = plain(whole);
  (all * weights).sum().backward();
  const auto mine = [&](const at::Tensor& t) { return t.narrow(0, 2 * world.rank(), 2); };
  lockstep::nn::SyncBatchNorm1d norm(world, torch::nn::BatchNormOptions(4));
  norm->to(world.device());
  const auto x = mine(whole.detach()).to(world.device()).set_requires_grad(true);
  const auto y = norm(x);
  (y * mine(weights).to(world.device())).sum().backward();
  at::Tensor d_weight = norm->weight.grad().clone();
  world.all_reduce(d_weight).wait();
  require(at::allclose(y.cpu(), mine(all), 1e-4, 1e-5), "SyncBatchNorm forward");
  require(at::allclose(x.grad().cpu(), mine(whole.grad()), 1e-3, 1e-5), "SyncBatchNorm input grad");
  require(at::allclose(d_weight.cpu(), plain->weight.grad(), 1e-3, 1e-4), "SyncBatchNorm d_weight");
  require(at::allclose(norm->running_var.cpu(), plain->running_var, 1e-4, 1e-5), "running_var");
  said(world, "SyncBatchNorm equals the whole batch");
}

void join_and_hooks(World& world) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 2));
  net->to(world.device());
  lockstep::DistributedDataParallel model{net, world, {.force_reducer = true}};
  model.register_comm_hook(lockstep::hooks::bf16_compress());
  model.join([&] {
    for (int step = 0; step <= world.rank(); ++step) {
      model(torch::ones({2, 4}, world.device())).sum().backward();
      torch::NoGradGuard no_grad;
      for (auto& p : net->parameters()) p.sub_(p.grad(), 0.01);
      net->zero_grad();
    }
  });
  model.verify_replicas();
  said(world, "join with uneven inputs, bf16 hook");
}

// The owner's pass against all-reduce, clipping and a replicated step, both on the device. With two
// ranks the sums have only one order, and the element-wise kernels are the same, so the bits are
// equal.
void sharded_optimizer(World& world, at::ScalarType dtype) {
  const auto make = [&] {
    torch::manual_seed(5);
    torch::nn::Sequential net(torch::nn::Linear(40, 300), torch::nn::Tanh(),
                              torch::nn::Linear(300, 50));
    net->to(world.device(), dtype);
    return net;
  };
  const auto batch = [&](int step) {
    torch::manual_seed(100 + 10 * step + world.rank());
    return torch::randn({6, 40}).to(world.device(), dtype);
  };
  torch::nn::Sequential net = make(), plain = make();
  lockstep::FullyShard model(*net, lockstep::Mesh(world, {{"shard", -1}}),
                             {.shard = lockstep::Shard::kState});
  const lockstep::optim::AdamWOptions options{.lr = 0.01, .weight_decay = 0.1};
  const auto made = model.make_optimizer({{net->parameters(), options}});
  lockstep::optim::Optimizer& optimizer = *made;
  const auto backward = [&](const at::Tensor& x) {
    model.before_forward();
    model.backward(net->forward(x).square().mean());
  };
  // Made for a model, so that it steps float in one pass, too.
  lockstep::optim::ReplicatedOptimizer replicated(
      lockstep::optim::NamedParameters(plain->named_parameters().pairs()), options);
  for (int step = 0; step < 5; ++step) {
    backward(batch(step));
    plain->forward(batch(step)).square().mean().backward();
    for (auto& p : plain->parameters()) world.all_reduce(p.grad(), lockstep::ReduceOp::kAvg).wait();
    double squares = 0;
    for (auto& p : plain->parameters())
      squares += p.grad().to(torch::kDouble).square().sum().item<double>();
    optimizer.set_lr(0.01 / (1 + step));
    replicated.set_lr(0.01 / (1 + step));
    const auto result = optimizer.step({.want_grad_norm = true, .skip_non_finite = true});
    require(!result.was_skipped(), "a good step is taken");
    require(std::abs(result.norm() - std::sqrt(squares)) < 1e-3 * std::sqrt(squares),
            "the norm of the averaged gradients");
    replicated.step();
    optimizer.zero_grad();
    replicated.zero_grad();
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    const at::Tensor ours = net->parameters()[i].detach(), theirs = plain->parameters()[i].detach();
    require(ours.device() == world.device(), "parameters stay on the device");
    const double tolerance = dtype == torch::kFloat ? 1e-6 : 1e-2;
    require(world.size() <= 2 ? ours.equal(theirs) : at::allclose(ours, theirs, 0, tolerance),
            "the sharded step is the replicated one");
  }
  const double state = all_reduce(world, static_cast<double>(optimizer.state_bytes()));
  require(state ==
              2.0 * (40 * 300 + 300 + 300 * 50 + 50) * static_cast<double>(c10::elementSize(dtype)),
          "every element's state is held once");
  // Clipped, and skipped on all ranks when one has a bad gradient.
  backward(batch(9));
  require(optimizer.step({.max_grad_norm = 1e-3}).norm() > 1e-3, "a step that is clipped");
  optimizer.zero_grad();
  const at::Tensor before = net->parameters()[0].detach().clone();
  auto bad = batch(10);
  if (world.rank() == world.size() - 1) bad.fill_(INFINITY);
  backward(bad);
  require(optimizer.step({.skip_non_finite = true}).was_skipped(), "a bad step is skipped");
  require(net->parameters()[0].detach().equal(before), "and changes nothing");
  const auto saved = optimizer.state_dict();
  optimizer.load_state_dict(saved);
  for (const auto& [name, tensor] : optimizer.state_dict())
    require(tensor.equal(saved.at(name)), "state out and in");
  model.verify_parameters();
  said(world, dtype == torch::kFloat ? "Shard::kState, float" : "Shard::kState, bfloat16");
}

// By this rank's own norm, on the device. Reading gradients there is nobody's concern.
void clipped_by_libtorch(World& world) {
  torch::nn::Linear net(40, 300);
  net->to(world.device());
  lockstep::FullyShard model(*net, lockstep::Mesh(world, {{"shard", -1}}),
                             {.shard = lockstep::Shard::kState});
  const auto optimizer =
      model.make_optimizer({{net->parameters(), lockstep::optim::AdamWOptions{}}});
  for (const bool clips : {false, true}) {
    model.before_forward();
    model.backward(net(torch::randn({6, 40}, world.device())).square().mean());
    for (auto& p : net->parameters())
      require(std::isfinite(p.grad().norm().item<double>()), "gradients are read");
    if (clips) torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3);
    bool refused = false;
    try {
      optimizer->step();
    } catch (const lockstep::UsageError&) {
      refused = true;
    }
    require(refused == (clips && world.size() > 1), "LibTorch's clipping is refused, and no more");
    optimizer->zero_grad();
  }
  said(world, "gradients that LibTorch has clipped");
}

// Batches that workers copy on a side stream are complete when the training stream reads them, even
// while that stream is busy and the memory of earlier batches is reused.
void loader(World& world) {
  using namespace lockstep::data;
  const auto rows = torch::arange(64 * 4096, torch::kFloat).view({64, 4096});
  const auto labels = torch::arange(64);
  const auto busy = torch::randn({1024, 1024}, world.device());
  for (const bool pin : {true, false}) {
    auto batches = lockstep::data::loader(
        std::make_shared<TensorDataset>(rows, labels), world,
        {.batch_size = 4, .shuffle = true, .num_workers = 2, .pin_memory = pin});
    for (int epoch = 0; epoch < 3; ++epoch) {
      auto wrong = torch::zeros({}, torch::dtype(torch::kLong).device(world.device()));
      for (auto& batch : batches.epoch(epoch)) {
        require(batch.data.device() == world.device(), "a batch arrives on the device");
        for (int i = 0; i < 4; ++i) at::mm(busy, busy);
        const auto wanted = rows.index_select(0, torch::tensor(batch.indices));
        wrong += batch.data.ne(wanted.to(world.device())).sum();
        wrong += batch.target.ne(torch::tensor(batch.indices).to(world.device())).sum();
      }
      require(wrong.item<std::int64_t>() == 0, "batches are what the dataset holds");
    }
    require(batches.timing().total.transfer > 0, "transfers are timed");
  }
  said(world, "loader copies on a side stream");
}

double device_ms(const lockstep::ledger::Totals& spent, lockstep::ledger::Phase phase) {
  return static_cast<double>(spent.device_ns[lockstep::ledger::index(phase)]) / 1e6;
}

// Phases by the device's clock, while the host only enqueues.
void device_times(World& world) {
  using lockstep::ledger::Phase;
  using Clock = std::chrono::steady_clock;
  const auto milliseconds = [](Clock::duration time) {
    return std::chrono::duration<double, std::milli>(time).count();
  };
  const auto a = torch::randn({4096, 4096}, world.device());
  const auto multiply = [&](int times) {
    for (int i = 0; i < times; ++i) at::mm(a, a);
  };
  multiply(2);
  torch::cuda::synchronize();
  lockstep::mark_device_phase(Phase::kNone, world.device());
  const auto before = lockstep::ledger::totals();
  const auto start = Clock::now();
  for (int step = 0; step < 10; ++step) {
    lockstep::mark_device_phase(Phase::kForward, world.device());
    multiply(6);
    lockstep::mark_device_phase(Phase::kBackward, world.device());
    multiply(2);
  }
  lockstep::mark_device_phase(Phase::kNone, world.device());
  const double host = milliseconds(Clock::now() - start);
  torch::cuda::synchronize();
  const double whole = milliseconds(Clock::now() - start);
  lockstep::mark_device_phase(Phase::kNone, world.device());  // reads those that are passed
  const auto spent = lockstep::ledger::since(before, lockstep::ledger::totals());
  const double forward = device_ms(spent, Phase::kForward);
  const double backward = device_ms(spent, Phase::kBackward);
  std::printf("gpu: device times: forward %.2f, backward %.2f of %.2f ms; enqueued in %.2f ms\n",
              forward, backward, whole, host);
  require(forward + backward < whole * 1.05 && forward + backward > whole * 0.8,
          "marks add up to the time that the device took");
  require(forward > 2 * backward && forward < 4 * backward, "phases have their own time");
  require(host < 0.5 * whole, "marks do not wait for the device");
  said(world, "device times without host syncs");
}

void trainer_times(World& world) {
  using lockstep::ledger::Phase;
  lockstep::TrainerTask task;
  torch::nn::Sequential net(torch::nn::Linear(1024, 4096), torch::nn::ReLU(),
                            torch::nn::Linear(4096, 1024));
  task.module = net.ptr();
  task.loss = [&](const lockstep::data::Batch& batch) {
    return net->forward(batch.data).square().mean();
  };
  task.train_data = std::make_shared<lockstep::data::TensorDataset>(torch::randn({512, 1024}));
  lockstep::TrainingArguments a;
  a.output_dir = std::filesystem::temp_directory_path() / "lockstep_gpu_trainer_times";
  a.max_steps = 40;
  a.per_device_train_batch_size = 64;
  a.logging_steps = 20;
  a.save_strategy = lockstep::Interval::kNo;
  a.disable_tqdm = true;
  // The time since the last mark is booked with the next one, so mark here to keep it out of ours.
  for (int i = 0; i < 2; ++i) {
    lockstep::mark_device_phase(Phase::kNone, world.device());
    torch::cuda::synchronize();
  }
  lockstep::mark_device_phase(Phase::kNone, world.device());
  const auto before = lockstep::ledger::totals();
  lockstep::Trainer trainer(world, std::move(task), a);
  trainer.train();
  const auto spent = lockstep::ledger::since(before, lockstep::ledger::totals());
  for (const Phase phase : {Phase::kForward, Phase::kBackward, Phase::kOptimizer})
    require(device_ms(spent, phase) > 0, "every phase of a step has device time");
  require(world.size() == 1 || device_ms(spent, Phase::kCommunication) > 0,
          "waiting for the buckets has device time");
  double sum = 0;
  for (const std::uint64_t ns : spent.device_ns) sum += static_cast<double>(ns);
  require(sum < 1.05 * static_cast<double>(spent.time_ns), "and no more than passed");
  world.barrier();
  if (world.is_leader()) std::filesystem::remove_all(a.output_dir);
  said(world, "a Trainer's device times");
}

lockstep::models::Gpt drawn_net(const World& world) {
  torch::manual_seed(3);
  lockstep::models::Gpt net(lockstep::models::GptConfig{
      .n_layer = 2, .n_head = 2, .n_embd = 64, .vocab_size = 128, .n_positions = 64});
  net->to(world.device());
  return net;
}

// A model, its optimizer and a step of it, with DDP.
struct Captured {
  explicit Captured(World& world)
      : net(drawn_net(world)),
        model(net, world, {.bucket_cap_mb = 0.1, .force_reducer = true}),
        optimizer(lockstep::optim::NamedParameters(net->named_parameters().pairs()),
                  lockstep::optim::AdamWOptions{.lr = 1e-3}) {}

  lockstep::CapturedStep::Tensors step(const at::Tensor& ids) {
    const auto loss = lockstep::models::next_token_loss(model(ids), ids);
    loss.backward();
    optimizer.step(how);
    optimizer.zero_grad();
    return {loss.detach()};
  }

  lockstep::optim::StepOptions how{.max_grad_norm = 1.0};
  lockstep::models::Gpt net;
  lockstep::DistributedDataParallel<lockstep::models::Gpt> model;
  lockstep::optim::ReplicatedOptimizer optimizer;
};

at::Tensor drawn_ids(World& world, int step, std::int64_t length) {
  torch::manual_seed(1000 * world.rank() + step);
  return torch::randint(128, {2, length}, torch::dtype(torch::kLong).device(world.device()));
}

// Collectives are in the graph. Ranks reach a shape at different steps, and choose together. log()
// returns before the device has computed the value, and writes the right one.
void logged_values(World& world) {
  const std::string place = std::filesystem::temp_directory_path() / "lockstep_gpu_run_log";
  if (world.is_leader()) std::filesystem::remove_all(place);
  {
    lockstep::RunLog run_log{place, world, {.tensorboard = false}};
    at::Tensor x = torch::randn({4096, 4096}, torch::device(world.device()));
    for (int i = 0; i < 20; ++i) x = x.matmul(x).clamp(-1, 1);
    at::Tensor loss = x.mul(0).sum() + 2.5;
    run_log.log({{"loss", loss}, {"learning_rate", 0.5}}, 1);
    if (world.is_leader())
      require(std::filesystem::is_empty(place + "/metrics.jsonl"), "log() waited for the device");
    loss.fill_(7);
  }
  std::string line;
  std::getline(std::ifstream(place + "/metrics.jsonl"), line);
  if (world.is_leader())
    require(line == R"({"step":1,"loss":2.5,"learning_rate":0.5})", "the value that was logged");
  said(world, "RunLog writes a value that nobody waited for");
}

void captured_ranks(World& world) {
  Captured plain(world), captured(world);
  lockstep::CapturedStep step{captured.optimizer,
                              {.step = captured.how,
                               .parameters = captured.net->parameters(),
                               .parallelism = captured.model.parallelism()},
                              [&](const auto& inputs, int) { return captured.step(inputs[0]); }};
  int replays = 0;
  for (int i = 0; i < 16; ++i) {
    const auto ids = drawn_ids(world, i, i >= 6 && i < 11 && world.rank() == 1 ? 24 : 32);
    const auto want = plain.step(ids);
    require(step.run({ids})[0].equal(want[0]), "captured: the loss of a step as it is");
    replays += step.replayed() ? 1 : 0;
  }
  require(step.unavailable_reason().empty(), "steps with collectives are captured");
  require(replays >= 8, "and replayed");
  const auto left = plain.net->parameters(), right = captured.net->parameters();
  for (std::size_t i = 0; i < left.size(); ++i)
    require(left[i].equal(right[i]), "captured: the weights of steps as they are");
  captured.model.verify_replicas();
  said(world, "captured steps of all ranks");
}

using WeakTensors = std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>;

WeakTensors gradients_of(const Captured& training) {
  WeakTensors gradients;
  for (const at::Tensor& parameter : training.net->parameters())
    gradients.emplace_back(parameter.grad().getIntrusivePtr());
  return gradients;
}

// Windows of many micro-batches: those in the middle come often before the first window has ended,
// when gradients and buckets are not yet where they will be.
void captured_windows(World& world) {
  constexpr int kPasses = 8;
  Captured plain(world), captured(world);
  const auto work = [](Captured& training, const at::Tensor& ids,
                       int variant) -> lockstep::CapturedStep::Tensors {
    std::optional<lockstep::NoSync> guard;
    if (variant != 2) guard.emplace(training.model.no_sync());
    const auto loss = lockstep::models::next_token_loss(training.model(ids), ids);
    (loss / kPasses).backward();
    if (variant != 2) return {loss.detach()};
    training.optimizer.step(training.how);
    training.optimizer.zero_grad();
    return {loss.detach()};
  };
  lockstep::CapturedStep step{
      captured.optimizer,
      {.step = captured.how,
       .parameters = captured.net->parameters(),
       .parallelism = captured.model.parallelism()},
      [&](const auto& inputs, int variant) { return work(captured, inputs[0], variant); }};
  int replays = 0;
  constexpr int kWindows = 12;
  WeakTensors of_plain, of_captured;
  for (int i = 0; i < kWindows * kPasses; ++i) {
    const int variant = i % kPasses == 0 ? 0 : i % kPasses == kPasses - 1 ? 2 : 1;
    const auto ids = drawn_ids(world, i, 32);
    const auto want = work(plain, ids, variant);
    require(step.run({ids}, variant)[0].equal(want[0]), "windows: the loss of a step as it is");
    if (i >= 6 * kPasses) replays += step.replayed() ? 1 : 0;
    // The first window's gradients, which no graph has made, end with it.
    if (i == kPasses - 2) of_plain = gradients_of(plain), of_captured = gradients_of(captured);
    if (i == kPasses)
      for (std::size_t k = 0; k < of_plain.size(); ++k)
        require(of_captured[k].expired() || !of_plain[k].expired(),
                "windows: a graph does not keep the gradients of an update that is over");
  }
  require(step.unavailable_reason().empty(), "windows are captured");
  require(replays == 6 * kPasses, "and from the sixth on replayed");
  const auto left = plain.net->parameters(), right = captured.net->parameters();
  for (std::size_t i = 0; i < left.size(); ++i)
    require(left[i].equal(right[i]), "windows: the weights of steps as they are");
  said(world, "captured windows of eight micro-batches");
}

// A rank agrees to replay and then does not: the others leave their graph at the deadline.
int stuck_in_a_graph(World& world) {
  Captured captured(world);
  lockstep::CapturedStep step{captured.optimizer,
                              {.step = captured.how,
                               .parameters = captured.net->parameters(),
                               .parallelism = captured.model.parallelism()},
                              [&](const auto& inputs, int) { return captured.step(inputs[0]); }};
  for (int i = 0; i < 8; ++i) step.run({drawn_ids(world, i, 32)})[0].item<double>();
  require(step.replayed(), "steps are replayed");
  if (world.rank() != 0) {
    all_reduce(world, 2, lockstep::ReduceOp::kMin);  // as a rank that replays
    std::this_thread::sleep_for(3 * world.timeout());
    return 0;
  }
  try {
    const auto outputs = step.run({drawn_ids(world, 8, 32)});
    std::printf("gpu: loss %f\n", outputs[0].item<double>());  // until the graph is left
    all_reduce(world, 1);
  } catch (const lockstep::CommError& e) {
    std::printf("gpu: left a graph: %s\n", e.what());
    return std::string_view(e.what()).find("captured_step") != std::string_view::npos ? 0 : 1;
  }
  return 1;
}

// What one rank cannot record runs uncaptured on all of them.
void captured_on_some_ranks(World& world) {
  Captured plain(world), captured(world);
  lockstep::CapturedStep step{captured.optimizer,
                              {.step = captured.how,
                               .parameters = captured.net->parameters(),
                               .parallelism = captured.model.parallelism()},
                              [&](const auto& inputs, int) {
                                // Before its first collective, which the others record.
                                if (world.rank() == world.size() - 1)
                                  static_cast<void>(inputs[0].sum().item());
                                return captured.step(inputs[0]);
                              }};
  for (int i = 0; i < 8; ++i) {
    const auto ids = drawn_ids(world, i, 32);
    require(step.run({ids})[0].equal(plain.step(ids)[0]), "not captured: the same loss");
  }
  const std::string& reason = step.unavailable_reason();
  const bool culprit = world.rank() == world.size() - 1;
  require(reason.find(culprit ? "_local_scalar_dense" : "another rank") != std::string::npos,
          reason.c_str());
  captured.model.verify_replicas();
  said(world, "a step that one rank cannot record");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "stuck") {
    World world = World::from_env();
    return stuck_in_a_graph(world);
  }
  return lockstep::run([](World& world) {
    require(world.device().is_cuda(), "the device is a GPU");
    train_gpt(world, false);
    train_gpt(world, true);
    unused_and_mixed_devices(world);
    moved_after_wrapping(world);
    memory_line(world);
    sync_batch_norm(world);
    join_and_hooks(world);
    sharded_optimizer(world, torch::kFloat);
    sharded_optimizer(world, torch::kBFloat16);
    clipped_by_libtorch(world);
    loader(world);
    device_times(world);
    trainer_times(world);
    logged_values(world);
    captured_ranks(world);
    captured_windows(world);
    captured_on_some_ranks(world);
    said(world, "all checks passed");
  });
}
