// The memory that observe/plan computes beside the peaks of real steps on a GPU: GPT-2 124M, a GPT
// of 1.3 billion parameters and Phi-3-mini with LoRA, at three batch sizes each.
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>

#include "lockstep/kernels/cuda/table.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/optimizer.h"
#include "observe/plan/model_shape.h"

namespace lockstep::plan {
namespace {

constexpr double kGiB = 1u << 30;

Model gpt(std::int64_t layers, std::int64_t heads, std::int64_t width, std::int64_t length) {
  const models::GptConfig c{
      .n_layer = layers, .n_head = heads, .n_embd = width, .n_positions = length};
  return {.config = models::CausalLmConfig{.model = c}, .length = length};
}

Model phi3() {
  const models::LlamaConfig c{.vocab_size = 32064,
                              .hidden_size = 3072,
                              .intermediate_size = 8192,
                              .fused_projections = true};
  Model model{.config = models::CausalLmConfig{.model = c}, .length = 512};
  model.lora = models::LoraConfig{.r = 16, .lora_alpha = 32};
  model.lora->target_modules = {"qkv_proj", "o_proj"};
  return model;
}

// Steps as the Trainer does, on one GPU without accumulation: bf16, AdamW.
class Steps {
 public:
  explicit Steps(const Model& model)
      : net_(models::make_causal_lm(*model.causal_lm(), {.device = at::kCUDA, .draw = false})) {
    if (model.lora) {
      models::add_lora(*net_, *model.lora);
      models::convert_frozen_weights(*net_, at::kBFloat16);
    }
    net_->to(at::kCUDA);
    net_->train();
    optimizer_ = std::make_unique<optim::ReplicatedOptimizer>(
        optim::NamedParameters(net_->named_parameters().pairs()), optim::AdamWOptions{.lr = 1e-5});
  }

  std::uint64_t peak(std::int64_t batch, std::int64_t length) {
    c10::DeviceAllocator& allocator = *c10::getDeviceAllocator(at::kCUDA);
    const at::Tensor ids =
        torch::randint(0, 1000, {batch, length}, at::TensorOptions(at::kLong).device(at::kCUDA));
    for (int step = 0; step < 2; ++step) {  // the first makes the optimizer's state
      allocator.resetPeakStats(0);
      at::Tensor loss;
      {
        const optim::Autocast autocast(at::Device(at::kCUDA, 0), at::kBFloat16);
        loss = net_->loss(ids, ids);
      }
      loss.backward();
      optimizer_->step({.max_grad_norm = 1});
      optimizer_->zero_grad();
    }
    torch::cuda::synchronize();
    return static_cast<std::uint64_t>(allocator.getDeviceStats(0).allocated_bytes[0].peak);
  }

 private:
  models::CausalLmPtr net_;
  std::unique_ptr<optim::ReplicatedOptimizer> optimizer_;
};

struct Case {
  const char* name;
  Model model;
  std::vector<std::int64_t> batches;
};

class PlanMemory : public ::testing::TestWithParam<Case> {};

TEST_P(PlanMemory, IsWithinTenPercentOfThePeak) {
  const Case& c = GetParam();
  const auto total = c10::getDeviceAllocator(at::kCUDA)->getMemoryInfo(0).second;
  Steps steps(c.model);
  for (const std::int64_t batch : c.batches) {
    const Memory memory = memory_of(c.model, {.batch = batch, .half = true, .fused = true});
    if (memory.total() > total) {
      std::printf("SKIP %s, batch %lld: this GPU is too small\n", c.name,
                  static_cast<long long>(batch));
      continue;
    }
    const auto measured = static_cast<double>(steps.peak(batch, c.model.length));
    const auto planned = static_cast<double>(memory.allocated());
    std::printf("%-12s batch %3lld: planned %7.2f GiB, measured %7.2f GiB, error %+5.1f %%\n",
                c.name, static_cast<long long>(batch), planned / kGiB, measured / kGiB,
                100 * (planned / measured - 1));
    EXPECT_NEAR(planned, measured, 0.1 * measured) << c.name << ", batch " << batch;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PlanMemory,
                         ::testing::Values(Case{"gpt2_124m", gpt(12, 12, 768, 1024), {4, 16, 64}},
                                           Case{"gpt_1b3", gpt(24, 16, 2048, 2048), {1, 4, 8}},
                                           Case{"phi3_lora", phi3(), {4, 8, 16}}),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace lockstep::plan

int main(int argc, char** argv) {
  // Also loads the plug-in, without which LibTorch sees no GPU.
  if (lockstep::kernels::cuda::table() == nullptr || !torch::cuda::is_available()) {
    std::puts("SKIPPED: no GPU on this machine");
    return 77;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
