// gtest matchers for tensors.
//
//   EXPECT_TENSOR_EQ(a, b);          bit for bit, shape and dtype included
//   EXPECT_TENSOR_NEAR(a, b, 1e-6);  largest absolute difference
//
// A failure prints the first element that differs.
//
//   message_of<UsageError>([&] { ... })  what it threw, for EXPECT_THAT
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <utility>

namespace lockstep::testing {

::testing::AssertionResult tensors_equal(const at::Tensor& a, const at::Tensor& b);
::testing::AssertionResult tensors_near(const at::Tensor& a, const at::Tensor& b, double tolerance);

// The text of the Error that `body` throws. Another exception, or none, gives a text that says so.
template <typename Error, typename Body>
std::string message_of(Body&& body) {
  try {
    std::forward<Body>(body)();
  } catch (const Error& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another exception: ") + e.what();
  }
  return "(nothing thrown)";
}

}  // namespace lockstep::testing

#define EXPECT_TENSOR_EQ(a, b) EXPECT_TRUE(::lockstep::testing::tensors_equal(a, b))
#define EXPECT_TENSOR_NEAR(a, b, t) EXPECT_TRUE(::lockstep::testing::tensors_near(a, b, t))
