#include "lockstep/parallel/sync_batch_norm.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;

// All dimensions but the channel's.
std::vector<std::int64_t> other_dims(const at::Tensor& x) {
  std::vector<std::int64_t> dims{0};
  for (std::int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return dims;
}

at::Tensor per_channel(const at::Tensor& v, const at::Tensor& like) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(like.dim()), 1);
  shape[1] = -1;
  return v.view(shape);
}

struct Statistics {
  at::Tensor mean;
  at::Tensor var;  // biased
  double count = 0;
};

// Means and variances of the parts are combined in rank order, in float, without the cancellation
// that sums of squares would suffer.
Statistics global_statistics(World& world, const at::Tensor& x) {
  const auto channels = x.size(1);
  const double count = static_cast<double>(x.numel()) / static_cast<double>(channels);
  at::Tensor mean = at::zeros({channels}, x.options());
  at::Tensor squares = at::zeros({channels}, x.options());  // sum of squared deviations
  if (count > 0) {
    mean = x.mean(other_dims(x));
    squares = (x - per_channel(mean, x)).square_().sum(other_dims(x));
  }
  const at::Tensor mine = at::cat({mean, squares, at::full({1}, count, x.options())});
  at::Tensor total = at::zeros({1}, x.options());
  at::Tensor combined_mean = at::zeros_like(mean);
  at::Tensor combined_squares = at::zeros_like(squares);
  for (const at::Tensor& part : world.all_gather(mine)) {
    const at::Tensor part_mean = part.narrow(0, 0, channels);
    const at::Tensor part_squares = part.narrow(0, channels, channels);
    const at::Tensor part_count = part.narrow(0, 2 * channels, 1);
    const at::Tensor sum = total + part_count;
    const at::Tensor share = part_count / sum.clamp_min(1);
    const at::Tensor delta = part_mean - combined_mean;
    combined_mean = combined_mean + delta * share;
    combined_squares = combined_squares + part_squares + delta.square() * total * share;
    total = sum;
  }
  const double all = total.item<double>();
  if (all < 2)
    throw UsageError("sync_batch_norm",
                     "the whole batch over {} ranks has {} values per channel; "
                     "training needs more than one. Use a larger batch or eval().",
                     world.size(), all);
  return {combined_mean, combined_squares / all, all};
}

struct WorldHolder : torch::CustomClassHolder {
  explicit WorldHolder(World w) : world(std::move(w)) {}
  World world;
};

void save_world(AutogradContext* context, const World& world) {
  context->saved_data["world"] = c10::IValue::make_capsule(c10::make_intrusive<WorldHolder>(world));
}

World saved_world(AutogradContext* context) {
  const auto holder = context->saved_data["world"].toCapsule();
  return static_cast<WorldHolder*>(holder.get())->world;
}

// An all-reduce that autograd can differentiate, any number of times. Every rank's result depends
// on every rank's summand, so the derivative is the sum over ranks, too.
class SumOverRanks : public torch::autograd::Function<SumOverRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& mine, World world) {
    save_world(context, world);
    at::Tensor sum = mine.clone(at::MemoryFormat::Contiguous);
    world.all_reduce(sum).wait();
    return sum;
  }
  static std::vector<at::Tensor> backward(AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    return {SumOverRanks::apply(gradients[0], saved_world(context)), at::Tensor()};
  }
};

// The whole batch's mean and inverse standard deviation, whose values forward has computed, as
// differentiable functions of this rank's part of the batch.
class DifferentiableStatistics : public torch::autograd::Function<DifferentiableStatistics> {
 public:
  static std::vector<at::Tensor> forward(AutogradContext* context, const at::Tensor& x,
                                         const at::Tensor& mean, const at::Tensor& inv_std,
                                         double count, const World& world) {
    const std::vector<at::Tensor> outputs{mean.clone(), inv_std.clone()};
    context->save_for_backward({x, outputs[0], outputs[1]});
    save_world(context, world);
    context->saved_data["count"] = count;
    return outputs;
  }
  static std::vector<at::Tensor> backward(AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &mean = saved[1], &inv_std = saved[2];
    const double count = context->saved_data["count"].toDouble();
    const auto channels = mean.numel();
    const at::Tensor sums =
        SumOverRanks::apply(at::cat({gradients[0], gradients[1]}), saved_world(context));
    // d mean / d x = 1 / count;  d inv_std / d x = -inv_std^3 (x - mean) / count
    const at::Tensor d_mean = sums.narrow(0, 0, channels);
    const at::Tensor slope = sums.narrow(0, channels, channels) * inv_std.pow(3);
    const at::Tensor dx =
        (per_channel(d_mean, x) - (x - per_channel(mean, x)) * per_channel(slope, x)) / count;
    return {dx, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& scale,
                            const std::optional<at::Tensor>& bias, const at::Tensor& mean,
                            const at::Tensor& inv_std, double count, const World& world) {
    const at::Tensor weight = scale.value_or(at::Tensor());
    context->save_for_backward({input, weight, mean, inv_std});
    save_world(context, world);
    context->saved_data["count"] = count;
    const at::Tensor x = input.to(mean.scalar_type());
    at::Tensor y = (x - per_channel(mean, x)) * per_channel(inv_std, x);
    if (weight.defined()) y = y * per_channel(weight, x) + per_channel(*bias, x);
    return y.to(input.scalar_type());
  }

  static std::vector<at::Tensor> backward(AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1];
    at::Tensor mean = saved[2], inv_std = saved[3];
    const double count = context->saved_data["count"].toDouble();
    const World world = saved_world(context);
    const auto channels = mean.numel();
    const at::Tensor dy = gradients[0].to(mean.scalar_type());
    const at::Tensor x = input.to(mean.scalar_type());
    if (torch::GradMode::is_enabled()) {
      // create_graph: this gradient is differentiated again, and the statistics depend on x.
      const auto statistics = DifferentiableStatistics::apply(x, mean, inv_std, count, world);
      mean = statistics[0];
      inv_std = statistics[1];
    }
    const at::Tensor x_hat = (x - per_channel(mean, dy)) * per_channel(inv_std, dy);
    const at::Tensor sum_dy = dy.sum(other_dims(dy));
    const at::Tensor sum_dy_x_hat = (dy * x_hat).sum(other_dims(dy));
    // The parameters' gradients stay local: DistributedDataParallel averages them as all others.
    at::Tensor d_weight, d_bias;
    if (weight.defined()) {
      d_weight = sum_dy_x_hat.to(weight.scalar_type());
      d_bias = sum_dy.to(weight.scalar_type());
    }
    const at::Tensor sums = SumOverRanks::apply(at::cat({sum_dy, sum_dy_x_hat}), world);
    const at::Tensor mean_dy = per_channel(sums.narrow(0, 0, channels) / count, dy);
    const at::Tensor mean_dy_x_hat = per_channel(sums.narrow(0, channels, channels) / count, dy);
    at::Tensor scale = inv_std;
    if (weight.defined()) scale = scale * weight;
    const at::Tensor dx = (dy - mean_dy - x_hat * mean_dy_x_hat) * per_channel(scale, dy);
    return {dx.to(input.scalar_type()),
            d_weight,
            d_bias,
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

template <typename Base>
SyncBatchNormImpl<Base>::SyncBatchNormImpl(World world, const Base& other)
    : SyncBatchNormImpl(std::move(world), other.options) {
  this->weight = this->parameters_["weight"] = other.weight;
  this->bias = this->parameters_["bias"] = other.bias;
  if (other.options.track_running_stats()) {
    // The list of buffers is private to torch: its tensors take over the memory instead.
    this->running_mean.set_data(other.running_mean);
    this->running_var.set_data(other.running_var);
    this->num_batches_tracked.set_data(other.num_batches_tracked);
  }
  this->train(other.is_training());
}

template <typename Base>
at::Tensor SyncBatchNormImpl<Base>::forward(const at::Tensor& input) {
  this->_check_input_dim(input);
  const auto& options = this->options;
  if (!this->is_training() || world_.size() == 1) return Base::forward(input);
  at::Tensor mean, inv_std;
  double count = 0;
  {
    torch::NoGradGuard no_grad;
    // Half precision statistics would lose the small differences they are made of.
    const bool half = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
    const at::Tensor x = half ? input.to(at::kFloat) : input;
    Statistics statistics = global_statistics(world_, x);
    mean = statistics.mean;
    count = statistics.count;
    inv_std = (statistics.var + options.eps()).rsqrt();
    if (options.track_running_stats()) {
      this->num_batches_tracked += 1;
      const double factor = options.momentum()
                                ? *options.momentum()
                                : 1.0 / this->num_batches_tracked.template item<double>();
      this->running_mean.mul_(1 - factor).add_(mean, factor);
      this->running_var.mul_(1 - factor).add_(statistics.var * (count / (count - 1)), factor);
    }
  }
  // apply() takes no undefined tensor, which is what they are without affine.
  const auto given = [](const at::Tensor& t) {
    return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
  };
  return SyncBatchNormFunction::apply(input, given(this->weight), given(this->bias), mean, inv_std,
                                      count, world_);
}

template class SyncBatchNormImpl<torch::nn::BatchNorm1dImpl>;
template class SyncBatchNormImpl<torch::nn::BatchNorm2dImpl>;
template class SyncBatchNormImpl<torch::nn::BatchNorm3dImpl>;

// ---------------------------------------------------------------- conversion

namespace {

template <typename Base>
bool is_plain(const torch::nn::Module& module) {
  return dynamic_cast<const Base*>(&module) != nullptr &&
         dynamic_cast<const SyncBatchNormImpl<Base>*>(&module) == nullptr;
}

bool is_plain_batch_norm(const torch::nn::Module& module) {
  return is_plain<torch::nn::BatchNorm1dImpl>(module) ||
         is_plain<torch::nn::BatchNorm2dImpl>(module) ||
         is_plain<torch::nn::BatchNorm3dImpl>(module);
}

using Sequentials = std::vector<torch::nn::SequentialImpl*>;

// Every Sequential below, and the full names of BatchNorms that are in none.
void survey(torch::nn::Module& module, const std::string& prefix, Sequentials& sequentials,
            std::vector<std::string>& others) {
  auto* sequential = module.as<torch::nn::SequentialImpl>();
  if (sequential != nullptr) sequentials.push_back(sequential);
  for (const auto& child : module.named_children()) {
    const std::string name = prefix + child.key();
    if (is_plain_batch_norm(*child.value())) {
      if (sequential == nullptr) others.push_back(name);
    } else {
      survey(*child.value(), name + ".", sequentials, others);
    }
  }
}

template <typename Base>
void convert(torch::nn::SequentialImpl& sequential, const std::string& name,
             torch::nn::AnyModule& module, const World& world) {
  if (!is_plain<Base>(*module.ptr())) return;
  const auto converted =
      std::make_shared<SyncBatchNormImpl<Base>>(world, static_cast<const Base&>(*module.ptr()));
  sequential.replace_module(name, converted);
  module = torch::nn::AnyModule(converted);
}

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module, const World& world) {
  Sequentials sequentials;
  std::vector<std::string> others;
  if (is_plain_batch_norm(module)) others.emplace_back("the module itself");
  survey(module, "", sequentials, others);
  if (!others.empty())
    throw UsageError("sync_batch_norm",
                     "{} BatchNorm module(s) cannot be replaced: {}. They are not in a Sequential, "
                     "so their forward is called by its type. Declare them as "
                     "lockstep::nn::SyncBatchNorm2d norm{{world, channels}} (or 1d, 3d), or put "
                     "them into a torch::nn::Sequential.",
                     others.size(), fmt::join(others, ", "));
  for (torch::nn::SequentialImpl* sequential : sequentials) {
    const auto names = sequential->named_children().keys();
    std::size_t index = 0;
    for (torch::nn::AnyModule& child : *sequential) {
      const std::string& name = names[index++];
      convert<torch::nn::BatchNorm1dImpl>(*sequential, name, child, world);
      convert<torch::nn::BatchNorm2dImpl>(*sequential, name, child, world);
      convert<torch::nn::BatchNorm3dImpl>(*sequential, name, child, world);
    }
  }
}

}  // namespace lockstep::nn
