// A map of a document, read key by key; what nobody asked for is refused at the end.
//
//   MapReader model(entry->value, "model");
//   const int layers = model.integer("n_layer", 12, 1, 1000);
//   const std::string kind = model.choice("type", "gpt", {"gpt", "mlp"});
//   model.finish();    // UsageError with place and nearest name for every other key
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/document.h"

namespace lockstep {

// Used by one thread, on the stack. The node must outlive it. A null value counts as not given.
class MapReader {
 public:
  // Throws UsageError when the node is neither a map nor null. `what` names it: "model"; empty: its
  // keys stand alone. With
  // `problems`, which must outlive it, nothing below throws: a mistake is added there, and the
  // fallback is the value.
  MapReader(const Node& map, std::string what, Problems* problems = nullptr);

  bool has(std::string_view key);
  const Node* node(std::string_view key);  // nullptr when it is not given

  // Throw UsageError `file:line:column: model.n_layer ...` for the wrong type or range.
  bool boolean(std::string_view key, bool fallback);
  std::int64_t integer(std::string_view key, std::int64_t fallback, std::int64_t min = INT64_MIN,
                       std::int64_t max = INT64_MAX);
  double real(std::string_view key, double fallback, double min, double max);
  std::string text(std::string_view key, std::string fallback);
  std::string choice(std::string_view key, std::string fallback,
                     std::initializer_list<std::string_view> choices);

  void finish() const;

 private:
  std::string full_name(std::string_view key) const;
  // The value at the key, converted by `read`.
  template <typename Value, typename Read>
  Value read_or(std::string_view key, Value fallback, const Read& read);

  const Node& map_;
  std::string what_;
  Problems* problems_;
  std::vector<std::string> asked_;
};

}  // namespace lockstep
