// lockstep bench kernels: the fused operations of lockstep::nn beside ATen's operations, and beside
// a copy that moves as many bytes as the fused one must. Each is verified before it is timed.
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <functional>

#include "bench/harness.h"
#include "bench/marks.h"
#include "lockstep/core/error.h"
#include "lockstep/nn/functional.h"
#include "lockstep/optim/adamw_pass.h"

namespace lockstep::bench {
namespace {

using Tensors = std::vector<at::Tensor>;
// Outputs first, then gradients of all inputs.
using Op = std::function<Tensors(const Tensors&)>;

struct KernelSettings {
  std::string device = "cuda";
  std::int64_t rows = 65536;
  int rounds = 20;
  bool small = false;
};

struct KernelCase {
  std::string name;
  double bytes;  // what must cross the memory bus; 0: bound by arithmetic
  std::function<Tensors(std::int64_t rows)> inputs;
  Op ours, aten;
  double tolerance = 0x1p-6;  // relative to the largest value
};

// Forward, and backward with a gradient of ones in the outputs' dtype.
Op with_backward(const Op& forward) {
  return [forward](const Tensors& inputs) {
    Tensors results = forward(inputs);
    Tensors leaves, ones;
    for (const auto& input : inputs)
      if (input.requires_grad()) leaves.push_back(input);
    for (const auto& output : results) ones.push_back(torch::ones_like(output));
    for (auto& grad : torch::autograd::grad(results, leaves, ones)) results.push_back(grad);
    for (auto& result : results) result = result.detach();
    return results;
  };
}

class Stopwatch {
 public:
  explicit Stopwatch(c10::Device device) : device_(device) {
    if (device.is_cuda())
      other_ = torch::empty({256 << 20}, at::TensorOptions(device).dtype(at::kByte));
  }

  // Median milliseconds. Other memory is written before each run, so that the caches hold none of
  // the operands.
  double median_ms(const std::function<void()>& body, int rounds) {
    std::vector<double> times;
    for (int i = -3; i < rounds; ++i) {
      if (other_.defined()) other_.fill_(i & 0xff);
      Marks marks(device_);
      marks.add();
      body();
      marks.add();
      if (const double ms = marks.between().front(); i >= 0) times.push_back(ms);
    }
    return median(std::move(times));
  }

 private:
  c10::Device device_;
  at::Tensor other_;
};

// The largest difference, relative to the largest value.
double difference(const Tensors& a, const Tensors& b) {
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double scale = b[i].abs().max().item<double>();
    const double error = (a[i].to(at::kFloat) - b[i].to(at::kFloat)).abs().max().item<double>();
    worst = std::max(worst, error / std::max(scale, 1e-30));
    if (std::isnan(error)) return error;
  }
  return worst;
}

struct Maker {
  c10::Device device;
  at::ScalarType type = at::kBFloat16;

  at::Tensor operator()(at::IntArrayRef sizes, double scale = 1, bool grad = true) const {
    return (torch::randn(sizes, at::TensorOptions(device).dtype(at::kFloat)) * scale)
        .to(type)
        .set_requires_grad(grad);
  }
  at::Tensor floats(at::IntArrayRef sizes, bool grad = true) const {
    return torch::randn(sizes, at::TensorOptions(device)).set_requires_grad(grad);
  }
};

void add_norms(std::vector<KernelCase>& cases, const Maker& make, std::int64_t rows,
               std::int64_t columns) {
  const double each = 2.0 * static_cast<double>(rows * columns);
  const auto inputs = [=](std::int64_t n) {
    return Tensors{make({n, columns}), make({n, columns}), make.floats({columns}),
                   make.floats({columns}), make.floats({columns})};
  };
  const Op ours = [](const Tensors& i) {
    const auto [sum, normed] = nn::add_layer_norm(i[0], i[1], i[2], i[3], i[4]);
    return Tensors{sum, normed};
  };
  const Op aten = [columns](const Tensors& i) {
    const auto sum = i[0] + (i[1] + i[2].to(i[0].scalar_type()));
    const auto as = [&](int k) { return i[k].to(i[0].scalar_type()); };
    return Tensors{sum, torch::layer_norm(sum, {columns}, as(3), as(4), 1e-5)};
  };
  const std::string c = std::to_string(columns);
  cases.push_back({"add_layer_norm " + c + " forward", 4 * each, inputs, ours, aten});
  cases.push_back({"add_layer_norm " + c + " forward+backward", 8 * each, inputs,
                   with_backward(ours), with_backward(aten)});
  const auto rms_inputs = [=](std::int64_t n) {
    return Tensors{make({n, columns}), make({columns})};
  };
  const Op rms = [](const Tensors& i) { return Tensors{nn::rms_norm(i[0], i[1])}; };
  const Op aten_rms = [columns](const Tensors& i) {
    return Tensors{torch::rms_norm(i[0], {columns}, i[1], 1e-6)};
  };
  cases.push_back({"rms_norm " + c + " forward+backward", 5 * each, rms_inputs, with_backward(rms),
                   with_backward(aten_rms)});
}

void add_losses(std::vector<KernelCase>& cases, const Maker& make, std::int64_t rows, bool small) {
  const std::int64_t padded = small ? 1024 : 50304, real = small ? 1001 : 50257, width = 768;
  const auto with_targets = [=](Tensors inputs, std::int64_t n) {
    inputs.push_back(torch::randint(real, {n}, at::TensorOptions(make.device).dtype(at::kLong)));
    return inputs;
  };
  const auto plain = [=](const at::Tensor& logits, const at::Tensor& targets) {
    return torch::cross_entropy_loss(logits.narrow(1, 0, real).to(at::kFloat), targets);
  };
  // The leaf's memory holds the gradient afterwards; its values do not change the time.
  cases.push_back({"cross_entropy forward+backward", 4.0 * static_cast<double>(rows * padded),
                   [=](std::int64_t n) { return with_targets({make({n, padded})}, n); },
                   with_backward([=](const Tensors& i) {
                     return Tensors{nn::cross_entropy(i[0], i[1], {.columns = real})};
                   }),
                   with_backward([=](const Tensors& i) { return Tensors{plain(i[0], i[1])}; })});
  cases.push_back({"linear_cross_entropy forward+backward", 0,
                   [=](std::int64_t n) {
                     return with_targets({make({n, width}), make({padded, width}, 0.02)}, n);
                   },
                   with_backward([=](const Tensors& i) {
                     return Tensors{nn::linear_cross_entropy(i[0], i[1], i[2], {.columns = real})};
                   }),
                   with_backward([=](const Tensors& i) {
                     return Tensors{plain(torch::linear(i[0], i[1]), i[2])};
                   }),
                   0x1p-4});
}

void add_perceptrons(std::vector<KernelCase>& cases, const Maker& make, std::int64_t rows) {
  const std::int64_t width = 768, hidden = 3072;
  const auto inputs = [=](std::int64_t n) {
    return Tensors{make({n, width}), make({hidden, width}, 0.03), make({hidden}),
                   make({width, hidden}, 0.02), make({width})};
  };
  const Op ours = [](const Tensors& i) {
    return Tensors{nn::gelu_mlp(i[0], i[1], i[2], i[3], i[4])};
  };
  const Op aten = [](const Tensors& i) {
    return Tensors{torch::linear(torch::gelu(torch::linear(i[0], i[1], i[2]), "tanh"), i[3], i[4])};
  };
  cases.push_back({"gelu_mlp 768-3072 forward", 0, inputs, ours, aten, 0x1p-5});
  cases.push_back({"gelu_mlp 768-3072 forward+backward", 0, inputs, with_backward(ours),
                   with_backward(aten), 0x1p-4});
  const std::int64_t up = 8192;
  cases.push_back({"swiglu 8192 forward+backward", 8.0 * 2 * static_cast<double>(rows / 8 * up),
                   [=](std::int64_t n) { return Tensors{make({n / 8, 2 * up})}; },
                   with_backward([](const Tensors& i) { return Tensors{nn::swiglu(i[0])}; }),
                   with_backward([](const Tensors& i) {
                     const auto halves = i[0].chunk(2, -1);
                     return Tensors{torch::silu(halves[0]) * halves[1]};
                   })});
  const auto lora_inputs = [=](std::int64_t n) {
    return Tensors{make({n / 8, 3072}), make({3072, 3072}, 0.02, false), make({16, 3072}, 0.02),
                   make({3072, 16}, 0.02)};
  };
  cases.push_back({"lora_linear 3072, r 16, forward+backward", 0, lora_inputs,
                   with_backward([](const Tensors& i) {
                     return Tensors{nn::lora_linear(i[0], i[1], {}, i[2], i[3], {.scaling = 2})};
                   }),
                   with_backward([](const Tensors& i) {
                     const auto low = torch::linear(i[0], i[2]);
                     return Tensors{torch::linear(i[0], i[1]) + 2 * torch::linear(low, i[3])};
                   }),
                   0x1p-4});
}

void add_attention(std::vector<KernelCase>& cases, const Maker& make, std::int64_t rows,
                   bool small) {
  const std::int64_t time = small ? 16 : 1024, heads = 12, width = 64;
  const auto shaped = [=](std::int64_t n) { return std::max<std::int64_t>(n / time, 1); };
  const auto part = [=](std::int64_t n, std::int64_t h) {
    return make({shaped(n), time, h, width}).detach().transpose(1, 2).set_requires_grad(true);
  };
  const auto angles = torch::rand({time, width / 2}, at::TensorOptions(make.device)) * 6;
  const auto cos = angles.cos(), sin = angles.sin();
  const double each = 2.0 * static_cast<double>(rows * heads * width);
  cases.push_back({"rope 12 heads of 64, forward+backward", 8 * each,
                   [=](std::int64_t n) { return Tensors{part(n, heads), part(n, heads)}; },
                   with_backward([=](const Tensors& i) {
                     const auto [q, k] = nn::rope(i[0], i[1], cos, sin);
                     return Tensors{q, k};
                   }),
                   with_backward([=](const Tensors& i) {
                     const auto rotate = [&](const at::Tensor& x) {
                       const auto halves = x.chunk(2, -1);
                       const auto c = torch::cat({cos, cos}, -1).to(x.scalar_type());
                       const auto s = torch::cat({sin, sin}, -1).to(x.scalar_type());
                       return x * c + torch::cat({-halves[1], halves[0]}, -1) * s;
                     };
                     return Tensors{rotate(i[0]), rotate(i[1])};
                   })});
  cases.push_back(
      {"attention 12 heads of 64, causal, forward+backward", 0,
       [=](std::int64_t n) { return Tensors{part(n, heads), part(n, heads), part(n, heads)}; },
       with_backward([](const Tensors& i) { return Tensors{nn::attention(i[0], i[1], i[2])}; }),
       with_backward([](const Tensors& i) {
         return Tensors{torch::scaled_dot_product_attention(i[0], i[1], i[2], {}, 0, true)};
       }),
       0x1p-5});
}

struct AdamWMemory {
  Tensors params, grads, averages, squares, steps;
};

// The tensors of GPT-2 124M: a few large ones and many of 768 and 3072.
AdamWMemory adamw_memory(const Maker& make, bool small) {
  AdamWMemory memory;
  std::vector<std::int64_t> sizes{(small ? 100 : 50304) * 768, 1024 * 768, 768, 768};
  for (int layer = 0; layer < (small ? 1 : 12); ++layer)
    for (const std::int64_t size :
         {768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768})
      sizes.push_back(size);
  const auto options = at::TensorOptions(make.device);
  for (const std::int64_t size : sizes) {
    memory.params.push_back(torch::randn({size}, options));
    memory.grads.push_back(torch::randn({size}, options) * 1e-3);
    memory.averages.push_back(torch::zeros({size}, options));
    memory.squares.push_back(torch::zeros({size}, options));
    memory.steps.push_back(torch::zeros({}, options));
  }
  return memory;
}

void add_row(Report& report, const std::string& name, double ours, double aten, double copy,
             double error) {
  report.row(name)
      .number("ms", ours, 4, "ms")
      .number("ATen ms", aten, 4, "aten_ms")
      .number("times faster", aten / ours, 2, "times_faster")
      .number("copy ms", copy > 0 ? std::optional(copy) : std::nullopt, 4, "copy_ms")
      .text("of copy", copy > 0 ? fmt::format("{:.0f} %", 100 * copy / ours) : "-")
      .text("error", fmt::format("{:.1e}", error));
  fmt::print("{:52} {:9.4f} ms, ATen {:9.4f} ms{}\n", name, ours, aten,
             copy > 0 ? fmt::format(", copy {:.4f} ms", copy) : "");
  std::fflush(stdout);
}

double copy_ms(Stopwatch& watch, double bytes, const KernelSettings& settings, c10::Device device) {
  const auto half = static_cast<std::int64_t>(bytes / 2);
  const at::Tensor from = torch::ones({half}, at::TensorOptions(device).dtype(at::kByte));
  const at::Tensor to = torch::empty_like(from);
  return watch.median_ms([&] { to.copy_(from); }, settings.rounds);
}

void verify(const std::string& name, double error, double tolerance) {
  if (error <= tolerance) return;
  throw Error("bench", fmt::format("{} differs from ATen by {:.2e} of the largest value, more than "
                                   "{:.2e}. Run tests/nn_test with LOCKSTEP_DEVICE=cuda.",
                                   name, error, tolerance));
}

void measure_adamw(Report& report, Stopwatch& watch, const Maker& make,
                   const KernelSettings& settings) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  AdamWMemory a = adamw_memory(make, settings.small);
  torch::manual_seed(1);
  AdamWMemory b = adamw_memory(make, settings.small);
  std::vector<optim::AdamWItem> items;
  double count = 0;
  for (std::size_t i = 0; i < a.params.size(); ++i) {
    items.push_back({a.params[i], a.grads[i], a.averages[i], a.squares[i], a.steps[i]});
    count += static_cast<double>(a.params[i].numel());
  }
  optim::AdamWPass pass{items, {{.lr = 1e-3, .betas = {0.9, 0.95}, .weight_decay = 0.1}}};
  pass.set_max_norm(1);
  const auto with_aten = [&] {
    const auto norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(b.grads)));
    at::_foreach_mul_(b.grads, at::clamp_max(1.0 / (norm + 1e-6), 1.0));
    at::_foreach_add_(b.steps, 1);
    at::_fused_adamw_(b.params, b.grads, b.averages, b.squares, {}, b.steps, 1e-3, 0.9, 0.95, 0.1,
                      1e-8, false, false);
  };
  pass.step();
  with_aten();
  const double error = difference(a.params, b.params);
  verify("AdamWPass", error, 1e-5);
  const double ours = watch.median_ms([&] { pass.step(); }, settings.rounds);
  const double aten = watch.median_ms(with_aten, settings.rounds);
  add_row(report, "norm, clip and AdamW, 124M", ours, aten,
          copy_ms(watch, 32 * count, settings, make.device), error);
}

void measure(Report& report, Stopwatch& watch, const KernelCase& test, const Maker& make,
             const KernelSettings& settings) {
  torch::manual_seed(0);
  const Tensors some = test.inputs(std::min<std::int64_t>(settings.rows, 2048));
  Tensors again;
  for (const auto& t : some)
    again.push_back(t.detach().clone().set_requires_grad(t.requires_grad()));
  const double error = difference(test.ours(again), test.aten(some));
  verify(test.name, error, test.tolerance);
  const Tensors inputs = test.inputs(settings.rows);
  const double ours = watch.median_ms([&] { test.ours(inputs); }, settings.rounds);
  const double aten = watch.median_ms([&] { test.aten(inputs); }, settings.rounds);
  const double copy = test.bytes > 0 ? copy_ms(watch, test.bytes, settings, make.device) : 0;
  add_row(report, test.name, ours, aten, copy, error);
}

}  // namespace

int kernels_main(int argc, char** argv) {
  KernelSettings settings;
  Options options("Fused operations beside ATen's and beside a copy of as many bytes");
  options.device(settings.device);
  options.number("--rows", settings.rows, 8, 1 << 24, "tokens in a batch");
  options.number("--rounds", settings.rounds, 1, 10000, "timed runs, of which the median counts");
  options.flag("--small", settings.small, "a small vocabulary and model, to try it on a CPU");
  if (const auto code = options.parse(argc, argv)) return *code;
  prepare_device(settings.device);
  const Maker make{c10::Device(settings.device)};
  Stopwatch watch(make.device);
  std::vector<KernelCase> cases;
  add_norms(cases, make, settings.rows, 768);
  if (!settings.small) add_norms(cases, make, settings.rows, 2048);
  add_losses(cases, make, settings.rows, settings.small);
  add_perceptrons(cases, make, settings.rows);
  add_attention(cases, make, settings.rows, settings.small);
  Report report("kernels", "operation");
  for (const KernelCase& test : cases) measure(report, watch, test, make, settings);
  measure_adamw(report, watch, make, settings);
  report.publish(options);
  return 0;
}

}  // namespace lockstep::bench
