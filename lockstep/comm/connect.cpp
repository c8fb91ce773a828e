#include "lockstep/comm/connect.h"

#include <arpa/inet.h>
#include <elf.h>
#include <link.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/comm/bounded.h"
#include "lockstep/comm/device.h"
#include "lockstep/comm/gloo/gloo.h"
#include "lockstep/comm/handshake.h"
#include "lockstep/comm/launcher_store.h"
#include "lockstep/comm/nccl/nccl.h"
#include "lockstep/comm/shm/shm.h"
#include "lockstep/comm/world_impl.h"
#include "lockstep/core/control.h"
#include "lockstep/core/env.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/core/rank_env.h"

namespace lockstep {

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using detail::Handshake;

constexpr const char* kWorld = "world";
constexpr std::chrono::seconds kProgressInterval{10};

// ---------------------------------------------------------------- who this is

std::string host_name() {
  char name[256] = "unknown";
  ::gethostname(name, sizeof name - 1);
  return name;
}

// The linker's build id of the running program: equal exactly for equal builds.
std::string build_id() {
  std::string id;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_NOTE) continue;
          const char* at = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
          const char* end = at + header.p_memsz;
          while (at + sizeof(ElfW(Nhdr)) <= end) {
            const auto* note = reinterpret_cast<const ElfW(Nhdr)*>(at);
            const char* name = at + sizeof *note;
            const char* body = name + ((note->n_namesz + 3u) & ~3u);
            if (note->n_type == NT_GNU_BUILD_ID && note->n_namesz == 4) {
              for (unsigned k = 0; k < std::min(note->n_descsz, 8u); ++k)
                static_cast<std::string*>(out)->append(
                    fmt::format("{:02x}", static_cast<unsigned char>(body[k])));
            }
            at = body + ((note->n_descsz + 3u) & ~3u);
          }
        }
        return 1;  // the program itself comes first; the libraries do not matter
      },
      &id);
  if (!id.empty()) return id;
  struct stat status {};
  return ::stat("/proc/self/exe", &status) == 0 ? fmt::format("size-{}", status.st_size)
                                                : "unknown";
}

// ---------------------------------------------------------------- start-up checks

// How start-up ended, the same on every rank that came.
struct Outcome {
  enum class Kind : char { kGood = '=', kProblem = '!', kTimeout = 't' };
  Kind kind = Kind::kGood;
  std::string text = {};
};

// One rank's part of the start-up conversation. Runs on a thread of its own (see bounded), which
// the caller may leave behind; `cancel` then ends it.
class Startup {
 public:
  Startup(StorePtr store, Identity identity, Handshake handshake, const WorldOptions& options)
      : store_(std::move(store)),
        identity_(std::move(identity)),
        handshake_(std::move(handshake)),
        share_device_(options.share_device),
        // The leader's outcome about missing ranks must still reach those who came.
        deadline_(
            Deadline::after(options.startup_timeout + (identity_.rank == 0 ? kNone : kGrace))) {}

  Outcome run() {
    const bool first = store_->add(fmt::format("claim/{}", identity_.rank), 1) == 1;
    store_->set(fmt::format("came/{}", store_->add("came", 1)), handshake_.text());
    if (identity_.rank == 0 && first) {
      const Outcome outcome = lead();
      store_->set("outcome", static_cast<char>(outcome.kind) + outcome.text);
      if (outcome.kind != Outcome::Kind::kGood) wait_until_heard(outcome.kind);
      return outcome;
    }
    const std::vector<int> leader{0};
    if (!poll([this] { return store_->check({"outcome"}); }, leader, deadline_))
      return {Outcome::Kind::kTimeout, absence(leader)};
    const std::string outcome = store_->get_to_str("outcome");
    store_->add("heard", 1);
    const auto kind = static_cast<Outcome::Kind>(outcome.at(0));
    // Too late to be seen by the leader, who has continued with the other one.
    if (kind == Outcome::Kind::kGood && !first)
      return {Outcome::Kind::kProblem,
              detail::contradictions({handshake_, handshake_}, share_device_)};
    return {kind, outcome.substr(1)};
  }

  void cancel() { cancelled_ = true; }

 private:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds kNone{0};
  static constexpr Milliseconds kGrace{2000};
  static constexpr Milliseconds kLateComers{8000};
  // Once something is wrong: how long the others may take to come, so that all who differ are
  // named, and how long those may take of whom rank 0 knows nothing.
  static constexpr Milliseconds kToBeNamed{10'000};
  static constexpr Milliseconds kUnexpected{1000};

  Outcome lead() {
    std::vector<int> absent;
    std::string problem;
    auto seen = Deadline::Clock::time_point::max();
    const auto ready = [&] {
      if (hear()) problem = detail::contradictions(handshakes_, share_device_);
      absent = missing();
      if (problem.empty()) return absent.empty();
      seen = std::min(seen, Deadline::Clock::now());
      const auto waited = Deadline::Clock::now() - seen;
      const bool all = static_cast<int>(handshakes_.size()) >= identity_.size;
      if (all) return !detail::miscounted(handshakes_) || waited >= kUnexpected;
      return waited >= kToBeNamed || deadline_.remaining() < kGrace / 2;
    };
    if (!poll(ready, absent, deadline_) && problem.empty())
      return {Outcome::Kind::kTimeout, absence(absent)};
    if (!problem.empty()) return {Outcome::Kind::kProblem, problem};
    return {Outcome::Kind::kGood, places()};
  }

  // Reads what has come since the last time; true when there was something.
  bool hear() {
    const auto count = store_->add("came", 0);
    while (counted_ < count) unread_.push_back(++counted_);
    return std::erase_if(unread_, [this](std::int64_t index) {
             const std::string key = fmt::format("came/{}", index);
             if (!store_->check({key})) return false;  // between its two calls
             handshakes_.push_back(Handshake::parse(store_->get_to_str(key)));
             return true;
           }) > 0;
  }

  std::vector<int> missing() const {
    std::set<int> there;
    for (const Handshake& handshake : handshakes_) there.insert(handshake.rank);
    std::vector<int> absent;
    for (int rank = 0; rank < identity_.size; ++rank) {
      if (!there.contains(rank)) absent.push_back(rank);
    }
    return absent;
  }

  // Where everyone is, one line per rank, if somebody does not know it.
  std::string places() const {
    const auto known = [](const Handshake& handshake) { return handshake.place.known(); };
    if (std::all_of(handshakes_.begin(), handshakes_.end(), known)) return "";
    std::string text;
    for (const auto& [rank, place] : detail::count_ranks(handshakes_))
      text += fmt::format("{} {} {}\n", place.local_rank, place.local_size, place.node);
    return text;
  }

  // Rank 0 takes the store with it when it ends, so bad news must have been read before. After a
  // timeout nobody else is expected; otherwise those on their way get a moment.
  void wait_until_heard(Outcome::Kind kind) {
    const bool late = kind == Outcome::Kind::kTimeout;
    const auto expected = std::max(handshakes_.size(), late ? 0 : std::size_t(identity_.size));
    const auto others = static_cast<std::int64_t>(expected) - 1;
    poll([&] { return store_->add("heard", 0) >= others; }, {},
         Deadline::after(late ? kGrace : kLateComers));
  }

  std::string absence(const std::vector<int>& absent) const {
    return fmt::format(
        "{} of {} did not come within {} s. They failed to start, or cannot "
        "reach this host. Look at their output; LOCKSTEP_STARTUP_TIMEOUT_S gives them "
        "longer.",
        detail::name_ranks(absent), identity_.size, deadline_.total().count() / 1000.0);
  }

  // Asks until `ready` (true) or the deadline, more and more rarely; `absent` is named in progress
  // lines.
  bool poll(const std::function<bool()>& ready, const std::vector<int>& absent,
            const Deadline& deadline) {
    auto pause = std::chrono::microseconds(200);
    auto next_line = Deadline::Clock::now() + kProgressInterval;
    while (!ready()) {
      if (cancelled_ || deadline.expired()) return false;
      if (identity_.rank == 0 && Deadline::Clock::now() >= next_line) {
        log::info(kWorld, "waiting for {} (of {}), {} s of {} s", detail::name_ranks(absent),
                  identity_.size, deadline.elapsed().count() / 1000,
                  deadline.total().count() / 1000);
        next_line += kProgressInterval;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 3 / 2, std::chrono::microseconds(20'000));
    }
    return true;
  }

  const StorePtr store_;
  const Identity identity_;
  const Handshake handshake_;
  const bool share_device_;
  const Deadline deadline_;
  // The leader's: who came, in order, and whose place in the list is taken but not yet filled.
  std::vector<Handshake> handshakes_;
  std::vector<std::int64_t> unread_;
  std::int64_t counted_ = 0;
  std::atomic<bool> cancelled_{false};
};

// Equal exactly for processes of one machine: host names alone repeat ("localhost").
std::string machine_of(const std::string& host) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  return fmt::format("{}/{}", host, boot);
}

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

Outcome converse(const StorePtr& store, const Identity& identity, const Handshake& handshake,
                 const WorldOptions& options) {
  auto startup = std::make_shared<Startup>(store, identity, handshake, options);
  // The conversation keeps its own deadline and names who is missing; this one is for a store that
  // does not answer at all.
  const auto outer = Deadline::after(options.startup_timeout + std::chrono::seconds(12));
  try {
    return detail::bounded<Outcome>("the start-up check", outer,
                                    [startup] { return startup->run(); });
  } catch (...) {
    startup->cancel();
    throw;
  }
}

// Exchanges handshakes with all ranks and fills in this rank's place where it is not known.
void check_start(const StorePtr& store, Identity& identity, const WorldOptions& options,
                 const detail::DeviceChoice& choice) {
  const Outcome outcome =
      converse(store, identity, handshake_of(identity, options, choice), options);
  if (outcome.kind == Outcome::Kind::kProblem)
    throw UsageError(kWorld, "start-up check: {}", outcome.text);
  if (outcome.kind == Outcome::Kind::kTimeout) {
    throw TimeoutError(kWorld, fmt::format("rank {}: {}", identity.rank, outcome.text),
                       {identity.rank, -1, "start-up", 0, options.startup_timeout});
  }
  if (outcome.text.empty()) return;
  std::istringstream places(outcome.text);
  for (int rank = 0; rank <= identity.rank; ++rank)
    places >> identity.local_rank >> identity.local_size >> identity.node;
}

// ---------------------------------------------------------------- connecting

// Ranks that share GPUs are sorted into slots: within one, every rank has a GPU of its own.
std::string shared_host_id(const Identity& identity, const WorldOptions& options) {
  const int visible = cuda_device_count();
  if (!options.share_device || visible == 0) return "";
  return fmt::format("{}-slot{}", identity.host, identity.local_rank / visible);
}

using BackendPtr = std::unique_ptr<detail::Backend>;

// Nothing and a sentence, the same on every rank, where they cannot share memory.
BackendPtr connect_shm(const StorePtr& store, const Identity& identity, const WorldOptions& options,
                       std::string* unavailable_reason) {
  const detail::shm::Options own{.store = c10::make_intrusive<c10d::PrefixStore>("shm", store),
                                 .rank = identity.rank,
                                 .size = identity.size,
                                 .startup_timeout = options.startup_timeout};
  detail::shm::BackendResult made = detail::bounded<detail::shm::BackendResult>(
      "sharing memory", Deadline::after(options.startup_timeout + std::chrono::seconds(2)),
      [own] { return detail::shm::make(own); });
  *unavailable_reason = std::move(made.unavailable_reason);
  if (!unavailable_reason->empty() && unavailable_reason->back() != '.') *unavailable_reason += '.';
  return std::move(made.backend);
}

constexpr const char* kGlooFailed = "failed";

// The store's end is not an error here: its host leaves only when all are connected, or has failed.
void wait_until_all_are_connected(const detail::gloo::Options& own) noexcept {
  try {
    const auto deadline = Deadline::after(own.startup_timeout);
    auto pause = std::chrono::microseconds(100);
    for (auto there = own.store->add("connected", 1);
         there < own.size && !deadline.expired() && !own.store->check({kGlooFailed});
         there = own.store->add("connected", 0)) {
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 3 / 2, std::chrono::microseconds(5'000));
    }
  } catch (const std::exception&) {
  }
}

void report_failure(const detail::gloo::Options& own) noexcept {
  try {
    own.store->set(kGlooFailed, std::vector<std::uint8_t>{1});
  } catch (const std::exception&) {
  }
}

// A rank that is connected may drop its world at once, and to ranks that are still connecting that
// is a connection which breaks. So nobody leaves before all are there, or one has failed.
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
  return detail::bounded<BackendPtr>(
      "connecting gloo", Deadline::after(options.startup_timeout + std::chrono::seconds(2)),
      [own] { return make_gloo(own); });
}

// Whoever hosts the store takes it along, so nobody leaves before all have read the refusal. Who is
// cut off while waiting knows the reason already.
void wait_until_all_know(const StorePtr& store, int size) {
  constexpr std::chrono::seconds kLateComers{8};
  try {
    detail::bounded<bool>(
        "reporting a refusal", Deadline::after(kLateComers + std::chrono::seconds(1)),
        [store, size, limit = Deadline::after(kLateComers)] {
          auto pause = std::chrono::microseconds(200);
          for (auto heard = store->add("refusal_heard", 1); heard < size && !limit.expired();
               heard = store->add("refusal_heard", 0)) {
            std::this_thread::sleep_for(pause);
            pause = std::min(pause * 3 / 2, std::chrono::microseconds(20'000));
          }
          return true;
        });
  } catch (const std::exception&) {
  }
}

// What moves CPU tensors. Where nobody asked for shm, gloo takes over on all ranks identically.
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
                 const detail::DeviceChoice& choice) {
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
    device_backend = detail::bounded<BackendPtr>("connecting nccl", deadline,
                                                 [gpu] { return detail::nccl::make(gpu); });
  }
  impl->open(store, std::move(host_backend), std::move(device_backend));
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
  if (identity.size > 1) check_start(store, identity, options, choice);
  return open_world(store, identity, options, choice);
}

World single(const Identity& identity, const WorldOptions& options, c10::Device device) {
  if (device.is_cuda()) detail::nccl::set_device(device);
  return World(std::make_shared<detail::WorldImpl>(identity, options, device));
}

}  // namespace

namespace detail {

void throw_if_doomed(const std::string& what) {
  if (const auto failure = control::failure())
    throw CommError("world", fmt::format("{} was given up: {}.", what, failure->text()));
}

World connect_child(WorldImpl& parent, Identity identity, const std::string& prefix) {
  identity.part = true;
  if (identity.size == 1) return single(identity, parent.options, parent.device);
  // Of a world of several hosts, a part may be on one.
  const Backend& likewise = parent.accelerator ? *parent.accelerator : *parent.host;
  const DeviceChoice choice{parent.device, parent.automatic ? "shm" : likewise.name(), "",
                            parent.automatic};
  World child = open_world(c10::make_intrusive<c10d::PrefixStore>(prefix, parent.store), identity,
                           parent.options, choice);
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

// The address of this host on the way to `host`: asking the kernel for a route sends nothing.
std::string address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  std::string address = "127.0.0.1";
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    return address;
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  char text[NI_MAXHOST];
  if (fd >= 0 && ::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
      ::getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text, sizeof text, nullptr, 0,
                    NI_NUMERICHOST) == 0) {
    address = text;
  }
  if (fd >= 0) ::close(fd);
  ::freeaddrinfo(found);
  return address;
}

// A store this process hosts serves as long as the process: another rank may still be on its way to
// the first world, or already on its way to the second.
void serve_until_exit(const StorePtr& store) {
  static std::mutex mutex;
  static std::vector<StorePtr> hosted;
  const std::lock_guard lock(mutex);
  hosted.push_back(store);
}

// A socket bound to the port on loopback, where MASTER_ADDR is loopback: c10d by itself would
// listen on every interface. -1 where it is another address or the port is taken (by the store of
// an earlier world of this process, which c10d finds; or by somebody else, which c10d reports).
int bind_on_loopback(const RankEnv& env) {
  const bool six = env.master_addr == "::1";
  if (!six && env.master_addr != "localhost" && env.master_addr.rfind("127.", 0) != 0) return -1;
  sockaddr_in address4{};
  address4.sin_family = AF_INET;
  address4.sin_port = htons(static_cast<std::uint16_t>(env.master_port));
  address4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (!six) ::inet_pton(AF_INET, env.master_addr.c_str(), &address4.sin_addr);  // 127.0.1.1, say
  sockaddr_in6 address6{};
  address6.sin6_family = AF_INET6;
  address6.sin6_port = address4.sin_port;
  address6.sin6_addr = in6addr_loopback;
  Fd fd(::socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (!fd || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) return -1;
  const int bound = six ? ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address6), sizeof address6)
                        : ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address4), sizeof address4);
  return bound == 0 ? fd.release() : -1;
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
    return detail::bounded<StorePtr>(
        "connecting to the launcher's store", deadline,
        [fd = env.store_channel] { return detail::open_launcher_store(fd); });
  }
  env.store_fd = claim_store_fd(env);
  const bool hosts = env.rank == 0 && !env.agent_store;
  if (hosts && env.store_fd < 0) env.store_fd = bind_on_loopback(env);
  for (;;) {
    std::string trouble;
    const auto slice = std::min<std::chrono::milliseconds>(kProgressInterval, deadline.remaining());
    try {
      return detail::bounded<StorePtr>(
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

// What was chosen and why, in one line.
World explained(World world, const RankEnv& env, const detail::DeviceChoice& choice) {
  const std::string& shm_unavailable_reason = detail::Access::impl(world)->shm_unavailable_reason;
  log::info(kWorld, "{} rank{} ({}), device {} ({}), backend {}{}", env.world_size,
            env.world_size == 1 ? "" : "s", env.source, choice.device.str(), choice.reason,
            world.backend(),
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
    converse(store, identity_of(env), handshake, options);
  } catch (const std::exception& e) {
    log::debug(kWorld, "the other ranks could not be notified: {}", e.what());
  }
}

World World::from_env(const WorldOptions& asked) {
  const WorldOptions options = with_environment(asked);
  RankEnv env = read_rank_env();
  log::set_rank(env.rank, env.world_size);
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
