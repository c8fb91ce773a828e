#include "lockstep/comm/world.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "lockstep/comm/world_impl.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/rendezvous/control.h"
#include "lockstep/rendezvous/startup.h"

namespace lockstep {

using detail::OperationInfo;
using detail::WorldImpl;

namespace detail {

const std::shared_ptr<WorldImpl>& Access::impl(const World& world) {
  return world.impl_;
}

// ---------------------------------------------------------------- WorldImpl

namespace {
// Long enough for any shape a person can read; fixed, so that the exchange itself cannot mismatch.
constexpr int64_t kFingerprintBytes = 256;
// The store answers in microseconds when it is alive; it is asked only to explain a failure.
constexpr std::chrono::milliseconds kExplainTimeout{3000};
constexpr std::chrono::milliseconds kAskAgain{20};

// How many barriers a rank has entered, and how many before its body returned: the last one.
std::string barrier_key(int rank, bool last) {
  return fmt::format("{}/{}", last ? "finish" : "barrier", rank);
}
}  // namespace

WorldImpl::WorldImpl(Identity identity_of, WorldOptions options_of, c10::Device device_of)
    : identity(std::move(identity_of)),
      options(std::move(options_of)),
      device(device_of),
      failure_state(std::make_shared<FailureState>(identity.rank)),
      debug(env::get_bool("LOCKSTEP_DEBUG").value_or(false)) {}

WorldImpl::~WorldImpl() {
  subscription_.reset();
  failure_state->set_hook(nullptr);
}

void WorldImpl::open(c10::intrusive_ptr<c10d::Store> rendezvous_store,
                     std::unique_ptr<Backend> host_backend,
                     std::unique_ptr<Backend> device_backend) {
  store = std::move(rendezvous_store);
  host = std::move(host_backend);
  accelerator = std::move(device_backend);
  if (host) backend_name = (accelerator ? accelerator : host)->name();
  failure_state->set_hook([this] {
    const int culprit = failure_state->blame().rank;
    if (accelerator) accelerator->abort(culprit);
    if (host) host->abort(culprit);
    const std::lock_guard lock(children_mutex_);
    for (auto& weak : children_) {
      if (auto child = weak.lock()) child->fail(failure_state->cause());
    }
  });
  subscription_ = control::subscribe(
      [failure_state = failure_state, part = identity.part](const control::PeerFailure& failure) {
        failure_state->fail(failure.text(), {part ? -1 : failure.rank});
      });
}

void WorldImpl::adopt(const std::shared_ptr<FailureState>& child) {
  const std::lock_guard lock(children_mutex_);
  std::erase_if(children_, [](const auto& weak) { return weak.expired(); });
  children_.push_back(child);
}

void WorldImpl::throw_if_failed(const OperationInfo& info) const {
  if (!failure_state->failed()) return;
  std::string cause = failure_state->cause();
  if (cause.back() != '.') cause += '.';
  const int culprit = failure_state->blame().rank;
  throw CommError(
      "world",
      fmt::format("rank {}: {} cannot start, because this world has failed: {} End this "
                  "rank; a failed world cannot be repaired.",
                  identity.rank, info.name, cause),
      {identity.rank, culprit >= 0 ? culprit : info.peer, info.name, info.sequence, {}});
}

std::shared_ptr<WorkState> WorldImpl::start(OperationInfo info,
                                            const std::function<std::string()>& what,
                                            std::optional<std::chrono::milliseconds> timeout) {
  // A recorded operation is not counted, since recording may fail on one rank.
  info.recorded = info.on_device && recording();
  info.sequence = info.recorded ? sequence.load() : ++sequence;
  if (!alone() && info.elements > 1 && at::isFloatingType(info.dtype)) exchanged_tensors = true;
  throw_if_failed(info);
  const auto limit = timeout.value_or(options.timeout);
  auto deadline = Deadline::after(limit);
  if (!info.recorded) info.ledger = post(info, deadline, /*message=*/false);
  if (debug && !alone() && !info.recorded) {
    compare_fingerprints(info, what());
    deadline = Deadline::after(limit);
  }
  auto state = std::make_shared<WorkState>(info, deadline, failure_state);
  failure_state->add(state);
  return state;
}

std::shared_ptr<WorkState> WorldImpl::start_message(OperationInfo info) {
  info.recorded = info.on_device && recording();
  info.sequence = info.recorded ? messages.load() : ++messages;
  if (!alone() && info.elements > 1 && at::isFloatingType(info.dtype)) exchanged_tensors = true;
  throw_if_failed(info);
  const auto deadline = Deadline::after(options.timeout);
  if (!info.recorded) info.ledger = post(info, deadline, /*message=*/true);
  auto state = std::make_shared<WorkState>(info, deadline, failure_state);
  failure_state->add(state);
  return state;
}

// In a world of one no rank waits for another, so nothing is posted. Reuses the time that the
// deadline has read.
ledger::Ticket WorldImpl::post(const OperationInfo& info, const Deadline& deadline,
                               bool message) const {
  if (alone()) return 0;
  const auto began = (deadline.time() - deadline.total()).time_since_epoch();
  const bool sized = info.elements >= 0;
  return ledger::post(
      {.name = info.name,
       .dtype = sized ? c10::toString(info.dtype) : "",
       .group = group,
       .sequence = info.sequence,
       .bytes =
           sized ? static_cast<std::uint64_t>(info.elements) * c10::elementSize(info.dtype) : 0,
       .peer = info.peer,
       .message = message,
       .time_ns = static_cast<std::uint64_t>(began / std::chrono::nanoseconds(1))});
}

Backend& WorldImpl::backend_for(const at::Tensor& tensor) const {
  LOCKSTEP_ASSERT(host != nullptr);
  if (tensor.is_cpu()) return *host;
  // Without an accelerator other devices' tensors are staged, if there is something to stage.
  if (accelerator ? tensor.device() != device : tensor.is_meta()) {
    throw UsageError("world",
                     "rank {}: the tensor is on {}, but this rank's device is {}. Move it "
                     "there (tensor.to(world.device())).",
                     identity.rank, tensor.device().str(), device.str());
  }
  return accelerator ? *accelerator : *host;
}

void WorldImpl::compare_fingerprints(OperationInfo info, const std::string& what) {
  info.ledger = 0;  // the comparison is not the operation
  std::string mine = fmt::format("#{} {} {}", info.sequence, info.name, what);
  mine.resize(kFingerprintBytes, '\0');
  const at::Tensor input =
      at::from_blob(mine.data(), {kFingerprintBytes}, at::dtype(at::kByte)).clone();
  at::Tensor all = at::empty({identity.size * kFingerprintBytes}, input.options());
  auto state = std::make_shared<WorkState>(info, Deadline::after(options.timeout), failure_state);
  failure_state->add(state);
  launch(state, [&] { host->all_gather(state, all, input); });
  state->wait_host(std::nullopt);
  const char* data = static_cast<const char*>(all.const_data_ptr());
  for (int rank = 0; rank < identity.size; ++rank) {
    const char* theirs = data + rank * kFingerprintBytes;
    if (std::memcmp(theirs, mine.data(), kFingerprintBytes) == 0) continue;
    const std::string text = fmt::format(
        "ranks call different operations.\n  rank {}: {}\n  rank {}: {}\nEvery rank must call the "
        "same operations in the same order, with tensors of the same dtype and shape; look for a "
        "branch on the rank or on local data.",
        identity.rank, mine.c_str(), rank,
        std::string_view(theirs, ::strnlen(theirs, kFingerprintBytes)));
    failure_state->fail(text, {rank, false});
    throw CommError("world", text, {identity.rank, rank, info.name, info.sequence, {}});
  }
}

void WorldImpl::barrier(std::optional<std::chrono::milliseconds> timeout, bool last) {
  const OperationInfo info{last ? "finish" : "barrier", 0, at::kByte, -1, -1};
  const auto state = start(info, [] { return std::string(); }, timeout);
  const std::uint64_t count = ++barriers;
  if (alone()) {
    state->complete();
    return;
  }
  // Only to name those that are missing; the barrier itself does not need the store, and the rank
  // that hosts it may be gone at the end of a run.
  try {
    store->set(barrier_key(identity.rank, last), std::to_string(count));
  } catch (const std::exception&) {
  }
  at::Tensor token = at::zeros({1}, at::kByte);
  launch(state, [&] {
    if (!host->barrier(state, last)) host->all_reduce(state, token, ReduceOp::kSum);
  });
  if (state->await(state->deadline())) return state->wait_host(std::nullopt);
  const std::vector<int> missing = missing_from_barrier(count, last);
  std::string who = "which ranks did not arrive is not known, because the store does not answer";
  if (!missing.empty()) who = fmt::format("{} did not arrive", name_ranks(missing));
  state->expire(
      fmt::format("{}{}: {} within {} ms (world of {}). They are stuck or on another path. "
                  "Look at their output, set LOCKSTEP_DEBUG=1 to see the call that differs, or "
                  "give the barrier a longer deadline.",
                  state->describe(), last ? " (this rank has returned from its body)" : "", who,
                  state->deadline().total().count(), identity.size),
      {missing.empty() ? -1 : missing.front()});
  state->wait_host(std::nullopt);  // throws it
}

std::vector<int> WorldImpl::missing_from_barrier(std::uint64_t count, bool last) {
  using Ranks = std::vector<int>;
  const auto ask = [store = store, size = identity.size, count, last]() -> Ranks {
    Ranks missing;
    for (int rank = 0; rank < size; ++rank) {
      const std::string key = barrier_key(rank, last);
      const bool there = store->check({key}) && std::stoull(store->get_to_str(key)) >= count;
      if (!there) missing.push_back(rank);
    }
    return missing;
  };
  try {
    return run_with_deadline<Ranks>("asking the store", Deadline::after(kExplainTimeout), ask);
  } catch (const std::exception&) {
    return {};  // the store is gone too; the caller says so
  }
}

bool WorldImpl::all_finish(std::chrono::milliseconds limit) {
  if (alone()) return true;
  const std::uint64_t count = barriers + 1;
  const Deadline deadline = Deadline::after(limit);
  try {
    const auto ask = [store = store, me = identity.rank, size = identity.size, count, deadline] {
      store->set(barrier_key(me, /*last=*/true), std::to_string(count));
      for (int rank = 0; rank < size;) {
        if (deadline.expired()) return false;
        const std::string key = barrier_key(rank, /*last=*/true);
        if (store->check({key}) && std::stoull(store->get_to_str(key)) >= count)
          ++rank;
        else
          std::this_thread::sleep_for(kAskAgain);
      }
      return true;
    };
    return run_with_deadline<bool>("asking the store", deadline, ask) && !failure_state->failed();
  } catch (const std::exception&) {
    return false;  // the store is gone, and with it the rank that hosts it
  }
}

}  // namespace detail

// ---------------------------------------------------------------- who

World::World()
    : impl_(std::make_shared<WorldImpl>(Identity{}, WorldOptions{}, c10::Device(c10::kCPU))) {}
World::World(std::shared_ptr<detail::WorldImpl> impl) : impl_(std::move(impl)) {}

int World::rank() const {
  return impl_->identity.rank;
}
int World::size() const {
  return impl_->identity.size;
}
int World::local_rank() const {
  return impl_->identity.local_rank;
}
int World::local_size() const {
  return impl_->identity.local_size;
}
int World::node_rank() const {
  return impl_->identity.node;
}
c10::Device World::device() const {
  return impl_->device;
}
const std::string& World::backend() const {
  return impl_->backend_name;
}
bool World::shares_memory() const {
  return !impl_->accelerator && impl_->host && impl_->host->shares_memory();
}
std::chrono::milliseconds World::timeout() const {
  return impl_->options.timeout;
}
void World::abort(const std::string& cause) {
  impl_->failure_state->fail(cause);
}

// ---------------------------------------------------------------- blocking conveniences

std::vector<at::Tensor> World::all_gather(const at::Tensor& input) {
  const ledger::CallSite here;
  std::vector<int64_t> shape = input.sizes().vec();
  shape.insert(shape.begin(), size());
  at::Tensor output = at::empty(shape, input.options().requires_grad(false));
  all_gather(output, input).wait();
  return output.unbind(0);
}

std::vector<at::Tensor> World::all_gather_v(const at::Tensor& input) {
  const ledger::CallSite here;
  if (!input.defined() || input.dim() == 0) {
    throw UsageError("world",
                     "all_gather_v: the tensor needs a first dimension, which may "
                     "differ between ranks. Use all_gather for single numbers.");
  }
  const at::Tensor plain = input.detach();
  std::vector<int64_t> rows;
  for (const auto& each : all_gather(at::scalar_tensor(plain.size(0), at::kLong)))
    rows.push_back(each.item<int64_t>());
  std::vector<int64_t> shape = plain.sizes().vec();
  shape[0] = *std::max_element(rows.begin(), rows.end());
  at::Tensor padded = plain;
  if (shape[0] != plain.size(0)) {
    padded = at::empty(shape, plain.options());
    padded.narrow(0, 0, plain.size(0)).copy_(plain);
  }
  std::vector<at::Tensor> result = all_gather(padded);
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = result[i].narrow(0, 0, rows[i]);
  return result;
}

void World::barrier(std::optional<std::chrono::milliseconds> timeout) {
  const ledger::CallSite here;
  impl_->barrier(timeout, /*last=*/false);
}

void World::finish(std::optional<std::chrono::milliseconds> timeout) {
  const ledger::CallSite here;
  // Enqueued operations must reach the peers before the communicator is freed.
  if (impl_->accelerator) {
    const c10::impl::VirtualGuardImpl accelerator(device().type());
    accelerator.synchronizeDevice(device().index());
  }
  impl_->barrier(timeout, /*last=*/true);
}

// ---------------------------------------------------------------- structure

std::optional<World> World::split(int color, int key) {
  const ledger::CallSite here;
  const at::Tensor mine = at::tensor({color, key}, at::kInt);
  const std::vector<at::Tensor> all = all_gather(mine);
  const int round = impl_->splits++;
  if (color < 0) return std::nullopt;
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (int other = 0; other < size(); ++other) {
    const auto* pair = all[static_cast<std::size_t>(other)].const_data_ptr<int>();
    if (pair[0] == color) members.emplace_back(pair[1], other);
  }
  std::sort(members.begin(), members.end());
  const auto me = std::find(members.begin(), members.end(), std::pair(key, rank()));
  Identity identity = impl_->identity;
  identity.rank = static_cast<int>(me - members.begin());
  identity.size = static_cast<int>(members.size());
  return detail::connect_child(*impl_, identity, fmt::format("split/{}/{}", round, color));
}

// ---------------------------------------------------------------- CUDA graphs

bool recording(const World& world) {
  return detail::Access::impl(world)->recording();
}

Work after_stream(World& world, const char* name) {
  const ledger::CallSite here;
  detail::WorldImpl& impl = *detail::Access::impl(world);
  const auto state = impl.start({.name = name, .elements = -1}, [] { return std::string(); });
  if (impl.alone() || !impl.accelerator) {
    state->complete();
  } else {
    impl.launch(state, [&] { impl.accelerator->after_stream(state); });
  }
  return Work(state);
}

}  // namespace lockstep
