// What tests of every layer share: a directory that goes away with the test, files in it, what an
// exception says, and a child process. Linked by tests only.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/types.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep {

// A directory that goes away with the test.
//
//   const TemporaryDirectory folder;
//   folder.write("proc/meminfo", "MemTotal: 100 kB\n");
//   read_cgroup(0, {.proc = folder / "proc"});
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "no temporary directory: " << name;
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  // Makes the folders above the file, and returns its path.
  std::string write(const std::string& name, const std::string& text) const {
    const std::string file = *this / name;
    std::filesystem::create_directories(std::filesystem::path(file).parent_path());
    std::ofstream(file, std::ios::binary) << text;
    return file;
  }

 private:
  std::string path_;
};

// The text of the Error that `body` throws. Another exception, or none, gives a text that says so.
//
//   EXPECT_THAT(message_of([&] { parse("depth: x"); }), HasSubstr("must be a number"));
template <typename Error = UsageError, typename Body>
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

// A test's child process that starts from its first instruction with a given environment: what is
// read before main(), signal actions and descriptors are then as a launcher leaves them.
//
//   CHILD(says_hello) { std::puts("hello"); return 3; }
//   TEST(X, Y) {
//     Child child("says_hello", {{"RANK", "1"}});
//     EXPECT_EQ(child.wait(), 3);
//     EXPECT_EQ(child.output(), "hello\n");
//   }
//
// The test owns the child; the destructor kills what is left. rank_test_main.cpp has the rest.
namespace child_for_test {

struct Registration {
  Registration(const char* name, std::function<int()> body);
};
#define CHILD(name)                                                                         \
  int child_##name();                                                                       \
  const ::lockstep::child_for_test::Registration registration_##name(#name, &child_##name); \
  int child_##name()

class Child {
 public:
  // Runs the CHILD of that name with these variables and no others (but PATH and the sanitizers').
  // `keep` descriptors stay open in it under their numbers.
  Child(const std::string& name, const std::map<std::string, std::string>& variables,
        const std::vector<int>& keep = {});
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  // Reads until the child has written this text; false when it ended or the time is over.
  bool says(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(30));
  // The exit code, or -n for signal n, or -1000 after killing a child that took too long.
  int wait(std::chrono::seconds limit = std::chrono::seconds(30));
  // stdout and stderr together, complete after wait().
  const std::string& output() const { return output_; }

 private:
  bool read_some(int timeout_ms);

  pid_t pid_ = -1;
  Fd out_;
  std::string output_;
};

// For main(): runs the child that argv asks for, or returns -1.
int run_requested_child(int argc, char** argv);

}  // namespace child_for_test

namespace io {

using lockstep::message_of;
using lockstep::TemporaryDirectory;

inline void put(const std::string& path, const std::string& contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << contents;
  ASSERT_TRUE(file.good()) << path;
}

inline std::string get(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

}  // namespace io
}  // namespace lockstep
