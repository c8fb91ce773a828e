// lockstep bench step: gradient synchronisation and optimizer of a training step, fused in one pass
// and separate. All contenders are in the same ranks, which verify them first, with the same
// parameters and gradients.
#include "lockstep/kernels/step.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "bench/harness.h"
#include "bench/limits.h"
#include "bench/processes.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/run.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;
using Tensors = std::vector<at::Tensor>;

// The contenders: what happens between backward and the next forward.
struct Tail {
  const char* key;        // in options and files
  const char* long_name;  // in tables
};
constexpr Tail kFused{"fused", "FullyShard with Shard::kState on shm"};
constexpr Tail kReplicated{"replicated", "shm zero-copy all-reduce + AdamW"};
constexpr Tail kGloo{"gloo", "gloo all-reduce + ATen's fused AdamW"};
constexpr Tail kAlone{"alone", "ATen's fused AdamW alone, no communication"};
// What the machine allows for a fused step without clipping (limits.h); the slower one is the
// limit.
constexpr Tail kMemory{"memory", "limit: a rank's share of the bytes, plain loop"};
constexpr Tail kArithmetic{"arithmetic", "limit: a rank's share of AdamW, in cache"};

struct StepSettings {
  int ranks = 2;
  std::int64_t params = 32'000'000;
  bool clip = false;
  std::string corrupt;  // the key of a contender that is to get a wrong gradient
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepSettings, ranks, params, clip, corrupt)

const optim::AdamWOptions kOptions{.lr = 1e-3};
constexpr double kMaxNorm = 1;  // far below the norm of the gradients: clipping always bites
constexpr int kStepsVerified = 3;
constexpr std::int64_t kBucketElements = 25 * 1024 * 1024 / 4;  // DDP's default bucket

// ---------------------------------------------------------------- parameters and gradients

// Uniform in [0, 1), determined by its arguments alone.
float noise(std::int64_t element, int a, int b) {
  const std::uint32_t mixed = (static_cast<std::uint32_t>(element) + 1) * 2654435761U +
                              static_cast<std::uint32_t>(a) * 2246822519U +
                              static_cast<std::uint32_t>(b) * 3266489917U;
  return static_cast<float>(static_cast<int>(mixed >> 8)) * 0x1p-24F;
}

// All ranks have the same sign, so that no sum cancels: a different order of adding then changes it
// by only a few units in the last place. The size changes from step to step, because AdamW would
// not notice a common factor on all gradients.
float gradient_of(std::int64_t element, int rank, int step) {
  const float size = (0.5F + noise(element, rank, step)) * static_cast<float>(1 + step % 4);
  return element % 2 == 0 ? size : -size;
}

// Matrices with their biases, as in a model of that many parameters.
Tensors make_parameters(std::int64_t count) {
  constexpr std::int64_t kWidth = 1024;
  Tensors params;
  for (std::int64_t left = count; left > 0;) {
    const bool bias = params.size() % 2 == 1;
    const std::int64_t size = std::min(left, bias ? kWidth : kWidth * kWidth);
    params.push_back(size == kWidth * kWidth ? at::empty({kWidth, kWidth}) : at::empty({size}));
    params.back().set_requires_grad(true);
    left -= size;
  }
  return params;
}

// Calls body(data, count, number of the first element) for every tensor.
template <typename Body>
void each_memory(const Tensors& tensors, const Body& body) {
  std::int64_t first = 0;
  for (const auto& tensor : tensors) {
    body(static_cast<float*>(tensor.data_ptr()), tensor.numel(), first);
    tensor.unsafeGetTensorImpl()->bump_version();  // FullyShard refuses what hides a write
    first += tensor.numel();
  }
}

void write_parameters(const Tensors& params) {
  each_memory(params, [](float* data, std::int64_t count, std::int64_t first) {
    for (std::int64_t i = 0; i < count; ++i) data[i] = noise(first + i, -1, -1) - 0.5F;
  });
}

void write_gradients(const Tensors& grads, int rank, int step) {
  each_memory(grads, [&](float* data, std::int64_t count, std::int64_t first) {
    for (std::int64_t i = 0; i < count; ++i) data[i] = gradient_of(first + i, rank, step);
  });
}

// The expected result of averaging: added in rank order, then divided.
void write_mean_gradients(const Tensors& grads, int ranks, int step) {
  each_memory(grads, [&](float* data, std::int64_t count, std::int64_t first) {
    for (std::int64_t i = 0; i < count; ++i) {
      float sum = gradient_of(first + i, 0, step);
      for (int rank = 1; rank < ranks; ++rank) sum += gradient_of(first + i, rank, step);
      data[i] = sum / static_cast<float>(ranks);
    }
  });
}

// Clipping as Lockstep defines it: square sums of blocks in double, added in order.
double clip_by_blocks(const Tensors& grads) {
  std::vector<double> sums;
  each_memory(grads, [&](const float* data, std::int64_t count, std::int64_t) {
    const std::size_t before = sums.size();
    sums.resize(before + static_cast<std::size_t>(kernels::norm_blocks(count)));
    kernels::block_norms(data, count, sums.data() + before);
  });
  const double norm =
      std::sqrt(kernels::add_blocks(sums.data(), static_cast<std::int64_t>(sums.size())));
  const double coefficient = kMaxNorm / (norm + 1e-6);
  if (coefficient < 1)
    for (const auto& grad : grads) grad.mul_(static_cast<float>(coefficient));
  return norm;
}

// ---------------------------------------------------------------- the contenders

struct StepContender {
  std::string key;
  Tensors params;
  Tensors grads;
  std::function<double()> run;  // the norm before clipping, or -1
  std::function<void()> reset;  // back to before the first step
  bool exact = true;            // its bits are promised to be right

  void bind() {
    for (std::size_t i = 0; i < params.size(); ++i) params[i].mutable_grad() = grads[i];
  }
};

// Flat memory in buckets, with the gradients inside.
struct Buckets {
  Tensors flats;
  Tensors grads;
};

Buckets make_buckets(const Tensors& params, const std::function<at::Tensor(std::int64_t)>& make) {
  Buckets buckets;
  std::vector<Tensors> members(1);
  std::int64_t filled = 0;
  for (const auto& param : params) {
    if (filled > 0 && filled + param.numel() > kBucketElements) {
      members.emplace_back();
      filled = 0;
    }
    members.back().push_back(param);
    filled += param.numel();
  }
  for (const auto& bucket : members) {
    std::int64_t size = 0;
    for (const auto& param : bucket) size += param.numel();
    buckets.flats.push_back(make(size));
    std::int64_t offset = 0;
    for (const auto& param : bucket) {
      buckets.grads.push_back(
          buckets.flats.back().narrow(0, offset, param.numel()).view(param.sizes()));
      offset += param.numel();
    }
  }
  return buckets;
}

void average(World& world, const Tensors& flats) {
  std::vector<Work> works;
  for (const auto& flat : flats) works.push_back(world.all_reduce(flat, ReduceOp::kAvg));
  for (auto& work : works) work.wait();
}

// Parameters that every rank has and steps for itself.
struct Replica {
  explicit Replica(std::int64_t count) : params(make_parameters(count)) { reset(); }
  void reset() {
    write_parameters(params);
    optimizer = std::make_unique<optim::AdamW>(params, kOptions);
  }
  Tensors params;
  std::unique_ptr<optim::AdamW> optimizer;
};

// The same with ATen's kernel and none of ours; two contenders share it in turn.
struct AtenReplica {
  explicit AtenReplica(std::int64_t count) : params(make_parameters(count)) { reset(); }
  void reset() {
    write_parameters(params);
    first.clear();
    second.clear();
    steps = 0;
    for (const auto& param : params) {
      first.push_back(at::zeros_like(param));
      second.push_back(at::zeros_like(param));
    }
  }
  void step(const Tensors& grads) {
    const torch::NoGradGuard no_grad;
    const Tensors counts(grads.size(), at::full({}, ++steps, at::kFloat));
    at::_fused_adamw_(params, grads, first, second, {}, counts, kOptions.lr, kOptions.betas.first,
                      kOptions.betas.second, kOptions.weight_decay, kOptions.eps, false, false);
  }
  Tensors params, first, second;
  int steps = 0;
};

// One model under a FullyShard that divides the state alone; backward has already filled its
// gradients.
struct Sharded {
  Sharded(World world, const StepSettings& settings)
      : net(settings.params),
        model(net, Mesh(std::move(world), {{"shard", -1}}), {.shard = Shard::kState}),
        optimizer(model.make_optimizer({{net.params, kOptions}})) {
    model.before_forward();
    at::Tensor loss = at::zeros({});
    for (const auto& param : net.params) loss = loss + param.sum();
    model.backward(loss);
  }
  struct Net : torch::nn::Module {
    explicit Net(std::int64_t count) : params(make_parameters(count)) {
      write_parameters(params);
      for (std::size_t i = 0; i < params.size(); ++i)
        register_parameter(fmt::format("p{}", i), params[i]);
    }
    Tensors params;
  };
  Net net;
  FullyShard model;
  std::unique_ptr<optim::Optimizer> optimizer;
};

std::vector<StepContender> make_contenders(World& shm, const StepSettings& settings) {
  auto sharded = std::make_shared<Sharded>(shm, settings);
  auto replica = std::make_shared<Replica>(settings.params);
  const auto gradients_of = [](const Tensors& params) {
    Tensors gradients;
    for (const auto& param : params) gradients.push_back(param.grad());
    return gradients;
  };
  const Buckets shared = make_buckets(
      replica->params, [&](std::int64_t size) mutable { return shm.symmetric_empty({size}); });
  const Buckets own =
      make_buckets(replica->params, [](std::int64_t size) { return at::empty({size}); });
  auto peer = std::make_shared<AtenReplica>(settings.params);
  World gloo = World::from_env({.backend = "gloo"});
  const bool clip = settings.clip;
  const auto fused = [sharded, clip] {
    // They were written past their versions, and are not what the step before has clipped.
    for (const auto& param : sharded->net.params)
      param.grad().unsafeGetTensorImpl()->bump_version();
    return sharded->optimizer->step({.max_grad_norm = clip ? kMaxNorm : 0}).norm();
  };
  const auto replicated = [shm, shared, replica, clip]() mutable {
    average(shm, shared.flats);
    const double norm = clip ? clip_by_blocks(shared.grads) : -1;
    replica->optimizer->step();
    return norm;
  };
  const auto alone = [own, peer, clip] {
    const double norm = clip ? torch::nn::utils::clip_grad_norm_(peer->params, kMaxNorm, 2.0) : -1;
    peer->step(own.grads);
    return norm;
  };
  const auto over_gloo = [gloo, own, alone]() mutable {
    average(gloo, own.flats);
    return alone();
  };
  // Two numbers have only one sum; gloo adds more of them in its own order. Torch takes the norm in
  // float and in another order.
  const bool gloo_exact = shm.size() == 2 && !clip;
  const auto reset = [replica] { replica->reset(); };
  const auto reset_peer = [peer] { peer->reset(); };
  return {{kFused.key, sharded->net.params, gradients_of(sharded->net.params), fused, [] {}},
          {kReplicated.key, replica->params, shared.grads, replicated, reset},
          {kGloo.key, peer->params, own.grads, over_gloo, reset_peer, gloo_exact},
          {kAlone.key, peer->params, own.grads, alone, reset_peer, !clip}};
}

// What the machine allows for the fused step, measured in turn with it, on arrays laid out like its
// own: gradients and parameters in memory that all ranks map, AdamW's state in a rank's own.
std::vector<StepContender> make_limits(World& shm, const StepSettings& settings) {
  const std::int64_t count = settings.params, n = shm.size(), own = shm.rank();
  const std::int64_t begin = count * own / n, end = count * (own + 1) / n;
  const Tensors grads = shm.symmetric({count}, at::kFloat);
  const at::Tensor param = shm.symmetric({count}, at::kFloat).front();
  const at::Tensor first = at::zeros({count}), second = at::zeros({count});
  param.slice(0, begin, end).zero_();
  const auto move = [=, ranks = shm.size()] {
    std::vector<const float*> sources;
    for (const auto& grad : grads) sources.push_back(grad.const_data_ptr<float>());
    move_step_bytes({sources.data(), ranks, param.mutable_data_ptr<float>(),
                     first.mutable_data_ptr<float>(), second.mutable_data_ptr<float>()},
                    begin, end);
    return -1.0;
  };
  const auto compute = [=] { return adamw_arithmetic(end - begin) == 42 ? 0.0 : -1.0; };
  return {{kMemory.key, {}, {grads[static_cast<std::size_t>(own)]}, move, [] {}},
          {kArithmetic.key, {}, {}, compute, [] {}}};
}

// ---------------------------------------------------------------- verification

struct Expected {
  Tensors params;
  std::vector<double> norms;
};

// The definition, written out with ATen.
Expected expect(const StepSettings& settings) {
  const torch::NoGradGuard no_grad;
  AtenReplica reference(settings.params);
  Expected expected{reference.params, {}};
  Tensors grads;
  for (const auto& param : reference.params) grads.push_back(at::empty_like(param));
  for (int step = 0; step < kStepsVerified; ++step) {
    write_mean_gradients(grads, settings.ranks, step);
    expected.norms.push_back(settings.clip ? clip_by_blocks(grads) : -1);
    reference.step(grads);
  }
  return expected;
}

// Torch adds up to a million squares in float before it continues.
constexpr double kNormError = 1e-4;

// A gradient summed in another order is wrong by at most ranks * 2^-24 of itself, and clipped by
// torch's norm by kNormError. An update is lr times a quotient of such gradients, of size about 1,
// so at most some four times as wrong; rounding the parameter adds 2^-24 of it per step and side.
double tolerance(const StepSettings& settings, double parameter) {
  const double gradient = settings.ranks * 0x1p-24 + (settings.clip ? kNormError : 0);
  return kStepsVerified * (4 * kOptions.lr * gradient + std::abs(parameter) * 0x1p-23);
}

void compare(const StepContender& contender, const Expected& expected,
             const StepSettings& settings) {
  std::int64_t first = 0;
  for (std::size_t i = 0; i < contender.params.size(); ++i) {
    const float* is = contender.params[i].const_data_ptr<float>();
    const float* right = expected.params[i].const_data_ptr<float>();
    const std::int64_t count = contender.params[i].numel();
    const auto bytes = static_cast<std::size_t>(count) * sizeof(float);
    const bool same = contender.exact && std::memcmp(is, right, bytes) == 0;
    for (std::int64_t k = 0; k < count && !same; ++k) {
      const double allowed = contender.exact ? 0 : tolerance(settings, right[k]);
      if (std::abs(static_cast<double>(is[k]) - right[k]) <= allowed) continue;
      throw Error("bench",
                  fmt::format("{} is wrong: parameter {} is {:.9g} after {} steps, not "
                              "{:.9g} (allowed: {:.2g})",
                              contender.key, first + k, is[k], kStepsVerified, right[k], allowed));
    }
    first += count;
  }
}

void verify(StepContender& contender, const Expected& expected, World& world,
            const StepSettings& settings) {
  const bool averages = contender.key != kAlone.key;
  contender.bind();
  for (int step = 0; step < kStepsVerified; ++step) {
    if (averages) {
      write_gradients(contender.grads, world.rank(), step);
    } else {
      write_mean_gradients(contender.grads, world.size(), step);
    }
    if (settings.corrupt == contender.key && step > 0)
      *static_cast<float*>(contender.grads.back().data_ptr()) *= 1.5F;
    const double norm = contender.run();
    const double right = expected.norms[static_cast<std::size_t>(step)];
    if (std::abs(norm - right) > (contender.exact ? 0 : std::abs(right) * kNormError))
      throw Error("bench", fmt::format("{} is wrong: the norm is {:.9g} in step {}, not {:.9g}",
                                       contender.key, norm, step, right));
  }
  compare(contender, expected, settings);
}

void verify_all(std::vector<StepContender>& contenders, World& world,
                const StepSettings& settings) {
  const Expected expected = expect(settings);
  for (auto& contender : contenders) {
    contender.reset();
    verify(contender, expected, world, settings);
    if (world.is_leader())
      fmt::print(stderr, "verified: {} ({})\n", contender.key,
                 contender.exact ? "bit for bit" : "within rounding");
  }
}

// ---------------------------------------------------------------- a rank

double measure_ms(StepContender& contender, World& world, int round) {
  contender.bind();
  write_gradients(contender.grads, world.rank(), round);
  all_reduce(world, 0);  // all start together
  const auto start = Deadline::Clock::now();
  contender.run();
  return 1e3 * seconds_since(start);
}

}  // namespace

// The order {"contender", "round"} is answered by {"ms"}.
int step_rank(const json& description, const std::string& orders) {
  const auto settings = description.get<StepSettings>();
  torch::set_num_threads(1);
  const auto body = [&](World& world) {
    auto contenders = make_contenders(world, settings);
    verify_all(contenders, world, settings);
    if (!settings.clip)
      for (auto& limit : make_limits(world, settings)) contenders.push_back(std::move(limit));
    serve(orders, world.rank(), [&](const json& order) -> json {
      for (StepContender& contender : contenders)
        if (contender.key == order.at("contender").get<std::string>())
          return {{"ms", measure_ms(contender, world, order.at("round"))}};
      throw InternalError("bench", "no such contender");
    });
  };
  return run(body, {.backend = "shm"});
}

namespace {

// ---------------------------------------------------------------- the benchmark

struct StepSide {
  std::string name;
  const char* long_name;
  std::vector<double> ms{};
};

// "32M" is 32 million: a count of parameters, not a size in bytes.
std::int64_t parse_count(const std::string& text) {
  const double count = parse_scaled(text, 1e3);
  if (!(count >= 1 && count <= 1e10))
    throw UsageError("bench", "'{}' is not a number of parameters. Write 500K, 32M or 1.3G.", text);
  return std::llround(count);
}

std::vector<StepSide> measure(const StepSettings& settings, const Turns& turns) {
  std::vector<StepSide> sides;
  for (const Tail& tail : {kFused, kReplicated, kGloo, kAlone, kMemory, kArithmetic})
    if (!settings.clip || !std::string(tail.long_name).starts_with("limit"))
      sides.push_back({tail.key, tail.long_name});
  RankProcesses ranks(
      {.name = "step", .ranks = settings.ranks, .rank = "step", .settings = settings});
  by_turns(turns, sides, [&](StepSide& side) {
    const json order{{"contender", side.name}, {"round", side.ms.size()}};
    double slowest = 0;  // a step is over when the last rank is done
    for (const json& answer : ranks.ask_all(order))
      slowest = std::max(slowest, answer.at("ms").get<double>());
    return side.ms.emplace_back(slowest);
  });
  ranks.finish();
  return sides;
}

}  // namespace

int step_main(int argc, char** argv) {
  StepSettings settings;
  Turns turns{.rounds = 20, .seconds = 60, .unit = "ms"};
  std::string params = "32M";
  Options options("The tail of a step: gradient synchronisation and AdamW, one thread per rank");
  options.number("--ranks", settings.ranks, 2, 64, "processes");
  options.text("--params", params, "how many, in float: 500K, 32M (million), 1.3G");
  options.flag("--clip", settings.clip, "clip to a global norm before the update");
  options.number("--rounds", turns.rounds, 3, 100000, "each contender once per round");
  options.positive("--seconds", turns.seconds, "begin no further round after this");
  options.text("--corrupt", settings.corrupt,
               "give this contender a wrong gradient, to see that it is refused",
               {kFused.key, kReplicated.key, kGloo.key, kAlone.key});
  if (const auto code = options.parse(argc, argv)) return *code;
  settings.params = parse_count(params);
  const std::vector<StepSide> sides = measure(settings, turns);
  const auto& fused = sides.front().ms;
  std::map<std::string, double> times;  // that of fused
  Report report(
      "step",
      fmt::format("step tail of {} ranks with {:.4g} M parameters{}", settings.ranks,
                  static_cast<double>(settings.params) / 1e6, settings.clip ? " and clipping" : ""),
      {{"ranks", settings.ranks}, {"parameters", settings.params}, {"clip", settings.clip}});
  for (const StepSide& side : sides) {
    const Summary ratio = over(side.ms, fused);
    times[side.name] = ratio.p50;
    report.row(side.long_name)
        .value("contender", side.name)
        .value("ms", side.ms)
        .number("rounds", static_cast<double>(side.ms.size()))
        .spread("ms", side.ms, 2)
        .ratio("times fused", ratio, "times_fused");
  }
  // A step needs at least the slower of its bytes and its arithmetic. Clipping needs two passes.
  if (!settings.clip)
    report.facts()["percent_of_limit"] = 100 * std::max(times[kMemory.key], times[kArithmetic.key]);
  report.publish(options);
  return 0;
}

}  // namespace lockstep::bench
