// What a tokenizer refuses, and what its parts do by themselves. The ids of real families are
// compared with the `tokenizers` package in tests/tokenizer.
#include "lockstep/data/tokenizer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/text.h"
#include "lockstep/data/bpe.h"

namespace lockstep::data {
namespace {

using Ids = std::vector<std::int64_t>;
using testing::AllOf;
using testing::HasSubstr;

class TokenizerTest : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const { folder_.write(name, text); }
  // A tokenizer.json of characters a to e, "ab", "abc" and the space mark.
  void write_tokenizer(const std::string& more = "", const std::string& model = "",
                       const std::string& merges = R"(["a b", "ab c"])") const {
    write("tokenizer.json",
          fmt::format(
              R"({{{}"model": {{"type": "BPE", {}"vocab": {{"<unk>": 0, "a": 1, "b": 2, "c": 3,
              "d": 4, "e": 5, "ab": 6, "abc": 7, "▁": 8}}, "merges": {}}}}})",
              more, model, merges));
  }
  Tokenizer load() const { return Tokenizer::from_file(folder_.path()); }
  std::string refused() const {
    return message_of([&] { load(); });
  }

  TemporaryDirectory folder_;
};

TEST_F(TokenizerTest, MergesInBothForms) {
  for (const char* merges :
       {R"(["#version: 0.2", "a b", "ab c"])", R"([["a", "b"], ["ab", "c"]])"}) {
    write_tokenizer("", "", merges);
    EXPECT_EQ(load().encode("abcabdz"), (Ids{7, 6, 4}));  // z is dropped: there is no unk_token
  }
}

TEST_F(TokenizerTest, TokensAndIds) {
  write_tokenizer(R"("added_tokens": [{"id": 9, "content": "</s>", "special": true,
                     "normalized": false}],)");
  write("tokenizer_config.json", R"({"bos_token": null, "eos_token": {"content": "</s>"}})");
  const Tokenizer tokenizer = load();
  EXPECT_EQ(tokenizer.token_to_id("abc"), 7);
  EXPECT_EQ(tokenizer.token_to_id("</s>"), 9);
  EXPECT_EQ(tokenizer.token_to_id("x"), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_token(9), "</s>");
  EXPECT_EQ(tokenizer.id_to_token(-1), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_token(10), std::nullopt);
  EXPECT_EQ(tokenizer.vocab_size(), 10);
  EXPECT_EQ(tokenizer.max_id(), 9);
  EXPECT_EQ(tokenizer.eos_token_id(), 9);
  EXPECT_EQ(tokenizer.bos_token_id(), std::nullopt);
  EXPECT_EQ(tokenizer.encode("ab</s>c"), (Ids{6, 9, 3}));
  EXPECT_EQ(tokenizer.decode(Ids{6, 9, 12345, -7, 3}), "ab c");
  EXPECT_EQ(tokenizer.decode(Ids{6, 9, 3}, {.skip_special_tokens = false}), "ab </s> c");
  EXPECT_EQ(Tokenizer::from_file(folder_ / "tokenizer.json").eos_token_id(), 9);
}

TEST_F(TokenizerTest, UnknownCharactersAndBytes) {
  write_tokenizer("", R"("unk_token": "<unk>",)");
  EXPECT_EQ(load().encode("xya"), (Ids{0, 0, 1}));
  write_tokenizer("", R"("unk_token": "<unk>", "fuse_unk": true,)");
  EXPECT_EQ(load().encode("xya\xFF"), (Ids{0, 1, 0}));
  write_tokenizer("", R"("unk_token": "gone",)");
  EXPECT_THAT(refused(), HasSubstr(R"(model.unk_token is "gone": it is not in the vocabulary)"));
}

TEST_F(TokenizerTest, RefusesByName) {
  const auto expect = [this](const std::string& more, const std::string& said) {
    write_tokenizer(more);
    EXPECT_THAT(refused(), AllOf(HasSubstr("tokenizer.json: "), HasSubstr(said)));
  };
  expect(R"("normalizer": {"type": "StripAccents"},)",
         R"(normalizer.type is "StripAccents": it is not supported; Sequence, NFC,)");
  expect(R"("normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend",
            "prepend": "_"}, {"type": "Nmt"}]},)",
         R"(normalizer.normalizers[1].type is "Nmt")");
  expect(R"("pre_tokenizer": {"type": "Whitespace"},)", R"(pre_tokenizer.type is "Whitespace")");
  expect(R"("pre_tokenizer": {"type": "Split", "pattern": {"String": "a"},
            "behavior": "Contiguous"},)",
         R"(pre_tokenizer.behavior is "Contiguous": it is not supported; Isolated, Removed and )"
         "MergedWithPrevious are");
  expect(R"("pre_tokenizer": {"type": "Metaspace", "replacement": "ab"},)",
         R"(pre_tokenizer.replacement is "ab": one character)");
  expect(R"("pre_tokenizer": {"type": "Metaspace", "replacement": "_",
            "prepend_scheme": "last"},)",
         R"(pre_tokenizer.prepend_scheme is "last")");
  expect(R"("decoder": {"type": "CTC"},)", R"(decoder.type is "CTC")");
  expect(R"("post_processor": {"type": "BertProcessing"},)",
         R"(post_processor.type is "BertProcessing")");
  expect(R"("added_tokens": [{"id": 12, "content": "<x>"}],)",
         "its id would be 9 to the tokenizers package");
  expect(R"("added_tokens": [{"id": "9", "content": "<x>"}],)",
         R"(added_tokens[0].id is "9": a whole number was expected)");
}

TEST_F(TokenizerTest, RefusesModels) {
  const auto expect = [this](const std::string& model, const std::string& merges,
                             const std::string& said) {
    write_tokenizer("", model, merges);
    EXPECT_THAT(refused(), HasSubstr(said));
  };
  expect(R"("dropout": 0.1,)", "[]", "model.dropout is 0.1: encoding would be random");
  expect(R"("dropout": 0.0,)", R"(["a  b"])", R"(model.merges[0] is "a  b": it is not two tokens)");
  expect("", R"([["a", "b"], ["a", "e"]])", R"(model.merges[1] is ["a","e"]: it is not two)");
  expect("", R"([["a", "b", "c"]])", "model.merges[0]");
  expect(R"("end_of_word_suffix": "</w>",)", "[]", R"(model.end_of_word_suffix is "</w>")");
  write("tokenizer.json", R"({"model": {"type": "Unigram", "vocab": []}})");
  EXPECT_THAT(refused(), HasSubstr(R"(model.type is "Unigram")"));
  write("tokenizer.json", R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}})");
  EXPECT_THAT(refused(), HasSubstr("model.vocab.b is 0: an id of 0 to"));
  write("tokenizer.json", R"({"model_max_length": 5})");
  EXPECT_THAT(refused(), HasSubstr("is not a tokenizer.json: it has no model"));
  write("tokenizer.json", "{\"model\": ");
  EXPECT_THAT(refused(), HasSubstr("tokenizer.json:1:"));
  std::filesystem::remove(folder_ / "tokenizer.json");
  EXPECT_THAT(refused(), AllOf(HasSubstr("there is no "), HasSubstr("Name a tokenizer.json")));
}

TEST_F(TokenizerTest, NoChatTemplate) {
  write_tokenizer();
  EXPECT_THAT([this] { load().apply_chat_template({{"user", "a"}}); },
              testing::ThrowsMessage<UsageError>(HasSubstr("tokenizer.json has no chat template")));
}

TEST_F(TokenizerTest, ManyThreadsGetTheSameIds) {
  write_tokenizer(R"("pre_tokenizer": {"type": "Metaspace", "replacement": "▁"},)");
  const Tokenizer tokenizer = load();
  const auto text = [](int i) { return fmt::format("abc {} dab", std::string(i % 97, 'a')); };
  std::vector<Ids> expected;
  for (int i = 0; i < 97; ++i) expected.push_back(tokenizer.encode(text(i)));
  std::vector<std::jthread> threads;
  std::atomic<int> wrong = 0;
  for (int thread = 0; thread < 4; ++thread)
    threads.emplace_back([&, thread] {
      for (int i = thread; i < 2000; ++i)
        wrong += tokenizer.encode(text(i)) == expected[static_cast<std::size_t>(i) % 97] ? 0 : 1;
    });
  threads.clear();
  EXPECT_EQ(wrong, 0);
}

TEST(BpeTest, AFullCacheForgetsAndStaysRight) {
  Bpe bpe(BpeOptions{});
  for (char c = '0'; c <= '9'; ++c) ASSERT_TRUE(bpe.add_token(std::string(1, c), c - '0'));
  ASSERT_TRUE(bpe.add_token("12", 10));
  ASSERT_TRUE(bpe.add_merge("1", "2"));
  bpe.finish();
  BpeScratch scratch;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 80'000; ++i) {
      Ids ids;
      bpe.encode(std::to_string(i), scratch, ids);
      Ids expected;
      for (const char c : std::to_string(i)) {
        if (c == '2' && !expected.empty() && expected.back() == 1)
          expected.back() = 10;
        else
          expected.push_back(c - '0');
      }
      ASSERT_EQ(ids, expected) << i;
    }
  }
}

// Words on both sides of the length at which the way of merging changes.
TEST(BpeTest, LongAndShortWordsMergeInOneOrder) {
  Bpe bpe(BpeOptions{});
  std::int64_t id = 0;
  for (const char* token : {"a", "b", "aa", "ab", "aab", "aaaa"})
    ASSERT_TRUE(bpe.add_token(token, id++));
  ASSERT_TRUE(bpe.add_merge("a", "b"));
  ASSERT_TRUE(bpe.add_merge("a", "a"));
  ASSERT_TRUE(bpe.add_merge("aa", "aa"));
  ASSERT_TRUE(bpe.add_merge("a", "ab"));
  bpe.finish();
  BpeScratch scratch;
  for (std::size_t size = 1; size < 130; ++size) {
    Ids ids;
    bpe.encode(std::string(size, 'a') + "b", scratch, ids);
    Ids expected((size - 1) / 4, 5);
    if ((size - 1) % 4 >= 2) expected.push_back(2);
    if ((size - 1) % 2 == 1)
      expected.push_back(4);
    else
      expected.push_back(3);
    EXPECT_EQ(ids, expected) << size;
  }
}

}  // namespace
}  // namespace lockstep::data
