#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/memory/cpu_cache.h"
#include "lockstep/optim/amp.h"
#include "lockstep/parallel/activation_checkpoint.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using detail::InplaceGradients;
using testing::run_threads;

// While it lives gradients of any size are allocated in place, or none.
struct InPlace {
  explicit InPlace(bool on) : before(InplaceGradients::set_min_bytes(on ? 1 : SIZE_MAX)) {}
  ~InPlace() { InplaceGradients::set_min_bytes(before); }
  std::size_t before;
};

struct ManyShapesImpl : torch::nn::Module {
  ManyShapesImpl() {
    words = register_module("words", torch::nn::Embedding(12, 6));
    wide = register_module("wide", torch::nn::Linear(6, 12));
    square = register_module("square", torch::nn::Linear(12, 12));
    bare = register_module("bare", torch::nn::Linear(torch::nn::LinearOptions(12, 7).bias(false)));
    image = register_module("image", torch::nn::Conv1d(7, 5, 3));
    experts = register_parameter("experts", at::randn({3, 5, 4}));
  }
  // Ids [3, tokens]; with 4 tokens the square layer has as many rows as columns.
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = torch::tanh(wide(words(ids)));
    x = square(square(x).relu());  // used twice
    x = image(bare(x).transpose(1, 2));
    return x.transpose(1, 2).reshape({3, -1, 5}).bmm(experts).square().mean();
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear wide{nullptr}, square{nullptr}, bare{nullptr};
  torch::nn::Conv1d image{nullptr};
  at::Tensor experts;
};
TORCH_MODULE(ManyShapes);

std::mutex draw_mutex;  // modules draw from one global generator
ManyShapes make_many_shapes() {
  std::lock_guard<std::mutex> lock(draw_mutex);
  torch::manual_seed(3);
  return ManyShapes();
}

at::Tensor ids_of(int rank, int step, std::int64_t tokens) {
  return at::randint(12, {3, tokens}, at::make_generator<at::CPUGeneratorImpl>(7 * rank + step),
                     at::kLong);
}

using Visit = std::function<void(DistributedDataParallel<ManyShapes>&, int step)>;

// The gradients of every step and rank, one behind the other.
std::vector<at::Tensor> train(bool in_place, const DdpOptions& options, const Visit& backward) {
  const InPlace how(in_place);
  std::vector<std::vector<at::Tensor>> found(2);
  run_threads(2, [&](World& world) {
    ManyShapes net = make_many_shapes();
    DistributedDataParallel<ManyShapes> model{net, world, options};
    for (int step = 0; step < 4; ++step) {
      backward(model, step);
      for (auto& p : net->parameters()) {
        found[static_cast<std::size_t>(world.rank())].push_back(p.grad().clone());
        torch::NoGradGuard no_grad;
        p.add_(p.grad(), -0.1);
      }
      net->zero_grad();
    }
  });
  found[0].insert(found[0].end(), found[1].begin(), found[1].end());
  return found[0];
}

void expect_same_bits(const DdpOptions& options, const Visit& backward, std::uint64_t least) {
  const auto wanted = train(false, options, backward);
  const std::uint64_t before = InplaceGradients::served();
  const auto got = train(true, options, backward);
  EXPECT_GE(InplaceGradients::served() - before, least);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(wanted[i])) << i;
}

TEST(InplaceGradients, GradientsOfEveryKindOfLayerAreTheSameBits) {
  for (const std::int64_t tokens : {4, 6}) {
    const Visit plain = [&](auto& model, int step) {
      model(ids_of(model.world().rank(), step, tokens)).backward();
    };
    // In 4 steps of 2 ranks the embedding, a linear layer and the batched product; and the wide
    // layer where its input's gradient has another size.
    const std::uint64_t least = (tokens == 4 ? 3 : 4) * 4 * 2;
    expect_same_bits({}, plain, least);
    expect_same_bits({.find_unused_parameters = true}, plain, least);
    expect_same_bits({.static_graph = true}, plain, least);
    expect_same_bits({.gradient_as_bucket_view = false}, plain, 0);
  }
}

TEST(InplaceGradients, AutocastAndAccumulationToo) {
  const Visit autocast = [](auto& model, int step) {
    optim::Autocast guard(at::kCPU, at::kBFloat16);
    model(ids_of(model.world().rank(), step, 6)).backward();
  };
  expect_same_bits({}, autocast, 4 * 2);
  const Visit window = [](auto& model, int step) {
    {
      auto alone = model.no_sync();
      model(ids_of(model.world().rank(), step, 6)).backward();
      model(ids_of(model.world().rank(), step + 50, 6)).backward();
    }
    model(ids_of(model.world().rank(), step + 90, 6)).backward();
  };
  expect_same_bits({}, window, 4 * 4 * 2);
}

// A slot is used again in every step; what somebody keeps must not lie in one.
TEST(InplaceGradients, WhoKeepsAGradientKeepsIt) {
  const InPlace on(true);
  run_threads(2, [](World& world) {
    ManyShapes net = make_many_shapes();
    DistributedDataParallel<ManyShapes> model{net, world};
    const auto step = [&](int number) { return model(ids_of(world.rank(), number, 6)); };
    step(0).backward();  // buckets have their final order from here on
    net->zero_grad();

    std::vector<at::Tensor> saved, copies;
    const auto keep = [&](const at::Tensor& gradient) {
      saved.push_back(gradient);
      copies.push_back(gradient.clone());
    };
    const auto hook = net->wide->weight.register_hook(keep);
    step(1).backward();
    net->zero_grad();
    net->wide->weight.remove_hook(hook);
    // The engine runs hooks on a node's own gradient within the node: copies of the size of the
    // parameter's gradient, in the embedding (as many tokens as words) and in a change of dtype.
    const at::Tensor found = net->words(at::arange(12));
    found.retain_grad();
    const at::Tensor half = net->bare->weight.to(at::kBFloat16);
    half.register_hook([&](const at::Tensor& gradient) { keep(gradient.to(at::kFloat)); });
    {
      auto alone = model.no_sync();
      (found.square().sum() + half.square().sum()).backward();
    }
    saved.push_back(found.grad());
    copies.push_back(found.detach() * 2);
    net->zero_grad();
    for (const auto& gradient :
         torch::autograd::grad({step(2)}, {net->words->weight, net->bare->weight}))
      keep(gradient);
    const at::Tensor turned = net->bare->weight.t();
    turned.retain_grad();
    const std::uint64_t before = InplaceGradients::served();
    at::randn({4, 12}).matmul(turned).sum().add(step(3)).backward();
    keep(turned.grad());
    net->zero_grad();
    EXPECT_GT(InplaceGradients::served(), before);

    ASSERT_EQ(saved.size(), 6u);
    for (int number = 4; number < 7; ++number) {
      step(number).backward();
      net->zero_grad();
    }
    for (std::size_t i = 0; i < saved.size(); ++i) EXPECT_TRUE(saved[i].equal(copies[i])) << i;
  });
}

// One weight at the end, in a checkpointed block and at the start: its gradients are added during
// backward.
struct TiedImpl : torch::nn::Module {
  TiedImpl() { weight = register_parameter("weight", at::randn({6, 6}) / 3); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor turned = weight.t();
    at::Tensor y = at::embedding(weight, x);
    y = checkpoint([this](const auto& in) { return torch::tanh(in[0].matmul(weight)); }, {y});
    return y.matmul(turned).square().mean();
  }
  at::Tensor weight;
};
TORCH_MODULE(Tied);

TEST(InplaceGradients, AWeightInsideAndOutsideOfACheckpoint) {
  const auto gradients = [](bool in_place, const DdpOptions& options, bool alone) {
    const InPlace how(in_place);
    at::Tensor found;
    run_threads(2, [&](World& world) {
      std::unique_lock<std::mutex> lock(draw_mutex);
      torch::manual_seed(5);
      Tied net;
      lock.unlock();
      DistributedDataParallel<Tied> model{net, world, options};
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        const at::Tensor ids = at::remainder(at::arange(8) + step + world.rank(), 6);
        if (alone) {
          auto window = model.no_sync();
          model(ids).backward();
        } else {
          model(ids).backward();
        }
      }
      if (world.rank() == 0) found = net->weight.grad().clone();
    });
    return found;
  };
  for (const bool alone : {false, true}) {
    for (const DdpOptions& options :
         {DdpOptions{.static_graph = true}, DdpOptions{.overlap = false},
          DdpOptions{.find_unused_parameters = true, .overlap = false}})
      EXPECT_TRUE(gradients(true, options, alone).equal(gradients(false, options, alone)));
  }
}

// What lay in the slot before is gone when the new gradient is made: that must not go unnoticed.
TEST(InplaceGradients, ALossOfTheLastStepsGradientIsRefusedOrRight) {
  const auto gradients = [](bool in_place) {
    const InPlace how(in_place);
    at::Tensor found;
    run_threads(2, [&](World& world) {
      ManyShapes net = make_many_shapes();
      DistributedDataParallel<ManyShapes> model{net, world};
      model(ids_of(world.rank(), 0, 6)).backward();
      const at::Tensor last = net->bare->weight.grad();
      net->zero_grad();
      const at::Tensor pull = (last * net->bare->weight).sum();
      try {
        (model(ids_of(world.rank(), 1, 6)) + pull).backward();
        if (world.rank() == 0) found = net->bare->weight.grad().clone();
      } catch (const c10::Error& e) {
        EXPECT_NE(std::string(e.what()).find("modified by an inplace operation"),
                  std::string::npos);
      }
    });
    return found;
  };
  const at::Tensor got = gradients(true);
  if (got.defined()) {
    EXPECT_TRUE(got.equal(gradients(false)));
  }
}

// A backward within a backward that brings the same parameter another gradient.
struct Detour : torch::autograd::Function<Detour> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static inline thread_local std::function<void()> go;
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          const std::vector<at::Tensor>& gradients) {
    if (go) {
      at::AutoGradMode on(true);
      go();
    }
    return gradients;
  }
};

TEST(InplaceGradients, ABackwardOnTheWayIsRightOrRefused) {
  const auto gradients = [](bool in_place) {
    const InPlace how(in_place);
    at::Tensor found;
    std::string refusal;
    std::mutex guard;
    run_threads(2, [&](World& world) {
      const at::Tensor weight = (at::arange(24, at::kFloat) / 24).view({6, 4}).clone();
      weight.set_requires_grad(true);
      const std::vector<NamedTensor> parameters{{"weight", weight}};
      const auto reducer = std::make_shared<Reducer>(parameters, std::vector<NamedTensor>{}, world,
                                                     DdpOptions{.overlap = false});
      const at::Tensor turned = weight.t();  // its node waits until all later ones have run
      Detour::go = [&] { at::ones({3, 6}).matmul(weight).square().sum().backward(); };
      try {
        const NoSync no_sync(reducer);
        Detour::apply(at::ones({5, 4}).set_requires_grad(true)).matmul(turned).sum().backward();
      } catch (const UsageError& e) {
        std::lock_guard<std::mutex> lock(guard);
        refusal = e.what();
      }
      Detour::go = nullptr;
      if (world.rank() == 0 && weight.grad().defined()) found = weight.grad().clone();
    });
    return std::make_pair(found, refusal);
  };
  const auto [plain, no_refusal] = gradients(false);
  EXPECT_EQ(no_refusal, "");
  const auto [got, refusal] = gradients(true);
  if (refusal.empty()) {
    EXPECT_TRUE(got.equal(plain));
  } else {
    EXPECT_NE(refusal.find("LOCKSTEP_GRAD_INPLACE_MIN_BYTES=0"), std::string::npos) << refusal;
  }
}

TEST(InplaceGradients, RejectsASizeThatIsNotANumber) {
  const char* before = std::getenv("LOCKSTEP_GRAD_INPLACE_MIN_BYTES");
  const std::string saved = before == nullptr ? "65536" : before;
  ::setenv("LOCKSTEP_GRAD_INPLACE_MIN_BYTES", "64K", 1);
  EXPECT_NE(message_of([] { InplaceGradients::enable(); }).find("LOCKSTEP_GRAD_INPLACE_MIN_BYTES"),
            std::string::npos);
  ::setenv("LOCKSTEP_GRAD_INPLACE_MIN_BYTES", saved.c_str(), 1);
}

TEST(InplaceGradients, EndsWithTheWrapper) {
  const InPlace on(true);
  run_threads(2, [](World& world) {
    ManyShapes net = make_many_shapes();
    at::Tensor gradient;
    {
      DistributedDataParallel<ManyShapes> model{net, world};
      model(ids_of(world.rank(), 0, 6)).backward();
      gradient = net->bare->weight.grad();
    }
    world.barrier();
    EXPECT_EQ(InplaceGradients::offered(), 0u);
    // Its memory lives on with the gradient.
    const at::Tensor copy = gradient.clone();
    net->zero_grad();
    net(ids_of(world.rank(), 1, 6)).backward();
    EXPECT_TRUE(gradient.equal(copy));
    EXPECT_FALSE(net->bare->weight.grad().equal(copy));
  });
}

}  // namespace
}  // namespace lockstep
