// A rank's ledger: whatever a rank has written there is refused or becomes text.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "launcher/stall_table.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger_layout.h"
#include "tests/fuzz/driver.h"

namespace {

namespace ledger = lockstep::ledger;

// A whole ledger with these bytes as its numbers, its list of files and its ring.
std::string ledger_with(std::string_view bytes) {
  std::string text(sizeof(ledger::LedgerMemory), '\0');
  std::memcpy(text.data(), ledger::kMagic, sizeof ledger::kMagic);
  const std::uint32_t numbers[] = {ledger::kVersion, static_cast<std::uint32_t>(ledger::kRecords)};
  std::memcpy(text.data() + sizeof ledger::kMagic, numbers, sizeof numbers);
  const std::size_t words = offsetof(ledger::LedgerMemory, saved_ns);
  const std::size_t files = offsetof(ledger::LedgerMemory, modules);
  const std::size_t ring = offsetof(ledger::LedgerMemory, ring);
  for (const std::size_t at : {words, files, ring}) {
    const std::size_t part = std::min(bytes.size(), at == words ? 96 : bytes.size() / 2);
    std::copy_n(bytes.data(), part, text.data() + at);
    bytes.remove_prefix(part);
  }
  return text;
}

}  // namespace

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using lockstep::fuzz::require;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    ledger::read(bytes, "input");
  } catch (const lockstep::UsageError& error) {
    require(error.what()[0] == '[', "an error without its component");
  }
  std::vector<lockstep::launch::RankView> ranks;
  for (const std::string_view part : {bytes.substr(0, size / 2), bytes.substr(size / 2)}) {
    ranks.push_back({.ledger = ledger::read(ledger_with(part), "input")});
    ranks.back().ledger.rank = static_cast<int>(ranks.size()) - 1;
    for (const std::uint64_t frame : ranks.back().ledger.stack)
      ranks.back().stack.push_back(ranks.back().ledger.place(frame));
  }
  const std::string text = lockstep::launch::describe_stall(ranks, {.now_ns = 1}).text;
  require(std::all_of(text.begin(), text.end(),
                      [](char c) { return c == '\n' || (c >= 0x20 && c < 0x7f); }),
          "a table that is not text");
  return 0;
}
