// SLURM's compressed lists, "n[03-07,9],m1" and "2(x3),1", after a byte that chooses the node.
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/rendezvous/rank_env.h"
#include "tests/fuzz/driver.h"

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using fuzz::require;
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  const auto attempt = [](auto&& read) {
    try {
      read();
    } catch (const UsageError& error) {
      require(error.what()[0] == '[', "an error without its component");
    }
  };
  attempt([&] { require(!detail::first_host(text).empty(), "a host without a name"); });
  attempt([&] { require(detail::tasks_on_node(text, data[0]) >= 1, "a node without a task"); });
  return 0;
}
