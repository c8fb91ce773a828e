// What clients send to the launcher's store, in the order in which it comes: a byte says from which
// of two clients and how much of the rest comes at once.
#include <algorithm>
#include <map>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/rendezvous/store_bytes_for_test.h"
#include "tests/fuzz/driver.h"

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using fuzz::require;
  const StoreLimits limits{.keys = 16, .bytes = 4096, .command_bytes = 1024};
  std::map<StoreTable::Client, std::string> inputs;
  std::size_t replied = 0;
  StoreTable table(
      [&](auto client, auto bytes) {
        require(inputs.count(client) != 0, "a reply to a client that is gone");
        replied += bytes.size();
      },
      limits);
  while (size > 0) {
    const StoreTable::Client client = data[0] & 1u;
    const std::size_t count = std::min<std::size_t>(size - 1, data[0] >> 1);
    std::string& input = inputs[client];
    input.append(reinterpret_cast<const char*>(data + 1), count);
    data += 1 + count;
    size -= 1 + count;
    try {
      const std::size_t used = feed_all(table, client, input);
      require(used <= input.size(), "more was used than came");
      input.erase(0, used);
    } catch (const CommError& error) {
      require(std::string(error.what()).rfind("[store] ", 0) == 0, "an error without component");
      table.drop(client);
      inputs.erase(client);
    }
  }
  return 0;
}
