// Token files, the byte tokenizer, making shards from text, and instruction files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/data/instruction_file.h"
#include "lockstep/data/prefetch.h"
#include "lockstep/data/shard_format.h"
#include "lockstep/data/tokenize.h"
#include "lockstep/data/tokenizer.h"

namespace lockstep::data {
namespace {

using io::message_of;
using io::put;
using io::TemporaryDirectory;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string header(std::int32_t magic, std::int32_t version, std::int32_t count) {
  std::string bytes(1024, '\0');
  const std::int32_t fields[] = {magic, version, count};
  std::memcpy(bytes.data(), fields, sizeof(fields));
  return bytes;
}

template <typename Token>
std::string token_bytes(const std::vector<Token>& tokens) {
  std::string bytes(tokens.size() * sizeof(Token), '\0');
  std::memcpy(bytes.data(), tokens.data(), bytes.size());
  return bytes;
}

std::vector<std::int64_t> all_tokens(const TokenFile& file) {
  std::vector<std::int64_t> tokens(file.size());
  file.copy(0, tokens);
  return tokens;
}

TEST(TokenFile, ReadsTheThreeFormats) {
  const TemporaryDirectory dir;
  put(dir / "a_train_000001.bin",
      header(20240520, 1, 4) + token_bytes<std::uint16_t>({1, 65535, 0, 50256}));
  put(dir / "b.bin", header(20240801, 7, 3) + token_bytes<std::uint32_t>({7, 128255, 4294967295}));
  put(dir / "train.bin", token_bytes<std::uint16_t>({5, 6}));

  const TokenFile a(dir / "a_train_000001.bin");
  EXPECT_EQ(a.layout().format, TokenFormat::kLlmc16);
  EXPECT_THAT(all_tokens(a), ElementsAre(1, 65535, 0, 50256));
  EXPECT_EQ(a[1], 65535u);
  EXPECT_EQ(a.largest_token(), 65535u);

  const TokenFile b(dir / "b.bin");
  EXPECT_EQ(b.layout().format, TokenFormat::kLlmc32);
  EXPECT_THAT(all_tokens(b), ElementsAre(7, 128255, 4294967295));
  EXPECT_EQ(b[2], 4294967295u);

  const TokenFile c(dir / "train.bin");
  EXPECT_EQ(c.layout().format, TokenFormat::kNanogpt);
  EXPECT_THAT(all_tokens(c), ElementsAre(5, 6));

  std::vector<std::int64_t> inputs(2), targets(2);
  b.copy_shifted(0, inputs, targets);
  EXPECT_THAT(inputs, ElementsAre(7, 128255));
  EXPECT_THAT(targets, ElementsAre(128255, 4294967295));
}

TEST(TokenFile, RefusesWhatIsNotWhole) {
  const TemporaryDirectory dir;
  const auto refusal = [&](const std::string& name, const std::string& contents,
                           TokenFormat format = TokenFormat::kAuto) {
    put(dir / name, contents);
    return message_of<UsageError>([&] { TokenFile(dir / name, format); });
  };
  const std::string tokens = token_bytes<std::uint16_t>({1, 2, 3});
  EXPECT_THAT(refusal("x.bin", header(20240520, 1, 4) + tokens),
              AllOf(StartsWith("[shards] "), HasSubstr("has 1030 bytes"),
                    HasSubstr("4 tokens, which make 1032 bytes"), HasSubstr("cut off")));
  EXPECT_THAT(refusal("x.bin", header(20240520, 1, 2) + tokens), HasSubstr("written twice"));
  EXPECT_THAT(refusal("x.bin", header(20240520, 2, 3) + tokens),
              HasSubstr("has version 2 with the magic number 20240520; llmc16 files have version"));
  EXPECT_THAT(refusal("x.bin", header(20240520, 1, -3) + tokens), HasSubstr("holds -3 tokens"));
  EXPECT_THAT(refusal("x.bin", header(20240520, 1, 3).substr(0, 1000)),
              HasSubstr("has 1000 bytes, and its header alone needs 1024"));
  EXPECT_THAT(refusal("x.bin", tokens),
              AllOf(HasSubstr("begins with 131073, which is not a magic number"),
                    HasSubstr("lockstep data tokenize")));
  EXPECT_THAT(refusal("x.bin", "ab"), HasSubstr("has 2 bytes, which is not a magic number"));
  EXPECT_THAT(refusal("x.bin", header(20240801, 7, 0), TokenFormat::kLlmc16),
              HasSubstr("is a llmc32 file, and llmc16 was asked for"));
  EXPECT_THAT(refusal("train.bin", "abc"), HasSubstr("has 3 bytes, and tokens of 2 bytes need an"));
  // The largest count an int32 holds does not overflow the size it is checked against.
  EXPECT_THAT(refusal("x.bin", header(20240801, 7, INT32_MAX)),
              HasSubstr("2147483647 tokens, which make 8589935612 bytes"));
  EXPECT_EQ(refusal("x.bin", tokens, TokenFormat::kNanogpt), "(nothing thrown)");
  EXPECT_THAT(message_of<SystemError>([&] { TokenFile(dir / "none.bin"); }), HasSubstr("none.bin"));
}

TEST(TokenFile, FormatsHaveNames) {
  for (const char* name : {"auto", "llmc16", "llmc32", "nanogpt"})
    EXPECT_EQ(data::name(token_format(name)), name);
  EXPECT_THAT(message_of<UsageError>([] { token_format("llmc"); }),
              HasSubstr("no token format 'llmc'"));
  EXPECT_THAT(message_of<UsageError>([] { token_header(TokenFormat::kLlmc16, 1ull << 31); }),
              HasSubstr("2147483648 tokens do not fit into one llmc16 file"));
  EXPECT_THAT(message_of<UsageError>([] { token_header(TokenFormat::kAuto, 1); }),
              HasSubstr("'auto' is for reading"));
}

TEST(TokenFile, FilesOfASplitAreFoundInOrder) {
  const TemporaryDirectory dir;
  for (const char* name : {"x_train_000002.bin", "x_train_000001.bin", "x_val_000000.bin", "a.txt"})
    put(dir / name, "");
  EXPECT_THAT(token_files(dir.path(), "train"),
              ElementsAre(dir / "x_train_000001.bin", dir / "x_train_000002.bin"));
  EXPECT_EQ(token_files(dir.path(), "").size(), 3u);
  EXPECT_THAT(message_of<UsageError>([&] { token_files(dir.path(), "test"); }),
              HasSubstr("has no file whose name ends in .bin and has 'test' as a part"));
  EXPECT_THAT(message_of<UsageError>([&] { token_files(dir / "none", ""); }),
              HasSubstr("cannot be listed"));
}

// The names that `data tokenize --name pretrain --val-tokens N` writes, and similar ones.
TEST(TokenFile, ASplitIsAWholePartOfTheName) {
  const TemporaryDirectory dir;
  for (const char* name :
       {"pretrain_val_000000.bin", "pretrain_train_000001.bin", "train_val_0.bin",
        "val-train-1.bin", "interval_train_000001.bin", "train0.bin"})
    put(dir / name, "");
  EXPECT_THAT(token_files(dir.path(), "train"),
              ElementsAre(dir / "interval_train_000001.bin", dir / "pretrain_train_000001.bin",
                          dir / "train0.bin", dir / "val-train-1.bin"));
  EXPECT_THAT(token_files(dir.path(), "val"),
              ElementsAre(dir / "pretrain_val_000000.bin", dir / "train_val_0.bin"));
}

TEST(ByteTokenizer, BringsBackAnyBytes) {
  std::string text(256, '\0');
  std::iota(text.begin(), text.end(), '\0');
  const ByteTokenizer tokenizer;
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_THAT(tokenizer.encode("\xff\n"), ElementsAre(255, 10));
  EXPECT_EQ(tokenizer.decode(Tokens{72, 256, 105}), "Hi");
  EXPECT_THAT(message_of<UsageError>([&] { tokenizer.decode(Tokens{1, 257}); }),
              HasSubstr("[tokenizer] token 257 at position 1 is not a byte"));
}

// The stream that shards must hold: end of text, then the file's bytes, file after file.
std::vector<std::int64_t> stream_of(const std::vector<std::string>& texts) {
  std::vector<std::int64_t> stream;
  for (const std::string& text : texts) {
    if (text.empty()) continue;
    stream.push_back(256);
    for (const char c : text) stream.push_back(static_cast<unsigned char>(c));
  }
  return stream;
}

std::vector<std::int64_t> tokens_of(const TokenizeResult& result, const std::string& folder) {
  std::vector<std::int64_t> stream;
  for (const auto& [name, count] : result.shards) {
    const TokenFile file(folder + "/" + name);
    EXPECT_EQ(file.size(), count);
    const auto tokens = all_tokens(file);
    stream.insert(stream.end(), tokens.begin(), tokens.end());
  }
  return stream;
}

TEST(Tokenize, ShardsHoldAllTextOnceAtAnyShardSizeAndNumberOfWorkers) {
  const TemporaryDirectory dir;
  std::mt19937 random(7);
  std::vector<std::string> texts;
  std::filesystem::create_directory(dir / "in");
  for (int i = 0; i < 30; ++i) {
    std::string text(random() % 200, '\0');
    for (char& c : text) c = static_cast<char>(random());
    texts.push_back(text);
    put(dir / fmt::format("in/{:02}.txt", i), text);
  }
  put(dir / "in/other.md", "not this one");
  const auto expected = stream_of(texts);
  int run = 0;
  for (const auto format : {TokenFormat::kLlmc16, TokenFormat::kLlmc32, TokenFormat::kNanogpt})
    for (const std::uint64_t shard : {1000u, 97u, 1u})
      for (const int workers : {1, 3}) {
        if (shard == 1 && workers == 1) continue;  // thousands of files; once is enough
        const std::string output = dir / fmt::format("out{}", run++);
        const TokenizeResult result = tokenize({.inputs = {dir / "in"},
                                                .suffixes = {".txt"},
                                                .output = output,
                                                .format = format,
                                                .shard_tokens = shard == 1 ? 11 : shard,
                                                .val_tokens = workers == 3 ? 50u : 0u,
                                                .workers = workers});
        EXPECT_EQ(result.tokens, expected.size());
        EXPECT_EQ(tokens_of(result, output), expected);
        EXPECT_EQ(result.shards.front().first.find("val") != std::string::npos, workers == 3);
      }
}

TEST(Tokenize, ReportsProgressUpToTheEnd) {
  const TemporaryDirectory dir;
  put(dir / "a.txt", std::string(5000, 'x'));
  std::uint64_t last = 0, of = 0;
  tokenize({.inputs = {dir / "a.txt"},
            .output = dir / "out",
            .progress = [&](std::uint64_t done, std::uint64_t total) {
              EXPECT_GE(done, last);
              last = done;
              of = total;
            }});
  EXPECT_EQ(last, 5001u);
  EXPECT_EQ(of, 5001u);
}

TEST(Tokenize, RefusesAndLeavesNothing) {
  const TemporaryDirectory dir;
  put(dir / "a.txt", "text");
  put(dir / "empty.txt", "");
  const auto refusal = [&](TokenizeOptions options) {
    if (options.output.empty()) options.output = dir / "out";
    const std::string message = message_of<UsageError>([&] { tokenize(options); });
    EXPECT_FALSE(std::filesystem::exists(dir / "out")) << message;
    return message;
  };
  EXPECT_THAT(refusal({}), HasSubstr("no text was named"));
  EXPECT_THAT(refusal({.inputs = {dir / "none"}}), HasSubstr("none does not exist"));
  EXPECT_THAT(refusal({.inputs = {dir / "empty.txt"}}), HasSubstr("1 files were found"));
  EXPECT_THAT(refusal({.inputs = {dir.path()}, .suffixes = {".cc"}}),
              HasSubstr("Look at the suffixes"));
  EXPECT_THAT(refusal({.inputs = {dir / "a.txt"}, .val_tokens = 5}),
              HasSubstr("5 tokens for validation leave nothing of 5"));
  EXPECT_THAT(refusal({.inputs = {dir / "a.txt"}, .shard_tokens = 0}), HasSubstr("0 tokens"));
  EXPECT_THAT(refusal({.inputs = {dir / "a.txt"}, .shard_tokens = 1ull << 31}),
              HasSubstr("do not fit into one llmc16 file"));
  EXPECT_THAT(refusal({.inputs = {dir / "a.txt"}, .name = "a/b"}),
              HasSubstr("is not a name for shards"));
  EXPECT_THAT(refusal({.inputs = {dir / "a.txt"}, .format = TokenFormat::kAuto}),
              HasSubstr("choose a format"));
  EXPECT_THAT(refusal({.inputs = {dir / "a.txt"}, .workers = -1}), HasSubstr("-1 workers"));
  EXPECT_THAT(message_of<UsageError>([&] { tokenize({.inputs = {dir / "a.txt"}}); }),
              HasSubstr("no output folder"));

  tokenize({.inputs = {dir / "a.txt"}, .output = dir / "there"});
  const std::string before = io::get(dir / "there/text_train_000000.bin");
  put(dir / "a.txt", "other");
  EXPECT_THAT(message_of<UsageError>(
                  [&] { tokenize({.inputs = {dir / "a.txt"}, .output = dir / "there"}); }),
              HasSubstr("there"));
  EXPECT_EQ(io::get(dir / "there/text_train_000000.bin"), before);
  tokenize({.inputs = {dir / "a.txt"}, .output = dir / "there", .replace = true});
  EXPECT_NE(io::get(dir / "there/text_train_000000.bin"), before);
}

TEST(Instructions, ReadsAListAndLines) {
  const Instruction full{"Do <é>\n", "this", "the correct answer is true", "true"};
  const std::string object = R"({"instruction": "Do <\u00e9>\n", "input": "this", )"
                             R"("output": "the correct answer is true", "answer": "true"})";
  EXPECT_THAT(parse_instructions("[" + object + ",\n" + object + "]", "f"),
              ElementsAre(full, full));
  EXPECT_THAT(parse_instructions(object + "\r\n\n" + object, "f"), ElementsAre(full, full));
  EXPECT_THAT(parse_instructions("\xEF\xBB\xBF" + object, "f"), ElementsAre(full));
  EXPECT_THAT(parse_instructions("[]", "f"), ElementsAre());
  // Other keys are skipped; numbers and truth values are taken as they are written.
  EXPECT_THAT(parse_instructions(
                  R"([{"id": [1, {"a": 2}], "instruction": "q", "output": 42, "answer": true,
                       "input": null}])",
                  "f"),
              ElementsAre(Instruction{"q", "", "42", "true"}));
}

TEST(Instructions, ReadsPromptsWithCompletionsAndChats) {
  const auto texts = parse_instructions(R"({"completion": " b\n", "prompt": "a"})", "f");
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_EQ(texts[0].kind, RecordKind::kCompletion);
  // No template is applied to them.
  EXPECT_EQ(apply({}, texts[0]).prompt, "a");
  EXPECT_EQ(apply({}, texts[0]).response, " b\n");

  const std::vector<ChatMessage> said{{"user", "q"}, {"assistant", "a"}};
  const std::string user = R"({"role": "user", "content": "q", "name": "x"})";
  const std::string assistant = R"({"content": "a", "role": "assistant"})";
  const auto chats = parse_instructions(
      "[{\"prompt_id\": 3, \"messages\": [" + user + "," + assistant + "]}]", "f");
  ASSERT_EQ(chats.size(), 1u);
  EXPECT_EQ(chats[0].kind, RecordKind::kChat);
  EXPECT_EQ(chats[0].messages, said);
  EXPECT_EQ(chats[0].given, 0u);
  const auto completions =
      parse_instructions("{\"prompt\": [" + user + "], \"completion\": [" + assistant + "]}", "f");
  EXPECT_EQ(completions.at(0).messages, said);
  EXPECT_EQ(completions.at(0).given, 1u);
  // An instruction may have anything under the other keys.
  EXPECT_THAT(
      parse_instructions(R"([{"messages": {"a": 1}, "instruction": "q", "output": "a"}])", "f"),
      ElementsAre(Instruction{"q", "", "a", ""}));

  const auto refusal = [](const std::string& text) {
    return message_of<UsageError>([&] { parse_instructions(text, "f.json"); });
  };
  EXPECT_THAT(refusal("{\"messages\": [" + user + "]}"),
              HasSubstr("has no message of the assistant to learn"));
  EXPECT_THAT(refusal(R"({"messages": "hello"})"), HasSubstr("messages must be a list"));
  EXPECT_THAT(refusal(R"({"messages": [{"role": "user"}]})"),
              HasSubstr("f.json:1:31: the message that ends here has no 'content'"));
  EXPECT_THAT(refusal(R"({"messages": [{"role": "user", "content": [{"text": "q"}]}]})"),
              HasSubstr("the content of a message must be a text"));
  EXPECT_THAT(refusal(R"({"prompt": "a"})"), HasSubstr("has no 'completion'"));
  EXPECT_THAT(refusal(R"({"prompt": "a", "completion": []})"), HasSubstr("both be texts"));
  EXPECT_THAT(refusal(R"({"prompt": "a", "completion": "b"}
                         {"instruction": "a", "output": "b"})"),
              HasSubstr("is an instruction, and the first of the file is prompt and completion"));
  EXPECT_THAT(message_of<UsageError>([&] { InstructionRows rows(chats); }),
              HasSubstr("Name that model's folder as the tokenizer"));
}

TEST(Instructions, ReportsProgress) {
  const std::string object =
      R"({"instruction": "q", "output": ")" + std::string(300'000, 'a') + "\"}";
  std::string list = "[" + object, lines = object;
  for (int i = 1; i < 10; ++i) {
    list += ",\n" + object;
    lines += "\n" + object;
  }
  for (const std::string& text : {list + "]", lines}) {
    std::vector<std::uint64_t> seen;
    const auto progress = [&](std::uint64_t done, std::uint64_t total) {
      EXPECT_EQ(total, text.size());
      seen.push_back(done);
    };
    EXPECT_EQ(parse_instructions(text, "f", progress).size(), 10u);
    // Every fourth object is past the next MiB; then the end.
    ASSERT_EQ(seen.size(), 3u);
    EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
    EXPECT_EQ(seen.back(), text.size());
  }
}

TEST(Instructions, RowsNameTheirFileAndReportProgress) {
  const std::vector<Instruction> items(2500, Instruction{"q", "", "a", ""});
  std::vector<std::uint64_t> seen;
  const InstructionRows rows(items, {}, [&](std::uint64_t done, std::uint64_t total) {
    EXPECT_EQ(total, items.size());
    seen.push_back(done);
  });
  EXPECT_EQ(rows.size(), 2500);
  EXPECT_THAT(seen, ElementsAre(1024u, 2048u));
  InstructionOptions options;
  options.source = "f.json";
  EXPECT_THAT(message_of<UsageError>([&] { InstructionRows({}, options); }),
              StartsWith("[instructions] f.json: there are no samples. Give a file"));
  options.max_length = 8;
  EXPECT_THAT(message_of<UsageError>([&] { InstructionRows(items, options); }),
              StartsWith("[instructions] f.json: of 2500 samples none has anything to learn from"));
}

TEST(Instructions, MistakesHaveAPlace) {
  const auto refusal = [](const std::string& text) {
    return message_of<UsageError>([&] { parse_instructions(text, "f.json"); });
  };
  const std::string good = R"({"instruction": "q", "output": "a"})";
  EXPECT_THAT(refusal(""), StartsWith("[instructions] f.json:1:1: there is nothing in it."));
  EXPECT_THAT(refusal("[" + good + ",\n {\"instruction\": \"q\"}]"),
              HasSubstr("f.json:2:22: the object that ends here has no 'output'"));
  EXPECT_THAT(refusal(good + "\n\n" + R"({"instruction": "ä", oops})"),
              HasSubstr("f.json:3:22: JSON takes double quotes around keys"));
  EXPECT_THAT(refusal(R"([{"output": "a", "output": "b"}])"),
              HasSubstr("f.json:1:27: the key 'output' appears twice"));
  EXPECT_THAT(refusal(R"([{"instruction": ["q"], "output": "b"}])"),
              HasSubstr("expected a text, not a list or an object"));
  EXPECT_THAT(refusal("[" + good),
              HasSubstr("f.json:1:37: the text ends inside a list or map that line 1 opened"));
  EXPECT_THAT(refusal("[" + good + "] x"), HasSubstr("one value was expected, but more follows"));
  EXPECT_THAT(refusal(good + " " + good),
              HasSubstr("f.json:1:37: one value was expected, but more follows"));
  EXPECT_THAT(refusal(good + "\n{"), HasSubstr("f.json:2:2: the text ends inside a list or map "
                                               "that line 2 opened"));
  EXPECT_THAT(refusal("7"), HasSubstr("expected an object"));
  EXPECT_THAT(refusal(good + "\n\xff"), HasSubstr("f.json:2:1: the byte 0xff is not valid UTF-8"));
  EXPECT_THAT(message_of<SystemError>([] { load_instructions("no/such/file"); }),
              HasSubstr("no/such/file"));
}

TEST(Instructions, TemplatesAreFilled) {
  const Instruction item{"ask", "about", "out", "yes"};
  const PromptAndResponse both = apply({}, item);
  EXPECT_EQ(both.prompt, "### Instruction:\nask\n\n### Input:\nabout\n\n### Response:\n");
  EXPECT_EQ(both.response, "out");
  EXPECT_EQ(apply({}, {"ask", "", "out", ""}).prompt, "### Instruction:\nask\n\n### Response:\n");
  const PromptTemplate own{.prompt = "{{{instruction}}} {input}{answer}", .response = "{answer}"};
  EXPECT_EQ(apply(own, item).prompt, "{ask} aboutyes");
  EXPECT_EQ(apply(own, item).response, "yes");
  // What a sample says is not a template.
  EXPECT_EQ(apply({.response = "{output}"}, {"q", "", "{x}}", ""}).response, "{x}}");
  const auto refusal = [&](const std::string& response) {
    return message_of<UsageError>([&] { apply({.response = response}, item); });
  };
  EXPECT_THAT(refusal("a {outptu}"),
              HasSubstr("[prompt] the template has '{outptu' at position 2"));
  EXPECT_THAT(refusal("{output"), HasSubstr("'{output' at position 0"));
  EXPECT_THAT(refusal("x}"), HasSubstr("a '}' at position 1 that closes nothing"));
}

// ---------------------------------------------------------------- prefetch

// The threads behind the loader, without torch: order, running ahead, dropping, errors, deadlines.

Deadline soon() {
  return Deadline::after(std::chrono::seconds(60));
}

Thing number_thing(std::int64_t number) {
  return std::make_shared<std::int64_t>(number);
}

std::int64_t number_of(const Thing& thing) {
  return *std::static_pointer_cast<std::int64_t>(thing);
}

// Waits for something that another thread will do; a test that fails says so instead of hanging.
template <typename Condition>
bool eventually(Condition&& condition) {
  const Deadline deadline = soon();
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

TEST(Prefetcher, GivesThingsInOrderWhateverTheWorkersDo) {
  Prefetcher prefetcher{{.workers = 4, .ahead = 7}};
  for (const std::int64_t count : {0, 1, 2, 50, 333}) {
    prefetcher.start(count, [](std::int64_t number) {
      if (number % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
      return number_thing(number);
    });
    for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(number_of(prefetcher.next(soon())), i);
    EXPECT_EQ(prefetcher.next(soon()), nullptr);
    EXPECT_EQ(prefetcher.next(soon()), nullptr);
  }
}

TEST(Prefetcher, RunsAheadThatFarAndNoFurther) {
  Prefetcher prefetcher{{.workers = 3, .ahead = 5}};
  std::atomic<std::int64_t> most{-1}, made{0};
  prefetcher.start(100, [&](std::int64_t number) {
    std::int64_t seen = most;
    while (number > seen && !most.compare_exchange_weak(seen, number)) {
    }
    ++made;
    return number_thing(number);
  });
  ASSERT_TRUE(eventually([&] { return made == 5; }));
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_EQ(most, 4);  // 0 to 4, while nothing was taken
  prefetcher.next(soon());
  ASSERT_TRUE(eventually([&] { return made == 6; }));
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_EQ(most, 5);
}

TEST(Prefetcher, SeveralWorkersMakeAtTheSameTime) {
  Prefetcher prefetcher{{.workers = 3, .ahead = 3}};
  std::atomic<int> inside{0};
  prefetcher.start(3, [&](std::int64_t number) {
    ++inside;
    EXPECT_TRUE(eventually([&] { return inside == 3; }));  // only if all three are in here
    return number_thing(number);
  });
  EXPECT_EQ(number_of(prefetcher.next(soon())), 0);
}

TEST(Prefetcher, ADroppedRoundLeavesNothingBehind) {
  Prefetcher prefetcher{{.workers = 2, .ahead = 4}};
  for (int round = 0; round < 300; ++round) {
    prefetcher.start(1000,
                     [round](std::int64_t number) { return number_thing(1000 * round + number); });
    for (int i = 0; i < round % 4; ++i)
      ASSERT_EQ(number_of(prefetcher.next(soon())), 1000 * round + i);
    if (round % 2 == 0) prefetcher.drop();
  }
  prefetcher.drop();
  EXPECT_EQ(prefetcher.next(soon()), nullptr);
}

TEST(Prefetcher, DroppingDoesNotWaitForWhatIsBeingMade) {
  std::atomic<bool> release{false}, entered{false};
  Prefetcher prefetcher{{.workers = 2, .ahead = 2}};
  prefetcher.start(2, [&](std::int64_t number) {
    entered = true;
    EXPECT_TRUE(number != 0 || eventually([&] { return release.load(); }));
    return number_thing(-1);
  });
  ASSERT_TRUE(eventually([&] { return entered.load(); }));
  prefetcher.start(1, number_thing);  // the other worker makes it
  EXPECT_EQ(number_of(prefetcher.next(soon())), 0);
  release = true;
}

TEST(Prefetcher, AnErrorComesAtItsTurnAndTheNextRoundIsClean) {
  Prefetcher prefetcher{{.workers = 3, .ahead = 6}};
  for (int round = 0; round < 50; ++round) {
    prefetcher.start(10, [](std::int64_t number) {
      if (number == 4) throw std::runtime_error("four");
      return number_thing(number);
    });
    for (int i = 0; i < 4; ++i) ASSERT_EQ(number_of(prefetcher.next(soon())), i);
    try {
      prefetcher.next(soon());
      FAIL() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "four");
    }
    EXPECT_EQ(prefetcher.next(soon()), nullptr);
  }
}

TEST(Prefetcher, AWaitEndsAtItsDeadline) {
  std::atomic<bool> release{false};
  Prefetcher prefetcher{{.workers = 1, .ahead = 1}};
  prefetcher.start(1, [&](std::int64_t number) {
    EXPECT_TRUE(eventually([&] { return release.load(); }));
    return number_thing(number);
  });
  try {
    prefetcher.next(Deadline::after(milliseconds(20)));
    FAIL() << "no error";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr("[loader] batch 0 was not loaded within 20 ms"));
    EXPECT_GE(error.context().elapsed.count(), 20);
  }
  release = true;
  prefetcher.start(1, number_thing);
  EXPECT_EQ(number_of(prefetcher.next(soon())), 0);
}

TEST(Prefetcher, TheDestructorStopsWorkersThatAreBusy) {
  std::atomic<int> made{0};
  {
    Prefetcher prefetcher{{.workers = 4, .ahead = 8}};
    prefetcher.start(100'000, [&](std::int64_t number) {
      ++made;
      return number_thing(number);
    });
    prefetcher.next(soon());
  }
  const int then = made;
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(made, then);
}

TEST(Prefetcher, FreesTheMakerAndWhatItHolds) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  Prefetcher prefetcher{{.workers = 2, .ahead = 2}};
  prefetcher.start(5, [held](std::int64_t) -> Thing { return held; });
  held.reset();
  EXPECT_NE(prefetcher.next(soon()), nullptr);
  prefetcher.drop();
  EXPECT_TRUE(eventually([&] { return watch.expired(); }));
}

}  // namespace
}  // namespace lockstep::data
