// Captured steps give the same bits as uncaptured ones. On the CPU nothing is captured; with
// LOCKSTEP_DEVICE=cuda everything is.
#include "lockstep/train/captured_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/ema.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using Tensors = CapturedStep::Tensors;

bool on_cuda() {
  return nn::test_device().is_cuda();
}

models::GptConfig small_gpt(double dropout = 0) {
  return {.n_layer = 2,
          .n_head = 2,
          .n_embd = 64,
          .vocab_size = 128,
          .n_positions = 64,
          .embd_pdrop = dropout,
          .resid_pdrop = dropout};
}

// A model with its optimizer, and the function that is captured.
struct Training {
  explicit Training(double dropout = 0) {
    torch::manual_seed(4);
    model = std::make_shared<models::GptImpl>(small_gpt(dropout));
    model->to(nn::test_device());
    optimizer = std::make_unique<optim::ReplicatedOptimizer>(
        optim::NamedParameters(model->named_parameters().pairs()), optim::AdamWOptions{.lr = 1e-3});
  }

  at::Tensor backward(const Tensors& inputs, double weight = 1) {
    at::Tensor loss;
    {
      const optim::Autocast autocast(nn::test_device(), type);
      loss = model->loss(inputs[0], inputs[1]);
    }
    (loss * weight).backward();
    return loss.detach();
  }
  Tensors step(const Tensors& inputs) {
    const at::Tensor loss = backward(inputs);
    const auto result = optimizer->step(how);
    optimizer->zero_grad();
    return {loss, result.grad_norm};
  }

  std::vector<at::Tensor> parameters() { return model->parameters(); }

  at::ScalarType type = at::kBFloat16;
  optim::StepOptions how{.max_grad_norm = 1.0, .want_grad_norm = true, .skip_non_finite = true};
  std::shared_ptr<models::GptImpl> model;
  std::unique_ptr<optim::ReplicatedOptimizer> optimizer;
};

Tensors batch(int index, std::int64_t rows = 2) {
  torch::manual_seed(100 + static_cast<std::uint64_t>(index));
  const auto ids = torch::randint(0, 128, {rows, 17}, at::kLong).to(nn::test_device());
  return {ids.slice(1, 0, -1).contiguous(), ids.slice(1, 1).contiguous()};
}

void expect_same_weights(Training& a, Training& b) {
  const auto left = a.parameters(), right = b.parameters();
  for (std::size_t i = 0; i < left.size(); ++i) EXPECT_TRUE(left[i].equal(right[i])) << i;
}

TEST(CapturedStep, HasTheBitsOfStepsAsTheyAre) {
  Training plain, captured;
  CapturedStep step(*captured.optimizer, {captured.how, captured.parameters()},
                    [&](const Tensors& inputs, int) { return captured.step(inputs); });
  for (int i = 0; i < 12; ++i) {
    const double lr = 1e-3 / (1 + i);  // a schedule
    plain.optimizer->set_lr(lr);
    captured.optimizer->set_lr(lr);
    // Every fifth batch is short; other weights are loaded once.
    const Tensors inputs = batch(i, i % 5 == 4 ? 1 : 2);
    if (i == 8) {
      const torch::NoGradGuard no_grad;
      plain.parameters()[0].mul_(0.5);
      captured.parameters()[0].mul_(0.5);
    }
    const Tensors want = plain.step(inputs);
    const Tensors got = step.run(inputs);
    EXPECT_TRUE(got[0].equal(want[0])) << i;
    EXPECT_TRUE(got[1].equal(want[1])) << i;
    EXPECT_EQ(step.replayed(), on_cuda() && i > 3 && i % 5 != 4) << i;
  }
  expect_same_weights(plain, captured);
  EXPECT_EQ(step.unavailable_reason().empty(), on_cuda());
}

// Averages take the weights' place and are swapped back, and weights are written past their version
// counters: a replay computes with the weights that are there.
TEST(CapturedStep, SeesTheWeightsThatAreThereAfterASwapOfAveragesAndWritesToData) {
  Training plain, captured;
  optim::Ema plain_average{*plain.model, {.decay = 0.5}}, average{*captured.model, {.decay = 0.5}};
  CapturedStep step(*captured.optimizer, {captured.how, captured.parameters()},
                    [&](const Tensors& inputs, int) { return captured.step(inputs); });
  const auto evaluate = [](Training& training, optim::Ema& ema, const Tensors& inputs) {
    const auto swapped = ema.swap();
    const torch::NoGradGuard no_grad;
    const optim::Autocast autocast(nn::test_device(), at::kBFloat16);
    return training.model->loss(inputs[0], inputs[1]);
  };
  for (int i = 0; i < 12; ++i) {
    EXPECT_TRUE(step.run(batch(i))[0].equal(plain.step(batch(i))[0])) << i;
    plain_average.update();
    average.update();
    EXPECT_TRUE(
        evaluate(captured, average, batch(50)).equal(evaluate(plain, plain_average, batch(50))))
        << i;
    if (i % 4 != 3) continue;
    for (Training* training : {&plain, &captured})
      for (const at::Tensor& parameter : training->parameters()) parameter.data().mul_(0.75);
  }
  expect_same_weights(plain, captured);
}

// Evaluations of other lengths come between the replays of a graph that reads rotary tables.
TEST(CapturedStep, HasTheBitsOfALlamaBetweenTextsOfOtherLengths) {
  for (const bool fused : {false, true}) {
    const auto made = [&] {
      torch::manual_seed(5);
      const models::LlamaConfig sizes{.vocab_size = 128,
                                      .hidden_size = 64,
                                      .intermediate_size = 96,
                                      .num_hidden_layers = 2,
                                      .num_attention_heads = 4};
      auto model = std::make_shared<models::LlamaImpl>(sizes);
      model->to(nn::test_device());
      model->use_fused(fused);
      return model;
    };
    const auto plain = made(), captured = made();
    const auto optimizer_of = [](models::LlamaImpl& model) {
      return std::make_unique<optim::ReplicatedOptimizer>(
          optim::NamedParameters(model.named_parameters().pairs()),
          optim::AdamWOptions{.lr = 1e-3});
    };
    const auto plain_optimizer = optimizer_of(*plain), optimizer = optimizer_of(*captured);
    const auto train = [](models::LlamaImpl& model, optim::ReplicatedOptimizer& with,
                          const Tensors& inputs) -> Tensors {
      const at::Tensor loss = model.loss(inputs[0], inputs[1]);
      loss.backward();
      with.step();
      with.zero_grad();
      return {loss.detach()};
    };
    CapturedStep step(*optimizer, {{}, captured->parameters()}, [&](const Tensors& inputs, int) {
      return train(*captured, *optimizer, inputs);
    });
    for (int i = 0; i < 12; ++i) {
      const at::Tensor want = train(*plain, *plain_optimizer, batch(i))[0];
      EXPECT_TRUE(step.run(batch(i))[0].equal(want)) << fused << " " << i;
      EXPECT_EQ(step.replayed(), on_cuda() && i > 3) << i;
      const torch::NoGradGuard no_grad;
      const at::Tensor text = torch::randint(0, 128, {1, 20 << (i % 4)}, at::kLong);
      captured->forward(text.to(nn::test_device()));
      // What was freed is written over.
      for (int size = 256; size <= 1 << 16; size *= 2)
        torch::full({size}, 1e3, at::TensorOptions(nn::test_device()));
    }
  }
}

TEST(CapturedStep, HasTheBitsOfStepsInFloat16) {
  Training plain, captured;
  plain.type = captured.type = at::kHalf;
  CapturedStep step(*captured.optimizer, {captured.how, captured.parameters()},
                    [&](const Tensors& inputs, int) { return captured.step(inputs); });
  for (int i = 0; i < 8; ++i)
    EXPECT_TRUE(step.run(batch(i))[0].equal(plain.step(batch(i))[0])) << i;
  expect_same_weights(plain, captured);
}

TEST(CapturedStep, WindowsOfSeveralMicroBatches) {
  Training plain, captured;
  const auto work = [](Training& training, const Tensors& inputs, bool last) -> Tensors {
    const at::Tensor loss = training.backward(inputs, 1.0 / 6);
    if (!last) return {loss};
    training.optimizer->step(training.how);
    training.optimizer->zero_grad();
    return {loss};
  };
  CapturedStep step(
      *captured.optimizer, {captured.how, captured.parameters()},
      [&](const Tensors& inputs, int variant) { return work(captured, inputs, variant == 2); });
  // Those in the middle are frequent before gradients are where a graph has them.
  constexpr int kPasses = 6, kWindows = 10;
  int replays = 0;
  for (int i = 0; i < kPasses * kWindows; ++i) {
    const int pass = i % kPasses;
    const int variant = pass == 0 ? 0 : pass == kPasses - 1 ? 2 : 1;
    // The last window ends with a short batch, for which there is no graph.
    const bool last = i == kPasses * kWindows - 1;
    const Tensors inputs = batch(i, last ? 1 : 2);
    const Tensors want = work(plain, inputs, variant == 2);
    const Tensors got = step.run(inputs, variant);
    EXPECT_TRUE(got[0].equal(want[0])) << i;
    // No graph holds memory while other passes of a window still run as they are.
    if (i < 3 * kPasses) {
      EXPECT_FALSE(step.replayed()) << i;
    }
    if (i >= kPasses * kWindows / 2) replays += step.replayed() ? 1 : 0;
  }
  EXPECT_EQ(replays, on_cuda() ? kPasses * kWindows / 2 - 1 : 0);
  expect_same_weights(plain, captured);
}

// A rank alone: no reducer counts what its backward does.
TEST(CapturedStep, CountsThePassesAndStepsOfReplays) {
  constexpr int kWindows = 12;
  Training training;
  const auto parallelism = std::make_shared<DataParallel>(*training.model, World());
  CapturedStep step(
      *training.optimizer,
      {.step = training.how, .parameters = training.parameters(), .parallelism = parallelism},
      [&](const Tensors& inputs, int last) -> Tensors {
        const at::Tensor loss = training.model->loss(inputs[0], inputs[1]);
        parallelism->backward(loss * 0.5, last == 1);
        if (last == 0) return {loss.detach()};
        training.optimizer->step(training.how);
        training.optimizer->zero_grad();
        return {loss.detach()};
      });
  int replays = 0;
  const ledger::Totals before = ledger::totals();
  for (int i = 0; i < 2 * kWindows; ++i) {
    step.run(batch(i), i % 2);
    replays += step.replayed() ? 1 : 0;
  }
  const ledger::Totals spent = ledger::since(before, ledger::totals());
  EXPECT_EQ(replays >= kWindows, on_cuda());
  EXPECT_EQ(spent.counts[index(ledger::Counter::kMicroBatches)], std::uint64_t{2 * kWindows});
  EXPECT_EQ(spent.steps, std::uint64_t{kWindows});
}

// One that fails has called the function, which is called again.
TEST(CapturedStep, ARecordingThatFailsCountsNothing) {
  constexpr int kSteps = 6;
  Training training;
  const auto parallelism = std::make_shared<DataParallel>(*training.model, World());
  CapturedStep step(
      *training.optimizer,
      {.step = training.how, .parameters = training.parameters(), .parallelism = parallelism},
      [&](const Tensors& inputs, int) -> Tensors {
        const at::Tensor loss = training.model->loss(inputs[0], inputs[1]);
        parallelism->backward(loss, /*last=*/true);
        static_cast<void>(loss.item<double>());  // a graph cannot wait
        training.optimizer->step(training.how);
        training.optimizer->zero_grad();
        return {};
      });
  const ledger::Totals before = ledger::totals();
  for (int i = 0; i < kSteps; ++i) step.run(batch(i));
  const ledger::Totals spent = ledger::since(before, ledger::totals());
  EXPECT_FALSE(step.unavailable_reason().empty());
  EXPECT_EQ(spent.counts[index(ledger::Counter::kMicroBatches)], std::uint64_t{kSteps});
  EXPECT_EQ(spent.steps, std::uint64_t{kSteps});
}

TEST(CapturedStep, LoadedStateIsWhatReplaysContinueFrom) {
  Training plain, captured;
  CapturedStep step(*captured.optimizer, {captured.how, captured.parameters()},
                    [&](const Tensors& inputs, int) { return captured.step(inputs); });
  for (int i = 0; i < 6; ++i) {
    plain.step(batch(i));
    step.run(batch(i));
  }
  const auto state = plain.optimizer->state_dict();
  for (int i = 6; i < 8; ++i) step.run(batch(i));  // away from it
  captured.optimizer->load_state_dict(state);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < plain.parameters().size(); ++i)
      captured.parameters()[i].copy_(plain.parameters()[i]);
  }
  plain.step(batch(9));
  step.run(batch(9));
  expect_same_weights(plain, captured);
}

TEST(CapturedStep, AStepThatIsNotFiniteIsSkippedInReplays) {
  Training plain, captured;
  const auto poisoned = [](Training& training, const Tensors& inputs) -> Tensors {
    at::Tensor loss;
    {
      const optim::Autocast autocast(nn::test_device(), at::kBFloat16);
      loss = training.model->loss(inputs[0], inputs[1]) * inputs[2].reshape({});
    }
    loss.backward();
    const auto result = training.optimizer->step(training.how);
    training.optimizer->zero_grad();
    return {result.skipped};
  };
  CapturedStep step(*captured.optimizer, {captured.how, captured.parameters()},
                    [&](const Tensors& inputs, int) { return poisoned(captured, inputs); });
  for (int i = 0; i < 8; ++i) {
    Tensors inputs = batch(i);
    inputs.push_back(torch::full({1}, i % 3 == 2 ? INFINITY : 1.0f).to(nn::test_device()));
    EXPECT_EQ(poisoned(plain, inputs)[0].item<double>(), i % 3 == 2 ? 1 : 0) << i;
    EXPECT_EQ(step.run(inputs)[0].item<double>(), i % 3 == 2 ? 1 : 0) << i;
  }
  expect_same_weights(plain, captured);
}

TEST(CapturedStep, WhatWaitsForTheDeviceIsNamedAndRunsAsItIs) {
  Training plain, captured;
  CapturedStep step(*captured.optimizer, {captured.how, captured.parameters()},
                    [&](const Tensors& inputs, int) {
                      const at::Tensor loss = captured.backward(inputs);
                      static_cast<void>(loss.item<double>());
                      captured.optimizer->step(captured.how);
                      captured.optimizer->zero_grad();
                      return Tensors{loss};
                    });
  for (int i = 0; i < 6; ++i) {
    plain.step(batch(i));
    step.run(batch(i));
  }
  expect_same_weights(plain, captured);
  EXPECT_NE(step.unavailable_reason().find(on_cuda() ? "_local_scalar_dense" : "not on a GPU"),
            std::string::npos)
      << step.unavailable_reason();
}

TEST(CapturedStep, RefusesWhatItCannotDo) {
  Training training;
  const auto work = [](const Tensors&, int) { return Tensors(); };
  EXPECT_THROW(CapturedStep(*training.optimizer, {training.how, {}}, work), UsageError);
  EXPECT_THROW(CapturedStep(*training.optimizer, {training.how, training.parameters(), 0}, work),
               UsageError);
}

// The seed documents' four orders of wrapping and compiling: each is right or refused, on the CPU
// too, so that the mistake is found before there is a GPU.
TEST(CapturedStep, AWrapperThatItWasNotGivenIsRefusedBeforeAndAfter) {
  testing::run_threads(2, [](World& world) {
    torch::nn::Linear net(4, 1);
    optim::ReplicatedOptimizer optimizer(optim::NamedParameters(net->named_parameters().pairs()),
                                         optim::SGDOptions{.lr = 0.1});
    int runs = 0;
    const auto work = [&](const Tensors&, int) {
      ++runs;
      return Tensors();
    };
    CapturedStep made_before(optimizer, {{}, net->parameters()}, work);
    made_before.run({});
    {
      DistributedDataParallel model(net, world);
      const std::string reason = testing::message_of<UsageError>([&] { made_before.run({}); });
      EXPECT_THAT(reason, ::testing::HasSubstr("Wrap the model first"));
      EXPECT_THROW(CapturedStep(optimizer, {{}, net->parameters()}, work), UsageError);
      CapturedStepOptions right{.parameters = net->parameters(),
                                .parallelism = model.parallelism()};
      CapturedStep(optimizer, right, work).run({});
    }
    made_before.run({});  // The wrapper is gone.
    EXPECT_EQ(runs, 3);
  });
}

}  // namespace
}  // namespace lockstep
