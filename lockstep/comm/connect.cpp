#include "lockstep/comm/connect.h"

#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <type_traits>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/c10d.h"
#include "lockstep/comm/device.h"
#include "lockstep/comm/world_impl.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/rendezvous/control.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/rendezvous/startup.h"
#include "lockstep/rendezvous/store_client.h"

// ---------------------------------------------------------------- the launcher's store

namespace lockstep::detail {
namespace {

using store::Command;

class LauncherStore : public c10d::Store {
 public:
  explicit LauncherStore(std::shared_ptr<StoreClient> client) : client_(std::move(client)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    auto copy = c10::make_intrusive<LauncherStore>(client_);
    copy->setTimeout(getTimeout());
    return copy;
  }

  void set(const std::string& key, const StoreBytes& value) override {
    post(StoreRequest(Command::kSet).key(key).value(value), "setting " + key);
  }
  void append(const std::string& key, const StoreBytes& value) override {
    post(StoreRequest(Command::kAppend).key(key).value(value), "appending to " + key);
  }
  void queuePush(const std::string& key, const StoreBytes& value) override {
    post(StoreRequest(Command::kQueuePush).key(key).value(value), "pushing to " + key);
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<StoreBytes>& values) override {
    if (keys.size() != values.size()) {
      throw UsageError("store", "multiSet was given {} keys and {} values.", keys.size(),
                       values.size());
    }
    StoreRequest request(Command::kMultiSet);
    request.number<std::uint64_t>(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) request.key(keys[i]).value(values[i]);
    post(request, "setting " + names(keys));
  }

  StoreBytes compareSet(const std::string& key, const StoreBytes& expected,
                        const StoreBytes& desired) override {
    return ask(StoreRequest(Command::kCompareSet).key(key).value(expected).value(desired),
               "comparing " + key, &StoreConnection::receive_value);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return ask_number(StoreRequest(Command::kAdd).key(key).number(amount), "adding to " + key);
  }
  bool deleteKey(const std::string& key) override {
    return ask_number(StoreRequest(Command::kDeleteKey).key(key), "deleting " + key) == 1;
  }
  std::int64_t getNumKeys() override {
    return ask_number(StoreRequest(Command::kNumKeys), "counting keys");
  }
  std::int64_t queueLen(const std::string& key) override {
    return ask_number(StoreRequest(Command::kQueueLen).key(key), "counting in " + key);
  }
  bool check(const std::vector<std::string>& keys) override {
    return ask(StoreRequest(Command::kCheck).keys(keys), "looking for " + names(keys),
               &StoreConnection::receive_number<char>) == store::kReady;
  }

  StoreBytes get(const std::string& key) override {
    wait({key});
    return ask(StoreRequest(Command::kGet).key(key), "reading " + key,
               &StoreConnection::receive_value);
  }
  std::vector<StoreBytes> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return ask(StoreRequest(Command::kMultiGet).keys(keys), "reading " + names(keys),
               [count = keys.size()](const StoreConnection& from, const StoreCall& call) {
                 std::vector<StoreBytes> values;
                 while (values.size() < count) values.push_back(from.receive_value(call));
                 return values;
               });
  }
  std::vector<std::string> listKeys() override {
    return ask(StoreRequest(Command::kListKeys), "listing keys",
               [](const StoreConnection& from, const StoreCall& call) {
                 std::vector<std::string> keys;
                 for (auto left = from.receive_number<std::int64_t>(call); left > 0; --left) {
                   const StoreBytes key = from.receive_value(call);
                   keys.emplace_back(key.begin(), key.end());
                 }
                 return keys;
               });
  }
  StoreBytes queuePop(const std::string& key, bool block) override {
    if (block) wait({key});
    const auto popped =
        ask(StoreRequest(Command::kQueuePop).key(key), "popping from " + key,
            [](const StoreConnection& from, const StoreCall& call) -> std::optional<StoreBytes> {
              if (from.receive_number<std::int64_t>(call) == 0) return std::nullopt;
              return from.receive_value(call);
            });
    TORCH_CHECK_WITH(DistQueueEmptyError, popped.has_value(), "queue is empty");
    return *popped;
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const char reply = client_->exchange(StoreRequest(Command::kWait).keys(keys),
                                         call_for("waiting for " + names(keys), timeout),
                                         &StoreConnection::receive_number<char>);
    LOCKSTEP_ASSERT(reply == store::kStopWaiting);
  }

  bool hasExtendedApi() const override { return true; }

 private:
  static std::string names(const std::vector<std::string>& keys) {
    constexpr std::size_t kShown = 8;
    std::string text;
    for (std::size_t i = 0; i < std::min(keys.size(), kShown); ++i)
      text += (i == 0 ? "" : ", ") + keys[i];
    if (keys.size() > kShown) text += fmt::format(" and {} more", keys.size() - kShown);
    return text;
  }

  static StoreCall call_for(const std::string& what, std::chrono::milliseconds timeout) {
    return {what,
            Deadline::after(timeout == c10d::Store::kNoTimeout ? std::chrono::milliseconds::max()
                                                               : timeout)};
  }

  template <typename Read, typename T = std::invoke_result_t<const Read&, const StoreConnection&,
                                                             const StoreCall&>>
  T ask(const StoreRequest& request, const std::string& what, const Read& read) {
    return client_->exchange(request, call_for(what, getTimeout()), read);
  }
  std::int64_t ask_number(const StoreRequest& request, const std::string& what) {
    return ask(request, what, &StoreConnection::receive_number<std::int64_t>);
  }
  void post(const StoreRequest& request, const std::string& what) {
    client_->change(request, call_for(what, getTimeout()));
  }

  const std::shared_ptr<StoreClient> client_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> open_launcher_store(int channel_fd) {
  auto store = c10::make_intrusive<LauncherStore>(std::make_shared<StoreClient>(channel_fd));
  store->getNumKeys();  // fails here when the launcher is gone
  return store;
}

}  // namespace lockstep::detail

namespace lockstep {

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using detail::Handshake;

constexpr const char* kWorld = "world";
constexpr std::chrono::seconds kProgressInterval{10};

// ---------------------------------------------------------------- start-up checks

std::string mode_of(const detail::DeviceChoice& choice, const WorldOptions& options) {
  const bool cuda = choice.device.is_cuda();
  return fmt::format("{} with {}{}", cuda ? "cuda" : "cpu",
                     choice.automatic ? "auto" : choice.backend,
                     cuda && options.share_device ? " (shared)" : "");
}

Handshake handshake_of(const Identity& identity, const WorldOptions& options,
                       const detail::DeviceChoice& choice) {
  const bool debug = env::get_bool("LOCKSTEP_DEBUG").value_or(false);
  return {.rank = identity.rank,
          .place = {identity.local_rank, identity.local_size, identity.node},
          .world_size = std::to_string(identity.size),
          .program = identity.program,
          .options = options.options_hash,
          .device = mode_of(choice, options),
          .debug = debug ? "on" : "off",
          .host = identity.host,
          .machine = machine_of(identity.host),
          .gpu = identity.gpu,
          // Named interfaces win over the address.
          .address = env::get("GLOO_SOCKET_IFNAME") ? "" : identity.address};
}

// Exchanges handshakes with all ranks and fills in this rank's place where it is not known.
void exchange_handshakes(const StorePtr& store, Identity& identity, const WorldOptions& options,
                         const detail::DeviceChoice& choice) {
  const detail::RankInfo place = detail::check_start(
      std::make_shared<detail::C10dStore>(store), handshake_of(identity, options, choice),
      {identity.size, options.share_device, options.startup_timeout});
  identity.local_rank = place.local_rank;
  identity.local_size = place.local_size;
  identity.node = place.node;
}

// ---------------------------------------------------------------- connecting

// Ranks that share GPUs are sorted into slots: within one, every rank has a GPU of its own.
std::string shared_host_id(const Identity& identity, const WorldOptions& options) {
  const int visible = cuda_device_count();
  if (!options.share_device || visible == 0) return "";
  return fmt::format("{}-slot{}", identity.host, identity.local_rank / visible);
}

using BackendPtr = std::unique_ptr<detail::Backend>;

// Null and a reason, the same on every rank, if the ranks cannot share memory.
BackendPtr connect_shm(const StorePtr& store, const Identity& identity, const WorldOptions& options,
                       std::string* unavailable_reason) {
  const detail::shm::Options own{.store = c10::make_intrusive<c10d::PrefixStore>("shm", store),
                                 .rank = identity.rank,
                                 .size = identity.size,
                                 .startup_timeout = options.startup_timeout};
  detail::shm::BackendResult made = detail::run_with_deadline<detail::shm::BackendResult>(
      "sharing memory", Deadline::after(options.startup_timeout + std::chrono::seconds(2)),
      [own] { return detail::shm::make(own); });
  *unavailable_reason = std::move(made.unavailable_reason);
  if (!unavailable_reason->empty() && unavailable_reason->back() != '.') *unavailable_reason += '.';
  return std::move(made.backend);
}

constexpr const char* kGlooFailed = "failed";

// The end of the store is not an error here: its host leaves only when all are connected, or
// failed.
void wait_until_all_are_connected(const detail::gloo::Options& own) noexcept {
  try {
    own.store->add("connected", 1);
    const auto all = [&] { return own.store->add("connected", 0) >= own.size; };
    poll_until([&] { return all() || own.store->check({kGlooFailed}); },
               Deadline::after(own.startup_timeout));
  } catch (const std::exception&) {
  }
}

void report_failure(const detail::gloo::Options& own) noexcept {
  try {
    own.store->set(kGlooFailed, std::vector<std::uint8_t>{1});
  } catch (const std::exception&) {
  }
}

// A connected rank may destroy its world at once, which ranks that are still connecting would see
// as a broken connection. So all wait here until every rank is connected, or one has failed.
BackendPtr make_gloo(const detail::gloo::Options& own) {
  try {
    BackendPtr backend = detail::gloo::make(own);
    wait_until_all_are_connected(own);
    return backend;
  } catch (...) {
    report_failure(own);
    throw;
  }
}

BackendPtr connect_gloo(const StorePtr& store, const Identity& identity,
                        const WorldOptions& options) {
  const detail::gloo::Options own{.store = c10::make_intrusive<c10d::PrefixStore>("gloo", store),
                                  .rank = identity.rank,
                                  .size = identity.size,
                                  .address = identity.address,
                                  .startup_timeout = options.startup_timeout,
                                  .timeout = options.timeout};
  return detail::run_with_deadline<BackendPtr>(
      "connecting gloo", Deadline::after(options.startup_timeout + std::chrono::seconds(2)),
      [own] { return make_gloo(own); });
}

// The store ends with the rank that hosts it, so all ranks wait here until each has read the
// refusal. A rank that is cut off while waiting already knows the reason.
void wait_until_all_know(const StorePtr& store, int size) {
  constexpr std::chrono::seconds kLateComers{8};
  try {
    detail::run_with_deadline<bool>(
        "reporting a refusal", Deadline::after(kLateComers + std::chrono::seconds(1)),
        [store, size, limit = Deadline::after(kLateComers)] {
          store->add("refusal_heard", 1);
          return poll_until([&] { return store->add("refusal_heard", 0) >= size; }, limit);
        });
  } catch (const std::exception&) {
  }
}

// Connects the backend for CPU tensors. Unless shm was requested, gloo replaces it on all ranks.
BackendPtr connect_host(const StorePtr& store, detail::WorldImpl& impl,
                        const detail::DeviceChoice& choice) {
  impl.automatic = choice.automatic;
  if (choice.backend == "shm") {
    if (auto shm = connect_shm(store, impl.identity, impl.options, &impl.shm_unavailable_reason))
      return shm;
    if (!choice.automatic) {
      wait_until_all_know(store, impl.identity.size);
      throw UsageError(kWorld, "backend shm was asked for, but {} Use backend gloo there.",
                       impl.shm_unavailable_reason);
    }
  }
  return connect_gloo(store, impl.identity, impl.options);
}

World open_world(const StorePtr& store, const Identity& identity, const WorldOptions& options,
                 const detail::DeviceChoice& choice, std::string group = {}) {
  auto impl = std::make_shared<detail::WorldImpl>(identity, options, choice.device);
  const auto deadline = Deadline::after(options.startup_timeout + std::chrono::seconds(2));
  BackendPtr host_backend = connect_host(store, *impl, choice);
  BackendPtr device_backend;
  if (choice.backend == "nccl") {
    const detail::nccl::Options gpu{.store = c10::make_intrusive<c10d::PrefixStore>("nccl", store),
                                    .rank = identity.rank,
                                    .size = identity.size,
                                    .device = choice.device,
                                    .shared_host_id = shared_host_id(identity, options)};
    device_backend = detail::run_with_deadline<BackendPtr>(
        "connecting nccl", deadline, [gpu] { return detail::nccl::make(gpu); });
  }
  impl->open(store, std::move(host_backend), std::move(device_backend));
  impl->group = std::move(group);
  // Tells the launcher which ranks the group has.
  if (identity.size > 1)
    ledger::ended(ledger::post({.name = "connect", .group = impl->group}), ledger::End::kFinished);
  return World(impl);
}

World connect_as(const StorePtr& store, Identity identity, const WorldOptions& options,
                 const detail::DeviceChoice& choice) {
  if (identity.host.empty()) identity.host = host_name();
  if (identity.program.empty())
    identity.program = fmt::format("{} (torch {})", build_id(), TORCH_VERSION);
  if (choice.device.is_cuda()) {
    detail::nccl::set_device(choice.device);
    if (identity.gpu.empty()) identity.gpu = detail::cuda_device_id(choice.device.index());
  }
  if (identity.size > 1) exchange_handshakes(store, identity, options, choice);
  return open_world(store, identity, options, choice);
}

World single(const Identity& identity, const WorldOptions& options, c10::Device device) {
  if (device.is_cuda()) detail::nccl::set_device(device);
  return World(std::make_shared<detail::WorldImpl>(identity, options, device));
}

}  // namespace

namespace detail {

World connect_child(WorldImpl& parent, Identity identity, const std::string& prefix) {
  identity.part = true;
  if (identity.size == 1) return single(identity, parent.options, parent.device);
  // The world may have several hosts and its sub-world only one.
  const Backend& likewise = parent.accelerator ? *parent.accelerator : *parent.host;
  const DeviceChoice choice{parent.device, parent.automatic ? "shm" : likewise.name(), "",
                            parent.automatic};
  World child = open_world(c10::make_intrusive<c10d::PrefixStore>(prefix, parent.store), identity,
                           parent.options, choice,
                           parent.group.empty() ? prefix : parent.group + "/" + prefix);
  parent.adopt(Access::impl(child)->failure_state);
  return child;
}

}  // namespace detail

World connect(StorePtr store, Identity identity, const WorldOptions& options) {
  if (identity.size < 1 || identity.rank < 0 || identity.rank >= identity.size) {
    throw UsageError(kWorld, "rank {} does not exist in a world of {}.", identity.rank,
                     identity.size);
  }
  if (identity.size == 1) {
    identity.local_rank = std::max(identity.local_rank, 0);
    identity.local_size = std::max(identity.local_size, 1);
    identity.node = std::max(identity.node, 0);
  }
  if (identity.local_size > 0 && identity.local_rank >= identity.local_size) {
    throw UsageError(
        kWorld,
        "rank {}: local rank {} does not exist among {} local ranks. Local ranks count "
        "from 0 on every host.",
        identity.rank, identity.local_rank, identity.local_size);
  }
  const detail::DeviceChoice choice = detail::choose_device(identity, options);
  return connect_as(store, std::move(identity), options, choice);
}

// ---------------------------------------------------------------- from the environment

namespace {

// A store this process hosts serves as long as the process: another rank may still be on its way to
// the first world, or already on its way to the second.
void serve_until_exit(const StorePtr& store) {
  static std::mutex mutex;
  static std::vector<StorePtr> hosted;
  const std::lock_guard lock(mutex);
  hosted.push_back(store);
}

StorePtr open_tcp_store(const RankEnv& env, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(env.master_port);
  options.isServer = env.rank == 0 && !env.agent_store;
  options.waitWorkers = false;
  options.timeout = timeout;
  // A second world of this process finds the server of the first.
  options.multiTenant = true;
  if (options.isServer && env.store_fd >= 0) options.masterListenFd = env.store_fd;
  auto store = c10::make_intrusive<c10d::TCPStore>(env.master_addr, options);
  store->setTimeout(c10d::Store::kDefaultTimeout);  // connecting has a shorter one
  if (options.isServer) serve_until_exit(store);
  return store;
}

// Rank 0 may start late: try again and again, saying so, until the start-up deadline.
StorePtr open_store(RankEnv env, std::chrono::milliseconds startup_timeout) {
  const auto deadline = Deadline::after(startup_timeout);
  if (env.store_channel >= 0) {
    return detail::run_with_deadline<StorePtr>(
        "connecting to the launcher's store", deadline,
        [fd = env.store_channel] { return detail::open_launcher_store(fd); });
  }
  const bool hosts = env.rank == 0 && !env.agent_store;
  if (hosts && env.store_fd < 0) env.store_fd = bind_on_loopback(env);
  for (;;) {
    std::string trouble;
    const auto slice = std::min<std::chrono::milliseconds>(kProgressInterval, deadline.remaining());
    try {
      return detail::run_with_deadline<StorePtr>(
          fmt::format("connecting to the store at {}:{}", env.master_addr, env.master_port),
          Deadline::after(slice + std::chrono::seconds(2)),
          [env, slice] { return open_tcp_store(env, slice); });
    } catch (const CommError& e) {
      if (dynamic_cast<const TimeoutError*>(&e) == nullptr) throw;
      trouble = e.what();
    } catch (const std::exception& e) {
      trouble = std::string(e.what()).substr(0, std::string(e.what()).find('\n'));
      if (hosts) {
        throw CommError(kWorld, fmt::format("rank 0 cannot open the store at {}:{} ({}). Another "
                                            "program may use the port; choose another "
                                            "MASTER_PORT or let the launcher choose.",
                                            env.master_addr, env.master_port, trouble));
      }
    }
    if (deadline.expired()) {
      throw TimeoutError(
          kWorld,
          fmt::format("rank {}: no store at {}:{} within {} s ({}). {}", env.rank, env.master_addr,
                      env.master_port, deadline.total().count() / 1000.0, trouble,
                      env.agent_store
                          ? "TORCHELASTIC_USE_AGENT_STORE=True says that a launcher serves it: "
                            "unset it where this process was not started by one, such as by a rank."
                          : "Rank 0 failed to start, or MASTER_ADDR and MASTER_PORT are not its "
                            "own."),
          {env.rank, 0, "start-up", 0, deadline.elapsed()});
    }
    log::warning(kWorld, "waiting for {} at {}:{}, {} s of {} s",
                 env.agent_store ? "the launcher's store" : "rank 0", env.master_addr,
                 env.master_port, deadline.elapsed().count() / 1000,
                 deadline.total().count() / 1000);
  }
}

WorldOptions with_environment(WorldOptions options) {
  constexpr std::int64_t kYear = 365 * 24 * 3600;
  if (const auto s = env::get_int("LOCKSTEP_TIMEOUT_S", 1, kYear))
    options.timeout = std::chrono::seconds(*s);
  if (const auto s = env::get_int("LOCKSTEP_STARTUP_TIMEOUT_S", 1, kYear))
    options.startup_timeout = std::chrono::seconds(*s);
  if (const auto share = env::get_bool("LOCKSTEP_SHARE_DEVICE")) options.share_device = *share;
  return options;
}

// Counts worlds made from the environment, so that the second one of a process does not read the
// first one's keys. All ranks make them in the same order, like every other collective.
std::atomic<int> worlds_made{0};

// Answers in one line whether the launcher's variables arrived, what was chosen, and why.
World explained(World world, const RankEnv& env, const detail::DeviceChoice& choice) {
  const std::string& shm_unavailable_reason = detail::Access::impl(world)->shm_unavailable_reason;
  log::info(kWorld, "WORLD_SIZE={} RANK={} LOCAL_RANK={} device={} backend={} ({}; {}{})",
            world.size(), world.rank(), world.local_rank(), choice.device.str(), world.backend(),
            env.source, choice.reason,
            shm_unavailable_reason.empty() ? "" : "; not shm, because " + shm_unavailable_reason);
  return world;
}

Identity identity_of(const RankEnv& env) {
  return {.rank = env.rank,
          .size = env.world_size,
          .local_rank = env.local_rank_known ? env.local_rank : -1,
          .local_size = env.local_size_known ? env.local_world_size : 0,
          .node = env.node_known ? env.node : -1};
}

// The rendezvous of this process's next world.
StorePtr open_rendezvous(RankEnv& env, const WorldOptions& options) {
  rendezvous(env, static_cast<int>(options.startup_timeout.count()));
  StorePtr store = open_store(env, options.startup_timeout);
  const std::string prefix =
      fmt::format("lockstep/{}/{}/{}", env::get("TORCHELASTIC_RUN_ID").value_or("none"),
                  env.attempt, worlds_made++);
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

}  // namespace

void report_startup_failure(const std::string& why) noexcept {
  try {
    // A Lockstep launcher notifies the others when this process ends, so there is no need to wait
    // long for late ranks.
    constexpr std::chrono::seconds kHeardOtherwise{10};
    WorldOptions options = with_environment({});
    if (control::connected())
      options.startup_timeout =
          std::min<std::chrono::milliseconds>(options.startup_timeout, kHeardOtherwise);
    RankEnv env = read_rank_env();
    if (env.alone()) return;
    const StorePtr store = open_rendezvous(env, options);
    const Handshake handshake{.rank = env.rank,
                              .world_size = std::to_string(env.world_size),
                              .host = host_name(),
                              .refusal = why};
    detail::report_refusal(std::make_shared<detail::C10dStore>(store), handshake,
                           {.size = env.world_size, .timeout = options.startup_timeout});
  } catch (const std::exception& e) {
    log::debug(kWorld, "the other ranks could not be notified: {}", e.what());
  }
}

World World::from_env(const WorldOptions& asked) {
  const WorldOptions options = with_environment(asked);
  RankEnv env = read_rank_env();
  log::set_rank(env.rank, env.world_size);
  if (under_lockstep_run()) ledger::open();
  const ledger::PhaseScope startup(ledger::Phase::kStartup);
  Identity identity = identity_of(env);
  const detail::DeviceChoice choice = detail::choose_device(identity, options);
  const bool forced =
      options.backend != "auto" || env::get("LOCKSTEP_BACKEND").value_or("auto") != "auto";
  if (env.alone()) {
    World world =
        forced ? connect_as(c10::make_intrusive<c10d::HashStore>(), identity, options, choice)
               : single(identity, options, choice.device);
    return explained(std::move(world), env, choice);
  }
  const StorePtr store = open_rendezvous(env, options);
  identity.address = address_towards(env.master_addr, env.master_port);
  return explained(connect_as(store, identity, options, choice), env, choice);
}

}  // namespace lockstep
