// Collectives between the ranks of one host, through memory that all of them map.
//
// The key idea is the round: every rank writes what the others need into its own segment,
// posts the round's number, waits until all have posted it, and reads theirs. Posting a round says
// that the one before has been read, so two alternating buffers and one synchronisation a round
// are enough. Small operations are one round; a large all-reduce is one per chunk (a rank sums its
// slice of it and takes the others' sums of the chunk before), or two in all and no copy where the
// arrays lie in symmetric memory.
//
//   EngineResult made = Engine::make(kv, {rank, size}, {}, deadline);
//   if (!made.engine) return use_gloo(made.unavailable_reason);
//   made.engine->all_reduce(data, count, DType::kF32, Op::kAvg)->wait();
//
// Threads: collectives are started by one thread at a time, in the same order on every rank;
// messages also by one thread at a time. abort(), failure() and all functions of a Ticket may be
// called from any thread. Arrays belong to the caller, until the ticket is done. After the first
// failure (a dead peer, a deadline, ranks that disagree, abort) the engine is broken forever: all
// tickets fail, later calls throw CommError with the first cause, and so do the peers' engines. The
// destructor fails pending operations, even if other threads wait for them, and never waits for
// peers; no array is touched afterwards. A forked child may only destroy its copy, which leaves the
// parent's intact; any other use is a UsageError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/shm/engine_types.h"  // IWYU pragma: export
#include "lockstep/comm/shm/peers.h"
#include "lockstep/comm/shm/reduce.h"
#include "lockstep/core/deadline.h"

namespace lockstep::shm {

enum class Probe : std::uint8_t {
  kNone,     // nothing yet
  kWaiting,  // a message has begun to arrive
  kClosed,   // nothing, and nothing will come: that rank has closed its engine
  kFailed    // the same, because its process has ended or its engine is broken
};

class Engine;
class EngineCore;
// Exactly one of the two members is set, and it is the same one on all ranks.
struct EngineResult {
  std::unique_ptr<Engine> engine;
  std::string unavailable_reason;  // a sentence: the ranks cannot share memory
};

class Engine {
 public:
  // Collective. Throws the store's exceptions, CommError when a rank's process ends meanwhile, and
  // UsageError for an invalid place or options; any other failure is reported in
  // unavailable_reason.
  static EngineResult make(KeyValueStore& kv, const RankAndSize& place,
                           const EngineOptions& options, const Deadline& deadline);
  ~Engine();

  int rank() const;
  int size() const;

  // Collectives. Counts are elements; zero is fine everywhere. In place where there is one array.
  TicketPtr all_reduce(void* data, std::size_t count, DType dtype, Op op,
                       const StartOptions& options = {});
  // Other ranks' arrays are left as they were.
  TicketPtr reduce(void* data, std::size_t count, DType dtype, Op op, int root,
                   const StartOptions& options = {});
  TicketPtr broadcast(void* data, std::size_t bytes, int root, const StartOptions& options = {});
  // `bytes` from each rank; output holds size() times that, and may hold the input in its place.
  TicketPtr all_gather(void* output, const void* input, std::size_t bytes,
                       const StartOptions& options = {});
  // The bytes of every rank, whose sizes may differ. The engine makes `outputs`, one array per
  // rank; they must live until the ticket is done.
  TicketPtr all_gather_v(std::vector<std::vector<std::byte>>& outputs, ConstPart input,
                         const StartOptions& options = {});
  // `count` elements for each rank; input holds size() times that.
  TicketPtr reduce_scatter(void* output, const void* input, std::size_t count, DType dtype, Op op,
                           const StartOptions& options = {});
  // The list is read on root only, where it has one part per rank. Sizes may differ over ranks.
  TicketPtr gather(std::vector<Part> outputs, ConstPart input, int root,
                   const StartOptions& options = {});
  TicketPtr scatter(Part output, std::vector<ConstPart> inputs, int root,
                    const StartOptions& options = {});
  // One part per rank in both lists; what i sends to j must be as long as what j expects of i.
  TicketPtr all_to_all(std::vector<Part> outputs, std::vector<ConstPart> inputs,
                       const StartOptions& options = {});
  TicketPtr barrier(const StartOptions& options = {});
  // The final barrier of a program, which matches no other operation.
  TicketPtr finish(const StartOptions& options = {});

  // Messages between two ranks arrive in the order of the calls, independently of collectives. A
  // send is done when its bytes have left the array, which may be before the other rank has asked.
  TicketPtr send(const void* data, std::size_t bytes, int peer, const StartOptions& options = {});
  TicketPtr recv(void* data, std::size_t bytes, int peer, const StartOptions& options = {});
  // Whether that rank has sent a message for which no receive was started, so that a receive from
  // any source can choose its peer. Any thread; never waits.
  Probe probe(int peer) const;

  // Collective and blocking. Throws UsageError on every rank when one of them lacks the memory
  // (the engine stays usable), CommError or TimeoutError when a peer is gone.
  std::shared_ptr<SymmetricBlock> symmetric(std::size_t bytes, const Deadline& deadline);

  // Breaks the engine on this rank and, at their next check, on its peers.
  void abort(const std::string& cause, int culprit = -1) noexcept;
  // The first cause; empty unless the engine is broken.
  std::string failure() const;

 private:
  explicit Engine(std::shared_ptr<EngineCore> core);
  std::shared_ptr<EngineCore> core_;
};

}  // namespace lockstep::shm
