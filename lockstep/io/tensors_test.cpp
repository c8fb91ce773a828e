// Tensors into safetensors files and back.
#include "lockstep/io/tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::io {
namespace {

using ::testing::HasSubstr;

TEST(Tensors, RoundTripOfEveryType) {
  TemporaryDirectory dir;
  std::vector<at::Tensor> tensors;
  for (int t = 0; t <= static_cast<int>(DType::kU64); ++t) {
    const auto dtype = static_cast<DType>(t);
    if (dtype == DType::kF4 || dtype == DType::kF6E2M3 || dtype == DType::kF6E3M2) {
      EXPECT_THAT(message_of<UsageError>([&] { scalar_type_of(dtype); }),
                  HasSubstr("torch has no type for F"));
      continue;
    }
    EXPECT_EQ(dtype_of(scalar_type_of(dtype)), dtype);
    EXPECT_EQ(c10::elementSize(scalar_type_of(dtype)) * 8,
              static_cast<std::size_t>(dtype_bits(dtype)));
    const auto raw = torch::randint(0, 2, {4, 24}, torch::kUInt8);
    tensors.push_back(raw.view(scalar_type_of(dtype)));
  }
  tensors.push_back(torch::scalar_tensor(2.5));
  tensors.push_back(torch::empty({0, 3}));
  {
    AtomicDir out(dir / "model");
    std::vector<TensorBytes> all;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      all.push_back(bytes_of_tensor(std::to_string(i), tensors[i]));
    write_safetensors_set(out, all);
    out.commit();
  }
  std::vector<at::Tensor> read;
  {
    const SafetensorsSet set(dir / "model");
    for (std::size_t i = 0; i < tensors.size(); ++i)
      read.push_back(tensor_of(set.at(std::to_string(i))));
  }
  // The file is closed: what was read stands on its own.
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(read[i].scalar_type(), tensors[i].scalar_type());
    ASSERT_EQ(read[i].sizes(), tensors[i].sizes());
    const auto bytes = bytes_of_tensor("", tensors[i]).bytes;
    EXPECT_TRUE(std::ranges::equal(bytes_of_tensor("", read[i]).bytes, bytes)) << i;
  }
}

TEST(Tensors, Refusals) {
  const auto refused = [](const at::Tensor& tensor) {
    return message_of<UsageError>([&] { bytes_of_tensor("w", tensor); });
  };
  EXPECT_THAT(refused(torch::zeros({2, 3}).t()),
              HasSubstr("tensor 'w' cannot be written as it is"));
  EXPECT_THAT(refused(at::Tensor()), HasSubstr("Pass tensor.contiguous().cpu()"));
  EXPECT_THAT(refused(torch::zeros({2}, torch::kComplexDouble)), HasSubstr("has no type"));
}

}  // namespace
}  // namespace lockstep::io
