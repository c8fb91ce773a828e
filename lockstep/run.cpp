#include "lockstep/run.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <thread>

#include "lockstep/comm/connect.h"
#include "lockstep/comm/device.h"
#include "lockstep/comm/world_impl.h"
#include "lockstep/core/crash.h"
#include "lockstep/core/device_rule.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/leave.h"
#include "lockstep/memory/cpu_cache.h"
#include "lockstep/rendezvous/control.h"
#include "lockstep/rendezvous/rank_env.h"

namespace lockstep {
namespace {

constexpr int kFailed = 1;
constexpr int kUsage = 2;
constexpr int kStopped = 143;  // of ranks that have agreed to stop, as train::StopRequest returns

// A broken connection is often noticed a moment before the launcher has said whose fault it is.
constexpr std::chrono::milliseconds kLauncherReport{1500};
// For the rank that threw first to report it, after which the launcher names it. A stack takes a
// while on a busy machine.
constexpr std::chrono::seconds kPeerReport{10};
// For the other ranks to return as well from a body that returned a failure's code.
constexpr std::chrono::seconds kPeersReturn{10};
// For flushing into a pipe that nobody may be reading.
constexpr std::chrono::seconds kFlushLimit{5};

std::atomic<bool> g_inside{false};

struct InsideRun {
  InsideRun() {
    if (g_inside.exchange(true)) {
      throw UsageError("run",
                       "run() or spawn() was called from inside a body that one of them runs. A "
                       "process is one rank; use world.split() for smaller worlds.");
    }
  }
  ~InsideRun() { g_inside = false; }
};

struct Outcome {
  int code = kFailed;
  crash::Report report;
};

// Which rank failed, and not why: the launcher that announced it prints the cause, once.
Outcome fallen_with(const control::PeerFailure& failure) {
  const std::string who = failure.rank < 0
                              ? failure.text()
                              : fmt::format("rank {} on {} failed", failure.rank, failure.host);
  return {kFailed, {fmt::format("ends because {}", who), {}, true}};
}

template <typename Kind>
bool is(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Kind&) {
    return true;
  } catch (...) {
    return false;
  }
}

// Another rank threw it first, reports it with its stack, and is named by the launcher.
Outcome thrown_by_peer(const std::exception& e, int code, bool same_mistake) {
  if (!same_mistake)
    if (const auto failure = control::failure()) return fallen_with(*failure);
  return {code, {fmt::format("ends because another rank failed: {}", e.what()), {}, true}};
}

// With the place where it was thrown.
Outcome failed_with(const std::exception& e, bool later = false) {
  return {kFailed, {crash::describe(e), crash::thrown_at(e), later}};
}

// The meaning of an exception that left the body. All ranks of one host usually make the same
// mistake, so there a UsageError is reported as such, also by ranks that are told of another's
// first. `finishing`: the body had returned.
Outcome judge(const std::exception_ptr& thrown, bool one_host, bool finishing) {
  const bool same_mistake = one_host && control::connected() && is<UsageError>(thrown);
  const bool of_peer = is<detail::FromPeer>(thrown);
  if (of_peer) control::failure(kPeerReport);
  if (const auto failure = control::failure(); failure && !same_mistake)
    return fallen_with(*failure);
  try {
    std::rethrow_exception(thrown);
  } catch (const UsageError& e) {
    if (of_peer) return thrown_by_peer(e, kUsage, same_mistake);
    return {kUsage, {crash::describe(e), {}, false}};
  } catch (const TimeoutError& e) {
    if (const auto failure = control::failure(kLauncherReport)) return fallen_with(*failure);
    return failed_with(e);
  } catch (const detail::Disagreement& e) {
    // The rank whose call nobody answers has the stack that helps.
    if (finishing)
      if (const auto failure = control::failure(kLauncherReport)) return fallen_with(*failure);
    return failed_with(e, finishing);
  } catch (const CommError& e) {
    if (const auto failure = control::failure(kLauncherReport)) return fallen_with(*failure);
    // Under another launcher another rank most likely reports the cause.
    if (!control::connected()) return {kFailed, {crash::describe(e), {}, true}};
    return failed_with(e);
  } catch (const c10::Error& e) {
    return {
        kFailed,
        {fmt::format("c10::Error: {}", e.what_without_backtrace()), crash::thrown_at(e), false}};
  } catch (const std::exception& e) {
    if (of_peer) return thrown_by_peer(e, kFailed, false);
    return failed_with(e);
  } catch (...) {
    return {kFailed, {"an exception that is not a std::exception left the body", {}, false}};
  }
}

void log_start(const World& world, const WorldOptions& options) {
  if (is_cpu_memory_cached())
    log::debug("run",
               "memory of CPU tensors of 1 MiB and more is cached in this process "
               "(LOCKSTEP_CPU_CACHE_MAX_BYTES=0 turns that off)");
  const int gpus = world.device().is_cuda() ? cuda_device_count() : 0;
  const std::string idle = idle_gpus_warning(world.size(), options.device.has_value(), gpus);
  if (!idle.empty()) log::warning("run", "{}", idle);
}

// The engine numbers the backward passes of a process. Zero where this thread has made no graph.
std::uint64_t backward_passes() {
  if (at::sequence_number::peek() == 0) return 0;
  const c10::AutoGradMode with_grad(true);
  const at::Tensor probe = at::zeros({}, at::kFloat).set_requires_grad(true);
  int passes = 0;
  probe.register_hook(
      [&](const at::Tensor&) { passes = torch::autograd::get_current_graph_task_id(); });
  probe.backward();
  return static_cast<std::uint64_t>(std::max(passes, 0));
}

// A body that returned a failure's code. All ranks may return one for what only one of them knows
// and has logged, such as that the last checkpoint was lost: its report tells the launcher which
// one, whichever of them ends first, and none may lose its peers in its last lines. Where the
// others have not returned, it is this rank that has failed.
void fail_with(int code, const World& world) {
  const std::string logged = log::last_error();
  if (!logged.empty()) crash::report(crash::Report{logged, {}, false, /*printed=*/true});
  if (detail::Access::impl(world)->all_finish(kPeersReturn)) return;
  if (logged.empty())
    crash::report({fmt::format("the body of run() returned {}", code), {}, false});
  detail::leave(code);
}

// Ranks that train without a wrapper, and exchange no tensor that could be a gradient either, each
// have a model of their own. Every wrapper counts its passes; the ledger, and with it the record of
// the run, learns of the others here.
void look_for_separate_models(const World& world) {
  if (world.size() == 1 || detail::WorldImpl::exchanged_tensors ||
      ledger::totals().counts[index(ledger::Counter::kMicroBatches)] > 0)
    return;
  const std::uint64_t passes = backward_passes();
  if (passes == 0) return;
  ledger::add(ledger::Counter::kSeparatePasses, passes);
  if (world.is_leader())
    log::warning("run",
                 "{} ranks never exchanged a gradient, and rank 0 ran {} backward pass{}: every "
                 "rank has trained a model of its own. Wrap the model "
                 "(lockstep::DistributedDataParallel) and train the wrapper; for separate models "
                 "start separate runs.",
                 world.size(), passes, passes == 1 ? "" : "es");
}

}  // namespace

namespace detail {

bool inside_run() {
  return g_inside;
}

void leave(int code) {
  std::thread([code] {
    std::this_thread::sleep_for(kFlushLimit);
    std::_Exit(code);
  }).detach();
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(code);
}

}  // namespace detail

int run(const RankBody& body, const WorldOptions& options) {
  return run([&] { return options; }, body);
}

int run(const Preparation& prepare, const RankBody& body) {
  const InsideRun inside;
  crash::install(-1, {.lockstep_run = under_lockstep_run()});
  int ranks = 1;
  bool one_host = false;
  bool preparing = false;
  bool finishing = false;
  int code = 0;                // what the body returned
  std::optional<World> world;  // outlives the catch: its destructor must not run in a failed rank
  try {
    const RankEnv env = read_rank_env();
    ranks = env.world_size;
    one_host = env.local_size_known && env.local_world_size == env.world_size;
    // Over several hosts the launchers print the first failure only.
    const bool launched = under_lockstep_run();
    crash::install(env.rank, {launched, launched && one_host});
    log::set_rank(env.rank, env.world_size);
    // Lines appear as they are printed, also through the launcher's pipe.
    if (!env.alone()) std::setvbuf(stdout, nullptr, _IOLBF, 0);
    preparing = true;
    cache_cpu_memory();
    const WorldOptions options = prepare();
    preparing = false;
    if (!env.alone()) body_mark::set();
    world = World::from_env(options);
    log_start(*world, options);
    code = body(*world);
    look_for_separate_models(*world);
    finishing = true;
    if (code != 0 && code != kStopped) fail_with(code, *world);
    world->finish();  // a rank that leaves early must not take its peers' last operation along
    body_mark::clear();
    ledger::set_phase(ledger::Phase::kEnded);
    return code;
  } catch (...) {
    const Outcome outcome = judge(std::current_exception(), one_host, finishing);
    crash::report(outcome.report);
    if (preparing) report_startup_failure(outcome.report.message);
    const int failed = code != 0 ? code : outcome.code;
    if (ranks > 1) detail::leave(failed);
    return failed;
  }
}

}  // namespace lockstep
