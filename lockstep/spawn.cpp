#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "launcher/host.h"
#include "launcher/plan.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/leave.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/run.h"

namespace lockstep {
namespace {

// Set for the ranks of a spawn: which call they belong to, and what the calls before it returned,
// as "<call>:<code>,<code>,...".
constexpr char kVariable[] = "LOCKSTEP_SPAWN";

struct CallSite {
  int call = 0;
  std::vector<int> earlier;
};

std::optional<CallSite> read_call_site() {
  const auto text = env::get(kVariable);
  if (!text) return std::nullopt;
  const auto colon = text->find(':');
  CallSite call_site{
      static_cast<int>(env::parse_int(text->substr(0, colon), kVariable, 0, 1 << 20)), {}};
  for (const std::string& code : split(colon == text->npos ? "" : text->substr(colon + 1), ','))
    if (!code.empty())
      call_site.earlier.push_back(static_cast<int>(env::parse_int(code, kVariable, 0, 255)));
  call_site.earlier.resize(static_cast<std::size_t>(call_site.call), 0);
  return call_site;
}

// The variable for the children, while it lives.
class CallSiteVariable {
 public:
  explicit CallSiteVariable(const CallSite& call_site) {
    std::string text = fmt::format("{}:", call_site.call);
    for (const int code : call_site.earlier) text += fmt::format("{},", code);
    ::setenv(kVariable, text.c_str(), 1);
  }
  CallSiteVariable(const CallSiteVariable&) = delete;
  CallSiteVariable& operator=(const CallSiteVariable&) = delete;
  ~CallSiteVariable() { ::unsetenv(kVariable); }
};

// This program and its arguments, as it was started.
std::vector<std::string> own_command() {
  std::vector<std::string> command = split(read_file("/proc/self/cmdline"), '\0');
  if (command.size() > 1 && command.back().empty()) command.pop_back();  // each ends with a zero
  char path[4096];
  const ssize_t n = ::readlink("/proc/self/exe", path, sizeof path);
  if (n <= 0 || n == static_cast<ssize_t>(sizeof path))
    throw SystemError("spawn", "cannot read /proc/self/exe", errno);
  command[0].assign(path, static_cast<std::size_t>(n));
  // A program that was rebuilt while it ran; only the kernel still has the old one.
  if (::access(command[0].c_str(), X_OK) != 0) {
    throw UsageError("spawn",
                     "{} is no longer there to be started again (was it rebuilt or removed while "
                     "it ran?). Start the program again.",
                     command[0]);
  }
  return command;
}

int default_nprocs() {
  const int gpus = launch::find_gpus().count;
  return gpus > 0 ? gpus : allowed_cores();
}

bool is_rank_already() {
  try {
    const RankEnv env = read_rank_env();
    return env.world_size > 1 || env.source == "lockstep run" || env.source == "torchrun";
  } catch (const UsageError&) {
    return true;  // run() reports it as it reports any other mistake in the environment
  }
}

std::vector<std::string> names_of_threads() {
  namespace fs = std::filesystem;
  std::vector<std::string> names;
  std::error_code error;
  const std::string self = std::to_string(::gettid());
  for (fs::directory_iterator task("/proc/self/task", error), end; !error && task != end;
       task.increment(error)) {
    if (task->path().filename() == self) continue;
    std::ifstream file(task->path() / "comm");
    std::string name;
    // A thread that has ended meanwhile has no name.
    if (std::getline(file, name)) names.push_back(name);
  }
  return names;
}

// The launcher's part runs in a fork of this process, which has the calling thread alone: a lock
// that another thread held would never be released there.
void refuse_other_threads() {
  // A thread that was joined is still listed for a moment.
  const auto deadline = Deadline::after(std::chrono::milliseconds(500));
  for (;;) {
    const std::vector<std::string> names = names_of_threads();
    if (names.empty()) return;
    if (deadline.expired()) {
      throw UsageError("spawn",
                       "this process has {} other thread{} ({}{}), and a process with threads "
                       "cannot be copied safely. LibTorch starts its own at the first larger "
                       "tensor operation. Call spawn() before them, at the top of main(), or start "
                       "the program with lockstep run --nproc-per-node=N.",
                       names.size(), names.size() == 1 ? "" : "s", names.front(),
                       names.size() == 1 ? "" : ", ...");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

int launch_ranks(const CallSite& call_site, int nprocs, const SpawnOptions& options) {
  refuse_other_threads();
  launch::LaunchPlan plan;
  plan.nproc_per_node = nprocs > 0 ? nprocs : default_nprocs();
  plan.run_id = fmt::format("spawn-{}-{}", ::getpid(), call_site.call);
  plan.max_restarts = options.max_restarts;
  plan.command = own_command();
  // The launcher's part runs in a copy of this process; it must not print what is buffered again.
  std::cout.flush();
  std::fflush(nullptr);
  const CallSiteVariable variable(call_site);
  return launch::supervise(plan);
}

}  // namespace

int spawn(const RankBody& body, int nprocs, const SpawnOptions& options) {
  static std::atomic<int> calls{0};
  static std::vector<int> codes;
  if (detail::inside_run()) return run(body, options.world);  // refuses, and says why
  if (nprocs < 0) {
    throw UsageError("spawn", "nprocs={} ranks cannot be started. Use 0 for one per GPU or core.",
                     nprocs);
  }
  const int call = calls++;
  if (const auto call_site = read_call_site()) {
    if (call < call_site->call) return call_site->earlier[static_cast<std::size_t>(call)];
    if (call == call_site->call) detail::leave(run(body, options.world));
  }
  if (is_rank_already()) return run(body, options.world);
  codes.push_back(launch_ranks({call, codes}, nprocs, options));
  return codes.back();
}

}  // namespace lockstep
