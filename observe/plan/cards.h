// The GPUs that a plan knows: memory, arithmetic, memory bandwidth and links of each.
//
//   const Devices devices = parse_devices("4xH100-80GB");        // {.count = 4, .card = ...}
//   const Devices here = detected_devices(found);                // what the driver reports
//
// A plan decides by what fits into `memory_bytes`, never by the name. Figures are the vendor's:
// dense bfloat16 with float accumulation (float16 for V100, which has no bfloat16), bytes per
// second in one direction for links.
//
// Values and functions without state; call from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::plan {

struct Card {
  std::string name{};              // "H100-80GB"; what the driver says for one that is not known
  std::uint64_t memory_bytes = 0;  // 0: not known, and not checked
  double flops = 0;                // per second, half type; 0: not known
  double float_flops = 0;          // the same in float, without TF32
  double memory_bandwidth = 0;     // bytes per second; 0: not known
  double nvlink = 0;               // bytes per second and direction; 0: there is none
  double pcie = 0;
  bool cpu = false;
  bool bfloat16 = true;  // tensor cores for bfloat16 and TF32: compute capability 8 and later
  bool peers = true;     // over PCIe one card reads another's memory; otherwise through the host's
  bool fp8 = false;      // tensor cores for 8-bit floats: compute capability 8.9 and later
};

struct Devices {
  int count = 1;
  Card card{};
};

// "H100-80GB", "4xH100", "2xRTX4090", "8xA100-40GB", "cpu", "4xcpu"; capitals do not matter.
// UsageError for a card that is not in the table, and for one that comes with several sizes of
// memory when none is given. A cpu's memory is filled by the caller, who knows the host.
Devices parse_devices(std::string_view text);

// What the CUDA driver says of one device.
struct FoundGpu {
  std::string name{};  // "NVIDIA H100 80GB HBM3"
  std::uint64_t memory_bytes = 0;
  int multiprocessors = 0;
  int clock_khz = 0;
  int capability_major = 0;
  int capability_minor = 0;
};

// A CPU with so many cores at a usual rate, which tells ways apart until one of them is measured.
Card assumed_cpu(Card cpu, int cores);

// With the memory that was found. A card outside the table gets its arithmetic from its
// multiprocessors, clock and compute capability. Of different cards the smallest and slowest count,
// since every rank waits for the last. UsageError for none; `reason` says why there is none.
Devices detected_devices(const std::vector<FoundGpu>& found, const std::string& reason = {});

}  // namespace lockstep::plan
