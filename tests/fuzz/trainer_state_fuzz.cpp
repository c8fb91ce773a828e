// trainer_state.json and sampler.json of a checkpoint: what is read is the same when it is written
// and read again; the rest is refused with an error.
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/train/trainer_state.h"
#include "tests/fuzz/driver.h"

namespace {

template <typename Read>
void attempt(Read&& read) {
  try {
    read();
  } catch (const lockstep::UsageError& error) {
    lockstep::fuzz::require(error.what()[0] == '[', "an error without its component");
  }
}

}  // namespace

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::train;
  using lockstep::fuzz::require;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  attempt([&] {
    const std::string again = trainer_state_text(parse_trainer_state(text, "input"));
    require(trainer_state_text(parse_trainer_state(again, "again")) == again,
            "a state that changes when it is written");
  });
  attempt([&] {
    const std::string again = data_position_text(parse_data_position(text, "input"));
    require(data_position_text(parse_data_position(again, "again")) == again,
            "a position that changes when it is written");
  });
  return 0;
}
