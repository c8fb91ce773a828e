// The half of the probe that needs no torch: starts the ranks of probe_ranks.cpp, reads what they
// left, and keeps the link that they measured for `lockstep plan`.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "cli/doctor_checks.h"
#include "cli/local_ranks.h"
#include "cli/plan.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"

namespace lockstep::cli {
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
