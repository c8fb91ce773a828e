// Which file a configuration key belongs in: the training file (Hugging Face's TrainingArguments)
// or the launcher's (Accelerate's). The readers of the two are in different layers and neither may
// include the other, but each must report where a misplaced key belongs.
//
//   if (is_launcher_key("num_processes")) ...   // "belongs in the launcher's file"
#pragma once

#include <span>
#include <string_view>

namespace lockstep {

// Every key that the reader accepts, older spellings included. A test compares the readers' tables.
std::span<const std::string_view> training_keys();
std::span<const std::string_view> launcher_keys();

bool is_training_key(std::string_view key);
bool is_launcher_key(std::string_view key);

}  // namespace lockstep
