// The checks of `lockstep doctor` that concern devices: what the GPUs' driver says; and the half of
// the probe that needs no torch, which starts the ranks of probe_ranks.cpp, reads what they left,
// and keeps the link that they measured for `lockstep plan`.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>

#include "cli/doctor_checks.h"
#include "cli/local_ranks.h"
#include "cli/plan.h"
#include "lockstep/core/device_rule.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/text.h"

namespace lockstep::cli {
namespace {

constexpr std::uint64_t kMemoryInUse = 1u << 30;

Check no_gpu(const char* name) {
  return Check{.name = name}.skip("no GPU");
}

// A card that CUDA_VISIBLE_DEVICES hides may be in use by another user.
bool is_visible(const Machine& machine, const monitor::GpuIdentity& gpu) {
  const auto& seen = machine.gpus.pci_addresses;
  if (machine.gpus.count == 0 || gpu.pci_bus_id.empty()) return true;
  return std::ranges::find(seen, gpu.pci_bus_id) != seen.end();
}

struct SeenGpu {
  const monitor::GpuIdentity* gpu;
  const monitor::GpuReading* reading;
  bool visible;
};

std::vector<SeenGpu> readings(const Machine& machine) {
  std::vector<SeenGpu> all;
  if (!machine.nvml.newest) return all;
  for (const monitor::GpuIdentity& gpu : machine.nvml.gpus) {
    const auto index = static_cast<std::size_t>(gpu.index);
    if (index < machine.nvml.newest->gpus.size())
      all.push_back({&gpu, &machine.nvml.newest->gpus[index], is_visible(machine, gpu)});
  }
  return all;
}

void worsen(Check& check, Status status) {
  if (status == Status::kFail || check.status == Status::kOk) check.status = status;
}

// "2 x NVIDIA H100 80GB HBM3, NVIDIA L40S"
std::string models_text(const launch::Gpus& gpus) {
  std::map<std::string, int> counts;
  for (const GpuModel& model : gpus.models) ++counts[model.name];
  std::vector<std::string> words;
  for (const auto& [name, count] : counts) words.push_back(fmt::format("{} x {}", count, name));
  return fmt::format("{}", fmt::join(words, ", "));
}

std::string cuda_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// The version in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  ...".
std::string module_version(const HostFiles& files) {
  std::istringstream words(text_or_empty(files.proc + "/driver/nvidia/version"));
  for (std::string word; words >> word;)
    if (word.find('.') != std::string::npos && std::isdigit(static_cast<unsigned char>(word[0])))
      return word;
  return "";
}

}  // namespace

const char* name(Status status) {
  constexpr const char* kNames[] = {"ok", "warn", "fail", "skip"};
  return kNames[static_cast<int>(status)];
}

Check check_devices(const Machine& machine) {
  Check check{.name = "devices"};
  const std::size_t installed = machine.nvml.gpus.size();
  check.data = {{"visible", integer_node(machine.gpus.count)},
                {"installed", integer_node(static_cast<std::int64_t>(installed))}};
  const bool module = !module_version(machine.files).empty();
  if (machine.gpus.count > 0) {
    check.value = fmt::format(
        "{} GPU{} visible of {}: {}", machine.gpus.count, machine.gpus.count == 1 ? "" : "s",
        installed > 0 ? std::to_string(installed) : "an unknown number",
        machine.gpus.models.empty() ? "model unknown" : models_text(machine.gpus));
    return check;
  }
  const bool hidden = machine.variable("CUDA_VISIBLE_DEVICES").value_or("x").empty();
  if (hidden || (installed == 0 && !module))
    return check.skip(fmt::format("no GPU is visible ({}): ranks run on the CPU",
                                  hidden ? "CUDA_VISIBLE_DEVICES is empty" : machine.gpus.reason));
  check.value = fmt::format("CUDA sees no GPU ({}), but {}", machine.gpus.reason,
                            installed > 0 ? fmt::format("NVML lists {}", installed)
                                          : "the kernel's NVIDIA driver is loaded");
  return check.fail(
      "Compare with nvidia-smi. In a container start it with --gpus all; otherwise the "
      "driver's libraries do not match its kernel module: reboot after an update. "
      "LOCKSTEP_DEVICE=cpu does without GPUs.");
}

Check check_driver(const Machine& machine) {
  Check check{.name = "driver"};
  const std::string module = module_version(machine.files);
  const std::string& library = machine.nvml.driver_version;
  if (machine.gpus.count == 0 && module.empty() && library.empty()) return no_gpu("driver");
  check.value =
      fmt::format("driver {}{}, CUDA {}", library.empty() ? "unknown" : library,
                  module.empty() ? "" : fmt::format(" (kernel module {})", module),
                  machine.gpus.cuda_version > 0 ? cuda_text(machine.gpus.cuda_version) : "unknown");
  check.data = {{"version", text_node(library)},
                {"module", text_node(module)},
                {"cuda", integer_node(machine.gpus.cuda_version)}};
  if (!module.empty() && !library.empty() && module != library)
    return check.fail(
        "Library and kernel module are of different drivers, as after an update without "
        "a reboot. Reboot, or reload the modules.");
  if (machine.nvml.problem.empty()) return check;
  check.value += "; " + machine.nvml.problem;
  return check.warn("Compare with nvidia-smi: without NVML nothing watches the GPUs.");
}

Check check_gpu_errors(const Machine& machine) {
  const auto all = readings(machine);
  if (all.empty()) return no_gpu("gpu_errors");
  Check check{.name = "gpu_errors"};
  std::uint64_t corrected = 0;
  std::uint64_t uncorrected = 0;
  bool counted = false;
  for (const SeenGpu& seen : all) {
    const std::string who = fmt::format("GPU {} at {}", seen.gpu->index, seen.gpu->pci_bus_id);
    if (!seen.reading->problem.empty()) {
      worsen(check, seen.visible ? Status::kFail : Status::kWarn);
      check.lines.push_back(fmt::format("{}: {}", who, seen.reading->problem));
      check.remedy =
          "Take it out of CUDA_VISIBLE_DEVICES; nvidia-smi -r or a reboot may bring it "
          "back.";
    }
    counted = counted || seen.reading->ecc_uncorrected;
    corrected += seen.reading->ecc_corrected.value_or(0);
    const std::uint64_t wrong = seen.reading->ecc_uncorrected.value_or(0);
    uncorrected += wrong;
    if (wrong == 0) continue;
    worsen(check, seen.visible ? Status::kFail : Status::kWarn);
    check.lines.push_back(fmt::format("{}: {} uncorrected ECC errors", who, wrong));
    if (check.remedy.empty())
      check.remedy =
          "Results of that GPU cannot be trusted. Reset it (nvidia-smi -r) and run "
          "nvidia-smi -q -d ECC,ROW_REMAPPER; replace the card when errors return.";
  }
  if (corrected > 0 && check.status == Status::kOk)
    check.warn("Corrected errors do no harm; watch whether they grow (nvidia-smi -q -d ECC).");
  check.value =
      fmt::format("{} GPU{} asked; ECC errors since the driver was loaded: {}", all.size(),
                  all.size() == 1 ? "" : "s",
                  counted ? fmt::format("{} corrected, {} uncorrected", corrected, uncorrected)
                          : "not counted by these cards");
  check.data = {{"ecc_corrected", integer_node(static_cast<std::int64_t>(corrected))},
                {"ecc_uncorrected", integer_node(static_cast<std::int64_t>(uncorrected))}};
  return check;
}

Check check_xid(const Machine& machine) {
  if (machine.nvml.gpus.empty()) return no_gpu("xid");
  Check check{.name = "xid"};
  for (const monitor::XidEvent& event : machine.nvml.xids)
    check.lines.push_back(fmt::format("GPU {}: Xid {} now", event.gpu, event.xid));
  std::size_t logged = 0;
  std::string last;
  for (const std::string& line : lines_of(machine.kernel_log)) {
    const auto at = line.find("NVRM: Xid");
    if (at == std::string::npos) continue;
    ++logged;
    last = line.substr(at, 160);
  }
  if (!last.empty()) check.lines.push_back(last);
  check.value =
      machine.kernel_log.empty()
          ? fmt::format("{} now (this user may not read the kernel log)", machine.nvml.xids.size())
          : fmt::format("{} now, {} in the kernel log", machine.nvml.xids.size(), logged);
  if (check.lines.empty()) return check;
  return check.judge(
      machine.nvml.xids.empty() ? Status::kWarn : Status::kFail,
      "The driver reported critical errors. NVIDIA's list of Xid numbers has the cause; "
      "48, 63, 79, 94 and 95 are the card, 13, 31 and 43 often a program.");
}

Check check_throttling(const Machine& machine) {
  const auto all = readings(machine);
  if (all.empty()) return no_gpu("throttling");
  Check check{.name = "throttling"};
  for (const SeenGpu& seen : all) {
    const std::uint64_t reasons = seen.reading->clock_reasons.value_or(0);
    if (!monitor::is_throttled(reasons)) continue;
    check.lines.push_back(fmt::format("GPU {}: {} ({})", seen.gpu->index,
                                      fmt::join(monitor::clock_reason_words(reasons), ", "),
                                      monitor::reading_text(*seen.reading)));
  }
  check.value = fmt::format("{} of {} GPUs are slowed down now", check.lines.size(), all.size());
  if (check.lines.empty()) return check;
  return check.warn(
      "Heat: check fans and air flow. Power: raise the limit (nvidia-smi -pl) or the "
      "supply. One slow GPU slows down all ranks.");
}

Check check_gpu_memory(const Machine& machine) {
  const auto all = readings(machine);
  if (all.empty()) return no_gpu("gpu_memory");
  Check check{.name = "gpu_memory"};
  std::uint64_t most = 0;
  for (const SeenGpu& seen : all) {
    const std::uint64_t used = seen.reading->memory_used_bytes.value_or(0);
    if (!seen.visible) continue;
    most = std::max(most, used);
    if (used < kMemoryInUse) continue;
    std::vector<std::int64_t> pids;
    for (const monitor::GpuProcess& process : seen.reading->processes) pids.push_back(process.pid);
    check.lines.push_back(
        fmt::format("GPU {}: {} in use{}", seen.gpu->index, monitor::memory_text(*seen.reading),
                    pids.empty() ? "" : fmt::format(" by pid {}", fmt::join(pids, ", "))));
  }
  check.value = fmt::format("at most {} of a GPU in use before the run", bytes_text(most));
  check.data = {{"most_used_bytes", integer_node(static_cast<std::int64_t>(most))}};
  if (check.lines.empty()) return check;
  return check.warn(
      "Another program uses the GPU. Wait for it or end it, or choose other GPUs with "
      "CUDA_VISIBLE_DEVICES.");
}

Check check_gpu_per_rank(const Machine& machine) {
  Check check{.name = "gpu_per_rank"};
  check.data = {{"ranks", integer_node(machine.ranks)}, {"gpus", integer_node(machine.gpus.count)}};
  if (!machine.on_gpu) {
    return check.skip(fmt::format("{} ranks on the CPU", machine.ranks));
  }
  for (int rank = 0; rank < machine.ranks; ++rank) {
    const DeviceRule rule = apply_device_rule(
        {.local_rank = rank, .visible_gpus = [&machine] { return machine.gpus.count; }});
    if (rule.problem.empty()) continue;
    check.value = rule.problem;
    return check.fail(fmt::format("Start {} ranks: --nproc-per-node=gpu.", machine.gpus.count));
  }
  check.value = fmt::format("{} ranks on {} visible GPUs", machine.ranks, machine.gpus.count);
  if (machine.ranks == machine.gpus.count) return check;
  const int idle = machine.gpus.count - machine.ranks;
  return check.warn(idle > 0
                        ? fmt::format("{} idle. Start one rank per GPU: --nproc-per-node=gpu.",
                                      idle == 1 ? "1 GPU stays" : fmt::format("{} GPUs stay", idle))
                        : "Ranks share a GPU (LOCKSTEP_SHARE_DEVICE=1), which is for tests: "
                          "it is slower than one rank per GPU.");
}

Check check_cudnn(const Machine& machine) {
  if (!machine.on_gpu) return no_gpu("cudnn");
  Check check{.name = "cudnn",
              .value = "LD_LIBRARY_PATH holds no libcudnn: LibTorch's own is used"};
  for (const std::string& folder : split(machine.variable("LD_LIBRARY_PATH").value_or(""), ':')) {
    std::error_code ignored;
    const std::string file = folder + "/libcudnn.so.9";
    if (folder.empty() || !std::filesystem::exists(file, ignored)) continue;
    if (folder.find("/nvidia/cudnn/") != std::string::npos) continue;  // the wheel's
    check.value = fmt::format(
        "LD_LIBRARY_PATH holds {}, which the loader may take instead of LibTorch's own", file);
    return check.warn(
        fmt::format("LibTorch may then lack cuDNN's attention, the fastest on H100 and "
                    "later. Remove {} from LD_LIBRARY_PATH.",
                    folder));
  }
  return check;
}

// ------------------------------------------------------------------ the probe

namespace {

namespace fs = std::filesystem;

constexpr double kSlowRank = 2;   // times the fastest one's time
constexpr double kSlowShm = 0.5;  // GB/s, far below any memory
constexpr double kSlowNccl = 2;   // GB/s, below PCIe 3.0 x4

// ------------------------------------------------------------------ what they found

Node read_node(const fs::path& file) {
  const std::string text = text_or_empty(file);
  if (text.empty()) return {};
  try {
    return parse_json(text, file);
  } catch (const UsageError&) {  // torn: the rank was killed while it wrote
    return {};
  }
}

NodeMembers members(const Node& node) {
  NodeMembers out;
  for (const Entry& entry : node.entries) out.emplace_back(entry.key, entry.value);
  return out;
}

Check check_libtorch(const Machine& machine, const Node& found) {
  Check check{.name = "libtorch", .data = members(found)};
  check.value = fmt::format("LibTorch {} from {}", found.get("torch").text,
                            fs::path(found.get("torch_library").text).parent_path().string());
  const int runtime = static_cast<int>(found.get("cuda").real);
  const int driver = machine.gpus.cuda_version;
  if (runtime == 0) {
    check.value += "; its CUDA part is not loaded";
    if (!machine.on_gpu) return check;
    return check.warn(
        "GPUs are visible, but these programs were built without CUDA and run on the CPU. Build "
        "them with nvcc and a LibTorch for CUDA.");
  }
  check.value += fmt::format(", built for CUDA {}.{}; NCCL {}", runtime / 1000, runtime % 1000 / 10,
                             found.get("nccl").text);
  // Within a major version older drivers run newer programs.
  if (driver == 0 || runtime / 1000 <= driver / 1000) return check;
  check.value += fmt::format("; the driver has CUDA {}.{}", driver / 1000, driver % 1000 / 10);
  return check.fail(
      fmt::format("Install a driver for CUDA {}.x or later, or a LibTorch that was built "
                  "for CUDA {}.x.",
                  runtime / 1000, driver / 1000));
}

// A wheel's cuDNN lies beside its torch; one from elsewhere may lack what LibTorch asks for.
std::optional<Check> check_loaded_cudnn(const Node& found) {
  const std::string library = found.get("cudnn_library").text;
  if (library.empty()) return std::nullopt;
  const fs::path root =
      fs::path(found.get("torch_library").text).parent_path().parent_path().parent_path();
  const auto loaded = static_cast<int>(found.get("cudnn").real);
  const auto compiled = static_cast<int>(found.get("cudnn_compiled").real);
  Check check{.name = "cudnn"};
  check.value =
      fmt::format("cuDNN {} from {} (LibTorch was built with {})", loaded, library, compiled);
  check.data = {{"loaded", integer_node(loaded)},
                {"compiled", integer_node(compiled)},
                {"library", text_node(library)}};
  if (library.starts_with(root.string() + "/") && loaded >= compiled) return check;
  return check.warn(
      fmt::format("LibTorch may lack cuDNN's attention, the fastest on H100 and later. "
                  "Remove {} from LD_LIBRARY_PATH and the loader's configuration, so "
                  "that LibTorch finds its own.",
                  fs::path(library).parent_path().string()));
}

Check check_compute(const Machine& machine, const std::vector<Node>& ranks) {
  Check check{.name = "compute"};
  double fastest = 1e30;
  double slowest = 0;
  std::string slow;
  std::vector<Node> times;
  for (const Node& rank : ranks) {
    const double ms = rank.get("compute_ms").real;
    const std::string who =
        fmt::format("rank {:.0f} ({})", rank.get("rank").real, rank.get("device").text);
    times.push_back(real_node(ms));
    fastest = std::min(fastest, ms);
    if (ms > slowest) slow = who;
    slowest = std::max(slowest, ms);
    if (rank.get("right").boolean) continue;
    check.lines.push_back(who + " computed a wrong gradient");
    check.fail(
        "That device or its memory is faulty. Leave it out, and run its own diagnosis "
        "(dcgmi diag -r 3, memtest).");
  }
  check.data = {{"ms", list_node(std::move(times))}};
  check.value =
      fmt::format("{} of {} ranks computed alone on their devices, in {:.2f} to {:.2f} ms",
                  ranks.size(), machine.ranks, fastest, slowest);
  if (check.status != Status::kOk) return check;
  if (static_cast<int>(ranks.size()) < machine.ranks)
    return check.fail(
        "A rank alone does not work. Run the program with one rank first: it is then "
        "a world of one.");
  if (slowest <= kSlowRank * fastest) return check;
  check.value += "; slowest: " + slow;
  return check.warn(
      "One slow rank slows down all. See whether another program uses its device or "
      "cores, and whether it is throttled.");
}

Check check_p2p(const Node& world) {
  Check check{.name = "p2p"};
  const Entry* pairs = world.find("p2p");
  if (pairs == nullptr || pairs->value.items.empty())
    return check.skip("fewer than two GPUs in use");
  double slowest = 1e30;
  std::size_t wrong = 0;
  for (const Node& pair : pairs->value.items) {
    slowest = std::min(slowest, pair.get("gb_per_s").real);
    if (pair.get("right").boolean) continue;
    ++wrong;
    check.lines.push_back(fmt::format("cuda:{:.0f} to cuda:{:.0f}: the copy differs",
                                      pair.get("from").real, pair.get("to").real));
  }
  check.value = fmt::format("{} copies between GPUs, {} wrong, slowest {:.1f} GB/s",
                            pairs->value.items.size(), wrong, slowest);
  check.data = {{"slowest_gb_per_s", real_node(slowest)}, {"pairs", pairs->value}};
  if (wrong == 0) return check;
  return check.fail(
      "Copies between GPUs arrive damaged, often because of the IOMMU or PCIe ACS. Set "
      "NCCL_P2P_DISABLE=1 for now; disable ACS or boot with iommu=pt.");
}

Check check_all_reduce(const Machine& machine, const Node& world) {
  Check check{.name = "all_reduce"};
  const Entry* found = world.find("all_reduce");
  if (found == nullptr) return check.skip("one rank has no peer");
  const std::string backend = world.get("backend").text;
  const double rate = found->value.get("gb_per_s").real;
  check.value = fmt::format(
      "{:.0f} MB over {} ranks by {}: {:.2f} ms, {:.2f} GB/s ({:.2f} GB/s on "
      "the bus)",
      found->value.get("bytes").real / 1e6, machine.ranks, backend, found->value.get("ms").real,
      rate, found->value.get("bus_gb_per_s").real);
  check.data = members(found->value);
  check.data.emplace_back("backend", text_node(backend));
  if (!found->value.get("right").boolean) {
    check.value += "; the sum is wrong";
    return check.fail(
        "A sum over ranks must be exact here. Test devices and memory (compute, p2p).");
  }
  if (rate >= (backend == "nccl" ? kSlowNccl : kSlowShm)) return check;
  return check.warn(backend == "nccl"
                        ? "NCCL probably uses sockets between GPUs of one host: "
                          "NCCL_DEBUG=INFO says which way it takes."
                        : "The cores are busy with something else, or ranks share one.");
}

// Saves the measured link for `lockstep plan` on this host.
void keep_link(const Machine& machine, const Node& world, const std::string& disturbance) {
  const Entry* found = world.find("all_reduce");
  if (found == nullptr || !found->value.get("right").boolean) return;
  const bool cpu = machine.gpus.models.empty() || !machine.on_gpu;
  save_link(cpu ? "cpu" : machine.gpus.models.front().name,
            {.backend = world.get("backend").text,
             .ranks = machine.ranks,
             .bandwidth = 1e9 * found->value.get("bus_gb_per_s").real,
             .disturbance = disturbance});
}

// Times of a machine that others use are not the machine's.
void add_disturbance(Check& check, const std::string& disturbance) {
  if (check.status == Status::kSkip) return;
  check.value += fmt::format("; {} meanwhile", disturbance);
  check.data.emplace_back("disturbance", text_node(disturbance));
  if (check.status != Status::kFail)
    check.warn("Measure again on an idle machine before you use these figures.");
}

}  // namespace

std::vector<Check> read_probe(const Machine& machine, const std::string& folder,
                              const std::string& problem, const std::string& disturbance) {
  std::vector<Node> ranks;
  for (int rank = 0; rank < machine.ranks; ++rank) {
    Node node = read_node(fs::path(folder) / fmt::format("rank_{}.json", rank));
    if (node.is(NodeKind::kMap)) ranks.push_back(std::move(node));
  }
  const Node world = read_node(fs::path(folder) / "world.json");
  std::vector<Check> checks;
  if (const Node versions = read_node(fs::path(folder) / "versions.json");
      versions.is(NodeKind::kMap)) {
    checks.push_back(check_libtorch(machine, versions));
    if (auto cudnn = check_loaded_cudnn(versions)) checks.push_back(std::move(*cudnn));
  }
  if (!ranks.empty()) checks.push_back(check_compute(machine, ranks));
  if (world.is(NodeKind::kMap)) {
    checks.push_back(check_p2p(world));
    checks.push_back(check_all_reduce(machine, world));
  }
  for (Check& check : checks)
    if (!disturbance.empty() && (check.name == "compute" || check.name == "all_reduce"))
      add_disturbance(check, disturbance);
  if (!problem.empty())
    checks.push_back({.name = "probe",
                      .status = Status::kFail,
                      .value = problem,
                      .remedy = ranks.empty()
                                    ? "The lines above are what it printed last."
                                    : "Each rank alone works: look for what is between them "
                                      "(limits, interface, NCCL). NCCL_DEBUG=INFO says more."});
  return checks;
}

std::vector<Check> probe_checks(const Machine& machine) {
  const auto skipped = [](const std::string& why) {
    return std::vector<Check>{Check{.name = "probe"}.skip(why)};
  };
  if (!machine.request.probe) return skipped("--no-probe: no ranks were started");
  if (check_gpu_per_rank(machine).status == Status::kFail)
    return skipped("there is no GPU for each rank (gpu_per_rank)");
  if (train_program().empty())
    return skipped("libexec/lockstep-train is not there: this build has no LibTorch");
  const ScratchFolder folder("doctor");
  const OtherPrograms others;
  const RanksOutcome outcome = [&] {
    const Progress progress("running ranks that compute and communicate");
    std::vector<std::string> variables;
    if (std::getenv("NCCL_DEBUG") == nullptr) variables.emplace_back("NCCL_DEBUG=WARN");
    return run_ranks({.ranks = machine.ranks,
                      .timeout_s = machine.request.probe_timeout_s,
                      .arguments = {"doctor-probe", folder.path()},
                      .environment = std::move(variables)},
                     folder.path());
  }();
  const std::string disturbance = others.text();
  std::string problem;
  if (!outcome.in_time)
    problem = fmt::format("{} ranks did not finish within {} s (--probe-timeout)", machine.ranks,
                          machine.request.probe_timeout_s);
  else if (!outcome.ending.ok())
    problem = fmt::format("the ranks failed: lockstep run {}", outcome.ending.text());
  std::vector<Check> checks = read_probe(machine, folder.path(), problem, disturbance);
  if (!problem.empty())
    checks.back().lines = tail(outcome.output);
  else
    keep_link(machine, read_node(fs::path(folder.path()) / "world.json"), disturbance);
  return checks;
}

}  // namespace lockstep::cli
