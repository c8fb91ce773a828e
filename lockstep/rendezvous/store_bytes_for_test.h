// The bytes that a client of the store sends.
//
//   write_all(fd, kHandshake + command(Command::kGet, piece("key")));
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/rendezvous/store_client.h"
#include "lockstep/rendezvous/store_table.h"

namespace lockstep {

template <typename T>
std::string number(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
inline std::string piece(const std::string& text) {
  return number<std::uint64_t>(text.size()) + text;
}
inline std::string command(store::Command which, const std::string& rest = "") {
  return std::string(1, static_cast<char>(which)) + rest;
}
inline const std::string kHandshake = command(store::Command::kValidate, number(store::kMagic));

// Executes the complete commands; returns how many bytes they had.
inline std::size_t feed_all(StoreTable& table, StoreTable::Client client, std::string_view input) {
  std::size_t used = 0;
  while (used < input.size()) {
    const std::size_t size = table.feed(client, input.substr(used));
    if (size == 0) break;
    used += size;
  }
  return used;
}

}  // namespace lockstep
