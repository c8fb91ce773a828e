// gtest matchers for tensors.
//
//   EXPECT_TENSOR_EQ(a, b);          bit for bit, shape and dtype included
//   EXPECT_TENSOR_NEAR(a, b, 1e-6);  largest absolute difference
//
// A failure prints the first element that differs.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/core/helpers_for_test.h"

namespace lockstep::testing {

::testing::AssertionResult tensors_equal(const at::Tensor& a, const at::Tensor& b);
::testing::AssertionResult tensors_near(const at::Tensor& a, const at::Tensor& b, double tolerance);

using lockstep::message_of;

}  // namespace lockstep::testing

#define EXPECT_TENSOR_EQ(a, b) EXPECT_TRUE(::lockstep::testing::tensors_equal(a, b))
#define EXPECT_TENSOR_NEAR(a, b, t) EXPECT_TRUE(::lockstep::testing::tensors_near(a, b, t))
