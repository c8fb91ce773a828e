// The strict reader: what it reads, and each kind of mistake with its place and remedy.
#include "lockstep/core/document.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/json.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/text.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Node yaml(const std::string& text) {
  return parse_yaml(text, "a.yaml");
}

Node json(const std::string& text) {
  return parse_json(text, "a.json");
}

std::string value_json(const std::string& scalar) {
  return to_json(yaml("k: " + scalar + "\n").find("k")->value);
}

// ------------------------------------------------------------------ what is read

TEST(Document, ScalarsHaveTheTypesOfTheCoreSchema) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"1e-4", "0.0001"},
      {"5E-5", "5e-05"},
      {"1e4", "10000.0"},
      {".5", "0.5"},
      {"-3.", "-3.0"},
      {"3.0", "3.0"},
      {"+7", "7"},
      {"-12", "-12"},
      {"0x1F", "31"},
      {"0o17", "15"},
      {"0", "0"},
      {"true", "true"},
      {"FALSE", "false"},
      {"yes", "\"yes\""},
      {"no", "\"no\""},
      {"on", "\"on\""},
      {"off", "\"off\""},
      {"010", "\"010\""},
      {"1_000", "\"1_000\""},
      {"1:30", "\"1:30\""},
      {"2024-01-02", "\"2024-01-02\""},
      {"~", "null"},
      {"null", "null"},
      {"", "null"},
      {"\"true\"", "\"true\""},
      {"'1e-4'", "\"1e-4\""},
      {"\"\\u00e9\\n\"", "\"\303\251\\n\""},
      {"9223372036854775807", "9223372036854775807"},
      {"9223372036854775808", "9.223372036854776e+18"},
      {".inf", "\".inf\""},
      {"-.INF", "\"-.inf\""},
      {".nan", "\".nan\""},
      {"1e999", "\".inf\""},
      {"e5", "\"e5\""},
      {"1e", "\"1e\""},
      {".", "\".\""},
      {"[1, a, true]", "[1,\"a\",true]"},
      {"{x: 1, y: [2]}", "{\"x\":1,\"y\":[2]}"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(value_json(text), expected) << text;
}

TEST(Document, EveryNodeAndKeyHasItsPlace) {
  const Node root = yaml("# comment\na: 1\nmap:\n  \"x\":   [2,\n     3]\nz:\n");
  EXPECT_EQ(root.find("a")->location.text(), "a.yaml:2:1");
  EXPECT_EQ(root.find("a")->value.location.text(), "a.yaml:2:4");
  const Entry* x = root.find("map")->value.find("x");
  EXPECT_EQ(x->location.text(), "a.yaml:4:3");
  EXPECT_EQ(x->value.items[1].location.text(), "a.yaml:5:6");
  // An empty value has no place of its own and takes that of its key.
  EXPECT_EQ(root.find("z")->value.location.text(), "a.yaml:6:1");
}

TEST(Document, ColumnsCountCharacters) {
  const Node root = yaml("{\303\251\303\251: 1, b: 2}\n");
  EXPECT_EQ(root.find("b")->location.text(), "a.yaml:1:9");
  const Node same = json("{\"\303\251\303\251\": 1, \"b\": 2}");
  EXPECT_EQ(same.find("b")->location.text(), "a.json:1:11");
}

TEST(Document, AByteOrderMarkAndWindowsLineEndsAreFine) {
  const Node root = yaml(
      "\xEF\xBB\xBF"
      "a: 1\r\nb: 2\r\n");
  EXPECT_EQ(to_json(root), "{\"a\":1,\"b\":2}");
  EXPECT_EQ(root.find("a")->location.text(), "a.yaml:1:1");
  EXPECT_EQ(root.find("b")->location.text(), "a.yaml:2:1");
}

TEST(Document, AnEmptyFileIsNull) {
  EXPECT_EQ(yaml("").kind, NodeKind::kNull);
  EXPECT_EQ(yaml("# only a comment\n").kind, NodeKind::kNull);
  EXPECT_EQ(yaml("---\n...\n").kind, NodeKind::kNull);
}

TEST(Document, AliasesAreCopies) {
  const Node root = yaml("a: &x {p: 1}\nb: *x\nc: [&y 5, *y]\n");
  EXPECT_EQ(to_json(root), "{\"a\":{\"p\":1},\"b\":{\"p\":1},\"c\":[5,5]}");
}

TEST(Document, BlocksOfTextAreStrings) {
  const Node root = yaml("a: |\n  12\n  13\nb: >-\n  true\n");
  EXPECT_EQ(to_json(root), "{\"a\":\"12\\n13\\n\",\"b\":\"true\"}");
}

TEST(Document, JsonIsReadWithPlaces) {
  const Node root =
      json("{\n\t\"a\": [1, -2.5e3, true, null],\n  \"b\": {\"c\": \"\\ud83d\\ude00\"}\n}");
  EXPECT_EQ(to_json(root), "{\"a\":[1,-2500.0,true,null],\"b\":{\"c\":\"\360\237\230\200\"}}");
  EXPECT_EQ(root.find("b")->location.text(), "a.json:3:3");
  // RFC 8259 allows DEL in strings; tokenizers have it as a token.
  EXPECT_EQ(json("[\"\x7f\"]").items[0].text, "\x7f");
  EXPECT_EQ(root.find("a")->value.items[1].location.text(), "a.json:2:11");
}

TEST(Document, JsonTextReadsBackTheSame) {
  const Node root =
      yaml("a: [1, 2.0, 1e-7, true, ~, 'x\\y\"z', \"\\x01\\t\\u2028\"]\nb: {c: {}, d: []}\n");
  const std::string text = to_json(root);
  EXPECT_TRUE(same_value(root, json(text))) << text;
  EXPECT_TRUE(same_value(root, yaml(text))) << text;
}

TEST(Document, SameValueLooksAtKindAndValueAlone) {
  EXPECT_TRUE(same_value(yaml("{a: 1, b: 'x'}"), yaml("b: x\na: 0x1\n")));
  EXPECT_FALSE(same_value(yaml("a: 1"), yaml("a: 1.0")));
  EXPECT_FALSE(same_value(yaml("a: 1"), yaml("{a: 1, b: 2}")));
  EXPECT_FALSE(same_value(yaml("[1, 2]"), yaml("[2, 1]")));
}

TEST(Document, FilesAreReadByTheirEnding) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("lockstep_document_" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  write_file_atomically(folder / "a.yaml", "a: yes\n");
  write_file_atomically(folder / "a.json", "{\"a\": 1}");
  write_file_atomically(folder / "a.toml", "a = 1\n");
  EXPECT_EQ(to_json(load_document(folder / "a.yaml")), "{\"a\":\"yes\"}");
  EXPECT_EQ(to_json(load_document(folder / "a.json")), "{\"a\":1}");
  EXPECT_THAT(message_of([&] { load_document(folder / "a.toml"); }),
              HasSubstr("TOML is not read. Write YAML (.yaml) or JSON (.json)."));
  EXPECT_THAT(message_of([&] { load_document(folder / "none.yaml"); }),
              HasSubstr("none.yaml cannot be read: No such file or directory. Check the path."));
  EXPECT_THAT(message_of([&] { load_document(folder); }), HasSubstr("cannot be read: Is a dir"));
  EXPECT_THAT(message_of([&] { load_document(folder / "a.yaml", {.bytes = 3}); }),
              HasSubstr("a.yaml is larger than 3 bytes. Is it the right file?"));
  for (const char* text : {"", "\n\n", "# nothing\n", "---\n", "null\n", "~\n"}) {
    write_file_atomically(folder / "empty.yaml", text);
    EXPECT_THAT(message_of([&] { load_document(folder / "empty.yaml"); }),
                HasSubstr("empty.yaml has no keys: it is empty or holds only comments. Write "))
        << text;
  }
  std::filesystem::remove_all(folder);
}

// Opening a named pipe waits for a writer, and a device may never end: both are refused at once.
TEST(Document, WhatIsNotAFileIsRefusedAtOnce) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("lockstep_pipe_" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  ASSERT_EQ(::mkfifo((folder / "pipe.yaml").c_str(), 0600), 0);
  ::alarm(20);  // without the refusal it would wait forever
  EXPECT_THAT(message_of([&] { load_document(folder / "pipe.yaml"); }),
              HasSubstr("pipe.yaml is a named pipe, not a regular file. Name a file."));
  for (const char* device : {"/dev/zero", "/dev/null"})
    EXPECT_THAT(message_of([&] { load_document(device); }),
                HasSubstr(std::string(device) + " is a device, not a regular file. Name a file."));
  // What a shell makes of <(...), with a writer that is slow.
  Pipe pipe = make_pipe();
  std::thread writer([&] {
    write_all(pipe.write.get(), "a: 1\n");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    write_all(pipe.write.get(), "b: 2\n");
    pipe.write.reset();
  });
  const std::string name = "/dev/fd/" + std::to_string(pipe.read.get());
  EXPECT_EQ(to_json(load_document(name)), "{\"a\":1,\"b\":2}");
  writer.join();
  ::alarm(0);
  std::filesystem::remove_all(folder);
}

// ------------------------------------------------------------------ what is refused

struct Mistake {
  const char* name;
  std::string text;
  std::string location;
  std::string expected;
};

class YamlMistake : public ::testing::TestWithParam<Mistake> {};
TEST_P(YamlMistake, IsNamedWithPlaceAndRemedy) {
  const std::string message = message_of([] { yaml(GetParam().text); });
  EXPECT_THAT(message, StartsWith("[config] a.yaml:" + GetParam().location + ": "));
  EXPECT_THAT(message, HasSubstr(GetParam().expected));
}

std::string doubling_aliases() {
  std::string text = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n";
  for (int i = 1; i < 10; ++i) {
    const std::string last = "*a" + std::to_string(i - 1);
    text += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [";
    for (int j = 0; j < 10; ++j) text += (j > 0 ? ", " : "") + last;
    text += "]\n";
  }
  return text;
}

const Mistake kYamlMistakes[] = {
    {"DuplicateKey", "seed: 1\nbf16: true\nseed: 2\n", "3:1",
     "the key 'seed' appears twice (first at line 1, column 1). Delete one of them."},
    {"DuplicateInFlow", "m: {a: 1, a: 2}\n", "1:11", "the key 'a' appears twice"},
    {"Tab", "model:\n\tname: gpt\n", "2:1", "there is a tab in the indentation. Use spaces."},
    {"TabAfterSpaces", "model:\n  \tname: gpt\n", "2:3", "there is a tab in the indentation."},
    {"SecondDocument", "a: 1\n---\nb: 2\n", "2:1",
     "a second document begins. One file holds one: delete the '---' or split the file."},
    {"NumberAsKey", "a: 1\n3: x\n", "2:1", "the key 3 is a number. Keys are strings: quote it"},
    {"BoolAsKey", "true: x\n", "1:1", "the key true is a boolean. Keys are strings: quote it"},
    {"ListAsKey", "? [a]\n: x\n", "1:3", "a list or a map cannot be a key"},
    {"NullAsKey", "~: x\n", "1:1", "a key is missing"},
    {"AliasAsKey", "a: &k x\n*k : 1\n", "2:1", "an alias cannot be a key"},
    {"MergeKey", "a: &x {p: 1}\nb:\n  <<: *x\n", "3:3",
     "merge keys ('<<') are not read. Write the keys out."},
    {"Tag", "a: !!python/object:os.system x\n", "1:4",
     "tags ('!') are not read. Delete it, or quote the value."},
    {"MapTag", "a: !!set {x}\n", "1:4", "tags ('!') are not read."},
    {"AliasBomb", doubling_aliases(), "5:45",
     "more than 100000 values, counting what aliases repeat."},
    {"SelfAlias", "a: &x [1, *x]\n", "1:11", "an alias is inside the value that it names"},
    {"UnknownAlias", "a: *nowhere\n", "1:4", "the referenced anchor is not defined"},
    {"Depth", std::string("a: ") + std::string(40, '[') + std::string(40, ']') + "\n", "1:35",
     "nested deeper than 32. Is it the right file?"},
    {"Utf8", "a: 1\nb: x\xFFy\n", "2:5",
     "the byte 0xff is not valid UTF-8. Save the file as UTF-8."},
    {"Overlong", "a: \xC0\xAF\n", "1:4", "is not valid UTF-8."},
    {"Surrogate", "a: \xED\xA0\x80\n", "1:4", "is not valid UTF-8."},
    {"Truncated", "a: \xE2\x82", "1:4", "is not valid UTF-8."},
    {"Control", std::string("a: x\0y\n", 7), "1:5", "the control character 0x00 is not allowed"},
    {"CarriageReturn", "a: 1\rb: 2\n", "1:5", "the control character 0x0d is not allowed"},
    {"OpenBracket", "a: [1, 2\nb: 3\n", "2:2", "A bracket that was opened is not closed"},
    {"MapAfterList", "- a\nb: 1\n", "2:1", "does not continue the lines above."},
    {"OpenSingleQuote", "a: &n 'it''s\nb: 3\n", "1:7", "A quote that was opened is not closed"},
    {"OpenQuote", "a: \"x\nb: 3\n", "1:4", "A quote that was opened is not closed"},
    {"Indentation", "a: 1\n  b: 2\n", "2:4", "Check the indentation"},
    {"MissingSpace", "a: 1\nb:2\nc: 3\n", "3:2", "every 'key:' is followed by a space"},
    {"LastLineWithoutSpace", "a: 1\nbf16:true\n", "2:1", "'bf16:true' is no `key: value`."},
    {"Directive", "%YAML 1.1\n---\na: 1\n", "1:1", "is a directive, which is not read."},
    {"Escape", "a: \"\\q\"\n", "1:7", "use single quotes"},
};
INSTANTIATE_TEST_SUITE_P(Document, YamlMistake, ::testing::ValuesIn(kYamlMistakes),
                         [](const auto& one) { return one.param.name; });

class JsonMistake : public ::testing::TestWithParam<Mistake> {};
TEST_P(JsonMistake, IsNamedWithPlaceAndRemedy) {
  const std::string message = message_of([] { json(GetParam().text); });
  EXPECT_THAT(message, StartsWith("[config] a.json:" + GetParam().location + ": "));
  EXPECT_THAT(message, HasSubstr(GetParam().expected));
}

const Mistake kJsonMistakes[] = {
    {"DuplicateKey", "{\"a\": 1,\n \"a\": 2}", "2:2", "the key 'a' appears twice (first at line 1"},
    {"TrailingComma", "{\"a\": 1,\n}", "2:1", "JSON has no comma before a closing bracket"},
    {"TrailingCommaInList", "[1, 2,]", "1:7", "JSON has no comma before a closing bracket"},
    {"Comment", "{ // x\n}", "1:3", "JSON has no comments. Delete it, or write YAML."},
    {"SingleQuotes", "{'a': 1}", "1:2", "JSON takes double quotes"},
    {"BareKey", "{a: 1}", "1:2", "JSON takes double quotes"},
    {"NumberAsKey", "{1: 1}", "1:2", "a key in double quotes was expected"},
    {"MissingColon", "{\"a\" 1}", "1:6", "a ':' was expected after the key 'a'"},
    {"MissingComma", "{\"a\": 1 \"b\": 2}", "1:9", "a ',' or '}' was expected"},
    {"MissingCommaInList", "[1 2]", "1:4", "a ',' or ']' was expected"},
    {"End", "{\"a\": [1, 2", "1:12", "the text ends inside a list or map that line 1 opened"},
    {"OpenQuote", "{\"a", "1:2", "A quote that was opened is not closed"},
    {"LineInString", "{\"a\": \"x\ny\"}", "1:9", "a string contains a line break. Write \\n."},
    {"Escape", "[\"\\q\"]", "1:3", "\\q is not an escape"},
    {"LoneSurrogate", "[\"\\ud83d\"]", "1:3", "half of a surrogate pair"},
    {"BadHex", "[\"\\u12g4\"]", "1:3", "\\u takes four hexadecimal digits"},
    {"LeadingZero", "[012]", "1:2", "'012' is not a JSON number"},
    {"Plus", "[+1]", "1:2", "'+1' is not a JSON value"},
    {"Word", "[True]", "1:2", "'True' is not a JSON value. Write true"},
    {"NaN", "[NaN]", "1:2", "'NaN' is not a JSON value"},
    {"More", "{} {}", "1:4", "one value was expected, but more follows"},
    {"Empty", "", "1:1", "the file is empty"},
    {"Depth", std::string(40, '['), "1:33", "nested deeper than 32"},
    {"Utf8", "[\"\x80\"]", "1:3", "is not valid UTF-8"},
    {"Big", "[1, 1e999]", "1:5", "'1e999' is too large"},
    {"Control", "[\"\x01\"]", "1:3", "a string contains the control character 0x01"},
};
INSTANTIATE_TEST_SUITE_P(Document, JsonMistake, ::testing::ValuesIn(kJsonMistakes),
                         [](const auto& one) { return one.param.name; });

TEST(Document, LimitsHoldForBothReaders) {
  std::string text = "[";
  for (int i = 0; i < 200; ++i) text += "1,";
  text += "1]";
  EXPECT_THAT(message_of([&] { parse_json(text, "a", {.nodes = 100}); }),
              HasSubstr("more than 100"));
  EXPECT_THAT(message_of([&] { parse_yaml(text, "a", {.nodes = 100}); }),
              HasSubstr("more than 100"));
  EXPECT_THAT(message_of([&] { parse_yaml(text, "a", {.bytes = 100}); }), HasSubstr("larger than"));
  EXPECT_THAT(message_of([&] { parse_json(text, "a", {.bytes = 100}); }), HasSubstr("larger than"));
}

// A line of 75 000 values once took time quadratic in its length.
TEST(Document, OneLongLineIsReadInItsLength) {
  std::string text = "[";
  for (int i = 0; i < 75'000; ++i) text += "\303\251,";
  text += "1]";
  for (const bool is_json : {false, true}) {
    if (is_json) {
      text = "[";
      for (int i = 0; i < 75'000; ++i) text += "\"\303\251\",";
      text += "1]";
    }
    const auto start = std::chrono::steady_clock::now();
    const Node root = is_json ? json(text) : yaml(text);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    EXPECT_EQ(root.items.back().location.column, is_json ? 75'000 * 4 + 2 : 75'000 * 2 + 2);
    EXPECT_LT(elapsed, std::chrono::seconds(20));
  }
}

// ------------------------------------------------------------------ the cursor

TEST(JsonReader, ReadsInOrder) {
  JsonReader json(R"( {"a" : [1, 2 ,18446744073709551615], "b\n\u00e9\ud83d\ude00": "\\\"\/",
                      "c": {"d": [[], {}, -1.5e-3, true, false, null, "x"]}} )");
  std::string key;
  json.enter_object();
  ASSERT_TRUE(json.next_key(key));
  EXPECT_EQ(key, "a");
  std::vector<std::uint64_t> numbers;
  json.enter_array();
  while (json.next_element()) numbers.push_back(json.unsigned_integer());
  EXPECT_THAT(numbers, ElementsAre(1u, 2u, UINT64_MAX));
  ASSERT_TRUE(json.next_key(key));
  EXPECT_EQ(key, "b\n\u00e9\U0001f600");
  EXPECT_EQ(json.string(), "\\\"/");
  ASSERT_TRUE(json.next_key(key));
  json.skip();
  EXPECT_FALSE(json.next_key(key));
  json.end();
}

std::string skip_all(const std::string& text) {
  return message_of<JsonError>([&] {
    JsonReader json(text);
    json.skip();
    json.end();
  });
}

TEST(JsonReader, RefusesWhatIsNotJson) {
  const std::pair<std::string, std::string> cases[] = {
      {"", "a value is missing"},
      {"nul", "'nul' is not a JSON value"},
      {"{\"a\":1,}", "no comma before a closing bracket"},
      {"[1,]", "no comma before a closing bracket"},
      {"[1 2]", "',' or ']'"},
      {"{\"a\":1 \"b\":2}", "',' or '}'"},
      {"{\"a\" 1}", "a ':' was expected after the key 'a'"},
      {"01", "'01' is not a JSON number"},
      {"-", "'-' is not a JSON number"},
      {"1.", "'1.' is not a JSON number"},
      {"1e", "'1e' is not a JSON number"},
      {"\"a", "is not closed"},
      {"\"\n\"", "a string contains a line break"},
      {"\"\x01\"", "a string contains the control character 0x01. Write \\u0001"},
      {"\"\\x\"", "\\x is not an escape"},
      {"\"\\", "is not an escape"},
      {"\"\\u12\"", "four hexadecimal digits"},
      {"\"\\u12g4\"", "four hexadecimal digits"},
      {"\"\\ud800\"", "surrogate"},
      {"\"\\udc00\"", "surrogate"},
      {"\"\\ud800\\u0041\"", "surrogate"},
      {"\"\xff\"", "not valid UTF-8"},
      {"\"\xc0\x80\"", "not valid UTF-8"},
      {"\"\xed\xa0\x80\"", "not valid UTF-8"},
      {"\"\xf4\x90\x80\x80\"", "not valid UTF-8"},
      {"1 1", "more follows"},
      {std::string("1\0", 2), "more follows"},
      {"\x1b[2J", "a value is missing"},
      {"tr\x1bue", "'tr' is not a JSON value"},
      {std::string(200, '['), "nested deeper than 128"},
  };
  for (const auto& [text, wanted] : cases) EXPECT_THAT(skip_all(text), HasSubstr(wanted)) << text;
  const auto number = [](const char* text) {
    return message_of<JsonError>([&] { JsonReader(text).unsigned_integer(); });
  };
  EXPECT_THAT(number("-1"), HasSubstr("0 or more"));
  EXPECT_THAT(number("1.0"), HasSubstr("without a fraction"));
  EXPECT_THAT(number("1e0"), HasSubstr("without a fraction"));
  EXPECT_THAT(number("007"), HasSubstr("not a JSON number"));
  EXPECT_THAT(number("18446744073709551616"), HasSubstr("beyond 64 bits"));
  EXPECT_THAT(message_of<JsonError>([] { JsonReader("[]").enter_object(); }),
              HasSubstr("an object"));
  EXPECT_THAT(message_of<JsonError>([] { JsonReader("{}").enter_array(); }), HasSubstr("a list"));
  EXPECT_THAT(message_of<JsonError>([] { JsonReader("1").string(); }), HasSubstr("a string"));
}

TEST(JsonReader, QuotesWhatItReads) {
  std::string text;
  for (int c = 1; c < 128; ++c) text.push_back(static_cast<char>(c));
  text += "\u00e9\U0001f600";
  const std::string quoted = json_quote(text);
  EXPECT_EQ(JsonReader(quoted).string(), text);
  EXPECT_EQ(json_quote("\x01\n"), "\"\\u0001\\n\"");
  // What is not UTF-8 does not spoil the rest.
  EXPECT_EQ(json_quote("a\xff\xe2\x82z\u00e9"), "\"a\uFFFD\uFFFD\uFFFDz\u00e9\"");
}

// Lines of a large text, each read by itself: offsets are those of the whole text.
TEST(JsonReader, BeginsAnywhere) {
  const std::string text = "{}\n[1,\n oops]";
  std::size_t offset = 0;
  EXPECT_THAT(message_of<JsonError>([&] {
                try {
                  JsonReader(text, 3).skip();
                } catch (const JsonError& error) {
                  offset = error.offset();
                  throw;
                }
              }),
              HasSubstr("'oops' is not a JSON value"));
  EXPECT_EQ(offset, text.find("oops"));
  EXPECT_THAT(message_of<JsonError>([] { JsonReader("{}\n[1,", 3).skip(); }),
              HasSubstr("that line 2 opened"));
}

// ------------------------------------------------------------------ types

TEST(Document, TypesAreDistinguished) {
  const Node root = yaml(
      "yes: yes\nquoted: \"true\"\none: 1\nnum: '3'\nzero: 010\nunder: 1_000\nhalf: 1.5\n"
      "word: abc\nlist: [1]\nbool: true\nbig: 1e30\nwhole: 1e4\ncomma: 1,5\nempty:\n");
  const auto at = [&](const char* key) -> const Node& { return root.find(key)->value; };
  const auto refused = [&](auto read, const char* key) {
    return message_of([&] { read(at(key), "k"); });
  };
  EXPECT_EQ(
      refused(as_bool, "yes"),
      "[config] a.yaml:1:6: k must be true or false, and 'yes' is a string here. Write true.");
  EXPECT_THAT(refused(as_bool, "quoted"), HasSubstr("Write true, without quotes."));
  EXPECT_THAT(refused(as_bool, "one"), HasSubstr("and 1 is a number. Write true."));
  EXPECT_THAT(refused(as_integer, "num"), HasSubstr("Write 3, without quotes."));
  EXPECT_THAT(refused(as_integer, "zero"),
              HasSubstr("8 to some readers and 10 to others. Write 10 or 0o10."));
  EXPECT_THAT(refused(as_integer, "under"), HasSubstr("Write 1000."));
  EXPECT_THAT(refused(as_integer, "half"), HasSubstr("must be a whole number, and 1.5 is not one"));
  EXPECT_THAT(refused(as_integer, "big"), HasSubstr("must be a whole number"));
  EXPECT_THAT(refused(as_real, "word"), HasSubstr("must be a number, and 'abc' is a string"));
  EXPECT_THAT(refused(as_real, "comma"), HasSubstr("Write 1.5."));
  EXPECT_THAT(refused(as_real, "list"), HasSubstr("must be a number, but this is a list"));
  EXPECT_THAT(refused(as_real, "bool"), HasSubstr("and true is a boolean"));
  EXPECT_THAT(refused(as_string, "bool"), HasSubstr("Quote it: \"true\"."));
  EXPECT_THAT(refused(as_string, "list"), HasSubstr("must be a string, but this is a list"));
  EXPECT_THAT(refused(as_map, "one"), HasSubstr("must be a map, and 1 is a number"));
  EXPECT_THAT(refused(as_real, "empty"), HasSubstr("must be a number, but there is nothing here"));
  EXPECT_EQ(as_integer(at("whole"), "k"), 10000);
  EXPECT_EQ(as_string(at("under"), "k"), "1_000");
  EXPECT_EQ(as_string(at("one"), "k"), "1");
}

TEST(MapReader, ReadsWhatIsAskedAndRefusesTheRest) {
  const Node root = yaml("n_layer: 4\ntype: gpt\ndropout: 0.1\nbias: true\nname: x\nn_heed: 2\n");
  MapReader reader(root, "model");
  EXPECT_EQ(reader.integer("n_layer", 12, 1, 100), 4);
  EXPECT_EQ(reader.integer("n_head", 8, 1, 100), 8);
  EXPECT_EQ(reader.real("dropout", 0, 0, 1), 0.1);
  EXPECT_TRUE(reader.boolean("bias", false));
  EXPECT_EQ(reader.text("name", ""), "x");
  EXPECT_EQ(reader.choice("type", "mlp", {"gpt", "mlp"}), "gpt");
  EXPECT_EQ(message_of([&] { reader.finish(); }),
            "[config] a.yaml:6:1: model has no key 'n_heed'. Did you mean n_head?");
}

TEST(MapReader, NamesRangeAndChoice) {
  const Node root = yaml("n: 0\ntype: gtp\nx: 2.0\n");
  MapReader reader(root, "model");
  EXPECT_EQ(message_of([&] { reader.integer("n", 1, 1, 9); }),
            "[config] a.yaml:1:4: model.n must be from 1 to 9, and 0 is not.");
  EXPECT_EQ(message_of([&] { reader.choice("type", "gpt", {"gpt", "mlp"}); }),
            "[config] a.yaml:2:7: model.type must be gpt or mlp, and 'gtp' is neither. "
            "Did you mean gpt?");
  EXPECT_EQ(message_of([&] { reader.real("x", 1, 0, 1); }),
            "[config] a.yaml:3:4: model.x must be from 0 to 1, and 2.0 is not.");
  EXPECT_THAT(message_of([] { MapReader(yaml("[1]"), "model"); }), HasSubstr("must be a map"));
}

TEST(Problems, AreAllReported) {
  Problems problems;
  EXPECT_NO_THROW(problems.raise());
  EXPECT_FALSE(problems.attempt([] { throw UsageError("config", "first"); }));
  EXPECT_TRUE(problems.attempt([] {}));
  EXPECT_EQ(message_of([&] { problems.raise(); }), "[config] first");
  problems.add("second");
  EXPECT_EQ(message_of([&] { problems.raise(); }), "[config] 2 mistakes:\n  first\n  second");
}

TEST(Spelling, FindsWhatWasMeant) {
  const std::vector<std::string> names = {"learning_rate", "warmup_steps", "seed", "bf16"};
  EXPECT_EQ(nearest("learning_rat", names), "learning_rate");
  EXPECT_EQ(nearest("wramup_stesp", names), "warmup_steps");
  EXPECT_EQ(nearest("sede", names), "seed");
  EXPECT_EQ(nearest("something_else", names), std::nullopt);
  const std::vector<std::string> short_names = {"run", "env", "bench"};
  EXPECT_EQ(nearest("rnu", short_names), "run");
  EXPECT_EQ(nearest("bnech", short_names), "bench");
  EXPECT_EQ(nearest("elephant", short_names), std::nullopt);
  EXPECT_EQ(did_you_mean("bf61", names), " Did you mean bf16?");
  EXPECT_EQ(did_you_mean("sed", names, "--"), " Did you mean --seed?");
  EXPECT_EQ(did_you_mean("zzzzzzz", names), "");
  EXPECT_EQ(edit_distance("abcd", "acbd"), 1u);
}

}  // namespace
}  // namespace lockstep
