// mixed_precision and fp8 in a training file: what they set, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config.h"

namespace lockstep::train {
namespace {

Config with_precision(const std::string& file, const std::vector<std::string>& flags = {}) {
  return resolve_config({.file = parse_yaml(file, "t.yaml"), .flags = flags});
}

TEST(PrecisionKeys, MixedPrecisionSetsWhatItStandsFor) {
  const Config fp8 = with_precision("mixed_precision: fp8\nfp8: {recipe: rowwise}\n");
  EXPECT_TRUE(fp8.arguments.bf16);
  EXPECT_EQ(fp8.setting("bf16").where, "mixed_precision");
  EXPECT_EQ(fp8_recipe_name(fp8.arguments), "rowwise");
  EXPECT_EQ(fp8_recipe_name(with_precision("mixed_precision: fp8\n").arguments), "tensorwise");
  const Config bf16 = with_precision("mixed_precision: bf16\n");
  EXPECT_TRUE(bf16.arguments.bf16);
  EXPECT_EQ(fp8_recipe_name(bf16.arguments), "");
  EXPECT_TRUE(with_precision("", {"--mixed_precision=fp16"}).arguments.fp16);
  EXPECT_FALSE(with_precision("mixed_precision: no\n").arguments.bf16);
  EXPECT_EQ(with_precision("bf16: true\n", {"--mixed_precision=fp8"}).setting("bf16").where,
            "t.yaml:1:1");
}

TEST(PrecisionKeys, MistakesAreNamedWithPlaceAndRemedy) {
  const std::pair<const char*, const char*> mistakes[] = {
      {"mixed_precision: int8\n", "t.yaml:1:18: mixed_precision must be no, fp16, bf16 or fp8"},
      {"mixed_precision: fp8\nbf16: false\n",
       "t.yaml:1:1: mixed_precision is fp8, and bf16 is false. Keep one."},
      {"mixed_precision: fp16\nbf16: true\n",
       "t.yaml:1:1: mixed_precision is fp16, and bf16 is true. Keep one."},
      {"mixed_precision: fp8\nfp16: true\n",
       "t.yaml:1:1: mixed_precision is fp8, and fp16 is true. Keep one."},
      {"mixed_precision: no\nbf16: true\n",
       "t.yaml:1:1: mixed_precision is no, and bf16 or fp16 is true. Keep one."},
      {"fp8: {recipe: rowwise}\n",
       "t.yaml:1:1: fp8 says how to scale, and mixed_precision is not fp8. Write mixed_precision: "
       "fp8, or delete it."},
      {"mixed_precision: fp8\nfp8: {recipe: delayed}\n",
       "t.yaml:2:15: fp8.recipe must be tensorwise or rowwise"},
      {"mixed_precision: fp8\nfp8: rowwise\n",
       "t.yaml:2:6: fp8 must be a map, and 'rowwise' is a string. Write {recipe: rowwise}"},
      {"mixed_precision: fp8\nfp8: {backend: TE}\n", "t.yaml:2:7: fp8 has no key 'backend'"}};
  for (const auto& [file, text] : mistakes) {
    try {
      with_precision(file);
      ADD_FAILURE() << file;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text)) << file;
    }
  }
}

}  // namespace
}  // namespace lockstep::train
