// How much of the cores other programs use while something is measured: figures from a busy machine
// do not describe the machine.
//
//   const OtherPrograms others;
//   measure();
//   if (const std::string what = others.text(); !what.empty()) say(what);
//
// Plain values; the processor time of child processes is counted when they have ended.
#pragma once

#include <chrono>
#include <string>

namespace lockstep {

class OtherPrograms {
 public:
  OtherPrograms();

  // "other programs used 1.2 of the 2 cores", if they used a tenth of those that this process may
  // use while nearly all of them were busy. Empty: otherwise, in less time than `shortest_s`, and
  // where the kernel does not say.
  std::string text(double shortest_s = 0.2) const;

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  const double all_s_, own_s_;  // processor time of all programs, and of this one
};

}  // namespace lockstep
