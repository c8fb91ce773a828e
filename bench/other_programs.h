// What other programs use of the cores while a benchmark measures: figures of a busy machine are
// not the machine's.
//
//   const OtherPrograms others;
//   measure();
//   fmt::print(stderr, "{}", others.note());   // nothing where the cores were the benchmark's own
#pragma once

#include <string>

namespace lockstep::bench {

class OtherPrograms {
 public:
  // A line, where others had 10 % of the cores and nearly all cores were in use; or nothing.
  std::string note() const;

 private:
  // CPU seconds of all programs on the cores that this process may use, and its own with those of
  // the children that have ended.
  struct Reading {
    double clock_s = 0;
    double all_s = 0;
    double own_s = 0;
  };
  static Reading read();

  const Reading begin_ = read();
};

}  // namespace lockstep::bench
