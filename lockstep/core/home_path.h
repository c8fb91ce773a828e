// `~` at the start of a path, read as a shell reads it: "~/runs" and "~ada/runs" are folders in
// somebody's home directory. Shells expand it only at the start of an argument, not in
// `--key=~/runs` and not in files.
//
//   output_dir = expand_home(output_dir, "output_dir");
//
// Functions without state; call from any thread.
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// Paths that do not begin with `~` come back unchanged. UsageError, which begins with `what`, when
// the user or the home directory is unknown.
std::string expand_home(const std::string& path, std::string_view what);

// For a path that is not there and reads like the name of a model on Hugging Face's hub
// ("Qwen/Qwen2-0.5B"): " That is a name on ...", with the command that makes a folder of it.
// Otherwise empty.
std::string hub_advice(const std::string& path);

}  // namespace lockstep
