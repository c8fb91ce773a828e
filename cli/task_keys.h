// The keys of the maps `model` and `data` of a training file, as `lockstep config keys` prints them
// and docs/configuration.md lists them. task_config.cpp reads them; a test compares the two.
//
//   fmt::print("{}", task_keys_help("n_layer"));
//
// Values and functions without state; call from any thread.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::cli {

// A few lines for each key with `part` in its name ("model.n_layer"); empty: there is none.
std::string task_keys_help(std::string_view part = "");
// The rows of a table.
std::string task_keys_markdown();

}  // namespace lockstep::cli
