// Directories that are whole or not there, what verify() sees, and which checkpoint is taken.
#include "lockstep/io/directory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::io {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory))
    names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

std::string contents_of(int step, int file) {
  std::mt19937_64 random(static_cast<std::uint64_t>(step * 10 + file));
  std::string bytes(static_cast<std::size_t>(2000 + 100 * file), '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

void save(const std::string& parent, int step) {
  AtomicDir dir(fmt::format("{}/checkpoint-{}", parent, step));
  for (int file = 0; file < 3; ++file)
    dir.write(fmt::format("file{}", file), contents_of(step, file));
  dir.commit();
}

std::vector<FaultKind> kinds(const std::string& directory, Depth depth = Depth::kFull) {
  std::vector<FaultKind> found;
  for (const Fault& fault : verify(directory, depth)) found.push_back(fault.kind);
  return found;
}

TEST(AtomicDir, HasItsNameOnlyAfterCommit) {
  TemporaryDirectory dir;
  const std::string target = dir / "new/parent/checkpoint-1/";
  AtomicDir out(target, {.expected_bytes = 10});
  out.write("a", "hello");
  out.write("b", [](FileWriter& file) { file.append("world"); });
  EXPECT_EQ(out.bytes(), 10u);
  EXPECT_FALSE(fs::exists(target));
  EXPECT_TRUE(is_temporary_name(out.path())) << out.path();
  out.commit();
  EXPECT_EQ(out.path(), dir / "new/parent/checkpoint-1");
  EXPECT_THAT(names_in(dir / "new/parent"), ElementsAre("checkpoint-1"));
  EXPECT_THAT(names_in(target), ElementsAre("SHA256SUMS", "a", "b"));
  EXPECT_EQ(get(out.path() + "/b"), "world");
  EXPECT_THAT(verify(out.path()), IsEmpty());
}

TEST(AtomicDir, LeavesNothingWhenDroppedOrWhenAnErrorPasses) {
  TemporaryDirectory dir;
  { AtomicDir(dir / "x").write("a", "hello"); }
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
  AtomicDir out(dir / "x");
  EXPECT_THROW(out.write("a", [](FileWriter&) { throw std::runtime_error("mine"); }),
               std::runtime_error);
  EXPECT_THAT(names_in(dir.path()), IsEmpty()) << "at once, not only when it is dropped";
  EXPECT_THAT(message_of<UsageError>([&] { out.write("b", "x"); }), HasSubstr("cannot write to"));
  EXPECT_THAT(message_of<UsageError>([&] { out.commit(); }),
              AllOf(HasSubstr("cannot commit"), HasSubstr("Use one object per directory")));
}

TEST(AtomicDir, RefusesNames) {
  TemporaryDirectory dir;
  for (const std::string name : {"", ".", "..", "a/b", "a\nb", "a\\b", "SHA256SUMS", "\xff"})
    EXPECT_THAT(message_of<UsageError>([&] { AtomicDir(dir / "x").write(name, ""); }),
                HasSubstr("cannot be the name of a file"));
  EXPECT_THAT(message_of<UsageError>([&] {
                AtomicDir out(dir / "x");
                out.write("a", "");
                out.write("a", "");
              }),
              HasSubstr("a was already written"));
  for (const std::string name : {"..", "x.tmp-1-0123456789abcdef"})
    EXPECT_THAT(message_of<UsageError>([&] { AtomicDir out(dir / name); }),
                HasSubstr("cannot be the name of a directory"));
  fs::create_directory(dir / "taken");
  EXPECT_THAT(message_of<UsageError>([&] { AtomicDir out(dir / "taken"); }),
              AllOf(HasSubstr("is already there"), HasSubstr("replace")));
  put(dir / "file", "");
  EXPECT_THAT(message_of<SystemError>([&] { AtomicDir out(dir / "file/x"); }),
              HasSubstr("Not a directory"));
}

TEST(AtomicDir, NameTakenWhileItWasWritten) {
  TemporaryDirectory dir;
  AtomicDir out(dir / "x");
  out.write("a", "mine");
  save(dir.path(), 1);
  fs::rename(dir / "checkpoint-1", dir / "x");
  EXPECT_THAT(message_of<SystemError>([&] { out.commit(); }),
              AllOf(HasSubstr("cannot rename a finished directory to"), HasSubstr("File exists")));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("x"));
  EXPECT_THAT(verify(dir / "x"), IsEmpty()) << "the other's";
}

TEST(AtomicDir, ReplacesTheOldOneByExchange) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  AtomicDir out(dir / "checkpoint-1", {.replace = true});
  out.write("new", "new");
  EXPECT_THAT(verify(dir / "checkpoint-1"), IsEmpty()) << "still the old one";
  out.commit();
  EXPECT_THAT(names_in(dir.path()), ElementsAre("checkpoint-1"));
  EXPECT_THAT(names_in(dir / "checkpoint-1"), ElementsAre("SHA256SUMS", "new"));
  EXPECT_THAT(verify(dir / "checkpoint-1"), IsEmpty());
}

TEST(AtomicDir, TooLittleSpaceIsReportedBeforeAnythingIsWritten) {
  TemporaryDirectory dir;
  const std::string text = message_of<SystemError>(
      [&] { AtomicDir out(dir / "x", {.expected_bytes = std::uint64_t{1} << 62}); });
  EXPECT_THAT(text, AllOf(HasSubstr("4.0 EiB needed"), HasSubstr(" free)"),
                          HasSubstr("keep fewer checkpoints"), HasSubstr("No space left")));
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
}

TEST(AtomicDir, FilesOfOthersAreAdoptedOrRefused) {
  TemporaryDirectory dir;
  AtomicDir out(dir / "x");
  put(out.path() + "/theirs", "theirs");
  out.adopt("theirs");
  out.commit();
  EXPECT_THAT(verify(dir / "x"), IsEmpty());
  AtomicDir other(dir / "y");
  put(other.path() + "/theirs", "theirs");
  EXPECT_THAT(message_of<UsageError>([&] { other.commit(); }),
              AllOf(HasSubstr("theirs was put into"), HasSubstr("adopt()")));
  EXPECT_THAT(message_of<SystemError>([&] { AtomicDir(dir / "z").adopt("no"); }),
              HasSubstr("cannot open"));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("x"));
}

// ---------------------------------------------------------------- what is wrong with a directory

TEST(Verify, SaysWhatIsWrong) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  const std::string path = dir / "checkpoint-1";
  put(path + "/file0", contents_of(1, 0).substr(1));
  std::string bytes = contents_of(1, 1);
  bytes[77] = static_cast<char>(bytes[77] ^ 4);
  put(path + "/file1", bytes);
  fs::remove(path + "/file2");
  put(path + "/more", "");
  const auto faults = verify(path);
  ASSERT_EQ(faults.size(), 4u);
  EXPECT_EQ(faults[0].kind, FaultKind::kSize);
  EXPECT_EQ(faults[0].text, "file0: it has 1999 bytes instead of 2000");
  EXPECT_EQ(faults[1].kind, FaultKind::kChecksum);
  EXPECT_THAT(faults[1].text, HasSubstr("file1: its SHA-256 is "));
  EXPECT_EQ(faults[2].kind, FaultKind::kMissing);
  EXPECT_EQ(faults[2].text, "file2: it is missing");
  EXPECT_EQ(faults[3].kind, FaultKind::kExtra);
  EXPECT_EQ(faults[3].text, "more: it is there but not in the manifest");
  EXPECT_EQ(describe(faults), "file0: it has 1999 bytes instead of 2000 (and 3 more)");
  EXPECT_THAT(kinds(path, Depth::kSizes),
              ElementsAre(FaultKind::kSize, FaultKind::kMissing, FaultKind::kExtra));
  EXPECT_EQ(describe({}), "whole");
}

TEST(Verify, Sha256sumReadsTheManifest) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  const std::string check =
      fmt::format("cd '{}' && sha256sum --strict -c SHA256SUMS >/dev/null", dir / "checkpoint-1");
  if (std::system("sha256sum --version >/dev/null 2>&1") != 0)
    GTEST_SKIP() << "sha256sum (GNU coreutils) is not here";
  EXPECT_EQ(std::system(check.c_str()), 0);
  std::string bytes = contents_of(1, 1);
  bytes[77] = static_cast<char>(bytes[77] ^ 4);
  put(dir / "checkpoint-1/file1", bytes);
  EXPECT_NE(std::system((check + " 2>&1").c_str()), 0);
}

// A folder that was written before 0.2.
TEST(Verify, AFolderWithMANIFESTJson) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  const std::string path = dir / "checkpoint-1";
  fs::remove(path + "/SHA256SUMS");
  EXPECT_FALSE(has_manifest(path));
  const auto entry = [&](const std::string& name) {
    return fmt::format("\"{}\": {{\"bytes\": {}, \"checksum\": \"0123456789abcdef\"}}", name,
                       fs::file_size(path + "/" + name));
  };
  put(path + "/MANIFEST.json",
      fmt::format("{{\"format\": \"lockstep-manifest-1\", \"files\": {{{}, {}, {}}}, "
                  "\"checksum\": \"0\"}}",
                  entry("file0"), entry("file1"), entry("file2")));
  EXPECT_TRUE(has_manifest(path));
  EXPECT_THAT(kinds(path), IsEmpty());
  put(path + "/file0", "short");
  fs::remove(path + "/file2");
  EXPECT_THAT(kinds(path), ElementsAre(FaultKind::kSize, FaultKind::kMissing));
  put(path + "/MANIFEST.json", "{\"format\": \"lockstep-manifest-1\", \"files");
  EXPECT_THAT(kinds(path), ElementsAre(FaultKind::kManifestTorn));
}

TEST(Verify, TheManifestItself) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  const std::string path = dir / "checkpoint-1", manifest = path + "/SHA256SUMS";
  const std::string good = get(manifest);
  EXPECT_EQ(parse_manifest(good).size(), 3u);
  EXPECT_EQ(manifest_text(parse_manifest(good)), good);
  EXPECT_TRUE(parse_manifest(manifest_text({})).empty());
  for (std::size_t size = 0; size < good.size(); ++size) {
    put(manifest, good.substr(0, size));
    EXPECT_THAT(kinds(path), ElementsAre(FaultKind::kManifestTorn)) << size;
  }
  // Every bit of it is covered: a changed size is the manifest's fault, not the file's.
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string bent = good;
    bent[bit / 8] = static_cast<char>(bent[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(message_of<UsageError>([&] { parse_manifest(bent); }), "(nothing thrown)") << bit;
  }
  EXPECT_THAT(message_of<UsageError>([&] { parse_manifest(good + " "); }),
              HasSubstr("its own digest does not hold"));
  EXPECT_THAT(
      message_of<UsageError>([&] { parse_manifest("{\"x\": 1}"); }),
      AllOf(HasSubstr("its first line is another one"), HasSubstr("Use another checkpoint")));
  fs::remove(manifest);
  EXPECT_THAT(kinds(path), ElementsAre(FaultKind::kManifestMissing));
  EXPECT_THAT(kinds(dir / "no"), ElementsAre(FaultKind::kManifestMissing));
  fs::create_directory(manifest);
  EXPECT_THAT(kinds(path), ElementsAre(FaultKind::kUnreadable));
}

TEST(Verify, AFileThatIsADirectoryOrPipe) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  const std::string file = dir / "checkpoint-1/file1";
  fs::rename(file, dir / "elsewhere");
  fs::create_symlink(dir / "elsewhere", file);
  EXPECT_THAT(kinds(dir / "checkpoint-1"), ElementsAre(FaultKind::kUnreadable));
  fs::remove(file);
  fs::create_directory(file);
  EXPECT_THAT(kinds(dir / "checkpoint-1"), ElementsAre(FaultKind::kUnreadable));
}

// One random damage to a directory of four files; what it did, as text.
class Vandal {
 public:
  explicit Vandal(std::string directory) : directory_(std::move(directory)) {
    for (const std::string& name : names_in(directory_)) good_[name] = get(directory_ + "/" + name);
  }

  void restore() {
    for (const std::string& name : names_in(directory_)) fs::remove_all(directory_ + "/" + name);
    for (const auto& [name, contents] : good_) put(directory_ + "/" + name, contents);
  }

  std::string damage() {
    const std::string name = any();
    const std::string path = directory_ + "/" + name;
    std::string bytes = good_[name];
    switch (random_() % 5) {
      case 0: {
        const std::size_t bit = random_() % (bytes.size() * 8);
        bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
        put(path, bytes);
        return fmt::format("bit {} of {}", bit, name);
      }
      case 1:
        bytes.resize(random_() % bytes.size());
        put(path, bytes);
        return fmt::format("{} cut to {}", name, bytes.size());
      case 2: {
        const std::size_t size = 1 + random_() % (bytes.size() / 4);
        const std::size_t a = random_() % (bytes.size() / 2 - size);
        const std::size_t b = bytes.size() / 2 + random_() % (bytes.size() / 2 - size);
        if (bytes.substr(a, size) == bytes.substr(b, size)) return damage();
        std::swap_ranges(bytes.begin() + static_cast<long>(a),
                         bytes.begin() + static_cast<long>(a + size),
                         bytes.begin() + static_cast<long>(b));
        put(path, bytes);
        return fmt::format("{} bytes at {} and {} of {} swapped", size, a, b, name);
      }
      case 3: {
        const std::string other = any();
        if (other == name) return damage();
        put(path, good_[other]);
        put(directory_ + "/" + other, bytes);
        return name + " and " + other + " swapped";
      }
      default:
        fs::remove(path);
        return name + " removed";
    }
  }

 private:
  std::string any() {
    auto it = good_.begin();
    std::advance(it, static_cast<long>(random_() % good_.size()));
    return it->first;
  }

  std::string directory_;
  std::map<std::string, std::string> good_;
  std::mt19937_64 random_{7};
};

TEST(NewestValid, AThousandDamagesAreFoundAndTheOneBeforeIsUsed) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  save(dir.path(), 2);
  Vandal vandal(dir / "checkpoint-2");
  for (int i = 0; i < 1000; ++i) {
    const std::string what = vandal.damage();
    const Newest newest = newest_valid(dir.path(), "checkpoint-");
    ASSERT_EQ(newest.step, 1) << what;
    ASSERT_EQ(newest.path, dir / "checkpoint-1");
    ASSERT_EQ(newest.passed_over.size(), 1u);
    ASSERT_EQ(newest.passed_over[0].path, dir / "checkpoint-2");
    ASSERT_FALSE(newest.passed_over[0].reason.empty());
    vandal.restore();
  }
  EXPECT_EQ(newest_valid(dir.path(), "checkpoint-").step, 2) << "whole again";
}

TEST(NewestValid, NumbersNotLetters) {
  TemporaryDirectory dir;
  EXPECT_EQ(newest_valid(dir / "no", "checkpoint-").step, -1);
  EXPECT_EQ(newest_valid(dir.path(), "checkpoint-").step, -1);
  save(dir.path(), 9);
  save(dir.path(), 10);
  for (const char* name : {"checkpoint-", "checkpoint-x", "checkpoint-12x", "checkpoint--1",
                           "checkpoint-99999999999999999999", "other-50", "checkpoint-+3",
                           "checkpoint-60.tmp-1-0123456789abcdef"})
    fs::create_directory(dir / name);
  put(dir / "checkpoint-70", "a file");
  std::vector<std::int64_t> steps;
  for (const NumberedDir& found : list_numbered(dir.path(), "checkpoint-"))
    steps.push_back(found.step);
  EXPECT_THAT(steps, ElementsAre(10, 9));
  EXPECT_EQ(newest_valid(dir.path(), "checkpoint-").step, 10);
  EXPECT_THAT(message_of<SystemError>([&] { list_numbered(dir / "checkpoint-70", ""); }),
              HasSubstr("cannot read the directory"));
}

TEST(NewestValid, AFileTooManyIsRemarkedAndNoMore) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  save(dir.path(), 2);
  put(dir / "checkpoint-2/.DS_Store", "");
  const Newest newest = newest_valid(dir.path(), "checkpoint-");
  EXPECT_EQ(newest.step, 2);
  EXPECT_THAT(newest.remark, HasSubstr(".DS_Store: it is there but not in the manifest"));
  EXPECT_THAT(newest.passed_over, IsEmpty());
}

// ---------------------------------------------------------------- deleting

TEST(Retain, KeepsTheNewestTheBestAndTheDurable) {
  TemporaryDirectory dir;
  for (int step = 1; step <= 6; ++step) save(dir.path(), step);
  EXPECT_THAT(retain(dir.path(), "checkpoint-",
                     {.limit = 3, .durable = dir / "checkpoint-6", .keep = {dir / "checkpoint-2"}}),
              ElementsAre(dir / "checkpoint-1", dir / "checkpoint-3", dir / "checkpoint-4"));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("checkpoint-2", "checkpoint-5", "checkpoint-6"));
  // After a resume from an older one, the durable one is not the highest.
  EXPECT_THAT(retain(dir.path(), "checkpoint-", {.limit = 1, .durable = dir / "checkpoint-5"}),
              ElementsAre(dir / "checkpoint-2", dir / "checkpoint-6"));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("checkpoint-5"));
}

TEST(Retain, BrokenOnesDoNotCount) {
  TemporaryDirectory dir;
  for (int step = 1; step <= 3; ++step) save(dir.path(), step);
  fs::remove(dir / "checkpoint-3/file0");
  save(dir.path(), 4);
  EXPECT_THAT(retain(dir.path(), "checkpoint-", {.limit = 2, .durable = dir / "checkpoint-4"}),
              ElementsAre(dir / "checkpoint-3", dir / "checkpoint-1"));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("checkpoint-2", "checkpoint-4"));
}

TEST(Retain, AFileTooManyIsNoDamage) {
  TemporaryDirectory dir;
  for (int step = 1; step <= 3; ++step) save(dir.path(), step);
  put(dir / "checkpoint-2/note", "the good one");
  put(dir / "checkpoint-3/note", "the durable one");
  EXPECT_THAT(retain(dir.path(), "checkpoint-", {.limit = 5, .durable = dir / "checkpoint-3"}),
              IsEmpty());
  EXPECT_THAT(retain(dir.path(), "checkpoint-", {.limit = 2, .durable = dir / "checkpoint-3"}),
              ElementsAre(dir / "checkpoint-1"));
}

// Hugging Face's own folders have such names, too; and a disk that fails now may not fail tomorrow.
TEST(Retain, WhatIsNotOursOrCannotBeReadStays) {
  TemporaryDirectory dir;
  fs::create_directory(dir / "checkpoint-1");
  put(dir / "checkpoint-1/model.safetensors", "weights");
  for (int step = 2; step <= 6; ++step) save(dir.path(), step);
  put(dir / "checkpoint-2/SHA256SUMS", "{\"format\": \"of another program\"}");
  fs::remove(dir / "checkpoint-3/file0");
  fs::create_symlink("file0", dir / "checkpoint-3/file0");  // reading it fails, even for root
  EXPECT_THAT(retain(dir.path(), "checkpoint-", {.limit = 1, .durable = dir / "checkpoint-6"}),
              ElementsAre(dir / "checkpoint-4", dir / "checkpoint-5"));
  EXPECT_THAT(names_in(dir.path()),
              ElementsAre("checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-6"));
}

TEST(Retain, DeletesNothingWithoutADurableOne) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  save(dir.path(), 2);
  EXPECT_THAT(message_of<UsageError>([&] {
                retain(dir.path(), "checkpoint-", {.limit = 1, .durable = dir / "checkpoint-3"});
              }),
              AllOf(HasSubstr("nothing is deleted"), HasSubstr("SHA256SUMS: it is missing")));
  EXPECT_THAT(message_of<UsageError>([&] {
                retain(dir.path(), "checkpoint-", {.limit = 0, .durable = dir / "checkpoint-2"});
              }),
              HasSubstr("at least 1 checkpoint must be retained"));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("checkpoint-1", "checkpoint-2"));
}

TEST(RemoveDurably, RemovesOrReportsTheReason) {
  TemporaryDirectory dir;
  save(dir.path(), 1);
  remove_durably(dir / "checkpoint-1/");
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
  EXPECT_THAT(message_of<SystemError>([&] { remove_durably(dir / "checkpoint-1"); }),
              AllOf(HasSubstr("cannot remove"), HasSubstr("No such file")));
}

// ---------------------------------------------------------------- sweeping

TEST(Sweep, KnowsATemporaryName) {
  EXPECT_TRUE(is_temporary_name("a/checkpoint-1.tmp-12-0123456789abcdef"));
  for (const char* name :
       {"checkpoint-1", "checkpoint-1.tmp", ".tmp-12-0123456789abcdef", "x.tmp-12-0123456789abcde",
        "x.tmp--0123456789abcdef", "x.tmp-1a-0123456789abcdef", "x.tmp-12-0123456789ABCDEF",
        "x.tmp-12-0123456789abcdef0", "x.tmp-12"})
    EXPECT_FALSE(is_temporary_name(name)) << name;
}

TEST(Sweep, TakesWhatTheDeadLeftAndNothingElse) {
  TemporaryDirectory dir;
  const std::string dead = dir / "checkpoint-9.tmp-1-0123456789abcdef";
  fs::create_directory(dead);
  put(dead + "/file", "x");
  put(dir / "file.tmp-1-0123456789abcdef", "a file, not ours");
  fs::create_directory(dir / "elsewhere");
  fs::create_symlink(dir / "elsewhere", dir / "link.tmp-1-0123456789abcdef");
  AtomicDir alive(dir / "checkpoint-10");
  alive.write("a", "x");
  const SweepResult result = sweep(dir.path());
  EXPECT_THAT(result.removed, ElementsAre(dead));
  ASSERT_EQ(result.remaining.size(), 1u);
  EXPECT_EQ(result.remaining[0].first, alive.path());
  EXPECT_EQ(result.remaining[0].second, "its writer is alive");
  alive.commit();
  EXPECT_THAT(verify(dir / "checkpoint-10"), IsEmpty());
  EXPECT_THAT(names_in(dir.path()),
              ElementsAre("checkpoint-10", "elsewhere", "file.tmp-1-0123456789abcdef",
                          "link.tmp-1-0123456789abcdef"));
  EXPECT_THAT(sweep(dir / "no").removed, IsEmpty());
}

TEST(Sweep, AWriterKilledHalfWay) {
  TemporaryDirectory dir;
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicDir out(dir / "checkpoint-1");
    out.write("a", "x");
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_EQ(names_in(dir.path()).size(), 1u);
  EXPECT_EQ(newest_valid(dir.path(), "checkpoint-").step, -1);
  EXPECT_EQ(sweep(dir.path()).removed.size(), 1u);
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
}

TEST(Sweep, RunsBesideWritersWithoutHarm) {
  // Sweeps without end while a writer makes its temporary directories: none may be lost.
  TemporaryDirectory dir;
  fs::create_directory(dir / "out");
  std::atomic<bool> stop{false};
  std::thread sweeper([&] {
    while (!stop.load()) sweep(dir / "out");
  });
  std::string problem;
  try {
    for (int step = 0; step < 50; ++step) {
      AtomicDir out(fmt::format("{}/checkpoint-{}", dir / "out", step));
      out.write("a", "x");
      out.commit();
    }
  } catch (const Error& e) {
    problem = e.what();
  }
  stop.store(true);
  sweeper.join();
  EXPECT_EQ(problem, "");
  EXPECT_EQ(list_numbered(dir / "out", "checkpoint-").size(), 50u);
}

// ---------------------------------------------------------------- one process at a time

constexpr std::chrono::milliseconds kNoWait{0};

TEST(FolderLock, IsOnesAloneAndNamesItsHolder) {
  TemporaryDirectory dir;
  const std::string folder = dir / "not/there/yet";
  FolderLock first(folder, "run 1", kNoWait);
  EXPECT_TRUE(first.held());
  const FolderLock second(folder, "run 2", kNoWait);
  EXPECT_FALSE(second.held());
  EXPECT_THAT(second.holder(), AllOf(HasSubstr("pid " + std::to_string(::getpid()) + " on "),
                                     HasSubstr(" since 20")));
  EXPECT_EQ(second.problem(), "");
  // Another writer of the same run shares the lock.
  EXPECT_EQ(FolderLock(folder, "run 1", kNoWait).holder(), "");
  first = FolderLock();
  EXPECT_TRUE(FolderLock(folder, "run 2", kNoWait).held());
}

TEST(FolderLock, DoesNotFollowALink) {
  TemporaryDirectory dir, other;
  put(other / "precious", "kept");
  std::filesystem::create_symlink(other / "precious", dir / kFolderLockName);
  const FolderLock lock(dir.path(), "run 1", kNoWait);
  EXPECT_FALSE(lock.held());
  EXPECT_THAT(lock.problem(), HasSubstr("cannot be opened: Too many levels of symbolic links"));
  EXPECT_EQ(get(other / "precious"), "kept");
}

TEST(FolderLock, GoesWithTheProcessThatHeldIt) {
  TemporaryDirectory dir;
  Pipe ready = make_pipe();
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock held(dir.path(), "a", kNoWait);
    [[maybe_unused]] const auto n = ::write(ready.write.get(), "x", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready.read.get(), &byte, 1), 1);
  EXPECT_THAT(FolderLock(dir.path(), "b", kNoWait).holder(),
              HasSubstr("pid " + std::to_string(child)));
  // Waited for while it dies, and long before the timeout ends.
  std::thread killer([child] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::kill(child, SIGKILL);
  });
  EXPECT_TRUE(FolderLock(dir.path(), "b", std::chrono::minutes(1)).held());
  killer.join();
  ::waitpid(child, nullptr, 0);
}

TEST(FolderLock, ThatCannotBeHadIsAProblemAndNoHolder) {
  TemporaryDirectory dir;
  put(dir / "file", "x");
  const FolderLock lock(dir / "file", "a", kNoWait);
  EXPECT_FALSE(lock.held());
  EXPECT_EQ(lock.holder(), "");
  EXPECT_THAT(lock.problem(), HasSubstr("cannot be opened: Not a directory"));
}

}  // namespace
}  // namespace lockstep::io
