// Processes that benchmarks start: ranks that take orders, and runs of `lockstep train`.
//
//   RankProcesses ours({.name = "ours", .ranks = 2, .rank = "model", .settings = settings});
//   const json answer = ours.ask({{"do", "time"}, {"steps", 10}});     // rank 0's
//   ours.finish();
//   const Scratch scratch;
//   const TrainFigures figures = run_train({.name = "fast", .ranks = 2, .file = "fast.json"},
//                                          scratch.file("out"));
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/local_ranks.h"
#include "launcher/process.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"
#include "lockstep/train/arguments.h"

namespace lockstep::bench {

// A program by its path relative to this one's directory.
std::string program_beside(const std::string& relative);
// A file of bench/peers; looked for beside the source tree and in the install tree.
std::string peer(const std::string& file);
// The interpreter of peers: LOCKSTEP_PYTHON, or the one the build was configured with.
std::string python();

// Added to this process's environment; an empty value removes a variable.
using Environment = std::map<std::string, std::string>;

// Starts `lockstep ARGUMENTS...`; `output` takes stdout and stderr, -1: inherited.
launch::Process start_lockstep(const std::vector<std::string>& arguments,
                               const Environment& changed = {}, int output = -1);
// Ends a running process: first by a request, then by force.
void stop(launch::Process& process);

// For the files of one benchmark run.
struct Scratch : cli::ScratchFolder {
  Scratch() : ScratchFolder("bench") {}
};

// ---------------------------------------------------------------- ranks that take orders

// The ranks of one side are started once, and sides take turns working.
//
// A rank is one of this program's (harness.h) or a Python script of bench/peers. It gets its
// settings as JSON on its command line, and then orders, one JSON object in a line, from a Unix
// socket; it answers each with an object, {"error": TEXT} where it cannot do it. `lockstep run`
// starts all of them.
//
// Sides must not disturb each other while they wait. A rank blocks in a read of its socket until it
// gets an order, and exits when the socket is closed, so no process is left when the benchmark
// dies. Every answer says how much processor time the rank used while it waited for the order.
struct RankProcessesOptions {
  std::string name;
  int ranks = 1;
  std::string rank;  // "model", or a script's name: "model_peer.py"
  nlohmann::json settings;
};

// Owned and used by one thread.
class RankProcesses {
 public:
  // Starts the ranks. Does not wait for them; wait_ready() does, or the first order.
  explicit RankProcesses(const RankProcessesOptions& options);
  // Ends ranks that are still running.
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  const std::string name;

  void wait_ready();
  // Gives all ranks the same order and returns their answers by rank. Error if a rank fails, has
  // ended or does not answer.
  std::vector<nlohmann::json> ask_all(const nlohmann::json& order);
  nlohmann::json ask(const nlohmann::json& order) { return ask_all(order).front(); }
  // Error if ranks computed while they waited, since the previous call.
  void check_idle();
  // Closes the orders: waits until the ranks have ended, and throws Error if they failed.
  void finish();

 private:
  struct Member {
    Fd socket;
    std::string unread;
  };
  std::string read_line(Member& member, const Deadline& deadline);
  // False at the deadline; throws Error when the ranks have ended.
  bool readable(int fd, const Deadline& deadline);
  [[noreturn]] void fail(const std::string& what);

  int ranks_;
  Scratch scratch_;
  Fd listener_;
  launch::Process launcher_;
  std::vector<Member> members_;
  double idle_s_ = 0, idle_cpu_s_ = 0;
};

// The rank's side: executes orders until there are no more.
void serve(const std::string& path, int rank,
           const std::function<nlohmann::json(const nlohmann::json&)>& obey);

// ---------------------------------------------------------------- runs of lockstep train

// A run is a process of its own, whose measurements are read from its metrics.jsonl.
struct TrainJob {
  std::string name;
  int ranks = 1;
  std::string file{};                // a training file; empty: none
  std::vector<std::string> flags{};  // "--max_steps=10"
  Environment environment{};
};

struct TrainFigures {
  double runtime_s = 0;  // for training, without the start of the process
  double train_loss = 0;
  // One value per log, oldest first; tokens of a language model alone.
  std::vector<double> losses{}, samples_per_second{}, tokens_per_second{};

  // Samples a second: the median of the logs except the first, which holds the start.
  double settled_rate() const { return settled(samples_per_second); }
  // The same of any of them.
  static double settled(const std::vector<double>& logged);
};

// Flags for a measured run of a few steps: they turn off whatever takes time away from its steps,
// would change the batch between them, or makes no sense for so few steps (a schedule). Later flags
// override them.
std::vector<std::string> short_run(std::int64_t steps, std::int64_t logging_steps);

// Whether a run of that file trains on the CPU of this machine.
bool on_cpu(const TrainingArguments& arguments);

// `folder` becomes output_dir. Error with the last lines of its output when it fails.
TrainFigures run_train(const TrainJob& job, const std::string& folder);

}  // namespace lockstep::bench
