// How much of the cores other programs use while a benchmark measures: figures from a busy machine
// do not describe the machine.
//
//   const OtherPrograms others;
//   measure();
//   fmt::print(stderr, "{}", others.note());   // nothing where the cores were the benchmark's own
#pragma once

#include <string>

namespace lockstep::bench {

class OtherPrograms {
 public:
  // A line if others used 10 % of the cores while nearly all cores were busy; otherwise nothing.
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
