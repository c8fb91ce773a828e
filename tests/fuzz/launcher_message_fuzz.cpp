// What one launcher reads from another's socket: any line is a message that survives being sent on,
// or is refused with an error.
#include <string>

#include "launcher/node_link.h"
#include "lockstep/core/error.h"
#include "tests/fuzz/driver.h"

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using fuzz::require;
  const std::string line(reinterpret_cast<const char*>(data), size);
  try {
    const launch::Message message = launch::decode(line);
    if (message.kind == launch::Message::Kind::kOtherVersion) return 0;
    const std::string again = launch::encode(message);
    require(again.find('\n') + 1 == again.size(), "a message of more than one line");
    require(launch::encode(launch::decode(again)) == again, "a message that changes on its way");
    if (message.failure) launch::failure_report(*message.failure);
  } catch (const UsageError& error) {
    require(std::string_view(error.what()).starts_with("[launch] "),
            "an error without its component");
  }
  return 0;
}
