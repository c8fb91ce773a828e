// Our side of `lockstep bench gpt|lora|resnet`: a rank that trains on request (models.h).
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/marks.h"
#include "bench/model_step.h"
#include "bench/stats.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/run.h"
#include "lockstep/train/async_saver.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;

constexpr std::int64_t kDistinctBatches = 4;  // while steps are timed
constexpr int kStepsAroundSave = 8;

// Asks the driver, since LibTorch has no name without its CUDA headers. Empty when there is none.
std::string cuda_name(int index) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "";
  const auto name = reinterpret_cast<int (*)(char*, int, int)>(::dlsym(library, "cuDeviceGetName"));
  std::array<char, 256> text{};
  if (name == nullptr || name(text.data(), static_cast<int>(text.size()) - 1, index) != 0)
    return "";
  return text.data();
}

class Trainee {
 public:
  Trainee(ModelSettings settings, World world)
      : settings_(std::move(settings)), world_(std::move(world)), device_(world_.device()) {
    settings_.device = device_.str();
  }

  json obey(const json& order) {
    const std::string what = order.at("do");
    if (what == "write") {
      write_start(settings_);
      release();
      return json::object();
    }
    if (what == "new") return begin(order);
    LOCKSTEP_ASSERT(model_ != nullptr);
    if (what == "train") return train_steps(order);
    if (what == "time") return time_steps(order.at("warmup"), order.at("steps"));
    if (what == "breakdown") return breakdown(order.at("steps"));
    if (what == "kernels") return kernels(order.at("steps"));
    LOCKSTEP_ASSERT(what == "save");
    return save(order.at("folder"), order.at("saves"));
  }

 private:
  // Frees memory that the others need while they are timed.
  void release() const {
    if (device_.is_cuda()) c10::getDeviceAllocator(c10::kCUDA)->emptyCache();
  }

  json begin(const json& order) {
    model_.reset();
    release();
    settings_.dtype = order.at("dtype").get<std::string>();
    settings_.mode = order.at("mode").get<std::string>();
    settings_.lr = order.at("lr");
    settings_.ddp = order.at("ddp");
    settings_.exact = order.at("exact");
    optim::set_tf32(order.at("tf32"));
    model_ = std::make_unique<ModelStep>(settings_, world_);
    trained_ = 0;
    if (device_.is_cuda()) c10::getDeviceAllocator(c10::kCUDA)->resetPeakStats(device_.index());
    return {{"parameters", model_->parameters()},
            {"trainable", model_->trainable()},
            {"flops", model_->flops()},
            {"device", device_.is_cuda() ? cuda_name(device_.index()) : "cpu"}};
  }

  json train_steps(const json& order) {
    ModelSettings sized = settings_;
    sized.batch_size = order.at("batch_size");
    const std::int64_t first = order.at("first"), steps = order.at("steps");
    std::vector<at::Tensor> losses;
    for (std::int64_t step = first; step < first + steps; ++step)
      losses.push_back(model_->step(make_batch(sized, step)).clone());
    std::vector<double> values;
    for (const at::Tensor& loss : losses) values.push_back(loss.item<double>());
    trained_ += steps;
    release();
    return {{"losses", values}};
  }

  std::vector<ModelBatch> batches() const {
    std::vector<ModelBatch> made;
    for (std::int64_t i = 0; i < kDistinctBatches; ++i) made.push_back(make_batch(settings_, i));
    return made;
  }

  at::Tensor step(const std::vector<ModelBatch>& batches) {
    return model_->step(batches[static_cast<std::size_t>(trained_++) % batches.size()]);
  }

  json time_steps(int warmup, int steps) {
    const auto inputs = batches();
    for (int i = 0; i < warmup; ++i) step(inputs);
    Marks marks(device_);
    marks.add();
    at::Tensor loss;
    for (int i = 0; i < steps; ++i) {
      loss = step(inputs);
      marks.add();
    }
    json answer{{"ms", marks.between()}, {"loss", loss.item<double>()}};
    const auto [peak, reserved] = memory();
    answer["peak_bytes"] = peak;
    answer["reserved_bytes"] = reserved;
    release();
    return answer;
  }

  // Peaks since "new": what is allocated, and what is held for it. 0 on the CPU.
  std::pair<std::int64_t, std::int64_t> memory() const {
    if (!device_.is_cuda()) return {0, 0};
    const auto stats = c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(device_.index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return {stats.allocated_bytes[kAll].peak, stats.reserved_bytes[kAll].peak};
  }

  // Medians over steps of the time until each part's work is done in the stream.
  json breakdown(int steps) {
    const auto inputs = batches();
    step(inputs);
    std::array<std::vector<double>, 3> parts;
    for (int i = 0; i < steps; ++i) {
      Marks marks(device_);
      marks.add();
      model_->on_phase([&](ModelStep::Phase) { marks.add(); });
      step(inputs);
      model_->on_phase({});
      const auto ms = marks.between();
      if (ms.size() != parts.size()) return json::object();  // a step without such parts
      for (std::size_t part = 0; part < parts.size(); ++part) parts[part].push_back(ms[part]);
    }
    release();
    return {{"forward_ms", median(parts[0])},
            {"backward_ms", median(parts[1])},
            {"optimizer_ms", median(parts[2])}};
  }

  // From LibTorch's profiler: how much of a step each kernel takes.
  json kernels(int steps) {
    namespace profiler = torch::autograd::profiler;
    using torch::profiler::impl::ActivityType;
    const auto inputs = batches();
    step(inputs);
    const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
    const std::set<ActivityType> activities{ActivityType::CUDA};
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
    for (int i = 0; i < steps; ++i) step(inputs);
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    const auto result = profiler::disableProfiler();
    std::map<std::string, std::pair<int, double>> sums;
    for (const auto& event : result->events()) {
      if (event.deviceType() != c10::DeviceType::CUDA) continue;
      auto& [count, ms] = sums[event.name()];
      ++count;
      ms += static_cast<double>(event.durationNs()) * 1e-6;
    }
    json all = json::array();
    for (const auto& [name, sum] : sums)
      all.push_back({{"name", name},
                     {"count", static_cast<double>(sum.first) / steps},
                     {"ms", sum.second / steps}});
    release();
    return {{"kernels", all}};
  }

  // The step after a save begins waits for the copy before it changes anything. The time beyond the
  // median of the steps around it is the stall; blocked_ms is the host's share. Steps before those
  // bring an idle GPU to its usual clocks.
  json save(const std::string& folder, int saves) {
    using Clock = std::chrono::steady_clock;
    const auto ms_since = [](Clock::time_point start) {
      return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    };
    train::AsyncSaver saver({.output_dir = folder, .limit = 1});
    const auto inputs = batches();
    json stalls = json::array();
    for (int number = 0; number < saves; ++number) {
      for (int i = 0; i < kStepsAroundSave; ++i) step(inputs);
      Marks marks(device_);
      marks.add();
      const auto train = [&] {
        for (int i = 0; i < kStepsAroundSave; ++i) {
          step(inputs);
          marks.add();
        }
      };
      train();
      auto start = Clock::now();
      saver.begin(model_->contents(trained_));
      double blocked_ms = ms_since(start);
      model_->before_update([&] {
        start = Clock::now();
        saver.wait_copied();
        blocked_ms += ms_since(start);
      });
      step(inputs);
      model_->before_update({});
      marks.add();
      train();
      std::vector<double> ms = marks.between();
      const double with_save = ms[kStepsAroundSave];
      ms.erase(ms.begin() + kStepsAroundSave);
      const auto outcome = saver.wait();
      LOCKSTEP_ASSERT(outcome.has_value());
      if (!outcome->committed) throw Error("bench", outcome->alert);
      stalls.push_back({{"stall_ms", with_save - median(ms)},
                        {"blocked_ms", blocked_ms},
                        {"copy_ms", outcome->copy_ms},
                        {"write_ms", outcome->write_ms}});
    }
    return {{"stalls", stalls}};
  }

  ModelSettings settings_;
  World world_;
  c10::Device device_;
  std::unique_ptr<ModelStep> model_;
  std::int64_t trained_ = 0;
};

void serve(const ModelSettings& settings, const std::string& path, World& world) {
  Trainee trainee(settings, world);
  Orders orders(path, world.rank());
  for (std::string line; orders.next(line);) orders.answer(trainee.obey(json::parse(line)).dump());
}

}  // namespace

int model_rank_main(int argc, char** argv) {
  std::string file, orders;
  CLI::App app{"a rank of lockstep bench gpt, lora or resnet"};
  app.add_option("--settings", file);
  app.add_option("--orders", orders);
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  const ModelSettings settings = json::parse(read_file(file)).get<ModelSettings>();
  return run([&](World& world) { serve(settings, orders, world); },
             {.device = c10::Device(settings.device)});
}

}  // namespace lockstep::bench
