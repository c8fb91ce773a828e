#include "observe/plan/machine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::plan {
namespace {

constexpr double kMicro = 1e-6;
constexpr double kGiga = 1e9;
constexpr double kTera = 1e12;
// NCCL's tuning table (src/graph/tuning.cc): it counts on 235 of the 300 GB/s of an A100's links;
// trees reach 0.9 of a ring, and 0.92 of that in the LL128 protocol; hops and the start of a
// collective in microseconds.
constexpr double kNvlinkShare = 235.0 / 300.0;
constexpr double kTreeShare = 0.9 * 0.92;
constexpr double kRingStart_s = 8.4 * kMicro;
constexpr double kTreeStart_s = 4.4 * kMicro;
// The share of the line rate that headers and acknowledgements leave; 24 of the 32 GB/s of PCIe 4.
constexpr double kNetworkShare = 0.9;
constexpr double kPcieShare = 0.75;
// Without peer access each byte is written to the host's memory and read from it again, so a link
// has half its rate, and all GPUs of a node share that memory. This is assumed, not measured.
constexpr double kThroughHost = 0.5;
constexpr double kHostShared = 40 * kGiga;
// Gbit/s of a port: from 1-gigabit Ethernet to InfiniBand XDR and 800-gigabit Ethernet.
constexpr double kSlowestPort = 1;
constexpr double kFastestPort = 800;
// Two threads of a core compute 1.3 times as much as one: Intel's figure for Hyper-Threading.
constexpr double kSecondThread = 1.3;
// gloo over the loopback device of a 16-core machine, all-reduces of 25 MB at 2 to 16 ranks
// (docs/plan.md): 2.6 GB/s for a rank, 20 GB/s for all of them together.
constexpr double kLoopback = 2.6 * kGiga;
constexpr double kLoopbackShared = 20 * kGiga;

// CPU ranks wait for the slower one before each sum of tensor parallelism. From three small
// trainings of two ranks, on a machine that had other work, too (docs/plan.md).
constexpr double kCpuSumWait_s = 1.2e-3;

// DistributedDataParallel's default buckets.
constexpr double kBucketBytes = 25 << 20;
constexpr double kFirstBucketBytes = 1 << 20;

[[noreturn]] void refuse_link(std::string_view text) {
  throw UsageError("plan",
                   "'{}' is not a link. Write nvlink, pcie or pcie-host (without peer access) "
                   "for one node, and with several "
                   "nvlink+ib400 (a port of 400 Gbit/s for each GPU), nvlink+ib1600/node or "
                   "pcie+eth25/node; loopback for ranks on CPUs.",
                   text);
}

// "ib400" or "eth100/node", for a whole node.
Link between_nodes(std::string_view text, std::string_view whole, int per_node) {
  constexpr std::string_view kPerNode = "/node";
  std::string_view name = text;
  const bool of_node = name.ends_with(kPerNode);
  if (of_node) name.remove_suffix(kPerNode.size());
  const bool infiniband = name.starts_with("ib");
  if (!infiniband && !name.starts_with("eth")) refuse_link(whole);
  name.remove_prefix(infiniband ? 2 : 3);
  double gigabits = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), gigabits);
  if (error != std::errc{} || end != name.data() + name.size() || !(gigabits > 0))
    refuse_link(whole);
  const double fastest = kFastestPort * (of_node ? std::max(8, per_node) : 1);
  if (!(gigabits >= kSlowestPort && gigabits <= fastest))
    throw UsageError("plan",
                     "'{}' has {} Gbit/s, and {} has {} to {}. Write ib100, ib200, ib400, ib800, "
                     "eth10, eth25, eth100 or eth400, or what the ports of a node have together "
                     "(ib1600/node).",
                     text, gigabits, of_node ? "a node" : "a port", kSlowestPort, fastest);
  const double node = gigabits / 8 * kGiga * (of_node ? 1 : per_node);
  return {.name = std::string(text),
          .bandwidth = kNetworkShare * node,
          .ring_hop_s = (infiniband ? 9.6 : 30) * kMicro,
          .tree_hop_s = (infiniband ? 8.5 : 30) * kMicro};
}

Link inside_node(std::string_view text, std::string_view whole, const Card& card) {
  if (text == "nvlink") {
    if (card.nvlink <= 0)
      throw UsageError("plan", "{} has no NVLink in the table of cards. Write pcie.", card.name);
    return {"nvlink", kNvlinkShare * card.nvlink, 3.4 * kMicro, 1.2 * kMicro};
  }
  if (text == "pcie" || text == "pcie-host") {
    const double share = text == "pcie" ? kPcieShare : kPcieShare * kThroughHost;
    return {std::string(text), share * (card.pcie > 0 ? card.pcie : 32 * kGiga), 5.7 * kMicro,
            1.9 * kMicro};
  }
  if (text == "loopback") return {"loopback", kLoopback, 30 * kMicro, 30 * kMicro};
  refuse_link(whole);
}

int nodes_of(const Cluster& cluster, int ranks) {
  return (ranks - 1) / cluster.per_node + 1;
}

double bus_bandwidth(const Cluster& cluster, int ranks) {
  double bandwidth = cluster.inside.bandwidth;
  const int local = std::min(ranks, cluster.per_node);
  if (cluster.shared_bandwidth > 0)
    bandwidth = std::min(bandwidth, cluster.shared_bandwidth / local);
  if (nodes_of(cluster, ranks) > 1) bandwidth = std::min(bandwidth, cluster.between.bandwidth);
  return bandwidth;
}

// `steps` around the ring: 2(n-1) of an all-reduce, n-1 of a gather.
double ring_s(const Cluster& cluster, int ranks, double bytes, int rounds) {
  const int nodes = nodes_of(cluster, ranks);
  const double steps = rounds * (ranks - 1.0);
  const double crossings = nodes > 1 ? rounds * (nodes - 1.0) : 0;
  return kRingStart_s + (steps - crossings) * cluster.inside.ring_hop_s +
         crossings * cluster.between.ring_hop_s +
         steps / ranks * bytes / bus_bandwidth(cluster, ranks);
}

double tree_s(const Cluster& cluster, int ranks, double bytes) {
  const int nodes = nodes_of(cluster, ranks);
  const int local = std::min(ranks, cluster.per_node);
  return kTreeStart_s +
         2 * ((local - 1) * cluster.inside.tree_hop_s +
              std::ceil(std::log2(nodes)) * cluster.between.tree_hop_s) +
         2 * bytes / (kTreeShare * bus_bandwidth(cluster, ranks));
}

// Ranks on CPUs beyond the physical cores share them, and the step waits for the slowest.
double slowdown(const Cluster& cluster, int ranks) {
  const int local = std::min(ranks, cluster.per_node);
  if (cluster.cores <= 0 || local <= cluster.cores) return 1;
  return 2 / kSecondThread * std::max(1.0, local / (2.0 * cluster.cores));
}

// Buckets leave one after another, each when its last gradient is there; gradients come evenly by
// size. How much of this ends after backward.
void add_buckets(const Work& work, const Cluster& cluster, int ranks, double backward_s,
                 StepTime& time) {
  double all = 0;
  for (const std::int64_t bytes : work.gradients) all += static_cast<double>(bytes);
  double produced = 0;
  double sent_until = 0;
  double bucket = 0;
  double sent = 0;
  double limit = kFirstBucketBytes;
  for (std::size_t i = 0; i < work.gradients.size(); ++i) {
    bucket += static_cast<double>(work.gradients[i]);
    produced += static_cast<double>(work.gradients[i]);
    if (bucket < limit && i + 1 < work.gradients.size()) continue;
    const double ready = backward_s * produced / all;
    const double takes = all_reduce_s(cluster, ranks, bucket);
    sent_until = std::max(sent_until, ready) + takes;
    sent += takes;
    bucket = 0;
    limit = kBucketBytes;
  }
  time.communication_s += sent;
  time.exposed_s += std::max(sent_until - backward_s, cluster.exposed_share * sent);
}

// An all-reduce between copies that are in parts on `group` ranks each: every GPU sends its part,
// and between nodes the ports of a node carry all of them.
double copies_s(const Cluster& cluster, int copies, int group, double bytes) {
  if (copies * group <= cluster.per_node) return all_reduce_s(cluster, copies, bytes / group);
  Cluster nodes = cluster;
  nodes.per_node = 1;
  nodes.inside = cluster.between;
  nodes.shared_bandwidth = 0;
  return all_reduce_s(nodes, copies, bytes);
}

}  // namespace

Cluster parse_link(std::string_view text, const Card& card, int per_node) {
  if (per_node < 1)
    throw UsageError("plan", "a node of {} GPUs does not exist. Give 1 or more.", per_node);
  const std::size_t plus = text.find('+');
  const std::string_view inside = text.substr(0, plus);
  Cluster cluster{.inside = inside_node(inside, text, card), .per_node = per_node};
  if (inside == "loopback") {
    cluster.shared_bandwidth = kLoopbackShared;
    cluster.text = fmt::format("loopback {:.1f} GB/s a rank, {:.0f} GB/s a host", kLoopback / kGiga,
                               kLoopbackShared / kGiga);
  } else {
    cluster.text = fmt::format("{} {:.0f} GB/s a GPU", inside, cluster.inside.bandwidth / kGiga);
  }
  if (inside == "pcie-host") {
    cluster.shared_bandwidth = kHostShared;
    cluster.exposed_share = 1 - kThroughHost;
    cluster.text += fmt::format(", {:.0f} GB/s a host (no peer access)", kHostShared / kGiga);
  }
  if (plus == std::string_view::npos) {
    cluster.per_node = std::numeric_limits<int>::max();  // one node of any size
    return cluster;
  }
  cluster.between = between_nodes(text.substr(plus + 1), text, per_node);
  cluster.text += fmt::format(", {} {:.0f} GB/s a node of {}", cluster.between.name,
                              cluster.between.bandwidth / kGiga, per_node);
  return cluster;
}

void use_measured(Cluster& cluster, const MeasuredLink& link) {
  const std::string assumed = cluster.text;
  const std::size_t between = assumed.rfind(", " + cluster.between.name);
  cluster.inside.name = link.backend;
  cluster.inside.bandwidth = link.bandwidth;
  // All ranks of the measurement were at work, so what they share is in it. NVLink is not shared.
  if (cluster.shared_bandwidth > 0) cluster.shared_bandwidth = link.bandwidth * link.ranks;
  cluster.text = fmt::format("{} {:.1f} GB/s a rank, measured by lockstep doctor with {} ranks",
                             link.backend, link.bandwidth / kGiga, link.ranks);
  if (!link.disturbance.empty()) cluster.text += fmt::format(" while {}", link.disturbance);
  if (cluster.between.bandwidth > 0 && between != std::string::npos)
    cluster.text += assumed.substr(between);
}

double all_reduce_s(const Cluster& cluster, int ranks, double bytes) {
  if (ranks < 2) return 0;
  return std::min(ring_s(cluster, ranks, bytes, 2), tree_s(cluster, ranks, bytes));
}

double all_gather_s(const Cluster& cluster, int ranks, double bytes) {
  return ranks < 2 ? 0 : ring_s(cluster, ranks, bytes, 1);
}

StepTime step_time(const Work& work, const Cluster& cluster, int ranks) {
  const double slower = slowdown(cluster, ranks * work.stages * work.tensor_ranks);
  // Ranks that a rank's state is divided over.
  const int group = work.sharding == Sharding::kNone ? 1
                    : work.shard_ranks > 0           ? std::min(work.shard_ranks, ranks)
                                                     : ranks;
  StepTime time{.compute_s = slower * work.compute_s(),
                .optimizer_s = slower * work.optimizer_s / group};
  Cluster one_copy = cluster;
  one_copy.shared_bandwidth /= ranks;  // all copies sum at once
  double micro_s = static_cast<double>(work.tensor_sums.size() + work.tensor_gathers.size()) *
                   (cluster.cores > 0 ? kCpuSumWait_s : 0);
  for (const double bytes : work.tensor_sums)
    micro_s += all_reduce_s(one_copy, work.tensor_ranks, bytes);
  for (const double bytes : work.tensor_gathers)
    micro_s += all_gather_s(one_copy, work.tensor_ranks, bytes);
  time.communication_s = work.accumulation * micro_s;
  if (work.tensor_once > 0)
    time.communication_s += all_reduce_s(one_copy, work.tensor_ranks, work.tensor_once);
  time.exposed_s = time.communication_s;
  if (ranks < 2) return time;
  if (work.tensor_ranks > 1) {
    // Copies are as far apart as the ranks of one of them, and as many rings share a node's ports.
    Cluster copies = cluster;
    copies.per_node = std::max(1, cluster.per_node / work.tensor_ranks);
    copies.between.bandwidth /= work.tensor_ranks;
    copies.shared_bandwidth /= work.tensor_ranks;
    Work own = work;
    own.tensor_ranks = 1;
    own.tensor_sums = own.tensor_gathers = {};
    own.tensor_once = 0;
    const StepTime between = step_time(own, copies, ranks);
    time.communication_s += between.communication_s;
    time.exposed_s += between.exposed_s;
    return time;
  }
  double gradients = 0;
  for (const std::int64_t bytes : work.gradients) gradients += static_cast<double>(bytes);
  const auto parameters = static_cast<double>(work.parameter_bytes);
  switch (work.sharding) {
    case Sharding::kNone:
      // On CPUs communication runs on the cores that compute, so nothing hides it.
      add_buckets(work, cluster, ranks, cluster.cores > 0 ? 0 : slower * work.backward_s, time);
      return time;
    case Sharding::kOptimizer:
      time.communication_s = 2 * all_gather_s(cluster, ranks, gradients);
      break;
    case Sharding::kFull:
    case Sharding::kGradOp: {
      const int gathers = work.sharding == Sharding::kFull ? 2 : 1;
      time.communication_s =
          work.accumulation * (gathers * all_gather_s(cluster, group, parameters) +
                               all_gather_s(cluster, group, gradients) +
                               copies_s(cluster, ranks / group, group, gradients));
      break;
    }
  }
  time.exposed_s = time.communication_s;
  return time;
}

// ---------------------------------------------------------------- cards

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

Card card_of(const GpuModel& gpu) {
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

Devices detected_devices(const std::vector<GpuModel>& found, const std::string& reason) {
  if (found.empty())
    throw UsageError("plan",
                     "there is no GPU to plan for ({}). Name the cards: --gpus 4xH100-80GB, or "
                     "--gpus cpu.",
                     reason.empty() ? "the driver shows no device" : reason);
  Devices devices{.count = static_cast<int>(found.size()), .card = card_of(found.front())};
  for (const GpuModel& gpu : found) {
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
