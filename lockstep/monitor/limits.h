// From which share of a step a wait is worth a word: for the rules of diagnose() and for what the
// Trainer says while it runs, so that both judge a run by the same figures.
#pragma once

namespace lockstep::monitor {

// A loader that is far enough ahead is never waited for; a tenth of a step is no accident.
inline constexpr double kDataShare = 0.10;
// Of the rank that waits least: one that is ahead waits for the others. Ranks that differ by some
// percent wait for each other a little in every step. Beyond a fifth it is the reduction itself.
inline constexpr double kCommunicationShare = 0.20;

}  // namespace lockstep::monitor
