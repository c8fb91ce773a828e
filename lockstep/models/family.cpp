#include "lockstep/models/family.h"

#include <algorithm>
#include <utility>

namespace lockstep::models {

const Family* find_family(std::string_view type) {
  const auto found = std::ranges::find(known_families(), type, &Family::type);
  return found == known_families().end() ? nullptr : *found;
}

const OptionValue* Options::find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

Options Family::defaults() const {
  Options all;
  for (const Option& option : options) all.set(option.key, option.fallback);
  if (rope) all.rope.rope_theta = rope->theta;
  return all;
}

FamilyConfig::FamilyConfig(const Family& family, Options options)
    : family_(&family), options_(std::move(options)), spec_(family.describe(options_)) {}

std::vector<io::TensorShape> tensors_of(const FamilyConfig& config) {
  return tensors_of(config.spec());
}

}  // namespace lockstep::models
