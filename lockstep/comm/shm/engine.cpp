#include "lockstep/comm/shm/engine.h"

#include <poll.h>

#include <type_traits>
#include <utility>

#include "lockstep/comm/shm/collectives.h"
#include "lockstep/comm/shm/engine_core.h"
#include "lockstep/comm/shm/segment.h"
#include "lockstep/core/error.h"

namespace lockstep::shm {
namespace {

void check_reduction(DType dtype, Op op) {
  if (!supports(dtype, op))
    throw UsageError("shm", "there is no {} of {}. Convert the array or choose another operation.",
                     name(op), name(dtype));
}

void check_rank(const Group& group, int rank, const char* role) {
  if (rank < 0 || rank >= group.size())
    throw UsageError("shm", "rank {} as {} does not exist: there are ranks 0 to {}.", rank, role,
                     group.size() - 1);
}

void check_peer(const Group& group, int peer) {
  check_rank(group, peer, "the other end of a message");
  if (peer == group.rank())
    throw UsageError("shm", "rank {} cannot send a message to itself. Copy the array.", peer);
}

void check_list(const Group& group, std::size_t parts) {
  if (parts != static_cast<std::size_t>(group.size()))
    throw UsageError("shm", "a list of {} parts for {} ranks. Give one part per rank.", parts,
                     group.size());
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

template <typename Operation, typename... Args>
TicketPtr start(EngineCore& core, const StartOptions& options, Args&&... args) {
  auto operation =
      std::make_shared<Operation>(core.group(), options.deadline, std::forward<Args>(args)...);
  if constexpr (std::is_base_of_v<Collective, Operation>) {
    operation->what.number = static_cast<std::uint32_t>(options.number);
    operation->what.saving = options.saving;
  }
  core.start(operation, options.caller_waits);
  return operation;
}

}  // namespace

EngineResult Engine::make(KeyValueStore& kv, const RankAndSize& place, const EngineOptions& options,
                          const Deadline& deadline) {
  if (place.size < 1 || place.size > kMaxRanks || place.rank < 0 || place.rank >= place.size)
    throw UsageError("shm", "rank {} of {} does not exist: an engine has 1 to {} ranks.",
                     place.rank, place.size, kMaxRanks);
  const Layout layout(place.size, options);
  const auto make_segment = [&] {
    auto segment = Segment::make(layout.segment_bytes());
    layout.construct(segment->data());
    return segment;
  };
  PeersResult result = connect_peers(kv, place, {layout.segment_bytes(), make_segment}, deadline);
  EngineResult made;
  made.unavailable_reason = result.unavailable_reason;
  if (made.unavailable_reason.empty())
    made.unavailable_reason = difference_of_form(layout, result.peers);
  if (!made.unavailable_reason.empty()) return made;
  result.peers[static_cast<std::size_t>(place.rank)].segment->close_fd();
  made.engine.reset(new Engine(
      std::make_shared<EngineCore>(place, layout, std::move(result.peers), options.policy)));
  return made;
}

Engine::Engine(std::shared_ptr<EngineCore> core) : core_(std::move(core)) {}
Engine::~Engine() {
  // A forked child has a copy of everything except the thread. Even destroying it could wait for
  // that thread forever, so the child keeps it until it ends.
  if (core_->inherited())
    new std::shared_ptr<EngineCore>(std::move(core_));
  else
    core_->close();
}

int Engine::rank() const {
  return core_->group().rank();
}
int Engine::size() const {
  return core_->group().size();
}

TicketPtr Engine::all_reduce(void* data, std::size_t count, DType dtype, Op op,
                             const StartOptions& options) {
  check_reduction(dtype, op);
  return start<AllReduce>(*core_, options, AllReduce::Call{data, count, dtype, op});
}

TicketPtr Engine::reduce(void* data, std::size_t count, DType dtype, Op op, int root,
                         const StartOptions& options) {
  check_reduction(dtype, op);
  check_rank(core_->group(), root, "root");
  return start<AllReduce>(*core_, options, AllReduce::Call{data, count, dtype, op, root});
}

TicketPtr Engine::broadcast(void* data, std::size_t bytes, int root, const StartOptions& options) {
  check_rank(core_->group(), root, "root");
  return start<Broadcast>(*core_, options, Part{data, bytes}, root);
}

TicketPtr Engine::all_gather(void* output, const void* input, std::size_t bytes,
                             const StartOptions& options) {
  return start<AllGather>(*core_, options, output, ConstPart{input, bytes});
}

TicketPtr Engine::all_gather_v(std::vector<std::vector<std::byte>>& outputs, ConstPart input,
                               const StartOptions& options) {
  return start<AllGatherV>(*core_, options, outputs, input);
}

TicketPtr Engine::reduce_scatter(void* output, const void* input, std::size_t count, DType dtype,
                                 Op op, const StartOptions& options) {
  check_reduction(dtype, op);
  return start<ReduceScatter>(*core_, options,
                              ReduceScatter::Call{output, input, count, dtype, op});
}

TicketPtr Engine::gather(std::vector<Part> outputs, ConstPart input, int root,
                         const StartOptions& options) {
  const Group& group = core_->group();
  check_rank(group, root, "root");
  const auto size = static_cast<std::size_t>(group.size());
  Exchange::Call call{Kind::kGather, root, std::vector<ConstPart>(size), std::vector<Part>(size)};
  if (group.rank() == root) {
    check_list(group, outputs.size());
    call.receives = std::move(outputs);
    check_self(input.bytes, call.receives[static_cast<std::size_t>(root)].bytes);
  }
  call.sends[static_cast<std::size_t>(root)] = input;
  return start<Exchange>(*core_, options, std::move(call));
}

TicketPtr Engine::scatter(Part output, std::vector<ConstPart> inputs, int root,
                          const StartOptions& options) {
  const Group& group = core_->group();
  check_rank(group, root, "root");
  const auto size = static_cast<std::size_t>(group.size());
  Exchange::Call call{Kind::kScatter, root, std::vector<ConstPart>(size), std::vector<Part>(size)};
  if (group.rank() == root) {
    check_list(group, inputs.size());
    call.sends = std::move(inputs);
    check_self(call.sends[static_cast<std::size_t>(root)].bytes, output.bytes);
  }
  call.receives[static_cast<std::size_t>(root)] = output;
  return start<Exchange>(*core_, options, std::move(call));
}

TicketPtr Engine::all_to_all(std::vector<Part> outputs, std::vector<ConstPart> inputs,
                             const StartOptions& options) {
  const Group& group = core_->group();
  check_list(group, outputs.size());
  check_list(group, inputs.size());
  const auto own = static_cast<std::size_t>(group.rank());
  check_self(inputs[own].bytes, outputs[own].bytes);
  return start<Exchange>(
      *core_, options, Exchange::Call{Kind::kAllToAll, -1, std::move(inputs), std::move(outputs)});
}

TicketPtr Engine::barrier(const StartOptions& options) {
  return start<Barrier>(*core_, options, Kind::kBarrier);
}

TicketPtr Engine::finish(const StartOptions& options) {
  return start<Barrier>(*core_, options, Kind::kFinish);
}

TicketPtr Engine::send(const void* data, std::size_t bytes, int peer, const StartOptions& options) {
  check_peer(core_->group(), peer);
  auto* const from = const_cast<std::byte*>(static_cast<const std::byte*>(data));
  return start<Message>(*core_, options, Message::Ends{from, bytes, peer, true});
}

TicketPtr Engine::recv(void* data, std::size_t bytes, int peer, const StartOptions& options) {
  check_peer(core_->group(), peer);
  return start<Message>(*core_, options,
                        Message::Ends{static_cast<std::byte*>(data), bytes, peer, false});
}

Probe Engine::probe(int peer) const {
  const Group& group = core_->group();
  check_peer(group, peer);
  // Read the state first: everything written before a rank closed is then visible.
  const View& theirs = group.view(peer);
  const State state = theirs.header->state.load();
  pollfd ended{group.peers()[static_cast<std::size_t>(peer)].pidfd.get(), POLLIN, 0};
  const bool gone = ::poll(&ended, 1, 0) > 0;
  const Ring& ring = group.layout().ring(theirs, group.rank());
  if (ring.written.load() != ring.taken.load()) return Probe::kWaiting;
  if (state == State::kClosed) return Probe::kClosed;
  return gone || state == State::kBroken ? Probe::kFailed : Probe::kNone;
}

std::shared_ptr<SymmetricBlock> Engine::symmetric(std::size_t bytes, const Deadline& deadline) {
  const auto core = core_;  // this thread may be the last to know of it
  return core->make_symmetric(bytes, deadline);
}

void Engine::abort(const std::string& cause, int culprit) noexcept {
  const auto core = core_;  // a callback may drop the engine
  if (core->inherited()) return;
  core->fail({.text = cause, .culprit = culprit});
}

std::string Engine::failure() const {
  return core_->failure().text();
}

// ---------------------------------------------------------------- tickets

void Ticket::wait(const Deadline& deadline) {
  engine_->wait(*this, deadline);
  if (auto failed = error()) std::rethrow_exception(failed);
}

void Ticket::wait() {
  wait(deadline_);
}

bool Ticket::poll() {
  return done() || engine_->poll(*this);
}

std::exception_ptr Ticket::error() const {
  return done() ? error_ : nullptr;  // stays as it is from then on
}

void Ticket::on_done(std::function<void()> callback) {
  // In a forked child nothing ends any more, and a lock may be held by a thread of the parent.
  if (engine_->inherited()) {
    new std::function<void()>(std::move(callback));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!done()) {
      callback_ = std::move(callback);
      callback = nullptr;
    }
  }
  if (callback)
    callback();
  else
    engine_->request_progress();
}

void Completions::finish(Ticket& ticket, std::exception_ptr error) {
  const std::lock_guard lock(ticket.mutex_);
  ticket.error_ = std::move(error);
  if (ticket.callback_) callbacks.push_back(std::exchange(ticket.callback_, nullptr));
  ticket.done_.store(true, std::memory_order_release);
  any = true;
}

}  // namespace lockstep::shm
