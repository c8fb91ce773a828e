// Answers the questions of optim_oracle_test.py: one JSON object per line in, one line out.
//
// Numbers that must be exact travel as the bits of a float, in hexadecimal.
#include <fmt/format.h>
#include <torch/torch.h>

#include <bit>
#include <iostream>
#include <limits>
#include <memory>
#include <string>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/optim/schedule.h"

namespace {

using namespace lockstep;

const Node& field(const Node& question, const char* key) {
  const Entry* entry = question.find(key);
  if (entry == nullptr) throw UsageError("optim_peer", "the question has no '{}'", key);
  return entry->value;
}
double real(const Node& question, const char* key) {
  const Node& node = field(question, key);
  if (node.is(NodeKind::kString)) return std::numeric_limits<double>::infinity();
  return as_real(node, key);
}

// The same numbers as grid() in Python, each exact in a float.
at::Tensor grid(std::int64_t size, std::int64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i)
    values[static_cast<std::size_t>(i)] =
        static_cast<float>(((i + 1) * 40503 + seed * 9973) % 65536 - 32768) / 4096.0f;
  return torch::tensor(values);
}

std::string bits(const at::Tensor& tensor) {
  std::string text;
  const at::Tensor flat = tensor.detach().contiguous().view({-1});
  for (std::int64_t i = 0; i < flat.numel(); ++i)
    text += fmt::format("{:08x}", std::bit_cast<std::uint32_t>(flat[i].item<float>()));
  return text;
}

std::vector<at::Tensor> leaves(const Node& question) {
  std::vector<at::Tensor> result;
  for (const Node& size : field(question, "sizes").items)
    result.push_back(
        grid(size.integer, static_cast<std::int64_t>(result.size())).set_requires_grad(true));
  return result;
}

std::string schedule(const Node& question) {
  const auto made =
      optim::make_schedule({.name = as_string(field(question, "name"), "name"),
                            .warmup_steps = field(question, "warmup").integer,
                            .total_steps = field(question, "total").integer,
                            .lr = real(question, "lr"),
                            .kwargs = optim::schedule_kwargs(field(question, "kwargs"))});
  std::string text;
  for (std::int64_t step = 0; step < field(question, "steps").integer; ++step)
    text += fmt::format("{}{:.17g}", step == 0 ? "" : " ", made.factor(step));
  return text;
}

std::string clip(const Node& question) {
  auto params = leaves(question);
  for (std::size_t i = 0; i < params.size(); ++i)
    params[i].mutable_grad() = params[i].detach() * real(question, "scale");
  std::string text;
  if (question.find("value") != nullptr) {
    optim::clip_grad_value_(params, real(question, "value"));
  } else {
    text = bits(optim::clip_grad_norm_(params, real(question, "max_norm"),
                                       {.norm_type = real(question, "norm_type")}));
  }
  for (const auto& param : params) text += " " + bits(param.grad());
  return text;
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const Node& question,
                                                      const std::vector<at::Tensor>& params) {
  const std::string name = as_string(field(question, "optimizer"), "optimizer");
  const double lr = real(question, "lr"), decay = real(question, "weight_decay");
  if (name == "adamw")
    return std::make_unique<optim::AdamW>(params,
                                          optim::AdamWOptions{.lr = lr, .weight_decay = decay});
  if (name == "adam")
    return std::make_unique<optim::Adam>(params,
                                         optim::AdamOptions{.lr = lr, .weight_decay = decay});
  return std::make_unique<optim::SGD>(
      params, optim::SGDOptions{.lr = lr,
                                .momentum = real(question, "momentum"),
                                .dampening = real(question, "dampening"),
                                .weight_decay = decay,
                                .nesterov = field(question, "nesterov").boolean});
}

// Steps with scaled losses, some of which have an infinite gradient.
std::string train(const Node& question) {
  auto params = leaves(question);
  const auto optimizer = optimizer_of(question, params);
  optim::GradScaler scaler({}, {.init_scale = real(question, "init_scale"),
                                .growth_interval = field(question, "growth_interval").integer,
                                .enabled = field(question, "scaled").boolean});
  std::string text;
  std::int64_t step = 0;
  for (const Node& factor : field(question, "factors").items) {
    optimizer->zero_grad();
    const double by =
        factor.is(NodeKind::kString) ? std::numeric_limits<double>::infinity() : factor.real;
    at::Tensor loss = torch::zeros({});
    for (const auto& param : params)
      loss = loss + (param * grid(param.numel(), 100 + step)).sum() * by;
    scaler.scale(loss).backward();
    const double max_norm = real(question, "max_norm");
    if (max_norm > 0) {
      scaler.unscale_(*optimizer);
      optim::clip_grad_norm_(params, max_norm);
    }
    scaler.step(*optimizer);
    scaler.update();
    const auto state = scaler.state_dict();
    text += fmt::format("{:.17g}:{} ", state.scale, state.growth_tracker);
    ++step;
  }
  for (const auto& param : params) text += bits(param) + " ";
  return text;
}

// A few steps of any rule over tensors of any shape, with options by name: parameters, then state.
std::string rule(const Node& question) {
  const std::string name = as_string(field(question, "rule"), "rule");
  optim::Rule made = name == "muon"      ? optim::Rule(optim::MuonOptions{})
                     : name == "lion"    ? optim::Rule(optim::LionOptions{})
                     : name == "rmsprop" ? optim::Rule(optim::RMSpropOptions{})
                                         : optim::Rule(optim::AdafactorOptions{});
  for (const Entry& option : field(question, "options").entries)
    made.set(option.key, as_real(option.value, option.key.c_str()));
  std::vector<at::Tensor> params;
  for (const Node& shape : field(question, "shapes").items) {
    std::vector<std::int64_t> sizes;
    for (const Node& size : shape.items) sizes.push_back(size.integer);
    const auto seed = static_cast<std::int64_t>(params.size());
    params.push_back(
        grid(c10::multiply_integers(sizes), seed).view(sizes).clone().set_requires_grad(true));
  }
  optim::NamedParameters names;
  for (const at::Tensor& param : params) names.emplace_back(std::to_string(names.size()), param);
  optim::Optimizer optimizer(names, made);
  for (std::int64_t step = 0; step < field(question, "steps").integer; ++step) {
    for (std::size_t i = 0; i < params.size(); ++i)
      params[i].mutable_grad() =
          grid(params[i].numel(), 100 + 7 * step + static_cast<std::int64_t>(i))
              .view(params[i].sizes())
              .clone();
    optimizer.step();
  }
  std::string text;
  for (const auto& param : params) text += bits(param) + " ";
  for (const auto& param : params)
    for (const at::Tensor& tensor : optim::find_state(optimizer, param)->tensors)
      text += bits(tensor) + " ";
  return text;
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  std::string line;
  while (std::getline(std::cin, line)) {
    try {
      const Node question = parse_json(line, "question");
      const std::string what = as_string(field(question, "ask"), "ask");
      std::cout << (what == "schedule" ? schedule(question)
                    : what == "clip"   ? clip(question)
                    : what == "rule"   ? rule(question)
                                       : train(question))
                << std::endl;
    } catch (const std::exception& e) {
      std::cout << "error: " << e.what() << std::endl;
    }
  }
  return 0;
}
