#include "lockstep/testing/matchers.h"

#include <cstring>
#include <sstream>

namespace lockstep::testing {

namespace {

::testing::AssertionResult same_kind(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) {
    if (a.defined() == b.defined()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "one tensor is undefined";
  }
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) {
    return ::testing::AssertionFailure()
           << c10::toString(a.scalar_type()) << " " << a.sizes() << " against "
           << c10::toString(b.scalar_type()) << " " << b.sizes();
  }
  return ::testing::AssertionSuccess();
}

// Says where the first difference is: `bad` marks them, flat.
::testing::AssertionResult first_difference(const at::Tensor& a, const at::Tensor& b,
                                            const at::Tensor& bad) {
  const at::Tensor where = bad.reshape({-1}).nonzero();
  const int64_t index = where[0].item<int64_t>();
  std::ostringstream text;
  text << where.size(0) << " of " << a.numel() << " elements differ, first at flat index " << index
       << ": " << a.reshape({-1})[index].item() << " against " << b.reshape({-1})[index].item();
  return ::testing::AssertionFailure() << text.str();
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.detach().cpu().contiguous();
}

}  // namespace

::testing::AssertionResult tensors_equal(const at::Tensor& a, const at::Tensor& b) {
  const auto kind = same_kind(a, b);
  if (!kind || !a.defined()) return kind;
  const at::Tensor x = on_host(a);
  const at::Tensor y = on_host(b);
  if (x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0)
    return ::testing::AssertionSuccess();
  const at::Tensor rows = x.reshape({-1, 1}).view(at::kByte).ne(y.reshape({-1, 1}).view(at::kByte));
  return first_difference(x, y, rows.any(1));
}

::testing::AssertionResult tensors_near(const at::Tensor& a, const at::Tensor& b,
                                        double tolerance) {
  const auto kind = same_kind(a, b);
  if (!kind || !a.defined()) return kind;
  const at::Tensor x = on_host(a);
  const at::Tensor y = on_host(b);
  const auto wide = x.is_complex() ? at::kComplexDouble : at::kDouble;
  // Written so that a NaN on either side counts as a difference.
  const at::Tensor bad = x.to(wide).sub(y.to(wide)).abs().le(tolerance).logical_not();
  if (!bad.any().item<bool>()) return ::testing::AssertionSuccess();
  return first_difference(x, y, bad);
}

}  // namespace lockstep::testing
