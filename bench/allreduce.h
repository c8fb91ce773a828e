// What the two sides of `lockstep bench allreduce` agree on: the parent starts jobs and prints, the
// ranks measure and report.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lockstep::bench {

// Microseconds per contender ("shm symmetric", "gloo", ...) and size in bytes.
using Samples = std::map<std::string, std::map<std::int64_t, std::vector<double>>>;

// "4K,64K,1M,25M" -> bytes; UsageError names the part that is not a size.
std::vector<std::int64_t> parse_sizes(const std::string& text);
std::string show_size(double bytes);

// How often a size is measured in one job at most: small ones often, large ones a few times. A size
// that takes more than its share of the job's time is measured less often.
int repetitions(std::int64_t bytes);
inline constexpr int kMinRepetitions = 5;

// From this size on a barrier precedes each operation; smaller operations need none.
inline constexpr std::int64_t kBarrierFirstBytes = 65536;

// Up to this size a contender is measured several times before the next one's turn.
inline constexpr std::int64_t kRunsUpToBytes = 1 << 20;

// What memory allows for the same traffic (limits.h): the faster of these is the limit.
inline constexpr const char* kLimits[] = {"limit: plain loop", "limit: memcpy"};
inline constexpr std::int64_t kLimitFromBytes = 1 << 20;

}  // namespace lockstep::bench
