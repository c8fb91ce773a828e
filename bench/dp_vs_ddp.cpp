// lockstep bench dp-vs-ddp: one process that drives all devices (DataParallel) beside one process
// for each (DistributedDataParallel). Both stay alive for the whole run and take turns. Orders:
//
//   {"do": "new", "type"}   a model with the start's weights, a fresh Adam: {"parameters"}. type:
//                           float64 or float32, to compare weights (Adam has a large epsilon), or
//                           tf32, to measure: float32 that may use TF32 on a GPU
//   {"do": "save", "path"}  rank 0 writes the weights as doubles, one after the other
//   {"do": "run", "steps"}  trains on the following batches: {"seconds", "loss"}
//   {"do": "parts", "steps"}   {"ms"} of each of kDpParts, medians; -1: this side has none
//
// What step k trains on is a function of k; a rank takes its part of the batch.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/thread_pool.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bench/harness.h"
#include "bench/processes.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/models/resnet.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/run.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;
using Clock = Deadline::Clock;

// ---------------------------------------------------------------- DataParallel

// DataParallel does what torch.nn.DataParallel does: a step scatters the batch, copies parameters
// and buffers to the replicas, runs each replica in a thread of its own, gathers the outputs on
// device 0, runs backward there and in the replicas, and adds their gradients to device 0's. Where
// there is a choice it favours DataParallel: modules and threads of replicas are made once (Python
// makes them in every step), and on CPUs too the replicas run backward in threads of their own, as
// autograd does for GPUs only. A replica on a CPU has its own memory, so scattering and replicating
// copy there as they do between GPUs. Buffers that forward changes are those of replica 0, which is
// also DistributedDataParallel's rule.

// Threads that run a function with their number, all at once.
class ReplicaThreads {
 public:
  explicit ReplicaThreads(std::size_t count) : errors_(count), pool_(static_cast<int>(count)) {}

  // Returns when all have finished; throws what one of them threw.
  void run(const std::function<void(std::size_t)>& body) {
    for (std::size_t i = 0; i < errors_.size(); ++i)
      pool_.run([&, i] {
        try {
          body(i);
        } catch (...) {
          errors_[i] = std::current_exception();
        }
      });
    pool_.waitWorkComplete();
    for (std::exception_ptr& error : errors_)
      if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }

 private:
  std::vector<std::exception_ptr> errors_;
  c10::ThreadPool pool_;
};

// The parts of a step, in its order. The update is the caller's.
enum DpPart : std::size_t {
  kScatterPart,
  kReplicatePart,
  kForwardPart,
  kGatherPart,
  kLossPart,
  kBackwardPart,
  kReducePart,
  kUpdatePart
};

template <typename Net>
class DataParallel {
 public:
  DataParallel(const std::function<std::shared_ptr<Net>()>& make, std::vector<c10::Device> devices)
      : devices_(std::move(devices)), threads_(devices_.size()) {
    for (const c10::Device device : devices_) {
      replicas_.push_back(make());
      replicas_.back()->to(device);
    }
  }

  const std::shared_ptr<Net>& module() const { return replicas_.front(); }
  std::vector<at::Tensor> parameters() const { return module()->parameters(); }
  // Called at the end of each part of a step.
  void on_part(std::function<void(DpPart)> reached) { reached_ = std::move(reached); }

  at::Tensor forward(const at::Tensor& batch) {
    const std::vector<at::Tensor> inputs = scatter(batch);
    reached(kScatterPart);
    replicate();
    reached(kReplicatePart);
    outputs_.assign(devices_.size(), {});
    threads_.run([&](std::size_t i) {
      const c10::DeviceGuard guard(devices_[i]);
      outputs_[i] = replicas_[i]->forward(inputs[i]);
    });
    reached(kForwardPart);
    gathered_ = gather().requires_grad_();
    reached(kGatherPart);
    return gathered_;
  }

  void backward(const at::Tensor& loss) {
    loss.backward();
    reached(kLossPart);
    const std::vector<at::Tensor> gradients = scatter(gathered_.grad());
    threads_.run([&](std::size_t i) {
      const c10::DeviceGuard guard(devices_[i]);
      outputs_[i].backward(gradients[i]);
    });
    outputs_.clear();
    reached(kBackwardPart);
    reduce();
    reached(kReducePart);
  }

 private:
  void reached(DpPart part) const {
    if (reached_) reached_(part);
  }

  std::vector<at::Tensor> scatter(const at::Tensor& whole) const {
    std::vector<at::Tensor> parts = whole.chunk(static_cast<std::int64_t>(devices_.size()));
    for (std::size_t i = 1; i < parts.size(); ++i)
      parts[i] = parts[i].to(devices_[i], /*non_blocking=*/true, /*copy=*/true);
    return parts;
  }

  void replicate() const {
    const torch::NoGradGuard no_grad;
    const auto copy = [](const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
      for (std::size_t k = 0; k < from.size(); ++k) to[k].copy_(from[k], /*non_blocking=*/true);
    };
    for (std::size_t i = 1; i < replicas_.size(); ++i) {
      copy(module()->parameters(), replicas_[i]->parameters());
      copy(module()->buffers(), replicas_[i]->buffers());
    }
  }

  at::Tensor gather() const {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& output : outputs_)
      parts.push_back(output.detach().to(devices_.front(), /*non_blocking=*/true));
    return at::cat(parts);
  }

  void reduce() const {
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> own = parameters();
    for (std::size_t i = 1; i < replicas_.size(); ++i) {
      const std::vector<at::Tensor> others = replicas_[i]->parameters();
      for (std::size_t k = 0; k < own.size(); ++k) {
        const at::Tensor& gradient = others[k].grad();
        if (gradient.defined()) own[k].grad().add_(gradient.to(devices_.front()));
        others[k].mutable_grad().reset();
      }
    }
  }

  std::vector<c10::Device> devices_;
  std::vector<std::shared_ptr<Net>> replicas_;
  ReplicaThreads threads_;
  std::vector<at::Tensor> outputs_;
  at::Tensor gathered_;
  std::function<void(DpPart)> reached_;
};

// ---------------------------------------------------------------- both sides

constexpr const char* kDp = "dp";
constexpr const char* kDdp = "ddp";

struct DpSettings {
  std::string contender;
  std::string model;  // mlp, resnet18 or resnet50
  std::string device = "cpu";
  int ranks = 2;                 // or replicas
  int threads = 1;               // per rank or replica, on the CPU
  std::int64_t batch_size = 64;  // over all of them
  std::int64_t image_size = 32;
  double lr = 1e-3;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DpSettings, contender, model, device, ranks, threads, batch_size,
                                   image_size, lr)

// By DpPart.
struct DpPartWords {
  const char* name;
  const char* what;       // DataParallel does there
  bool overhead = false;  // DistributedDataParallel does none of it, or does it while it computes
};
constexpr DpPartWords kDpParts[] = {
    {"scatter", "copies parts of the batch to the replicas", true},
    {"replicate", "copies all weights to the replicas", true},
    {"forward", "all replicas at once"},
    {"gather", "copies the outputs to device 0", true},
    {"loss", "on device 0, the others wait"},
    {"backward", "all replicas at once"},
    {"gradients", "adds the replicas' on device 0 (DDP: exposed all-reduce)", true},
    {"update", "on device 0, the others wait"}};

// ---------------------------------------------------------------- a rank

constexpr std::int64_t kClasses = 10;
constexpr std::int64_t kDpBatches = 4;
constexpr std::size_t kParts = std::size(kDpParts);

// An image classifier of any kind.
class Classifier : public torch::nn::Module {
 public:
  explicit Classifier(const DpSettings& settings) {
    if (settings.model == "mlp") {
      mlp_ = register_module("mlp", models::Mlp(models::MlpConfig{
                                        .inputs = 3 * settings.image_size * settings.image_size,
                                        .hidden = 1024,
                                        .layers = 3,
                                        .outputs = kClasses}));
    } else {
      resnet_ = register_module(
          "resnet", models::ResNet(models::ResNetConfig{
                        .depth = settings.model == "resnet50" ? 50 : 18, .num_classes = kClasses}));
    }
  }
  at::Tensor forward(const at::Tensor& images) {
    return mlp_ ? mlp_->forward(images.flatten(1)) : resnet_->forward(images);
  }

 private:
  models::Mlp mlp_{nullptr};
  models::ResNet resnet_{nullptr};
};

struct Images {
  at::Tensor data, target;
};

// Rows [first, first + rows) of the batch for step k; every rank draws the whole batch.
Images draw(const DpSettings& settings, std::int64_t k, std::int64_t first, std::int64_t rows) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(1000 + k));
  const auto size = settings.image_size;
  const at::Tensor data = torch::randn({settings.batch_size, 3, size, size}, generator);
  const at::Tensor target =
      torch::randint(kClasses, {settings.batch_size}, generator, at::TensorOptions(at::kLong));
  return {data.narrow(0, first, rows).contiguous(), target.narrow(0, first, rows).contiguous()};
}

class Worker {
 public:
  Worker(const DpSettings& settings, World& world) : settings_(settings), world_(world) {
    const std::int64_t rows = is_dp() ? settings.batch_size : settings.batch_size / settings.ranks;
    for (std::int64_t k = 0; k < kDpBatches; ++k)
      batches_.push_back(draw(settings, k, is_dp() ? 0 : rows * world.rank(), rows));
  }

  json obey(const json& order) {
    const std::string what = order.at("do");
    if (what == "new") return begin(order.at("type"));
    LOCKSTEP_ASSERT(optimizer_ != nullptr);
    if (what == "run") return train(order.at("steps"));
    if (what == "parts") return parts(order.at("steps"));
    save(order.at("path"));
    return json::object();
  }

 private:
  bool is_dp() const { return settings_.contender == kDp; }

  json begin(const std::string& type) {
    optim::set_tf32(type == "tf32");
    const auto number = type == "float64" ? at::kDouble : at::kFloat;
    const c10::Device device = world_.device();
    dp_.reset();
    ddp_.reset();
    placed_.clear();
    trained_ = 0;
    for (const Images& batch : batches_)
      placed_.push_back({batch.data.to(device, number), batch.target.to(device)});
    const auto drawn = [&] {
      torch::manual_seed(0);
      auto net = std::make_shared<Classifier>(settings_);
      net->to(device, number);
      return net;
    };
    if (is_dp()) {
      dp_.emplace(drawn, replica_devices());
      net_ = dp_->module();
      dp_->on_part([this](DpPart part) { reached(part); });
    } else {
      net_ = drawn();
      ddp_.emplace(net_, world_);
    }
    // With the usual epsilon, Adam turns the smallest difference of a gradient near zero into one
    // as large as the learning rate. With a large one its update follows the gradient and can be
    // compared.
    optimizer_ = std::make_unique<optim::Adam>(
        net_->parameters(),
        optim::AdamOptions{.lr = settings_.lr,
                           .eps = type == "tf32" ? optim::AdamOptions{}.eps : 0.1});
    std::int64_t count = 0;
    for (const at::Tensor& parameter : net_->parameters()) count += parameter.numel();
    return {{"parameters", count}};
  }

  // Replica i is on GPU i, as rank i is; LOCKSTEP_SHARE_DEVICE lets them share one.
  std::vector<c10::Device> replica_devices() const {
    std::vector<c10::Device> devices;
    for (int i = 0; i < settings_.ranks; ++i)
      devices.push_back(
          world_.device().is_cuda()
              ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(i % cuda_device_count()))
              : world_.device());
    return devices;
  }

  // Marks the end of a part while a breakdown is measured.
  void reached(DpPart part) {
    if (!timed_) return;
    const Clock::time_point time = now();
    part_ms_[part] = std::chrono::duration<double, std::milli>(time - part_begin_).count();
    part_begin_ = time;
  }
  Clock::time_point now() const {
    if (world_.device().is_cuda())
      for (c10::DeviceIndex i = 0; i < torch::cuda::device_count(); ++i)
        torch::cuda::synchronize(i);
    return Clock::now();
  }

  at::Tensor step() {
    const Images& batch = placed_[trained_++ % placed_.size()];
    at::Tensor loss;
    if (dp_) {
      loss = torch::cross_entropy_loss(dp_->forward(batch.data), batch.target);
      dp_->backward(loss);
    } else {
      const at::Tensor output = (*ddp_)(batch.data);
      reached(kForwardPart);
      loss = torch::cross_entropy_loss(output, batch.target);
      reached(kLossPart);
      loss.backward();
      reached(kBackwardPart);
    }
    optimizer_->step();
    optimizer_->zero_grad();
    reached(kUpdatePart);
    return loss.detach();
  }

  json train(int steps) {
    const auto start = Clock::now();
    at::Tensor loss;
    for (int i = 0; i < steps; ++i) loss = step();
    const double value = loss.item<double>();  // waits for the device
    return {{"seconds", seconds_since(start)}, {"loss", value}};
  }

  json parts(int steps) {
    std::array<std::vector<double>, kParts> samples;
    timed_ = true;
    for (int i = 0; i < steps; ++i) {
      part_ms_.fill(-1);
      part_begin_ = now();
      step();
      if (ddp_) {  // from the last gradient to the end of backward
        const StepTiming& timing = ddp_->last_timing();
        part_ms_[kReducePart] = timing.finalized_ms - timing.last_gradient_ms;
        part_ms_[kBackwardPart] -= part_ms_[kReducePart];
      }
      for (std::size_t k = 0; k < kParts; ++k) samples[k].push_back(part_ms_[k]);
    }
    timed_ = false;
    json ms = json::array();
    for (const auto& part : samples) ms.push_back(median(part));
    return {{"ms", ms}};
  }

  void save(const std::string& path) {
    if (ddp_) ddp_->verify_replicas();
    if (!world_.is_leader()) return;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& parameter : net_->parameters())
      flat.push_back(parameter.detach().to(at::kCPU, at::kDouble).flatten());
    const at::Tensor values = at::cat(flat);
    write_file_atomically(path,
                          {static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
  }

  const DpSettings settings_;
  World& world_;
  std::vector<Images> batches_, placed_;
  std::size_t trained_ = 0;
  std::shared_ptr<Classifier> net_;
  std::optional<DataParallel<Classifier>> dp_;
  std::optional<DistributedDataParallel<std::shared_ptr<Classifier>>> ddp_;
  std::unique_ptr<optim::Adam> optimizer_;
  bool timed_ = false;
  Clock::time_point part_begin_;
  std::array<double, kParts> part_ms_{};  // -1: this side has no such part
};

}  // namespace

int dp_vs_ddp_rank(const json& description, const std::string& orders) {
  const auto settings = description.get<DpSettings>();
  torch::set_num_threads(settings.threads);
  // NCCL refuses two ranks on one GPU of one host; with different names it takes them for two.
  if (env::get_bool("LOCKSTEP_SHARE_DEVICE").value_or(false))
    ::setenv("NCCL_HOSTID", ("rank" + env::get("RANK").value_or("0")).c_str(), /*overwrite=*/0);
  return run(
      [&](World& world) {
        Worker worker(settings, world);
        serve(orders, world.rank(), [&](const json& order) { return worker.obey(order); });
      },
      {.device = c10::Device(settings.device)});
}

namespace {

// ---------------------------------------------------------------- the benchmark

// Few, because batch norms over small batches let rounding errors grow from step to step.
constexpr int kDpSteps = 2;
constexpr int kBlock = 10;      // steps of one side before the other's turn
constexpr int kPartSteps = 10;  // at most
// The two sides may differ by the rounding of both, each about the difference between float32 and
// float64 on one side; twice that for good measure.
constexpr double kRoundings = 4;
// Rounding must be small compared to how far the steps have moved, or the comparison is
// meaningless.
constexpr double kMaxRounding = 0.05;

struct DpSide {
  explicit DpSide(const DpSettings& settings)
      : name(settings.contender),
        ranks({.name = settings.contender,
               .ranks = settings.contender == kDp ? 1 : settings.ranks,
               .rank = "dp-vs-ddp",
               .settings = settings}) {}

  // Milliseconds per step of the slowest rank.
  double train(int steps) {
    double slowest = 0;
    for (const json& answer : ranks.ask_all({{"do", "run"}, {"steps", steps}})) {
      if (!answer.at("loss").is_number())
        throw Error("bench", fmt::format("the loss of '{}' is not finite", name));
      slowest = std::max(slowest, answer.at("seconds").get<double>());
    }
    return 1e3 * slowest / steps;
  }
  void begin(const char* type) {
    parameters = ranks.ask({{"do", "new"}, {"type", type}}).at("parameters");
  }
  std::vector<double> weights() {
    ranks.ask({{"do", "save"}, {"path", scratch.file("weights")}});
    const std::string bytes = read_file(scratch.file("weights"), std::size_t{1} << 33);
    std::vector<double> values(bytes.size() / sizeof(double));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(double));
    return values;
  }

  std::string name;
  RankProcesses ranks;
  Scratch scratch;
  double parameters = 0;
  std::vector<double> block_ms{};  // per step, for each block
  std::vector<double> parts{};     // rank 0's
};
using DpSides = std::deque<DpSide>;

// The length of a - b.
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  LOCKSTEP_ASSERT(a.size() == b.size() && !a.empty());
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

// From the same weights and batches both must arrive at the same weights. The effect of float32 is
// measured: DataParallel also trains in float64.
void verify(DpSide& dp, DpSide& ddp) {
  dp.begin("float64");
  const std::vector<double> start = dp.weights();
  dp.train(kDpSteps);
  const std::vector<double> exact = dp.weights();
  const auto trained = [&](DpSide& side) {
    side.begin("float32");
    side.train(kDpSteps);
    return side.weights();
  };
  const std::vector<double> one = trained(dp), many = trained(ddp);
  const double moved = distance(exact, start), rounding = distance(one, exact);
  const double difference = distance(one, many);
  if (!(rounding <= kMaxRounding * moved))
    throw Error("bench", fmt::format("{} in float32 and float64 differ by {:.2g} of what {} steps "
                                     "moved the weights; nothing could be verified",
                                     kDp, rounding / moved, kDpSteps));
  if (!(difference <= kRoundings * rounding))
    throw Error("bench",
                fmt::format("{} and {} do not train the same: after {} steps the weights "
                            "are {:.3g} apart; rounding explains {:.3g}, and they moved "
                            "by {:.3g}",
                            kDp, kDdp, kDpSteps, difference, kRoundings * rounding, moved));
  fmt::print(stderr,
             "verified: after {} steps the weights of both are {:.2g} apart; they moved by {:.2g}, "
             "and rounding explains {:.2g}\n",
             kDpSteps, difference, moved, kRoundings * rounding);
}

void measure(DpSides& sides, int steps) {
  for (DpSide& side : sides) {
    side.begin("tf32");
    side.train(std::min(steps, 3));
  }
  by_turns({.rounds = (steps + kBlock - 1) / kBlock, .unit = "ms a step", .what = "block"}, sides,
           [&](DpSide& side) {
             const int before = kBlock * static_cast<int>(side.block_ms.size());
             return side.block_ms.emplace_back(side.train(std::min(kBlock, steps - before)));
           });
  for (DpSide& side : sides) {
    const json order{{"do", "parts"}, {"steps", std::min(steps, kPartSteps)}};
    side.parts = side.ranks.ask(order).at("ms").get<std::vector<double>>();
    side.ranks.finish();
  }
}

double overhead_ms(const DpSide& dp) {
  double sum = 0;
  for (std::size_t i = 0; i < dp.parts.size(); ++i)
    if (kDpParts[i].overhead) sum += dp.parts[i];
  return sum;
}

Report steps_report(const DpSides& sides, const DpSettings& s, int steps) {
  Report report("dp-vs-ddp",
                fmt::format("{} of {:.3g} M parameters, batch {} of 3x{}x{}, Adam", s.model,
                            sides[0].parameters / 1e6, s.batch_size, s.image_size, s.image_size),
                {{"settings", s},
                 {"parameters", sides[0].parameters},
                 {"overhead_ms", overhead_ms(sides[0])}});
  for (const DpSide& side : sides) {
    json parts = json::object();
    for (std::size_t i = 0; i < kParts; ++i)
      if (side.parts[i] >= 0) parts[kDpParts[i].name] = side.parts[i];
    report
        .row(side.name == kDp ? fmt::format("DataParallel, 1 process, {} replicas", s.ranks)
                              : fmt::format("DistributedDataParallel, {} processes", s.ranks))
        .value("contender", side.name)
        .value("ms", side.block_ms)
        .value("p50_ms", median(side.block_ms))
        .value("parts_ms", parts)
        .number("steps", steps)
        .number("blocks", static_cast<double>(side.block_ms.size()))
        .spread("ms/step", side.block_ms, 2, "min p50 max")
        .number("samples/s", static_cast<double>(s.batch_size) / median(side.block_ms) * 1e3, 1)
        .ratio("DP / this", over(sides[0].block_ms, side.block_ms), "dp_times_this");
  }
  return report;
}

// Timed in separate steps, with a wait for the devices after each part.
Report parts_report(const DpSides& sides) {
  Report report("dp-vs-ddp", "ms of a step");
  const auto part = [](double ms) { return ms < 0 ? std::nullopt : std::optional(ms); };
  for (std::size_t i = 0; i < kParts; ++i)
    report.row(kDpParts[i].name)
        .number("DataParallel", part(sides[0].parts[i]), 2)
        .number("DistributedDataParallel", part(sides[1].parts[i]), 2)
        .text("what DP does there", kDpParts[i].what);
  return report;
}

// Checks that the devices exist and every replica gets an equal part of the batch.
void check(const DpSettings& s) {
  if (s.batch_size % s.ranks != 0)
    throw UsageError("bench",
                     "--batch_size {} is not a multiple of --ranks {}: the sides would weigh "
                     "samples differently. Try --batch_size {}.",
                     s.batch_size, s.ranks, (s.batch_size / s.ranks + 1) * s.ranks);
  if (s.device == "cpu") return;
  const int visible = cuda_device_count();
  const bool share = visible > 0 && env::get_bool("LOCKSTEP_SHARE_DEVICE").value_or(false);
  if (visible < s.ranks && !share)
    throw UsageError("bench",
                     "--device cuda with --ranks {} needs as many GPUs, and {} visible. Use fewer "
                     "ranks, or --device cpu.",
                     s.ranks, visible == 1 ? "1 is" : fmt::format("{} are", visible));
}

}  // namespace

int dp_vs_ddp_main(int argc, char** argv) {
  const bool gpu = cuda_device_count() > 0;
  DpSettings s;
  int steps = 100;
  std::string corrupt;
  s.device = gpu ? "cuda" : "cpu";
  s.model = gpu ? "resnet50" : "mlp";
  s.image_size = gpu ? 224 : 32;
  s.threads = 0;
  Options options(
      "DataParallel (one process scatters, replicates, gathers) beside DistributedDataParallel "
      "(one process per device), from the same weights on the same batches");
  options.number("--ranks", s.ranks, 1, 64, "replicas of one side, processes of the other");
  options.number("--steps", steps, 1, 1e6, "timed steps of each side, in blocks by turns");
  options.number("--batch_size", s.batch_size, 1, 1 << 20,
                 "samples per step of all replicas together");
  options.text("--model", s.model, "what is trained", {"mlp", "resnet18", "resnet50"});
  options.number("--image_size", s.image_size, 1, 4096, "height and width of the images in pixels");
  options.number("--threads", s.threads, 0, 1024,
                 "of each replica and rank on the CPU; 0: cores divided by ranks");
  options.text("--device", s.device, "cpu, or cuda: a GPU for each replica", {"cpu", "cuda"});
  options.text("--corrupt", corrupt, "let this side train differently, to see that it is refused",
               {kDp, kDdp});
  if (const auto code = options.parse(argc, argv)) return *code;
  check(s);
  if (s.threads == 0) s.threads = std::max(1, allowed_cores() / s.ranks);
  DpSides sides;
  for (const char* contender : {kDp, kDdp}) {
    DpSettings own = s;
    own.contender = contender;
    if (corrupt == contender) own.lr *= 2;
    sides.emplace_back(own);
  }
  verify(sides[0], sides[1]);
  measure(sides, steps);
  steps_report(sides, s, steps).publish(options);
  fmt::print("min, p50, max and the ratios are of blocks of up to {} steps, a mean of each.\n",
             kBlock);
  const double overhead = overhead_ms(sides[0]);
  fmt::print(
      "\n{}scatter, replicate, gather and gradients take {:.2f} ms, {:.0f} % of DataParallel's "
      "step.\n",
      parts_report(sides).text(), overhead, 100 * overhead / median(sides[0].block_ms));
  return 0;
}

}  // namespace lockstep::bench
