// The models of oracle.py, operation for operation, under the same parameter names. GPT is the
// library's own.
#pragma once

#include <torch/torch.h>

#include <string>

namespace parity {

struct Mlp : torch::nn::Module {
  Mlp() {
    net = register_module("net", torch::nn::Sequential(torch::nn::Linear(20, 64), torch::nn::ReLU(),
                                                       torch::nn::Linear(64, 10)));
  }
  at::Tensor forward(const at::Tensor& x) { return net->forward(x); }

  torch::nn::Sequential net;
};

struct ConvNet : torch::nn::Module {
  ConvNet() {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("conv2", conv2);
    register_module("bn2", bn2);
    register_module("fc", fc);
  }
  at::Tensor forward(const at::Tensor& images) {
    auto x = torch::max_pool2d(torch::relu(bn1(conv1(images))), 2);
    x = torch::relu(bn2(conv2(x)));
    return fc(x.mean({2, 3}));
  }

  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(3, 8, 3).padding(1)};
  torch::nn::BatchNorm2d bn1{8};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(8, 16, 3).padding(1)};
  torch::nn::BatchNorm2d bn2{16};
  torch::nn::Linear fc{16, 10};
};

// Uses one head or both, as the caller chooses.
struct Branches : torch::nn::Module {
  Branches() {
    register_module("trunk", trunk);
    register_module("head_a", head_a);
    register_module("head_b", head_b);
  }
  at::Tensor forward(const at::Tensor& input, const std::string& heads) {
    const auto x = torch::relu(trunk(input));
    if (heads == "a") return head_a(x);
    if (heads == "b") return head_b(x);
    return head_a(x) + head_b(x);
  }

  torch::nn::Linear trunk{20, 64};
  torch::nn::Linear head_a{64, 10};
  torch::nn::Linear head_b{64, 10};
};

// Like heads_of() in oracle.py.
inline std::string heads_of(int micro_step, int rank) {
  const int kind = micro_step % 5;
  if (kind == 0) return "ab";
  if (kind == 1 || kind == 3) return (rank + kind / 2) % 2 == 0 ? "a" : "b";
  return kind == 2 ? "b" : "a";
}

}  // namespace parity
