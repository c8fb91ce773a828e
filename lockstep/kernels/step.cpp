#include "lockstep/kernels/step.h"

#include <algorithm>
#include <cmath>

#include "lockstep/kernels/machine.h"
#include "lockstep/kernels/mean.h"

namespace lockstep::kernels {
namespace {

using detail::AdamConstants;
using detail::Mean;
using detail::SgdConstants;

// 1 - lr * weight_decay as ATen's compiler made it; the difference shows only in double.
double one_minus(double lr, double weight_decay) {
  return detail::machine().fuses_decay ? std::fma(-lr, weight_decay, 1.0) : 1 - lr * weight_decay;
}

template <typename T>
AdamConstants<T> constants_of(const AdamStep& step, bool decoupled) {
  const double correction1 = 1 - std::pow(step.beta1, step.step);
  const double correction2 = 1 - std::pow(step.beta2, step.step);
  AdamConstants<T> c;
  c.l2 = !decoupled && step.weight_decay != 0;
  if (c.l2) {
    c.decay = static_cast<T>(step.weight_decay);
  } else if (decoupled && step.weight_decay != 0) {
    c.decay = static_cast<T>(one_minus(step.lr, step.weight_decay));
  }
  c.lerp = static_cast<T>(1 - step.beta1);
  c.beta2 = static_cast<T>(step.beta2);
  c.fresh = static_cast<T>(1 - step.beta2);
  c.correction = static_cast<T>(std::sqrt(correction2));
  c.eps = static_cast<T>(step.eps);
  c.minus_step = static_cast<T>(-(step.lr / correction1));
  return c;
}

template <typename T>
SgdConstants<T> constants_of(const SgdStep& step) {
  return {.l2 = step.weight_decay != 0,
          .momentum = step.momentum != 0,
          .first = step.first,
          .nesterov = step.nesterov,
          .decay = static_cast<T>(step.weight_decay),
          .mu = static_cast<T>(step.momentum),
          .fresh = static_cast<T>(1 - step.dampening),
          .minus_lr = static_cast<T>(-step.lr)};
}

// How many elements of the slice lie before the last, partial vector of their tensor.
template <typename T>
std::int64_t whole_vectors(const Slice& slice) {
  const std::int64_t lanes = detail::machine().vector_bytes / std::int64_t{sizeof(T)};
  const std::int64_t end = slice.tensor_size - slice.tensor_size % lanes;
  return std::clamp<std::int64_t>(end - slice.begin, 0, slice.count);
}

// Calls body(mean, begin, count, last) for the part of a slice in whole vectors and for the rest.
template <typename T, typename Body>
void in_two_parts(const Gradient<T>& gradient, const Slice& slice, const Body& body) {
  auto mean = detail::mean_of(gradient);
  const std::int64_t whole = whole_vectors<T>(slice);
  if (whole > 0) body(mean, 0, whole, /*last=*/false);
  mean.offset = whole;
  if (whole < slice.count) body(mean, whole, slice.count - whole, /*last=*/true);
}

template <typename T>
void adam_step(const Gradient<T>& gradient, const AdamTensors<T>& tensors, const Slice& slice,
               const AdamConstants<T>& c) {
  in_two_parts(gradient, slice,
               [&](const Mean<T>& mean, std::int64_t begin, std::int64_t count, bool last) {
                 const auto loop = last ? detail::loops<T>().adam_last : detail::loops<T>().adam;
                 loop({tensors.param + begin, tensors.exp_avg + begin, tensors.exp_avg_sq + begin,
                       mean, count},
                      c);
               });
}

}  // namespace

template <typename T>
void adamw(const Gradient<T>& gradient, const AdamTensors<T>& tensors, const Slice& slice,
           const AdamStep& step) {
  adam_step(gradient, tensors, slice, constants_of<T>(step, /*decoupled=*/true));
}

template <typename T>
void adam(const Gradient<T>& gradient, const AdamTensors<T>& tensors, const Slice& slice,
          const AdamStep& step) {
  adam_step(gradient, tensors, slice, constants_of<T>(step, /*decoupled=*/false));
}

template <typename T>
void sgd(const Gradient<T>& gradient, const SgdTensors<T>& tensors, const Slice& slice,
         const SgdStep& step) {
  const SgdConstants<T> c = constants_of<T>(step);
  in_two_parts(gradient, slice,
               [&](const Mean<T>& mean, std::int64_t begin, std::int64_t count, bool last) {
                 const auto loop = last ? detail::loops<T>().sgd_last : detail::loops<T>().sgd;
                 T* momentum = c.momentum ? tensors.momentum + begin : nullptr;
                 loop({tensors.param + begin, momentum, mean, count}, c);
               });
}

template void adamw(const Gradient<float>&, const AdamTensors<float>&, const Slice&,
                    const AdamStep&);
template void adamw(const Gradient<double>&, const AdamTensors<double>&, const Slice&,
                    const AdamStep&);
template void adam(const Gradient<float>&, const AdamTensors<float>&, const Slice&,
                   const AdamStep&);
template void adam(const Gradient<double>&, const AdamTensors<double>&, const Slice&,
                   const AdamStep&);
template void sgd(const Gradient<float>&, const SgdTensors<float>&, const Slice&, const SgdStep&);
template void sgd(const Gradient<double>&, const SgdTensors<double>&, const Slice&, const SgdStep&);

}  // namespace lockstep::kernels
