// Tokens of 2 or 4 bytes as int64, at memory speed: the one loop of building a batch. Private to
// lockstep/data. The build chooses widen_x86.cpp or widen_other.cpp; the processor chooses among
// the former's variants when the program runs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::data::detail {

// inputs[i] = tokens[i] and targets[i] = tokens[i + 1], for i below n.
struct WidenShifted {
  void (*from16)(const std::uint16_t* tokens, std::int64_t* inputs, std::int64_t* targets,
                 std::size_t n);
  void (*from32)(const std::uint32_t* tokens, std::int64_t* inputs, std::int64_t* targets,
                 std::size_t n);
};
const WidenShifted& widen_shifted();

// The loop itself, for each variant to compile with its own instructions.
template <typename Token>
[[gnu::always_inline]] inline void widen_shifted_loop(const Token* __restrict tokens,
                                                      std::int64_t* __restrict inputs,
                                                      std::int64_t* __restrict targets,
                                                      std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    inputs[i] = tokens[i];
    targets[i] = tokens[i + 1];
  }
}

}  // namespace lockstep::data::detail
