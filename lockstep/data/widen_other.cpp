#include "lockstep/data/widen.h"

namespace lockstep::data::detail {

const WidenShifted& widen_shifted() {
  static constexpr WidenShifted kPlain{widen_shifted_loop<std::uint16_t>,
                                       widen_shifted_loop<std::uint32_t>};
  return kPlain;
}

}  // namespace lockstep::data::detail
