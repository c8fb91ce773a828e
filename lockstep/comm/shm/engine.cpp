#include "lockstep/comm/shm/engine.h"

#include <poll.h>

#include "lockstep/comm/shm/collectives.h"
#include "lockstep/comm/shm/engine_core.h"
#include "lockstep/comm/shm/layout.h"
#include "lockstep/comm/shm/segment.h"
#include "lockstep/core/error.h"

namespace lockstep::shm {
namespace {

void check_reduction(DType dtype, Op op) {
  if (!supports(dtype, op))
    throw UsageError("shm", "there is no {} of {}. Convert the array or choose another operation.",
                     name(op), name(dtype));
}

void check_rank(const RankInfo& place, int rank, const char* role) {
  if (rank < 0 || rank >= place.size)
    throw UsageError("shm", "rank {} as {} does not exist: there are ranks 0 to {}.", rank, role,
                     place.size - 1);
}

void check_peer(const RankInfo& place, int peer) {
  check_rank(place, peer, "the other end of a message");
  if (peer == place.rank)
    throw UsageError("shm", "rank {} cannot send a message to itself. Copy the array.", peer);
}

void check_list(const RankInfo& place, std::size_t parts) {
  if (parts != static_cast<std::size_t>(place.size))
    throw UsageError("shm", "a list of {} parts for {} ranks. Give one part per rank.", parts,
                     place.size);
}

void check_self(std::size_t sent, std::size_t expected) {
  if (sent != expected)
    throw UsageError("shm", "this rank sends {} bytes to itself but expects {}.", sent, expected);
}

// Why these ranks cannot use each other's segments, or nothing; the same on all of them.
std::string difference_of_form(const Layout& layout, const std::vector<Peer>& peers) {
  const auto form_of = [&](std::size_t rank) -> const Form& {
    return layout.view(peers[rank].segment->data()).header->form;
  };
  for (std::size_t rank = 1; rank < peers.size(); ++rank)
    if (!(form_of(rank) == form_of(0)))
      return fmt::format("rank {} divides its buffers in another way than rank 0 ({}; {})", rank,
                         form_of(rank).text(), form_of(0).text());
  return "";
}

}  // namespace

EngineResult Engine::make(KeyValueStore& kv, const RankInfo& place, const EngineOptions& options,
                          const Deadline& deadline) {
  if (place.size < 1 || place.size > kMaxRanks || place.rank < 0 || place.rank >= place.size)
    throw UsageError("shm", "rank {} of {} makes no sense: an engine has 1 to {} ranks.",
                     place.rank, place.size, kMaxRanks);
  const Layout layout(place.size, options);
  const auto make_segment = [&] {
    auto segment = Segment::make(layout.segment_bytes());
    layout.construct(segment->data());
    return segment;
  };
  Rendezvous rendezvous =
      connect_peers(kv, place, {layout.segment_bytes(), make_segment}, deadline);
  EngineResult made;
  made.unavailable_reason = rendezvous.unavailable_reason;
  if (made.unavailable_reason.empty())
    made.unavailable_reason = difference_of_form(layout, rendezvous.peers);
  if (!made.unavailable_reason.empty()) return made;
  rendezvous.peers[static_cast<std::size_t>(place.rank)].segment->close_fd();
  made.engine.reset(
      new Engine(std::make_shared<EngineCore>(place, layout, std::move(rendezvous.peers))));
  return made;
}

Engine::Engine(std::shared_ptr<EngineCore> core) : core_(std::move(core)) {}
Engine::~Engine() {
  // A forked child has a copy of all but the thread. Even taking it apart could wait for that one
  // forever, so the child keeps it until its end.
  if (core_->inherited())
    new std::shared_ptr<EngineCore>(std::move(core_));
  else
    core_->close();
}

int Engine::rank() const {
  return core_->place().rank;
}
int Engine::size() const {
  return core_->place().size;
}

TicketPtr Engine::all_reduce(void* data, std::size_t count, DType dtype, Op op,
                             const StartOptions& options) {
  check_reduction(dtype, op);
  auto ticket =
      std::make_shared<AllReduce>(core_, options.deadline, AllReduce::Call{data, count, dtype, op});
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::reduce(void* data, std::size_t count, DType dtype, Op op, int root,
                         const StartOptions& options) {
  check_reduction(dtype, op);
  check_rank(core_->place(), root, "root");
  auto ticket = std::make_shared<AllReduce>(core_, options.deadline,
                                            AllReduce::Call{data, count, dtype, op, root});
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::broadcast(void* data, std::size_t bytes, int root, const StartOptions& options) {
  check_rank(core_->place(), root, "root");
  auto ticket = std::make_shared<Broadcast>(core_, options.deadline, Part{data, bytes}, root);
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::all_gather(void* output, const void* input, std::size_t bytes,
                             const StartOptions& options) {
  auto ticket =
      std::make_shared<AllGather>(core_, options.deadline, output, ConstPart{input, bytes});
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::all_gather_v(std::vector<std::vector<std::byte>>& outputs, ConstPart input,
                               const StartOptions& options) {
  auto ticket = std::make_shared<AllGatherV>(core_, options.deadline, outputs, input);
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::reduce_scatter(void* output, const void* input, std::size_t count, DType dtype,
                                 Op op, const StartOptions& options) {
  check_reduction(dtype, op);
  auto ticket = std::make_shared<ReduceScatter>(
      core_, options.deadline, ReduceScatter::Call{output, input, count, dtype, op});
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::gather(std::vector<Part> outputs, ConstPart input, int root,
                         const StartOptions& options) {
  const RankInfo& place = core_->place();
  check_rank(place, root, "root");
  const auto size = static_cast<std::size_t>(place.size);
  Exchange::Call call{Kind::kGather, root, std::vector<ConstPart>(size), std::vector<Part>(size)};
  if (place.rank == root) {
    check_list(place, outputs.size());
    call.receives = std::move(outputs);
    check_self(input.bytes, call.receives[static_cast<std::size_t>(root)].bytes);
  }
  call.sends[static_cast<std::size_t>(root)] = input;
  auto ticket = std::make_shared<Exchange>(core_, options.deadline, std::move(call));
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::scatter(Part output, std::vector<ConstPart> inputs, int root,
                          const StartOptions& options) {
  const RankInfo& place = core_->place();
  check_rank(place, root, "root");
  const auto size = static_cast<std::size_t>(place.size);
  Exchange::Call call{Kind::kScatter, root, std::vector<ConstPart>(size), std::vector<Part>(size)};
  if (place.rank == root) {
    check_list(place, inputs.size());
    call.sends = std::move(inputs);
    check_self(call.sends[static_cast<std::size_t>(root)].bytes, output.bytes);
  }
  call.receives[static_cast<std::size_t>(root)] = output;
  auto ticket = std::make_shared<Exchange>(core_, options.deadline, std::move(call));
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::all_to_all(std::vector<Part> outputs, std::vector<ConstPart> inputs,
                             const StartOptions& options) {
  const RankInfo& place = core_->place();
  check_list(place, outputs.size());
  check_list(place, inputs.size());
  const auto own = static_cast<std::size_t>(place.rank);
  check_self(inputs[own].bytes, outputs[own].bytes);
  auto ticket = std::make_shared<Exchange>(
      core_, options.deadline,
      Exchange::Call{Kind::kAllToAll, -1, std::move(inputs), std::move(outputs)});
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::barrier(const StartOptions& options) {
  auto ticket = std::make_shared<Barrier>(core_, options.deadline);
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::send(const void* data, std::size_t bytes, int peer, const StartOptions& options) {
  check_peer(core_->place(), peer);
  auto* const from = const_cast<std::byte*>(static_cast<const std::byte*>(data));
  auto ticket =
      std::make_shared<Message>(core_, options.deadline, Message::Ends{from, bytes, peer, true});
  core_->start(ticket, options.caller_waits);
  return ticket;
}

TicketPtr Engine::recv(void* data, std::size_t bytes, int peer, const StartOptions& options) {
  check_peer(core_->place(), peer);
  auto ticket = std::make_shared<Message>(
      core_, options.deadline, Message::Ends{static_cast<std::byte*>(data), bytes, peer, false});
  core_->start(ticket, options.caller_waits);
  return ticket;
}

Probe Engine::probe(int peer) const {
  check_peer(core_->place(), peer);
  // The state first: what a rank has written before it closed is there when it says so.
  const View& theirs = core_->view(peer);
  const State state = theirs.header->state.load();
  pollfd ended{core_->peers()[static_cast<std::size_t>(peer)].pidfd.get(), POLLIN, 0};
  const bool gone = ::poll(&ended, 1, 0) > 0;
  const Ring& ring = core_->layout().ring(theirs, core_->place().rank);
  if (ring.written.load() != ring.taken.load()) return Probe::kWaiting;
  if (state == State::kClosed) return Probe::kClosed;
  return gone || state == State::kBroken ? Probe::kFailed : Probe::kNone;
}

std::shared_ptr<SymmetricBlock> Engine::symmetric(std::size_t bytes, const Deadline& deadline) {
  const auto core = core_;  // this thread may be the last to know of it
  core->throw_if_broken();
  try {
    return make_symmetric(*core, bytes, deadline);
  } catch (const CommError& error) {
    // The ranks may no longer agree on what has been said: nothing can follow.
    EngineFailure failure;
    failure.text = error_text(error);
    failure.timeout = dynamic_cast<const TimeoutError*>(&error) != nullptr;
    failure.culprit = error.context().peer;
    core->break_with(std::move(failure));
    core->settle();
    throw;
  }
}

bool Engine::is_symmetric(const void* data, std::size_t bytes) const {
  return core_->blocks().find(data, bytes).block != nullptr;
}

void Engine::abort(const std::string& cause, int culprit) noexcept {
  const auto core = core_;  // a callback may drop the engine
  if (core->inherited()) return;
  EngineFailure failure;
  failure.culprit = culprit;
  failure.text = cause;
  core->break_with(std::move(failure));
  core->settle();
}

std::string Engine::failure() const {
  return core_->failure();
}

}  // namespace lockstep::shm
