// How long a step takes on many ranks: computation beside an alpha-beta model of the collectives.
//
//   const Cluster cluster = parse_link("nvlink+ib400", card, /*per_node=*/8);
//   const StepTime step = step_time(work, cluster, 64);
//
// A collective of S bytes on n ranks takes alpha per hop and beta per byte. Ring: 2(n-1)/n S/B;
// tree: 2 S/B' with log2(nodes) hops between nodes; the faster one counts, as NCCL chooses. B is
// the bandwidth of the slowest link on the way: inside a node its own, between nodes all ports of a
// node together. Latencies are those of NCCL's tuning table (src/graph/tuning.cc).
//
// With DDP a bucket is sent when its gradients are ready and hides behind the backward that is
// left; what ends later is exposed. The sharded optimizer and fully sharded models expose all of
// theirs: published runs that differ in the micro-batch alone show a step that is longer by the
// time of its collectives (scaling_test.cpp). So do the sums of tensor parallelism, which the next
// layer waits for.
//
// Values and functions without state; call from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "observe/plan/cards.h"

namespace lockstep::plan {

struct Link {
  std::string name{};
  double bandwidth = 0;   // bytes per second and direction that a collective reaches
  double ring_hop_s = 0;  // alpha
  double tree_hop_s = 0;
};

struct Cluster {
  Link inside{};   // of a rank inside its node
  Link between{};  // of a whole node; bandwidth 0: there is one node
  int per_node = 8;
  double shared_bandwidth =
      0;               // all ranks of a node together, where they share a bus; 0: they do not
  int cores = 0;       // physical ones of a node whose ranks compute on it; 0: on GPUs
  std::string text{};  // what was assumed, for a report
};

// "nvlink", "pcie", "pcie-host" (without peer access: through the host's memory), "nvlink+ib400",
// "pcie+eth25", "loopback"; ib400: a port of 400 Gbit/s for each GPU, ib1600/node: ports of 1600
// Gbit/s for a node. UsageError for another text, for nvlink where
// the card has none, and for a port of less than 1 or more than 800 Gbit/s.
Cluster parse_link(std::string_view text, const Card& card, int per_node);

// What `lockstep doctor` has measured inside a node, in place of what was assumed.
struct MeasuredLink {
  std::string backend{};  // "nccl", "shm"
  int ranks = 0;
  double bandwidth = 0;       // bytes per second on the bus: 2(n-1)/n of the bytes of an all-reduce
  std::string disturbance{};  // "other programs used 1.0 of the 2 cores"; empty: none
};
void use_measured(Cluster& cluster, const MeasuredLink& link);

enum class Sharding {
  kNone,       // DDP
  kOptimizer,  // gradients are reduced and parameters gathered in the update
  kFull,       // parameters are gathered in forward and in backward of every micro-batch
  kGradOp,     // they are gathered in forward and stay whole until backward has used them
};

// One rank's part of a step.
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
  // Tensor parallel ranks of one stage, and the bytes of each sum over them in a micro-batch; of
  // each gather and each reduce-scatter where they divide the sequence.
  int tensor_ranks = 1;
  std::vector<double> tensor_sums{};
  std::vector<double> tensor_gathers{};
  double tensor_once = 0;  // bytes of one more sum, once in an update
  std::int64_t bucket_bytes = 25 << 20;
  std::int64_t first_bucket_bytes = 1 << 20;

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
