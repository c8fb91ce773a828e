// Both sides of `lockstep bench dp-vs-ddp`: a process of DataParallel, or a rank of
// DistributedDataParallel, that trains on request (dp_vs_ddp.h).
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/data_parallel.h"
#include "bench/dp_vs_ddp.h"
#include "bench/stats.h"
#include "bench/strategies.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/models/mlp.h"
#include "lockstep/models/resnet.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/run.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kClasses = 10;
constexpr std::int64_t kDistinctBatches = 4;
constexpr std::size_t kParts = std::size(kDpParts);
using Parts = std::array<double, kParts>;  // milliseconds; -1: this side has no such part

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

// Marks the ends of a step's parts while a breakdown is measured; nothing otherwise.
class PartClock {
 public:
  explicit PartClock(bool cuda) : cuda_(cuda) {}
  void begin() {
    parts_.fill(-1);
    at_ = now();
  }
  void end(std::size_t part) {
    const Clock::time_point time = now();
    parts_[part] = std::chrono::duration<double, std::milli>(time - at_).count();
    at_ = time;
  }
  Parts parts() const { return parts_; }

 private:
  Clock::time_point now() const {
    if (cuda_)
      for (c10::DeviceIndex i = 0; i < torch::cuda::device_count(); ++i)
        torch::cuda::synchronize(i);
    return Clock::now();
  }
  bool cuda_;
  Clock::time_point at_;
  Parts parts_{};
};

enum PartIndex : std::size_t {
  kForwardPart = 2,
  kLossPart = 4,
  kBackwardPart,
  kReducePart,
  kUpdatePart
};

class Trainee {
 public:
  virtual ~Trainee() = default;
  // Marks its parts on `clock` where there is one.
  virtual at::Tensor step(const Images& batch, PartClock* clock) = 0;
  virtual torch::nn::Module& module() = 0;
};

std::shared_ptr<Classifier> drawn(const DpSettings& settings, at::ScalarType type) {
  torch::manual_seed(0);
  auto net = std::make_shared<Classifier>(settings);
  net->to(type);
  return net;
}

struct Numerics {
  at::ScalarType type;
  double eps;  // Adam's
};

// With the usual epsilon, Adam turns the smallest difference of a gradient near zero into one as
// large as the learning rate. With a large one its update follows the gradient and can be compared.
Numerics numerics_of(const std::string& type) {
  if (type == "tf32") return {at::kFloat, optim::AdamOptions{}.eps};
  return {type == "float64" ? at::kDouble : at::kFloat, 0.1};
}

class DpTrainee : public Trainee {
 public:
  DpTrainee(const DpSettings& settings, const Numerics& numerics, std::vector<c10::Device> devices)
      : model_([&] { return drawn(settings, numerics.type); }, std::move(devices)),
        optimizer_(model_.parameters(), {.lr = settings.lr, .eps = numerics.eps}) {}

  at::Tensor step(const Images& batch, PartClock* clock) override {
    if (clock == nullptr) {
      model_.on_part({});
    } else {
      model_.on_part([clock](DpPart part) { clock->end(static_cast<std::size_t>(part)); });
      clock->begin();
    }
    const at::Tensor loss = torch::cross_entropy_loss(model_.forward(batch.data), batch.target);
    model_.backward(loss);
    optimizer_.step();
    optimizer_.zero_grad();
    if (clock != nullptr) clock->end(kUpdatePart);
    return loss.detach();
  }
  torch::nn::Module& module() override { return *model_.module(); }

 private:
  DataParallel<Classifier> model_;
  optim::Adam optimizer_;
};

class DdpTrainee : public Trainee {
 public:
  DdpTrainee(const DpSettings& settings, const Numerics& numerics, World& world)
      : net_(moved(drawn(settings, numerics.type), world.device())),
        model_(net_, world),
        optimizer_(net_->parameters(), {.lr = settings.lr, .eps = numerics.eps}) {}

  at::Tensor step(const Images& batch, PartClock* clock) override {
    const auto reached = [clock](std::size_t part) {
      if (clock != nullptr) clock->end(part);
    };
    if (clock != nullptr) clock->begin();
    const at::Tensor output = model_(batch.data);
    reached(kForwardPart);
    const at::Tensor loss = torch::cross_entropy_loss(output, batch.target);
    reached(kLossPart);
    loss.backward();
    reached(kBackwardPart);
    exposed_ms_ = model_.last_timing().finalized_ms - model_.last_timing().last_gradient_ms;
    optimizer_.step();
    optimizer_.zero_grad();
    reached(kUpdatePart);
    return loss.detach();
  }
  torch::nn::Module& module() override {
    model_.verify_replicas();
    return *net_;
  }
  // From the last gradient to the end of backward, in the last step.
  double exposed_ms() const { return exposed_ms_; }

 private:
  static std::shared_ptr<Classifier> moved(std::shared_ptr<Classifier> net, c10::Device device) {
    net->to(device);
    return net;
  }
  std::shared_ptr<Classifier> net_;
  DistributedDataParallel<std::shared_ptr<Classifier>> model_;
  optim::Adam optimizer_;
  double exposed_ms_ = 0;
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
  Worker(const DpSettings& settings, World& world)
      : settings_(settings),
        world_(world),
        dp_(settings.contender == kDp),
        clock_(world.device().is_cuda()) {
    const std::int64_t rows = dp_ ? settings.batch_size : settings.batch_size / settings.ranks;
    for (std::int64_t k = 0; k < kDistinctBatches; ++k)
      batches_.push_back(draw(settings, k, dp_ ? 0 : rows * world.rank(), rows));
  }

  std::string obey(const std::string& line) {
    std::istringstream fields(line);
    std::string what, text;
    fields >> what;
    if (what == "new") {
      fields >> text;
      optim::set_tf32(text == "tf32");
      return begin(numerics_of(text));
    }
    LOCKSTEP_ASSERT(trainee_ != nullptr);
    if (what == "save") {
      fields >> text;
      save(text);
      return "ok";
    }
    int first = 0, steps = 0;
    if (what == "run") {
      fields >> first >> steps;
      return train(first, steps);
    }
    fields >> steps;
    return parts(steps);
  }

 private:
  std::string begin(const Numerics& numerics) {
    trainee_.reset();
    const c10::Device device = world_.device();
    placed_.clear();
    for (const Images& batch : batches_)
      placed_.push_back({batch.data.to(device, numerics.type), batch.target.to(device)});
    if (dp_) {
      trainee_ = std::make_unique<DpTrainee>(settings_, numerics, replica_devices());
    } else {
      trainee_ = std::make_unique<DdpTrainee>(settings_, numerics, world_);
    }
    std::int64_t count = 0;
    for (const at::Tensor& parameter : trainee_->module().parameters()) count += parameter.numel();
    return fmt::format("ok {}", count);
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

  const Images& batch_of(int step) const {
    return placed_[static_cast<std::size_t>(step) % placed_.size()];
  }

  std::string train(int first, int steps) {
    const auto start = Clock::now();
    at::Tensor loss;
    for (int step = first; step < first + steps; ++step)
      loss = trainee_->step(batch_of(step), nullptr);
    const double value = loss.item<double>();  // waits for the device
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return fmt::format("{:.6f} {:.9g}", seconds, value);
  }

  std::string parts(int steps) {
    std::array<std::vector<double>, kParts> samples;
    for (int step = 0; step < steps; ++step) {
      trainee_->step(batch_of(step), &clock_);
      Parts ms = clock_.parts();
      if (const auto* ddp = dynamic_cast<DdpTrainee*>(trainee_.get())) {
        ms[kReducePart] = ddp->exposed_ms();
        ms[kBackwardPart] -= ddp->exposed_ms();
      }
      for (std::size_t i = 0; i < kParts; ++i) samples[i].push_back(ms[i]);
    }
    std::string text;
    for (const auto& part : samples) text += fmt::format("{:.6f} ", median(part));
    return text;
  }

  void save(const std::string& path) {
    const std::vector<at::Tensor> parameters = trainee_->module().parameters();
    if (!world_.is_leader()) return;
    std::ofstream file(path, std::ios::binary);
    for (const at::Tensor& parameter : parameters) {
      const at::Tensor values = parameter.detach().to(at::kCPU, at::kDouble).contiguous();
      file.write(reinterpret_cast<const char*>(values.const_data_ptr<double>()),
                 static_cast<std::streamsize>(values.nbytes()));
    }
    file.close();
    if (!file) throw Error("bench", fmt::format("cannot write '{}'", path));
  }

  const DpSettings settings_;
  World& world_;
  const bool dp_;
  PartClock clock_;
  std::vector<Images> batches_, placed_;
  std::unique_ptr<Trainee> trainee_;
};

}  // namespace

int dp_vs_ddp_rank_main(int argc, char** argv) {
  std::string file, path;
  CLI::App app{"a process of lockstep bench dp-vs-ddp"};
  app.add_option("--settings", file);
  app.add_option("--orders", path);
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  const DpSettings settings = nlohmann::json::parse(read_file(file)).get<DpSettings>();
  torch::set_num_threads(settings.threads);
  // NCCL refuses two ranks on one GPU of one host; with different names it takes them for two.
  if (env::get_bool("LOCKSTEP_SHARE_DEVICE").value_or(false))
    ::setenv("NCCL_HOSTID", ("rank" + env::get("RANK").value_or("0")).c_str(), /*overwrite=*/0);
  return run(
      [&](World& world) {
        Worker worker(settings, world);
        Orders orders(path, world.rank());
        for (std::string line; orders.next(line);) orders.answer(worker.obey(line));
      },
      {.device = c10::Device(settings.device)});
}

}  // namespace lockstep::bench
