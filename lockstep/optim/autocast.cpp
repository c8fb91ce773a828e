#include "lockstep/optim/autocast.h"

#include <ATen/autocast_mode.h>

#include "lockstep/core/error.h"

namespace lockstep::optim {
namespace {

void check(c10::Device device, c10::ScalarType dtype) {
  if (!device.is_cpu() && !device.is_cuda())
    throw UsageError("Autocast", "there is no autocasting for {} here. It works on cpu and cuda.",
                     device.str());
  if (dtype != at::kHalf && dtype != at::kBFloat16 && dtype != at::kFloat)
    throw UsageError("Autocast",
                     "{} is not a type to compute in. Use kBFloat16 or kHalf, or kFloat to switch "
                     "autocasting off.",
                     c10::toString(dtype));
}

}  // namespace

Autocast::Autocast(c10::Device device, c10::ScalarType dtype, bool cache_enabled)
    : type_(device.type()) {
  check(device, dtype);
  was_enabled_ = at::autocast::is_autocast_enabled(type_);
  was_dtype_ = at::autocast::get_autocast_dtype(type_);
  was_cached_ = at::autocast::is_autocast_cache_enabled();
  const bool on = dtype != at::kFloat;
  at::autocast::set_autocast_enabled(type_, on);
  if (on) at::autocast::set_autocast_dtype(type_, dtype);
  at::autocast::set_autocast_cache_enabled(cache_enabled);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(type_, was_enabled_);
  at::autocast::set_autocast_dtype(type_, was_dtype_);
  at::autocast::set_autocast_cache_enabled(was_cached_);
}

}  // namespace lockstep::optim
