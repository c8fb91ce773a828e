// Not a parser but a test of the driver: each way in which a parser can fail has a trigger string.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/fuzz/driver.h"

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto has = [&](const char* trigger) { return text.find(trigger) != text.npos; };
  lockstep::fuzz::require(!has("abort"), "the planted defect");
  if (has("throw")) throw std::runtime_error("the planted exception");
  if (has("exit")) std::exit(3);
  if (has("kill")) std::raise(SIGKILL);
  while (has("loop")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  static std::vector<std::vector<char>> held;
  while (has("fill")) held.emplace_back(1u << 20, 'x');
  return 0;
}
