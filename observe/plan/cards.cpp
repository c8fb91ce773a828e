#include "observe/plan/cards.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "observe/plan/units.h"

namespace lockstep::plan {
namespace {

constexpr int kMaxDevices = 1'000'000;
// One core: what matrix products in float reach of its vector units, and bytes a second.
constexpr double kCoreFlops = 40 * kGiga;
constexpr double kCoreBandwidth = 10 * kGiga;

// Memory as nvidia-smi shows it; the rest from the vendor's data sheets.
const std::array kCards{
    Card{"H200", 143'771 * kMiB, 989 * kTera, 67 * kTera, 4800 * kGiga, 450 * kGiga, 64 * kGiga,
         false, true, true, true},
    Card{"H100-80GB", 81'559 * kMiB, 989 * kTera, 67 * kTera, 3350 * kGiga, 450 * kGiga, 64 * kGiga,
         false, true, true, true},
    Card{"A100-80GB", 81'920 * kMiB, 312 * kTera, 19.5 * kTera, 2039 * kGiga, 300 * kGiga,
         32 * kGiga},
    Card{"A100-40GB", 40'960 * kMiB, 312 * kTera, 19.5 * kTera, 1555 * kGiga, 300 * kGiga,
         32 * kGiga},
    Card{"L40S", 46'068 * kMiB, 362 * kTera, 91.6 * kTera, 864 * kGiga, 0, 32 * kGiga, false, true,
         true, true},
    Card{"RTX4090", 24'564 * kMiB, 165 * kTera, 82.6 * kTera, 1008 * kGiga, 0, 32 * kGiga, false,
         true, false, true},
    Card{"RTX3090", 24'576 * kMiB, 71 * kTera, 35.6 * kTera, 936 * kGiga, 0, 32 * kGiga, false,
         true, false},
    Card{"V100-32GB", 32'768 * kMiB, 125 * kTera, 15.7 * kTera, 900 * kGiga, 150 * kGiga,
         16 * kGiga, false, false},
    Card{"V100-16GB", 16'384 * kMiB, 125 * kTera, 15.7 * kTera, 900 * kGiga, 150 * kGiga,
         16 * kGiga, false, false},
};

// "NVIDIA RTX 4090" and "rtx-4090" are "4090": letters and digits, without the maker.
std::string plain(std::string_view text) {
  std::string out;
  for (const char c : text)
    if (std::isalnum(static_cast<unsigned char>(c)) != 0)
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const std::string_view word : {"nvidia", "geforce", "tesla", "rtx"})
    if (const std::size_t at = out.find(word); at != std::string::npos) out.erase(at, word.size());
  return out;
}

// The model without its memory: "a100" of "A100-40GB".
std::string family(const Card& card) {
  return plain(card.name.substr(0, card.name.find('-')));
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const Card& card : kCards) all.push_back(card.name);
  return all;
}

Card find_card(std::string_view text) {
  const std::string wanted = plain(text);
  std::vector<std::string> sizes;
  for (const Card& card : kCards) {
    if (plain(card.name) == wanted) return card;
    if (family(card) == wanted) sizes.push_back(card.name);
  }
  if (sizes.size() == 1) return *std::ranges::find(kCards, sizes.front(), &Card::name);
  if (sizes.size() > 1)
    throw UsageError("plan", "{} comes with several sizes of memory. Write {}.", text,
                     fmt::join(sizes, " or "));
  throw UsageError("plan",
                   "the card '{}' is not known.{} Known are {}; --gpus detected asks the driver of "
                   "this machine.",
                   text, did_you_mean(std::string(text), names()), fmt::join(names(), ", "));
}

// Operations of a multiprocessor in one clock: half type, dense, float accumulation.
double flops_per_clock(int major, int minor) {
  if (major >= 10) return 8192;
  if (major == 9) return 4096;
  if (major == 8) return minor == 0 ? 2048 : 512;
  if (major == 7) return 1024;
  return 0;
}

Card card_of(const FoundGpu& gpu) {
  const std::string name = plain(gpu.name);
  const Card* best = nullptr;
  for (const Card& card : kCards) {
    if (name.find(family(card)) == std::string::npos) continue;
    // The nearest of several sizes.
    const auto away = [&](const Card& c) {
      return std::max(c.memory_bytes, gpu.memory_bytes) -
             std::min(c.memory_bytes, gpu.memory_bytes);
    };
    if (best == nullptr || away(card) < away(*best)) best = &card;
  }
  Card card = best != nullptr ? *best : Card{};
  card.memory_bytes = gpu.memory_bytes;
  if (best != nullptr) return card;
  card.name = gpu.name;
  card.flops = flops_per_clock(gpu.capability_major, gpu.capability_minor) *
               static_cast<double>(gpu.multiprocessors) * static_cast<double>(gpu.clock_khz) * 1e3;
  const bool narrow =
      gpu.capability_major < 8 || (gpu.capability_major == 8 && gpu.capability_minor == 0);
  const double lanes = narrow ? 64 : 128;  // that multiply and add floats in one clock
  card.float_flops = 2 * lanes * static_cast<double>(gpu.multiprocessors) *
                     static_cast<double>(gpu.clock_khz) * 1e3;
  card.pcie = 32 * kGiga;
  card.bfloat16 = gpu.capability_major >= 8;
  card.fp8 = 10 * gpu.capability_major + gpu.capability_minor >= 89;
  // The driver has no peer access over PCIe for this line of cards.
  card.peers = gpu.name.find("GeForce") == std::string::npos;
  return card;
}

}  // namespace

Devices parse_devices(std::string_view text) {
  Devices devices;
  std::string_view name = text;
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  if (digits > 0 && digits < text.size() && (text[digits] == 'x' || text[digits] == 'X')) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + digits, devices.count);
    if (error != std::errc{} || devices.count < 1 || devices.count > kMaxDevices)
      throw UsageError("plan", "'{}' names {} devices. Give 1 to {}.", text, text.substr(0, digits),
                       kMaxDevices);
    name = text.substr(digits + 1);
  }
  if (name.empty())
    throw UsageError("plan", "'{}' names no card. Write 4xH100-80GB, cpu or detected.", text);
  if (plain(name) == "cpu") {
    devices.card = {.name = "cpu", .cpu = true};
    return devices;
  }
  devices.card = find_card(name);
  return devices;
}

Card assumed_cpu(Card cpu, int cores) {
  cpu.flops = cpu.float_flops = kCoreFlops * std::max(1, cores);
  cpu.memory_bandwidth = kCoreBandwidth * std::max(1, cores);
  return cpu;
}

Devices detected_devices(const std::vector<FoundGpu>& found, const std::string& reason) {
  if (found.empty())
    throw UsageError("plan",
                     "there is no GPU to plan for ({}). Name the cards: --gpus 4xH100-80GB, or "
                     "--gpus cpu.",
                     reason.empty() ? "the driver shows no device" : reason);
  Devices devices{.count = static_cast<int>(found.size()), .card = card_of(found.front())};
  for (const FoundGpu& gpu : found) {
    const Card card = card_of(gpu);
    devices.card.memory_bytes = std::min(devices.card.memory_bytes, card.memory_bytes);
    if (card.flops >= devices.card.flops) continue;
    const std::uint64_t memory = devices.card.memory_bytes;
    devices.card = card;
    devices.card.memory_bytes = memory;
  }
  return devices;
}

}  // namespace lockstep::plan
