#include "lockstep/parallel/sync_batch_norm.h"

#include <torch/torch.h>

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

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& mean, const at::Tensor& inv_std, double count,
                            const World& world) {
    context->save_for_backward({input, weight, mean, inv_std});
    context->saved_data["world"] =
        c10::IValue::make_capsule(c10::make_intrusive<WorldHolder>(world));
    context->saved_data["count"] = count;
    const at::Tensor x = input.to(mean.scalar_type());
    at::Tensor y = (x - per_channel(mean, x)) * per_channel(inv_std, x);
    if (weight.defined()) y = y * per_channel(weight, x) + per_channel(bias, x);
    return y.to(input.scalar_type());
  }

  static std::vector<at::Tensor> backward(AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &inv_std = saved[3];
    const double count = context->saved_data["count"].toDouble();
    const auto holder = context->saved_data["world"].toCapsule();
    World world = static_cast<WorldHolder*>(holder.get())->world;
    const auto channels = mean.numel();
    const at::Tensor dy = gradients[0].to(mean.scalar_type());
    const at::Tensor x_hat =
        (input.to(mean.scalar_type()) - per_channel(mean, dy)) * per_channel(inv_std, dy);
    const at::Tensor sum_dy = dy.sum(other_dims(dy));
    const at::Tensor sum_dy_x_hat = (dy * x_hat).sum(other_dims(dy));
    // The parameters' gradients stay local: DistributedDataParallel averages them as all others.
    at::Tensor d_weight, d_bias;
    if (weight.defined()) {
      d_weight = sum_dy_x_hat.to(weight.scalar_type());
      d_bias = sum_dy.to(weight.scalar_type());
    }
    at::Tensor sums = at::cat({sum_dy, sum_dy_x_hat});
    world.all_reduce(sums).wait();
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
  return SyncBatchNormFunction::apply(input, this->weight, this->bias, mean, inv_std, count,
                                      world_);
}

template class SyncBatchNormImpl<torch::nn::BatchNorm1dImpl>;
template class SyncBatchNormImpl<torch::nn::BatchNorm2dImpl>;
template class SyncBatchNormImpl<torch::nn::BatchNorm3dImpl>;

}  // namespace lockstep::nn
