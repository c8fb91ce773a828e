// What no single key can show: values that contradict each other. Private to this layer.
//
//   for (auto& text : contradictions(arguments, where)) problems.add(text);
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/train/arguments.h"

namespace lockstep::train {

// Where a key's value comes from: "train.yaml:3:1"; "default"; "" when the arguments were set in a
// program.
using Where = std::function<std::string(std::string_view key)>;

std::vector<std::string> contradictions(const TrainingArguments& arguments, const Where& where);

// A number of steps, where below 1 stands for a share of all: rounded up.
std::int64_t in_steps(double value, std::int64_t max_steps);

// `~` at the start of every path, for arguments that were set in a program. UsageError when that
// home directory is not known.
void expand_paths(TrainingArguments& arguments);

// What is allowed and probably not meant.
std::vector<std::string> advice(const TrainingArguments& arguments, const Where& where);

}  // namespace lockstep::train
