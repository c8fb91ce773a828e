// A model of GPUs and their links, which predicts the time of a step on many ranks: computation
// beside an alpha-beta model of the collectives.
//
//   const Devices devices = parse_devices("4xH100-80GB");        // {.count = 4, .card = ...}
//   const Devices here = detected_devices(found);                // what the driver reports
//   const Cluster cluster = parse_link("nvlink+ib400", devices.card, /*per_node=*/8);
//   const StepTime step = step_time(work, cluster, 64);
//
// A plan decides by what fits into a card's memory, never by its name. A card's figures are the
// vendor's: dense bfloat16 with float accumulation (float16 for V100, which has no bfloat16), bytes
// per second in one direction for links.
//
// A collective of S bytes on n ranks takes alpha per hop and beta per byte. Ring: 2(n-1)/n S/B;
// tree: 2 S/B' with log2(nodes) hops between nodes; the faster one counts, as NCCL chooses. B is
// the bandwidth of the slowest link on the path: inside a node its own, between nodes all ports of
// a node together. Latencies are those of NCCL's tuning table (src/graph/tuning.cc).
//
// With DDP a bucket is sent when its gradients are ready and overlaps the rest of backward; the
// part after that is exposed, and at least Cluster::exposed_share of it all. The sharded optimizer
// and fully sharded models expose all of theirs: published runs that differ only in the micro-batch
// show steps longer by the time of their collectives (scaling_test.cpp). So do the sums of tensor
// parallelism, which the next layer waits for.
//
// Values and functions without state; call from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/device_rule.h"

namespace lockstep::plan {

// ---------------------------------------------------------------- cards

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct Card {
  std::string name{};              // "H100-80GB"; for an unknown card the driver's name
  std::uint64_t memory_bytes = 0;  // 0: not known, and not checked
  double flops = 0;                // per second, half type; 0: not known
  double float_flops = 0;          // the same in float, without TF32
  double memory_bandwidth = 0;     // bytes per second; 0: not known
  double nvlink = 0;               // bytes per second and direction; 0: there is none
  double pcie = 0;
  bool cpu = false;
  bool bfloat16 = true;  // tensor cores for bfloat16 and TF32: compute capability 8 and later
  bool peers = true;     // PCIe peer access between cards; otherwise through the host's memory
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

// A CPU with this many cores at a typical rate, to compare strategies until one is measured.
Card assumed_cpu(Card cpu, int cores);

// The devices, with the memory that was found. An unknown card's arithmetic rate follows from its
// multiprocessors, clock and compute capability. Of different cards the smallest and slowest count,
// since every rank waits for the last. UsageError for none, because of `reason`.
Devices detected_devices(const std::vector<GpuModel>& found, const std::string& reason = {});

// ---------------------------------------------------------------- links

struct Link {
  std::string name{};
  double bandwidth = 0;   // attained by a collective, in bytes per second and direction
  double ring_hop_s = 0;  // alpha
  double tree_hop_s = 0;
};

struct Cluster {
  Link inside{};   // of a rank inside its node
  Link between{};  // of a whole node; bandwidth 0: there is one node
  int per_node = 8;
  double shared_bandwidth = 0;  // of all ranks of a node that share a bus; 0: they do not
  int cores = 0;                // physical cores of a node whose ranks compute on them; 0: on GPUs
  // The part of DDP's communication that overlap cannot hide: without peer access, kernels of one
  // GPU write each byte into the host's memory before another GPU reads it.
  double exposed_share = 0;
  std::string text{};  // what was assumed, for a report
};

// "nvlink", "pcie", "pcie-host" (without peer access: through the host's memory), "nvlink+ib400",
// "pcie+eth25", "loopback"; ib400: a port of 400 Gbit/s for each GPU, ib1600/node: ports of 1600
// Gbit/s for a node. UsageError for another text, for nvlink where the card has none, and for a
// port of less than 1 or more than 800 Gbit/s.
Cluster parse_link(std::string_view text, const Card& card, int per_node);

// A link inside a node as `lockstep doctor` measured it, which replaces the assumption.
struct MeasuredLink {
  std::string backend{};  // "nccl", "shm"
  int ranks = 0;
  double bandwidth = 0;       // bytes per second on the bus: 2(n-1)/n of the bytes of an all-reduce
  std::string disturbance{};  // "other programs used 1.0 of the 2 cores"; empty: none
};
void use_measured(Cluster& cluster, const MeasuredLink& link);

// ---------------------------------------------------------------- steps

enum class Sharding {
  kNone,       // DDP
  kOptimizer,  // gradients are reduced and parameters gathered in the update
  kFull,       // parameters are gathered in forward and in backward of every micro-batch
  kGradOp,     // they are gathered in forward and stay whole until backward has used them
};

// One rank's share of a step.
struct Work {
  double forward_s = 0;  // of one micro-batch
  double backward_s = 0;
  double accumulation = 1;                // micro-batches, and those in which a pipeline waits
  double optimizer_s = 0;                 // of the whole state; sharding divides it
  std::vector<std::int64_t> gradients{};  // bytes, in the order in which backward produces them
  std::int64_t parameter_bytes = 0;       // that kFull and kGradOp gather
  Sharding sharding = Sharding::kNone;
  int shard_ranks = 0;  // kFull, kGradOp: divided over so many, copied beyond them; 0: over all
  int stages = 1;       // ranks of a pipeline
  // Tensor parallel ranks of one stage, and the bytes of each sum over them in a micro-batch; with
  // sequence parallelism, of each gather and each reduce-scatter.
  int tensor_ranks = 1;
  std::vector<double> tensor_sums{};
  std::vector<double> tensor_gathers{};
  double tensor_once = 0;  // bytes of one more sum, once in an update

  double compute_s() const { return accumulation * (forward_s + backward_s); }
};

double all_reduce_s(const Cluster& cluster, int ranks, double bytes);
// A reduce-scatter takes as long.
double all_gather_s(const Cluster& cluster, int ranks, double bytes);

struct StepTime {
  double compute_s = 0;
  double optimizer_s = 0;
  double communication_s = 0;  // all of it
  double exposed_s = 0;        // what nothing hides

  double total_s() const { return compute_s + optimizer_s + exposed_s; }
};
StepTime step_time(const Work& work, const Cluster& cluster, int ranks);

}  // namespace lockstep::plan
