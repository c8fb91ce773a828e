// Tokenizers in a build without PCRE2 and utf8proc: this program has the stub in it, whatever the
// build found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "lockstep/core/error.h"
#include "lockstep/data/tokenizer.h"

namespace lockstep::data {
namespace {

// A tokenizer of one character, with `more` keys.
Tokenizer load(const std::string& more) {
  std::string name = (std::filesystem::temp_directory_path() / "tokenizer_XXXXXX").string();
  const int file = ::mkstemp(name.data());
  ::close(file);
  std::ofstream(name) << "{" << more
                      << R"("model": {"type": "BPE", "vocab": {"a": 0, "▁": 1}, "merges": []}})";
  try {
    const Tokenizer tokenizer = Tokenizer::from_file(name);
    std::filesystem::remove(name);
    return tokenizer;
  } catch (...) {
    std::filesystem::remove(name);
    throw;
  }
}

TEST(UnicodeUnavailable, SaysWhatToInstall) {
  for (const char* needs :
       {R"("pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},)",
        R"("normalizer": {"type": "NFC"},)", R"("normalizer": {"type": "Lowercase"},)",
        R"("added_tokens": [{"id": 0, "content": "a", "single_word": true}],)"})
    EXPECT_THAT([&] { load(needs); },
                testing::ThrowsMessage<UsageError>(testing::HasSubstr(
                    "built without them. Install libpcre2-dev and libutf8proc-dev")))
        << needs;
}

TEST(UnicodeUnavailable, TheShapeOfLlama2WorksWithoutThem) {
  const Tokenizer tokenizer = load(R"("normalizer": {"type": "Sequence", "normalizers": [
      {"type": "Prepend", "prepend": "▁"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},)");
  EXPECT_EQ(tokenizer.encode("a a"), (std::vector<std::int64_t>{1, 0, 1, 0}));
}

}  // namespace
}  // namespace lockstep::data
