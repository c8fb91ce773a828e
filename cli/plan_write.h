// A training file with a plan's settings in it.
//
//   write_file("planned.yaml", with_settings(read_file("train.yaml"), way.settings, "train.yaml"));
#pragma once

#include <string>
#include <vector>

#include "observe/plan/ranking.h"

namespace lockstep::cli {

// The text of a YAML training file in which each setting has its value; comments, order and all
// other keys stay. Throws UsageError where a key is written in a form that it does not edit.
std::string with_settings(const std::string& text, const std::vector<plan::Setting>& settings,
                          const std::string& name);

}  // namespace lockstep::cli
