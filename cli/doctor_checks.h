// The checks of `lockstep doctor` before a run: one function each, which reads a Machine and
// returns what it found and what to change.
//
//   const Machine machine = look_at(request);
//   for (const Check& check : host_checks(machine)) print(check);
//
// The functions only read, so a test passes a machine that it has made up.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launcher/host.h"
#include "lockstep/core/document.h"
#include "lockstep/core/host.h"
#include "lockstep/monitor/gpu_sampler.h"

namespace lockstep::cli {

enum class Status { kOk, kWarn, kFail, kSkip };
const char* name(Status status);

struct Check {
  std::string name;  // "open_files": stable, for scripts
  Status status = Status::kOk;
  std::string value{};               // what was measured
  std::string remedy{};              // what to change; empty when there is nothing to do
  NodeMembers data{};                // the same figures for JSON
  std::vector<std::string> lines{};  // more evidence, such as the end of a program's stderr

  // Completes a check that asks for a change: `return check.warn("Set ulimit -n 65536.")`.
  Check& judge(Status found, std::string change) {
    status = found;
    remedy = std::move(change);
    return *this;
  }
  Check& warn(std::string change) { return judge(Status::kWarn, std::move(change)); }
  Check& fail(std::string change) { return judge(Status::kFail, std::move(change)); }
  Check& skip(std::string why) {
    status = Status::kSkip;
    value = std::move(why);
    return *this;
  }
};

struct DoctorRequest {
  bool json = false;
  bool probe = true;
  std::optional<int> ranks{};  // unset: one per GPU, or two
  std::string master_addr{};
  int master_port = 0;
  std::string output_dir{};
  int probe_timeout_s = 30;
};

inline constexpr std::uint64_t kUnlimited = UINT64_MAX;

// The inputs of all checks except files, collected once.
struct Machine {
  DoctorRequest request{};
  HostFiles files{};
  std::string shm = "/dev/shm";
  int ranks = 1;
  bool on_gpu = false;  // a rank would take a GPU
  launch::Gpus gpus{};
  monitor::GpuSnapshot nvml{};
  std::string kernel_log{};
  launch::Variables variable = launch::process_variables();
  std::vector<int> cpus{};  // by affinity
  std::optional<double> quota{};
  bool root = false;  // RLIMIT_NPROC does not apply
  std::uint64_t open_files = kUnlimited;
  std::uint64_t open_files_max = kUnlimited;
  std::uint64_t processes = kUnlimited;
  std::uint64_t address_space = kUnlimited;

  double cores() const;  // the limit by affinity and quota, at least 1
  int threads_per_rank() const;
};

// Asks the drivers and the kernel. Reports on stderr if that takes longer than two seconds.
Machine look_at(const DoctorRequest& request);

// doctor_gpu.cpp
Check check_devices(const Machine& machine);
Check check_driver(const Machine& machine);
Check check_gpu_errors(const Machine& machine);
Check check_xid(const Machine& machine);
Check check_throttling(const Machine& machine);
Check check_gpu_memory(const Machine& machine);
Check check_gpu_per_rank(const Machine& machine);
Check check_cudnn(const Machine& machine);

// doctor_host.cpp
Check check_cores(const Machine& machine);
Check check_threads(const Machine& machine);
Check check_memory(const Machine& machine);
Check check_shm(const Machine& machine);
Check check_open_files(const Machine& machine);
Check check_processes(const Machine& machine);
Check check_disk(const Machine& machine);

std::vector<Check> network_checks(const Machine& machine);

// doctor_gpu.cpp: starts ranks that compute, copy and reduce, and reports their findings.
std::vector<Check> probe_checks(const Machine& machine);
// Evaluates the ranks' files in `folder`; `problem` says why the probe has not finished, or is
// empty, and `disturbance` describes other programs' use of the cores (lockstep/core/host.h).
std::vector<Check> read_probe(const Machine& machine, const std::string& folder,
                              const std::string& problem, const std::string& disturbance = {});

// doctor.cpp: shows the current check on stderr after two seconds, then every five seconds.
class Progress {
 public:
  explicit Progress(const char* what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
};

// "1.5 GiB", "640 MiB"
std::string bytes_text(std::uint64_t bytes);

}  // namespace lockstep::cli
