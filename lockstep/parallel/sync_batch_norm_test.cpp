// convert_sync_batchnorm() against PyTorch's semantics; replicas_test.cpp has SyncBatchNorm itself.
#include "lockstep/parallel/sync_batch_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

at::Generator own_generator(std::uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

// Ranks are threads: the same weights without the process's generator.
void fill(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  auto random = own_generator(3);
  for (at::Tensor& p : module.parameters()) p.copy_(torch::randn(p.sizes(), random) * 0.5);
  for (at::Tensor& b : module.buffers())
    if (b.is_floating_point()) b.copy_(torch::rand(b.sizes(), random) + 0.5);
}

// A Sequential inside a module of the user's inside a Sequential.
struct BlockImpl : torch::nn::Module {
  BlockImpl() { register_module("body", body); }
  at::Tensor forward(const at::Tensor& x) { return body->forward(x) + x; }
  torch::nn::Sequential body{torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 3, 1)),
                             torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(3).momentum(0.3))};
};
TORCH_MODULE(Block);

torch::nn::Sequential conv_net() {
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 3, 1)),
                            torch::nn::BatchNorm2d(3), torch::nn::ReLU(), Block());
  net->push_back("last",
                 torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(3).affine(false).eps(1e-3)));
  fill(*net);
  return net;
}

at::Tensor all_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const auto& t : tensors) flat.push_back(t.detach().to(at::kDouble).flatten());
  return at::cat(flat);
}

TEST(ConvertSyncBatchNorm, PreservesNamesParametersBuffersOptionsAndMode) {
  torch::nn::Sequential net = conv_net();
  net->eval();
  net[1]->as<torch::nn::BatchNorm2dImpl>()->train();
  const auto parameters = net->named_parameters();
  const auto buffers = net->named_buffers();
  const auto children = net->named_children().keys();
  nn::convert_sync_batchnorm(*net, World{});

  EXPECT_EQ(net->named_children().keys(), children);
  ASSERT_EQ(net->named_parameters().keys(), parameters.keys());
  for (const auto& item : net->named_parameters())
    EXPECT_EQ(item.value().unsafeGetTensorImpl(), parameters[item.key()].unsafeGetTensorImpl())
        << item.key() << " must be the same tensor: an optimizer may have it";
  ASSERT_EQ(net->named_buffers().keys(), buffers.keys());
  for (const auto& item : net->named_buffers()) {
    EXPECT_TRUE(torch::equal(item.value(), buffers[item.key()])) << item.key();
    EXPECT_EQ(item.value().data_ptr(), buffers[item.key()].data_ptr()) << item.key();
  }
  const auto* first = net[1]->as<nn::SyncBatchNorm2dImpl>();
  ASSERT_NE(first, nullptr);
  EXPECT_TRUE(first->is_training());
  const auto* inner = net[3]->as<BlockImpl>()->body[1]->as<nn::SyncBatchNorm2dImpl>();
  ASSERT_NE(inner, nullptr);
  EXPECT_FALSE(inner->is_training());
  EXPECT_EQ(*inner->options.momentum(), 0.3);
  const auto* last = net[4]->as<nn::SyncBatchNorm2dImpl>();
  ASSERT_NE(last, nullptr);
  EXPECT_EQ(last->options.eps(), 1e-3);
  EXPECT_FALSE(last->weight.defined());

  // A second call finds nothing to do.
  const auto before = net[1];
  nn::convert_sync_batchnorm(*net, World{});
  EXPECT_EQ(net[1], before);
}

TEST(ConvertSyncBatchNorm, EqualsPlainBatchNormOnTheWholeBatch) {
  constexpr std::int64_t kPerRank = 4;
  for (const int ranks : {1, 2, 3}) {
    auto random = own_generator(8);
    const at::Tensor x = torch::randn({kPerRank * ranks, 2, 3, 3}, random);
    const at::Tensor goal = torch::randn({kPerRank * ranks, 3, 3, 3}, random);
    torch::nn::Sequential plain = conv_net();
    plain->train();
    const at::Tensor expected = plain->forward(x);
    torch::mse_loss(expected, goal).backward();
    std::vector<at::Tensor> gradients;
    for (const auto& p : plain->parameters()) gradients.push_back(p.grad());

    testing::run_threads(ranks, [&](World& world) {
      torch::nn::Sequential net = conv_net();
      nn::convert_sync_batchnorm(*net, world);
      net->train();
      DistributedDataParallel model{net, world, {.broadcast_buffers = false}};
      const auto mine =
          torch::indexing::Slice(kPerRank * world.rank(), kPerRank * (world.rank() + 1));
      const at::Tensor y = model(x.index({mine}));
      torch::mse_loss(y, goal.index({mine})).backward();
      EXPECT_TRUE(torch::allclose(y, expected.index({mine}), 1e-4, 1e-5));
      std::vector<at::Tensor> own;
      for (const auto& p : net->parameters()) own.push_back(p.grad());
      EXPECT_TRUE(torch::allclose(all_of(own), all_of(gradients), 1e-3, 1e-5));
      EXPECT_TRUE(torch::allclose(all_of(net->buffers()), all_of(plain->buffers()), 1e-4, 1e-5));
    });
  }
}

struct TypedImpl : torch::nn::Module {
  TypedImpl() {
    register_module("norm", norm);
    register_module("list", list);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(x); }
  torch::nn::BatchNorm1d norm{4};
  torch::nn::ModuleList list{torch::nn::BatchNorm1d(4)};
};
TORCH_MODULE(Typed);

TEST(ConvertSyncBatchNorm, RefusesByNameWhatIsCalledByItsType) {
  torch::nn::Sequential net(torch::nn::BatchNorm1d(4), Typed());
  const auto refusal = [](torch::nn::Module& module) {
    return testing::message_of<UsageError>([&] { nn::convert_sync_batchnorm(module, World{}); });
  };
  const std::string text = refusal(*net);
  EXPECT_THAT(text, HasSubstr("2 BatchNorm module(s) cannot be replaced: 1.norm, 1.list.0."));
  EXPECT_THAT(text, HasSubstr("SyncBatchNorm2d norm{world, channels}"));
  EXPECT_EQ(net[0]->as<nn::SyncBatchNorm1dImpl>(), nullptr) << "nothing is changed";
  torch::nn::BatchNorm1d alone(4);
  EXPECT_THAT(refusal(*alone), HasSubstr("the module itself"));
}

}  // namespace
}  // namespace lockstep
