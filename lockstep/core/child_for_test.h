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
// The test owns the child; the destructor kills what is left. Linked by tests only.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep::child_for_test {

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

}  // namespace lockstep::child_for_test
