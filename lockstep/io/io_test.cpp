// Digests, files, event records and safetensors. tests/io compares event records with TensorBoard's
// reader and files with the safetensors package.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/io/event_file.h"
#include "lockstep/io/file.h"
#include "lockstep/io/safetensors.h"

namespace lockstep::io {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string random_bytes(std::mt19937_64& random, std::size_t count) {
  std::string bytes(count, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

// FIPS 180-4's examples.
TEST(Sha256, KnownValues) {
  EXPECT_EQ(sha256(bytes_of("")),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256(bytes_of("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Sha256, DoesNotDependOnHowTheBytesArrive) {
  std::mt19937_64 random(2);
  const std::string bytes = random_bytes(random, 3000);
  for (int repetition = 0; repetition < 20; ++repetition) {
    Sha256 sum;
    for (std::string_view rest = bytes; !rest.empty();) {
      const std::size_t n = std::min<std::size_t>(random() % 200, rest.size());
      sum.update(bytes_of(rest.substr(0, n)));
      rest.remove_prefix(n);
    }
    ASSERT_EQ(sum.finish(), sha256(bytes_of(bytes)));
  }
}

TEST(Crc32c, KnownValues) {
  EXPECT_EQ(crc32c(bytes_of("")), 0u);
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xe3069283u);
  EXPECT_EQ(crc32c(bytes_of(std::string(32, '\0'))), 0x8a9136aau);
}

TEST(File, WritesAndReadsAndKnowsItsDigest) {
  TemporaryDirectory dir;
  std::mt19937_64 random(4);
  std::string all;
  FileWriter file(dir / "a");
  for (const std::size_t size : {0, 1, 100, 300'000, 5, 262'144, 2'500'000, 3}) {
    const std::string piece = random_bytes(random, size);
    file.append(piece);
    all += piece;
  }
  const FileDigest digest = file.finish();
  EXPECT_EQ(digest.bytes, all.size());
  EXPECT_EQ(digest.sha256, sha256(bytes_of(all)));
  EXPECT_EQ(digest_file(dir / "a"), digest);
  const MappedFile map(dir / "a");
  EXPECT_TRUE(std::ranges::equal(map.bytes(), bytes_of(all)));
  put(dir / "empty", "");
  EXPECT_TRUE(MappedFile(dir / "empty").bytes().empty());
}

TEST(File, ErrorsNamePathCallAndRemedy) {
  TemporaryDirectory dir;
  put(dir / "a", "x");
  EXPECT_THAT(message_of<SystemError>([&] { FileWriter file(dir / "a"); }),
              AllOf(HasSubstr("cannot create " + (dir / "a")), HasSubstr("Choose another name"),
                    HasSubstr("File exists")));
  EXPECT_THAT(message_of<SystemError>([&] { FileWriter file(dir / "no/a"); }),
              AllOf(HasSubstr("cannot create"), HasSubstr("Check the path")));
  EXPECT_THAT(message_of<SystemError>([&] { MappedFile map(dir / "no"); }),
              AllOf(HasSubstr("cannot open"), HasSubstr("No such file")));
  EXPECT_THAT(message_of<SystemError>([&] { MappedFile map(dir.path()); }),
              AllOf(HasSubstr("cannot map"), HasSubstr("directory")));
  EXPECT_THAT(message_of<SystemError>([&] { digest_file(dir.path()); }), HasSubstr("cannot read"));
  EXPECT_THAT(message_of<SystemError>([&] { sync_directory(dir / "no"); }),
              HasSubstr("cannot open the directory"));
  EXPECT_THAT(
      file_error("write to", dir / "a", ENOSPC, 3u << 20).what(),
      AllOf(HasSubstr("3.0 MiB needed"), HasSubstr(" free)"), HasSubstr("Free some space")));
}

TEST(File, FreeSpaceOfAPlaceThatIsNotThereYet) {
  TemporaryDirectory dir;
  EXPECT_GT(free_space(dir.path()), 0u);
  EXPECT_GT(free_space(dir / "not/yet/there"), 0u);
  EXPECT_GT(free_space(""), 0u);
  EXPECT_THAT(message_of<SystemError>([&] { free_space(std::string(300, 'a')); }),
              HasSubstr("cannot ask for the space"));
  EXPECT_EQ(size_text(0), "0 bytes");
  EXPECT_EQ(size_text(1536), "1.5 KiB");
  EXPECT_EQ(size_text(5'000'000'000), "4.7 GiB");
}

// ---------------------------------------------------------------- event records

// TensorBoard reads them in tests/io/events_oracle_test.py and tests/train/events_test.py.

TEST(EventFile, IsNeverAppendedToAndFlushesWhenDropped) {
  TemporaryDirectory dir;
  std::string first;
  std::size_t before = 0;
  {
    EventFile events(dir.path());
    first = events.path();
    events.scalars(1, {{"x", 1.0f}});
    before = get(first).size();
  }
  EXPECT_GT(get(first).size(), before) << "not before a flush";
  EventFile second(dir.path());
  EXPECT_NE(second.path(), first);
}

TEST(EventFile, Refusals) {
  TemporaryDirectory dir;
  EventFile events(dir.path());
  EXPECT_THAT(message_of<UsageError>([&] { events.scalars(0, {{"", 1.0f}}); }),
              HasSubstr("cannot be a tag"));
  EXPECT_THAT(message_of<UsageError>([&] { events.scalars(0, {{"\xff", 1.0f}}); }),
              HasSubstr("UTF-8"));
  put(dir / "file", "");
  EXPECT_THAT(message_of<SystemError>([&] { EventFile other(dir / "file/x"); }),
              HasSubstr("cannot make the directory"));
}

// ---------------------------------------------------------------- safetensors

// safetensors files and sets of them: round trips, and every refusal with its message.

std::string framed(const std::string& header, const std::string& data = "") {
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

std::string refusal(const std::string& contents) {
  return message_of<UsageError>([&] { parse_safetensors(bytes_of(contents), "some.file"); });
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

std::string written(const TemporaryDirectory& dir, std::vector<TensorBytes> tensors,
                    const Metadata& metadata = {}) {
  std::filesystem::remove(dir / "out");
  FileWriter file(dir / "out");
  write_safetensors(file, std::move(tensors), metadata);
  file.finish();
  return get(dir / "out");
}

TEST(Safetensors, RoundTripOfEveryType) {
  TemporaryDirectory dir;
  std::mt19937_64 random(5);
  std::vector<std::string> memory;
  std::vector<TensorBytes> tensors;
  for (int t = 0; t <= static_cast<int>(DType::kU64); ++t) {
    const auto dtype = static_cast<DType>(t);
    EXPECT_EQ(dtype_of(dtype_name(dtype)), dtype);
    std::string bytes(*tensor_bytes(dtype, std::vector<std::int64_t>{3, 8}), '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    memory.push_back(bytes);
  }
  for (std::size_t t = 0; t < memory.size(); ++t)
    tensors.push_back({fmt::format("t{}", t), static_cast<DType>(t), {3, 8}, bytes_of(memory[t])});
  tensors.push_back({"scalar", DType::kF32, {}, bytes_of("1234")});
  tensors.push_back({"empty", DType::kF64, {0, 5}, {}});
  tensors.push_back({"", DType::kBool, {1}, bytes_of("\x01")});
  written(dir, tensors, {{"format", "pt"}, {"q\"", "\n"}});
  const SafetensorsFile file(dir / "out");
  EXPECT_EQ(file.tensors().size(), tensors.size());
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"q\"", "\n"}}));
  for (const TensorBytes& tensor : tensors) {
    const TensorEntry& found = file.at(tensor.name);
    EXPECT_EQ(found.dtype, tensor.dtype);
    EXPECT_EQ(found.shape, tensor.shape);
    EXPECT_TRUE(std::ranges::equal(file.bytes(found), tensor.bytes)) << tensor.name;
    const auto place = reinterpret_cast<std::uintptr_t>(file.bytes(found).data());
    EXPECT_EQ(place % std::max(1, dtype_bits(tensor.dtype) / 8), 0u) << "aligned to its element";
  }
  EXPECT_EQ(file.find("no"), nullptr);
  EXPECT_THAT(message_of<UsageError>([&] { file.at("no"); }),
              AllOf(HasSubstr("has no tensor \"no\""), HasSubstr("another model?")));
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  const std::string a = entry("a", "U8", "[1]", "[0,1]");
  for (const std::string& header :
       {"{" + a + "}   ", "{" + a + "}\n", "{\n\t" + a + " , \"__metadata__\" : { } }",
        std::string(R"({"a":{"data_offsets":[0,1],"x":{"y":[1,{}]},"shape":[1],"dtype":"U8"}})"),
        "{" + entry("z", "F64", "[0]", "[0,0]") + "," + a + "}",
        "{" + a + "," + entry("z", "F64", "[4,0]", "[1,1]") + "}",
        "{" + entry("\\u0061", "U8", "[]", "[0,1]") + "}",
        "{" + entry("n", "I8", "[0,9223372036854775807,4]", "[0,0]") + "," + a + "}"})
    EXPECT_EQ(refusal(framed(header, "x")), "(nothing thrown)") << header;
  EXPECT_EQ(refusal(framed("{}")), "(nothing thrown)");
  EXPECT_EQ(refusal(framed("{" + entry("a", "F4", "[2,3]", "[0,3]") + "}", "xxx")),
            "(nothing thrown)");
}

TEST(Safetensors, RefusesByName) {
  const auto one = [](const std::string& dtype, const std::string& shape,
                      const std::string& offsets) {
    return framed("{" + entry("w", dtype, shape, offsets) + "}", "xxxxxxxx");
  };
  const std::string a = entry("a", "F32", "[1]", "[0,4]"), b = entry("b", "F32", "[1]", "[4,8]");
  const std::pair<std::string, std::string> cases[] = {
      {"", "has 0 bytes, and 8 are the least"},
      {"1234567", "has 7 bytes"},
      {std::string("\x01\xe1\xf5\x05\0\0\0\0", 8), "header has 100000001 bytes (limit 100000000)"},
      {std::string("\0\xe1\xf5\x05\0\0\0\0{}", 10), "header has 100000000 bytes, but has 10 bytes"},
      {framed(" {}"), "does not start with '{'"},
      {framed("[]"), "does not start with '{'"},
      {framed(""), "does not start with '{'"},
      {framed("{\"\xff\":1}"), "at byte 10: the byte 0xff is not valid UTF-8"},
      {framed("{\"a\":}"), "at byte 13: expected an object"},
      {framed("{} x"), "one value was expected, but more follows"},
      {framed(std::string("{}\0", 3)), "one value was expected, but more follows"},
      {framed("{" + a + "," + a + "}", "xxxx"), "\"a\" appears twice"},
      {framed(R"({"__metadata__":{"k":"1","k":"2"}})"), "\"k\" appears twice in __metadata__"},
      {framed(R"({"__metadata__":{"k":1}})"), "expected a string"},
      {framed(R"({"__metadata__":null})"), "expected an object"},
      {framed(R"({"w":["U8",[1],[0,1]]})", "x"), "expected an object"},
      {framed(R"({"w":{"shape":[1],"data_offsets":[0,1]}})", "x"), "tensor \"w\" has no dtype"},
      {framed(R"({"w":{"dtype":"U8","data_offsets":[0,1]}})", "x"), "tensor \"w\" has no shape"},
      {framed(R"({"w":{"dtype":"U8","shape":[1]}})", "x"), "tensor \"w\" has no data_offsets"},
      {framed(R"({"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x"),
       "tensor \"w\" has dtype twice"},
      {one("F33", "[2]", "[0,8]"), "tensor \"w\" has the unknown dtype \"F33\""},
      {one("F32", "[-2]", "[0,8]"), "number of 0 or more"},
      {one("F32", "[2.0]", "[0,8]"), "without a fraction"},
      {one("F32", "[9223372036854775808]", "[0,8]"), "dimension of 9223372036854775808"},
      {one("F32", "[2]", "[0,8,8]"), "tensor \"w\" has not two data_offsets"},
      {one("F32", "[2]", "[8]"), "tensor \"w\" has not two data_offsets"},
      {one("F32", "[2]", "[8,0]"), "ends at 0, before it begins at 8"},
      {one("F32", "[1]", "[4,8]"), "leaves a hole from 0 to 4"},
      {one("F32", "[3]", "[0,12]"), "ends at 12, but the file has 8 bytes of data"},
      {one("F32", "[3]", "[0,8]"), "has 8 bytes, but F32 of [3] needs 12"},
      {one("F32", "[4294967296,4294967296]", "[0,8]"), "impossible size (F32 of [4294967296"},
      {one("U8", "[9223372036854775807,4,0]", "[0,0]"), "impossible size"},
      {one("F4", "[15]", "[0,8]"), "impossible size (F4 of [15])"},
      {one("F32", "[1]", "[0,4]"), "4 bytes follow the last tensor"},
      {framed("{" + a + "," + entry("b", "F32", "[1]", "[2,6]") + "}", "xxxxxxxx"),
       "tensor \"b\" overlaps \"a\" at 2"},
      {framed("{" + a + "," + b + "}", "xxxxxxx"), "tensor \"b\" ends at 8, but the file has 7"},
  };
  for (const auto& [contents, wanted] : cases)
    EXPECT_THAT(refusal(contents), AllOf(HasSubstr("[safetensors] some.file: "), HasSubstr(wanted),
                                         HasSubstr("Copy or write it again")));
}

TEST(Safetensors, RefusesToWrite) {
  TemporaryDirectory dir;
  const auto refused = [&](std::vector<TensorBytes> tensors, const Metadata& metadata = {}) {
    return message_of<UsageError>([&] { written(dir, tensors, metadata); });
  };
  EXPECT_THAT(refused({{"__metadata__", DType::kU8, {1}, bytes_of("x")}}), HasSubstr("for itself"));
  EXPECT_THAT(refused({{"\xff", DType::kU8, {1}, bytes_of("x")}}), HasSubstr("not valid UTF-8"));
  EXPECT_THAT(
      refused({{"a", DType::kU8, {1}, bytes_of("x")}, {"a", DType::kU8, {1}, bytes_of("x")}}),
      HasSubstr("tensor \"a\" cannot be written: the name appears twice"));
  EXPECT_THAT(refused({{"a", DType::kF32, {2}, bytes_of("x")}}),
              HasSubstr("it has 1 bytes, which is not F32 of [2]"));
  EXPECT_THAT(refused({{"a", DType::kF32, {-1}, {}}}), HasSubstr("not F32 of [-1]"));
  EXPECT_THAT(refused({}, {{"a", "\xff"}}), HasSubstr("metadata \"a\" is not valid UTF-8"));
  EXPECT_THAT(refused({}, {{"a", std::string(100'000'000, 'x')}}), HasSubstr("limit 100000000"));
}

// ---------------------------------------------------------------- sets

std::vector<TensorBytes> five_tensors() {
  static const std::string kBytes(40, 'q');
  std::vector<TensorBytes> tensors;
  for (int i = 0; i < 5; ++i)
    tensors.push_back({fmt::format("t{}", i), DType::kF32, {10}, bytes_of(kBytes)});
  return tensors;
}

TEST(SafetensorsSet, OneFileBelowTheLimit) {
  TemporaryDirectory dir;
  AtomicDir out(dir / "model");
  EXPECT_THAT(write_safetensors_set(out, five_tensors()), ElementsAre("model.safetensors"));
  out.commit();
  const SafetensorsSet set(dir / "model");
  EXPECT_THAT(set.names(), ElementsAre("t0", "t1", "t2", "t3", "t4"));
  EXPECT_EQ(set.at("t3").bytes().size(), 40u);
  EXPECT_EQ(set.find("no").entry, nullptr);
  EXPECT_THAT(message_of<UsageError>([&] { set.at("no"); }), HasSubstr("has no tensor \"no\""));
}

TEST(SafetensorsSet, SeveralFilesAndAnIndexAboveIt) {
  TemporaryDirectory dir;
  AtomicDir out(dir / "model");
  EXPECT_THAT(
      write_safetensors_set(out, five_tensors(), {{"format", "pt"}}, {.max_shard_bytes = 80}),
      ElementsAre("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                  "model-00003-of-00003.safetensors", "model.safetensors.index.json"));
  out.commit();
  EXPECT_THAT(get(dir / "model/model.safetensors.index.json"),
              AllOf(HasSubstr("\"total_size\": 200"),
                    HasSubstr("\"t2\": \"model-00002-of-00003.safetensors\"")));
  const SafetensorsSet set(dir / "model");
  EXPECT_EQ(set.files().size(), 3u);
  EXPECT_THAT(set.names(), ElementsAre("t0", "t1", "t2", "t3", "t4"));
  EXPECT_EQ(set.at("t4").file->metadata().at("format"), "pt");
  // A tensor above the limit gets a file, not an error.
  AtomicDir tiny(dir / "tiny");
  EXPECT_EQ(
      write_safetensors_set(tiny, five_tensors(), {}, {.stem = "m", .max_shard_bytes = 1}).size(),
      6u);
  AtomicDir twice(dir / "twice");
  auto tensors = five_tensors();
  tensors.back().name = "t0";
  EXPECT_THAT(message_of<UsageError>(
                  [&] { write_safetensors_set(twice, tensors, {}, {.max_shard_bytes = 80}); }),
              HasSubstr("the name appears twice"));
}

TEST(SafetensorsSet, RefusesAnIndexThatDoesNotFit) {
  TemporaryDirectory dir;
  const std::string index = dir / "model.safetensors.index.json";
  put(dir / "a.safetensors", framed("{" + entry("a", "U8", "[1]", "[0,1]") + "}", "x"));
  const auto refused = [&](const std::string& text) {
    put(index, text);
    return message_of<UsageError>([&] { SafetensorsSet set(dir.path()); });
  };
  EXPECT_EQ(refused(R"({"weight_map":{"a":"a.safetensors"},"metadata":{"total_size":1}})"),
            "(nothing thrown)");
  EXPECT_EQ(refused(R"({"weight_map":{"a":"a.safetensors"}})"), "(nothing thrown)");
  EXPECT_THAT(refused("{}"), AllOf(HasSubstr("it has no weight_map"), HasSubstr("index.json")));
  EXPECT_THAT(refused("{"), HasSubstr("not valid at byte 1"));
  EXPECT_THAT(refused(R"({"weight_map":{},"weight_map":{}})"),
              HasSubstr("weight_map appears twice"));
  EXPECT_THAT(refused(R"({"weight_map":{"a":"a.safetensors","a":"a.safetensors"}})"),
              HasSubstr("tensor \"a\" appears twice"));
  EXPECT_THAT(refused(R"({"weight_map":{"b":"a.safetensors"}})"),
              HasSubstr("tensor \"b\" is not in a.safetensors"));
  EXPECT_THAT(refused(R"({"weight_map":{"a":"b.safetensors"}})"),
              HasSubstr("\"b.safetensors\", which is not there"));
  EXPECT_THAT(refused(R"({"weight_map":{"a":"../a.safetensors"}})"),
              HasSubstr("not the name of a file beside it"));
  std::filesystem::remove(index);
  EXPECT_THAT(message_of<UsageError>([&] { SafetensorsSet set(dir.path()); }),
              HasSubstr("has neither model.safetensors nor model.safetensors.index.json"));
}

}  // namespace
}  // namespace lockstep::io
