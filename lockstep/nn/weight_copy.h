// A copy of a float parameter in the dtype that matrix products use, beside the parameter: one
// conversion per step instead of one per use, and none where the optimizer writes it with the
// parameter (AdamWPass).
//
//   const at::Tensor copy = nn::weight_copy(weight, x.scalar_type());
//   const auto y = nn::linear(x, weight, bias, {.weight_copy = copy});
//
// The copy is current while the parameter's version is the one it was made from; otherwise
// weight_copy() converts again, into the same memory. There is one for each parameter, of the dtype
// that was asked for last; it is freed with the next one that is made after the parameter is gone.
//
// Callable from any thread; a parameter and its copy belong to the thread that trains.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::nn {

// The parameter itself where it has that dtype.
at::Tensor weight_copy(const at::Tensor& parameter, at::ScalarType dtype);

// The copy that exists, current or not; undefined where there is none.
at::Tensor find_weight_copy(const at::Tensor& parameter);

bool weight_copy_is_current(const at::Tensor& parameter);
// Whoever has written parameter and copy together says so.
void mark_weight_copy_current(const at::Tensor& parameter);
// The next weight_copy() converts.
void expire_weight_copy(const at::Tensor& parameter);

// Converts those that are not current.
void refresh_weight_copies(const std::vector<at::Tensor>& parameters);

}  // namespace lockstep::nn
