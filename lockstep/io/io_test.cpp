// Digests, files and event records.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/io/event_file.h"
#include "lockstep/io/file.h"

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

struct ReadEvent {
  double wall_time_s = 0;
  std::int64_t step = 0;
  std::string version;
  std::string session;
  std::vector<EventFile::Scalar> values;
};

template <typename T>
T take(std::string_view& from) {
  T value{};
  std::memcpy(&value, from.data(), sizeof value);
  from.remove_prefix(sizeof value);
  return value;
}

std::uint64_t take_varint(std::string_view& from) {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = take<std::uint8_t>(from);
    value |= std::uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return value;
  }
}

std::string_view take_message(std::string_view& from) {
  const std::size_t size = take_varint(from);
  const std::string_view message = from.substr(0, size);
  from.remove_prefix(size);
  return message;
}

EventFile::Scalar read_value(std::string_view value) {
  EventFile::Scalar scalar;
  while (!value.empty()) {
    const std::uint64_t field = take_varint(value);
    if (field == (1 << 3 | 2))
      scalar.first = take_message(value);
    else if (field == (2 << 3 | 5))
      scalar.second = take<float>(value);
    else
      ADD_FAILURE() << "field " << field;
  }
  return scalar;
}

ReadEvent read_event(std::string_view message) {
  ReadEvent event;
  while (!message.empty()) {
    const std::uint64_t field = take_varint(message);
    if (field == (1 << 3 | 1)) {
      event.wall_time_s = take<double>(message);
    } else if (field == (2 << 3)) {
      event.step = static_cast<std::int64_t>(take_varint(message));
    } else if (field == (3 << 3 | 2)) {
      event.version = take_message(message);
    } else if (field == (5 << 3 | 2)) {
      for (std::string_view summary = take_message(message); !summary.empty();) {
        EXPECT_EQ(take_varint(summary), 1u << 3 | 2u);
        event.values.push_back(read_value(take_message(summary)));
      }
    } else if (field == (7 << 3 | 2)) {
      event.session = take_message(message);
    } else {
      ADD_FAILURE() << "field " << field;
    }
  }
  return event;
}

std::uint32_t unmask(std::uint32_t crc) {
  return std::rotl(crc - 0xa282ead8u, 15);
}

std::vector<ReadEvent> read_events(const std::string& path) {
  const std::string contents = get(path);
  std::vector<ReadEvent> events;
  for (std::string_view rest = contents; rest.size() >= 16;) {
    const std::string_view length_bytes = rest.substr(0, 8);
    const auto length = take<std::uint64_t>(rest);
    EXPECT_EQ(unmask(take<std::uint32_t>(rest)), crc32c(bytes_of(length_bytes)));
    const std::string_view message = rest.substr(0, length);
    rest.remove_prefix(length);
    EXPECT_EQ(unmask(take<std::uint32_t>(rest)), crc32c(bytes_of(message)));
    events.push_back(read_event(message));
  }
  return events;
}

TEST(EventFile, WritesWhatTensorBoardReads) {
  TemporaryDirectory dir;
  EventFile events(dir / "runs/a");
  events.scalars(7, {{"train/loss", 0.5f}, {"train/\u03b7", 1e-4f}}, 12.25);
  events.scalars(-1, {}, 13.0);
  events.scalars(1'000'000'000'000, {{"x", INFINITY}});
  events.flush();
  const auto read = read_events(events.path());
  ASSERT_EQ(read.size(), 4u);
  EXPECT_EQ(read[0].version, "brain.Event:2");
  EXPECT_EQ(read[1].step, 7);
  EXPECT_EQ(read[1].wall_time_s, 12.25);
  EXPECT_THAT(read[1].values, ElementsAre(EventFile::Scalar{"train/loss", 0.5f},
                                          EventFile::Scalar{"train/\u03b7", 1e-4f}));
  EXPECT_EQ(read[2].step, -1);
  EXPECT_EQ(read[3].step, 1'000'000'000'000);
  EXPECT_EQ(read[3].values.at(0).second, INFINITY);
  EXPECT_GT(read[3].wall_time_s, 1.6e9);
  EXPECT_THAT(events.path(), HasSubstr("/events.out.tfevents."));
}

TEST(EventFile, SaysWhereARunBegins) {
  TemporaryDirectory dir;
  EventFile events(dir.path());
  events.begin_at(300);
  events.flush();
  const auto read = read_events(events.path());
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[1].step, 300);
  EXPECT_EQ(read[1].session, "\x08\x01");  // status: START
}

TEST(EventFile, IsNeverAppendedToAndFlushesWhenDropped) {
  TemporaryDirectory dir;
  std::string first;
  {
    EventFile events(dir.path());
    first = events.path();
    events.scalars(1, {{"x", 1.0f}});
    EXPECT_EQ(read_events(first).size(), 1u) << "not before a flush";
  }
  EXPECT_EQ(read_events(first).size(), 2u);
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

}  // namespace
}  // namespace lockstep::io
