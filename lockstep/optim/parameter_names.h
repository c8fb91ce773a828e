// What a parameter's name says about it, for groups of an optimizer (decay_groups, muon_groups) and
// for plans that see no module. Without torch.
//
//   is_named_as_norm_or_bias("h.0.ln_1.bias");   // true
//   is_named_as_end("transformer.wte.weight");   // true
#pragma once

#include <algorithm>
#include <cctype>
#include <sstream>
#include <string>

namespace lockstep::optim {

// The names by which Hugging Face's Trainer excludes parameters from weight decay: "bias",
// "layernorm" or "rmsnorm" anywhere in the name, "norm" as a whole part of it, or "_norm" at the
// end of a part.
inline bool is_named_as_norm_or_bias(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* word : {"bias", "layernorm", "rmsnorm"})
    if (name.find(word) != std::string::npos) return true;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');)
    if (part == "norm" || part.ends_with("_norm")) return true;
  return false;
}

// An embedding or a head, which are not for Muon.
inline bool is_named_as_end(const std::string& name) {
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');) {
    if (part.find("embed") != std::string::npos) return true;
    for (const char* word : {"wte", "wpe", "lm_head", "head", "classifier", "score"})
      if (part == word) return true;
  }
  return false;
}

}  // namespace lockstep::optim
