// How rows are divided: as FSDP2 does it. And where they lie: ranks of one host share the memory of
// whole parameters, and no rank may write its rows while others read them.
#include "lockstep/parallel/shard_unit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/ledger.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/model_options.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/block.h"
#include "lockstep/nn/divided.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/sharding.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::parallel {
namespace {

using ::testing::ElementsAre;

TEST(RowCuts, AreThoseOfFsdp2) {
  const auto counts = [](at::IntArrayRef sizes, int ranks) {
    std::vector<std::int64_t> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(cut_rows(sizes, ranks).count(rank));
    return all;
  };
  // torch.chunk: the last parts are shorter, or missing.
  EXPECT_THAT(counts({10, 3}, 4), ElementsAre(3, 3, 3, 1));
  EXPECT_THAT(counts({5}, 4), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(counts({}, 3), ElementsAre(1, 0, 0));
  EXPECT_THAT(counts({0, 4}, 2), ElementsAre(0, 0));
  for (const std::int64_t rows : {1, 4, 5, 9}) {
    const at::Tensor whole = at::arange(2 * rows, at::kFloat).view({rows, 2});
    const auto cut = cut_rows(whole.sizes(), 4);
    const at::Tensor parts = at::zeros({4, cut.padded()});
    copy_to_parts(cut, whole, parts);
    at::Tensor back = at::empty_like(whole);
    copy_from_parts(cut, parts, back);
    EXPECT_TENSOR_EQ(back, whole);
    const auto chunks = whole.chunk(4);
    for (std::size_t r = 0; r < chunks.size(); ++r)
      EXPECT_TENSOR_EQ(parts[static_cast<std::int64_t>(r)].narrow(0, 0, chunks[r].numel()),
                       chunks[r].flatten());
  }
}

// ---------------------------------------------------------------- rows that ranks share

struct Cell : torch::nn::Module, nn::Block {
  Cell() {
    weight = register_parameter("weight", torch::empty({5, 5}));
    gain = register_parameter("gain", torch::empty({}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return run(
        [this](const std::vector<at::Tensor>& in) {
          if (look) look();
          return in[0] + in[0].matmul(weight).tanh() * gain;
        },
        {x});
  }
  at::Tensor weight, gain;
  std::function<void()> look;
};

struct Cells : torch::nn::Module {
  Cells() {
    for (const char* name : {"first", "second", "third"})
      cells.push_back(register_module(name, std::make_shared<Cell>()));
    head = register_parameter("head", torch::empty({5, 2}));
    fill(0);
  }
  void fill(double from) {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : parameters())
      p.copy_(at::sin(at::arange(from, from + static_cast<double>(p.numel())).view_as(p)));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& cell : cells) x = cell->forward(x);
    return x.matmul(head);
  }
  std::vector<std::shared_ptr<Cell>> cells;
  at::Tensor head;
};

at::Tensor cells_input() {
  return at::cos(at::arange(10, at::kFloat)).view({2, 5});
}

struct SharedRun {
  explicit SharedRun(const Mesh& mesh, FullyShardOptions options = {})
      : model(net, mesh, options),
        optimizer(model.make_optimizer({{net.parameters(), optim::AdamWOptions{.lr = 0.1}}})) {}
  void backward() {
    model.before_forward();
    const double own = 1.0 + model.mesh().batch().rank();
    model.backward(net.forward(cells_input() * own).square().mean());
  }
  at::Tensor evaluate() {
    const torch::NoGradGuard no_grad;
    model.before_forward();
    return net.forward(cells_input());
  }
  at::Tensor weights() {
    const auto whole = model.gathered();
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : net.parameters()) all.push_back(p.detach().flatten());
    return at::cat(all);
  }
  Cells net;
  FullyShard model;
  std::unique_ptr<optim::Optimizer> optimizer;
};

void on_shared_meshes(const std::function<void(const Mesh&)>& body) {
  const std::vector<std::vector<MeshAxis>> meshes{
      {{"shard", 2}}, {{"shard", 3}}, {{"data", 2}, {"shard", 2}}};
  for (const auto& axes : meshes) {
    testing::ThreadOptions options;
    options.world.backend = "shm";
    testing::run_threads(
        axes.size() == 2 ? 4 : axes[0].size, [&](World& world) { body(Mesh(world, axes)); },
        options);
  }
}

void wait_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// A type that parameters have already rounds nothing, and what has a type of its own is copied.
// Ranks are threads here, to which one memory has one address.
TEST(SharedRows, HaveTheBitsOfCopies) {
  for (const bool reshard : {true, false})
    on_shared_meshes([&](const Mesh& mesh) {
      std::vector<at::Tensor> weights;
      for (const FullyShardOptions& options :
           {FullyShardOptions{.reshard_after_forward = reshard},
            FullyShardOptions{.reshard_after_forward = reshard, .param_dtype = at::kFloat},
            FullyShardOptions{.reshard_after_forward = reshard, .cpu_offload = true}}) {
        SharedRun run(mesh, options);
        std::set<const void*> seen;
        for (const auto& cell : run.net.cells)
          cell->look = [&seen, cell = cell.get()] { seen.insert(cell->weight.const_data_ptr()); };
        for (int step = 0; step < 3; ++step) {
          run.backward();
          run.optimizer->step({.max_grad_norm = 0.5});
          run.optimizer->zero_grad();
        }
        std::string text;
        for (const void* each : seen)
          text += std::to_string(reinterpret_cast<std::uintptr_t>(each)) + " ";
        const std::vector<std::string> all = all_gather_bytes(mesh["shard"], text);
        EXPECT_EQ(all[0] == all[1], !options.param_dtype);
        EXPECT_TRUE(options.param_dtype || seen.size() == 3);
        weights.push_back(run.weights());
        mesh.world().barrier();
      }
      EXPECT_TENSOR_EQ(weights[0], weights[1]);
      EXPECT_TENSOR_EQ(weights[0], weights[2]);
    });
}

TEST(SharedRows, AreSteppedWhenNoRankComputesWithThem) {
  on_shared_meshes([](const Mesh& mesh) {
    SharedRun run(mesh);
    const at::Tensor expected = run.evaluate();
    run.backward();
    if (mesh.rank("shard") == 1) run.net.cells[1]->look = [] { wait_ms(200); };
    EXPECT_TENSOR_NEAR(run.evaluate(), expected, 1e-5);
    run.optimizer->step();  // others come here while the second rank waits
    mesh.world().barrier();
  });
}

TEST(SharedRows, AreReadWhenEveryRankHasLoadedItsOwn) {
  on_shared_meshes([](const Mesh& mesh) {
    SharedRun run(mesh);
    run.evaluate();
    mesh.world().barrier();
    Cells other;
    other.fill(0.5);
    wait_ms(100 * mesh.rank("shard"));
    const auto from = other.parameters(), to = run.net.parameters();
    for (std::size_t i = 0; i < to.size(); ++i) nn::assign(to[i], from[i]);
    EXPECT_TENSOR_NEAR(run.evaluate(), other.forward(cells_input()).detach(), 1e-5);
    mesh.world().barrier();
  });
}

// Every rank writes what it has gathered.
TEST(SharedRows, AreWrittenOnce) {
  on_shared_meshes([](const Mesh& mesh) {
    SharedRun run(mesh);
    const at::Tensor before = run.weights();
    {
      const auto whole = run.model.gathered();
      const torch::NoGradGuard no_grad;
      for (at::Tensor& p : run.net.parameters()) p.add_(1);
      run.optimizer->sync_from_model();
    }
    run.evaluate();
    EXPECT_TENSOR_EQ(run.weights(), before + 1);
    mesh.world().barrier();
  });
}

// ---------------------------------------------------------------- the type of computation

// Widths that fp8 covers, and that no three ranks divide.
models::CausalLmPtr model_for_fp8(bool gpt, std::uint64_t seed = 5) {
  static std::mutex drawing;
  const std::lock_guard lock(drawing);
  torch::manual_seed(seed);
  if (gpt)
    return models::make_causal_lm(
        {.model = models::GptConfig{
             .n_layer = 2, .n_head = 2, .n_embd = 16, .vocab_size = 29, .n_positions = 12}});
  return models::make_causal_lm({.model = models::LlamaConfig{.vocab_size = 29,
                                                              .hidden_size = 32,
                                                              .intermediate_size = 48,
                                                              .num_hidden_layers = 2,
                                                              .num_attention_heads = 4,
                                                              .num_key_value_heads = 2}});
}

// Rows travel, since ranks share no memory.
void on_gloo(int ranks, const std::function<void(World&)>& body) {
  testing::ThreadOptions options;
  options.world.backend = "gloo";
  testing::run_threads(ranks, body, options);
}

std::int64_t different_values(const at::Tensor& t) {
  return std::get<0>(at::_unique(t.detach().abs().flatten())).numel();
}

// Products travel in the type that they are computed in, other parameters in their own, and a step
// has the bits of one with the exact parameters.
TEST(GatheredProducts, AreRoundedWithoutALoss) {
  const at::Tensor ids = at::arange(22, at::kLong).view({2, 11});
  for (const bool gpt : {true, false})
    for (const int ranks : {2, 3})
      for (const std::optional<nn::Fp8Recipe>& fp8 :
           {std::optional<nn::Fp8Recipe>(), std::optional(nn::Fp8Recipe::kTensorwise),
            std::optional(nn::Fp8Recipe::kRowwise)})
        on_gloo(ranks, [&](World& world) {
          const auto net = model_for_fp8(gpt);
          std::map<std::string, at::Tensor> own;
          for (const auto& p : net->named_parameters()) own[p.key()] = p.value().detach().clone();
          FullyShard model(*net, Mesh(world, {{"shard", -1}}), {.reshard_after_forward = false});
          const auto step = [&] {
            model.before_forward();  // also before what computes in fp8
            const optim::Autocast autocast(at::kCPU, at::kBFloat16, /*cache_enabled=*/false);
            const nn::Fp8Autocast as_fp8(fp8);
            return net->loss(ids, ids);
          };
          const auto gradients = [&](const at::Tensor& loss) {
            model.backward(loss);
            std::vector<at::Tensor> all{loss.detach().view({1})};
            for (at::Tensor& p : net->parameters()) {
              all.push_back(p.grad().flatten());
              p.mutable_grad() = at::Tensor();
            }
            return at::cat(all);
          };
          const at::Tensor loss = step();
          const std::string block = gpt ? "transformer.h.1." : "model.layers.1.";
          for (const auto& p : net->named_parameters()) {
            if (!p.key().starts_with(block)) continue;
            if (p.value().dim() == 2 && fp8 != nn::Fp8Recipe::kRowwise) {
              EXPECT_TENSOR_NEAR(p.value(), own[p.key()], fp8 ? 0.01 : 0.001);
              EXPECT_FALSE(p.value().equal(own[p.key()])) << p.key();
              if (fp8) {
                EXPECT_LE(different_values(p.value()), 127) << p.key();
              }
            } else {
              EXPECT_TENSOR_EQ(p.value(), own[p.key()]);
            }
          }
          const at::Tensor rounded = gradients(loss);
          // Without autocasting the next forward has exact values.
          model.before_forward();
          net->loss(ids, ids);
          for (const auto& p : net->named_parameters()) EXPECT_TENSOR_EQ(p.value(), own[p.key()]);
          const auto whole = model.gathered();
          EXPECT_TENSOR_EQ(rounded, gradients(step()));
        });
}

// In a loop of one's own before_forward() may be outside of what computes in fp8. The largest
// magnitudes are exchanged again after an update all the same: those of the forward before would
// cut off what has grown.
TEST(GatheredProducts, AreScaledByTheMagnitudesOfTheirForward) {
  const at::Tensor ids = at::arange(22, at::kLong).view({2, 11});
  on_gloo(2, [&](World& world) {
    const auto net = model_for_fp8(/*gpt=*/true);
    FullyShard model(*net, Mesh(world, {{"shard", -1}}));
    const auto optimizer = model.make_optimizer({{net->parameters(), optim::SGDOptions{.lr = 1}}});
    const auto loss = [&] {
      model.before_forward();
      const nn::Fp8Autocast fp8(nn::Fp8Recipe::kTensorwise);
      return net->loss(ids, ids);
    };
    for (int k = 0; k < 2; ++k) {
      model.backward(loss());
      for (at::Tensor& p : net->parameters())  // the step doubles every weight
        p.mutable_grad().copy_(-nn::rows_of(p)->values.view_as(p.grad()));
      optimizer->step();
      optimizer->zero_grad();
      const torch::NoGradGuard no_grad;
      const at::Tensor got = loss();
      const auto whole = model.gathered();
      EXPECT_TENSOR_EQ(got, loss());
    }
  });
}

// With a cache of keys and values nothing is computed in fp8, and weights do not travel in it.
TEST(GatheredProducts, GenerationWithACacheHasTheTextsOfOneProcess) {
  const at::Tensor ids = at::arange(22, at::kLong).view({2, 11});
  for (const bool gpt : {true, false})
    on_gloo(2, [&](World& world) {
      const auto net = model_for_fp8(gpt), one = model_for_fp8(gpt);
      FullyShard model(*net, Mesh(world, {{"shard", -1}}));
      const optim::Autocast autocast(at::kCPU, at::kBFloat16, /*cache_enabled=*/false);
      const nn::Fp8Autocast fp8(nn::Fp8Recipe::kTensorwise);
      const torch::NoGradGuard no_grad;
      model.before_forward();
      EXPECT_TENSOR_EQ(net->loss(ids, ids), one->loss(ids, ids));  // in fp8
      model.before_forward();
      models::KvCache cache, whole_cache;
      for (const at::Tensor& next : {ids.narrow(1, 0, 10), ids.narrow(1, 10, 1)})
        EXPECT_TENSOR_EQ(net->forward(next, &cache), one->forward(next, &whole_cache));
      const models::GenerateOptions greedy{.max_new_tokens = 8};
      EXPECT_EQ(models::generate(*net, {1, 2, 3}, greedy),
                models::generate(*one, {1, 2, 3}, greedy));
    });
}

// ---------------------------------------------------------------- the ledger

// Ranks are processes, since a process has one phase. The second one is late.
// torch::autograd::grad() gathers blocks as a backward does, averages nothing, and leaves the graph
// to the backward that follows. A graph of its own needs blocks that stay.
TEST(ShardUnits, GradientsOfInputsAreThoseOfOneProcess) {
  on_shared_meshes([](const Mesh& mesh) {
    const auto loss_of = [](Cells& net, const at::Tensor& x) {
      return net.forward(x).square().mean();
    };
    const auto gradient = [&](const at::Tensor& loss, const at::Tensor& x, bool create_graph) {
      return torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, create_graph)[0];
    };
    const at::Tensor x = cells_input().requires_grad_();
    Cells one;
    optim::ReplicatedOptimizer its(one.named_parameters().pairs(), optim::AdamWOptions{.lr = 0.1});
    SharedRun run(mesh);
    for (const bool penalty : {false, true}) {
      std::shared_ptr<void> whole;
      if (penalty) {
        run.model.before_forward();
        EXPECT_THAT(
            testing::message_of<UsageError>([&] { gradient(loss_of(run.net, x), x, true); }),
            ::testing::HasSubstr("Hold gathered()"));
        whole = run.model.gathered();
      }
      at::Tensor expected = loss_of(one, x);
      const at::Tensor of_one = gradient(expected, x, penalty);
      run.model.before_forward();
      at::Tensor loss = loss_of(run.net, x);
      const at::Tensor got = gradient(loss, x, penalty);
      EXPECT_TENSOR_NEAR(got.detach(), of_one.detach(), 1e-6);
      for (const at::Tensor& p : run.net.parameters()) EXPECT_FALSE(p.grad().defined());
      if (penalty) {
        loss = loss + got.square().sum();
        expected = expected + of_one.square().sum();
      }
      run.model.backward(loss);
      expected.backward();
      run.optimizer->step();
      its.step();
      run.optimizer->zero_grad();
      its.zero_grad();
      whole.reset();
      std::vector<at::Tensor> all;
      for (const at::Tensor& p : one.parameters()) all.push_back(p.detach().flatten());
      EXPECT_TENSOR_NEAR(run.weights(), at::cat(all), 1e-4);
    }
  });
}

TEST(ShardUnits, WaitsAreBookedAsCommunication) {
  const auto ranks = testing::run_processes(2, [](World& world) {
    const auto expect_waits = [&](const std::function<void()>& body) {
      world.barrier();
      const ledger::Totals before = ledger::totals();
      body();
      const ledger::Totals spent = ledger::since(before, ledger::totals());
      world.barrier();
      if (world.rank() == 0) {
        EXPECT_GE(spent.host_ns[ledger::index(ledger::Phase::kCommunication)], 100'000'000u);
      }
    };
    const auto late = [&] {
      if (world.rank() == 1) wait_ms(500);
    };
    const Mesh mesh(world, {{"shard", 2}});
    {  // rows are copied: an evaluation gathers, and reduces nothing
      SharedRun run(mesh, {.param_dtype = at::kFloat});
      expect_waits([&] {
        late();
        run.evaluate();
      });
    }
    {  // rows are shared: nothing is gathered, and the first wait is for a reduction
      SharedRun run(mesh);
      run.net.cells[0]->look = late;
      expect_waits([&] { run.backward(); });
    }
  });
  for (const testing::RankResult& rank : ranks) EXPECT_EQ(rank.exit_code, 0) << rank.output;
}

TEST(ShardedLayout, BlocksCoverEveryElementOnceAndEvenly) {
  constexpr std::int64_t kBlock = kernels::kNormBlock;
  for (const std::int64_t elements :
       {std::int64_t{0}, std::int64_t{1}, kBlock - 1, kBlock, 3 * kBlock + 5, 100 * kBlock})
    for (const int ranks : {1, 2, 3, 4, 7, 64}) {
      const RowCut cut = cut_blocks(elements, ranks);
      EXPECT_EQ(cut.rows * cut.row_size, elements);
      std::int64_t reached = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        if (cut.count(rank) == 0) continue;
        EXPECT_EQ(cut.begin(rank), reached);
        EXPECT_EQ(reached % kBlock, 0);
        EXPECT_LE(cut.count(rank), elements / ranks + kBlock);
        reached += cut.count(rank);
      }
      EXPECT_EQ(reached, elements);
    }
}

TEST(ShardedLayout, WholeTensorsAreDealtByTheirCosts) {
  EXPECT_EQ(deal_tensors({10, 0, 5, 5}, {8, 9, 4, 4}, 2), (std::vector{0, -1, 1, 1}));
}

TEST(ShardedLayout, OffsetsDoNotOverlap) {
  const std::vector<std::int64_t> sizes{100, 30, 30, 30, 5, 0};
  const auto offsets = spread_over_parts(sizes, 2);
  EXPECT_EQ(offsets.part_size, 100);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_LE(offsets.places[i].offset + sizes[i], offsets.part_size);
    for (std::size_t j = 0; j < i; ++j) {
      const auto &a = offsets.places[i], &b = offsets.places[j];
      const bool apart =
          a.part != b.part || a.offset >= b.offset + sizes[j] || b.offset >= a.offset + sizes[i];
      EXPECT_TRUE(apart) << i << " and " << j;
    }
  }
}

}  // namespace

}  // namespace lockstep::parallel
