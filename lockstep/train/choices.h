// Lists of accepted values, written "no|steps|epoch" in the table. Private to this layer.
//
//   split_choices("no|steps")       // {"no", "steps"}
//   choices_text("no|steps|epoch")  // "no, steps or epoch"
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::train {

inline std::vector<std::string> split_choices(std::string_view choices) {
  std::vector<std::string> values(choices.empty() ? 0 : 1);
  for (const char c : choices) {
    if (c == '|') {
      values.emplace_back();
    } else {
      values.back() += c;
    }
  }
  return values;
}

inline std::string choices_text(std::string_view choices) {
  const std::vector<std::string> values = split_choices(choices);
  std::string text;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += i + 1 == values.size() ? " or " : ", ";
    text += values[i];
  }
  return text;
}

}  // namespace lockstep::train
