// The checks of `lockstep doctor` on machines that are made up: control groups, cards that
// fail, and what ranks may have left of a probe.
#include "cli/doctor_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>

#include "lockstep/core/helpers_for_test.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using io::TemporaryDirectory;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class Doctor : public testing::Test {
 protected:
  Doctor() {
    ::unsetenv("LOCKSTEP_DEVICE");
    machine.files = {.proc = folder / "proc", .sys = folder / "sys"};
    machine.variable = [this](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      if (found == variables.end()) return std::nullopt;
      return found->second;
    };
    machine.cpus = {0, 1, 2, 3};
    machine.ranks = 2;
  }
  ~Doctor() override { ::setenv("LOCKSTEP_DEVICE", "cpu", 1); }

  void file(const std::string& name, const std::string& text) {
    const std::string path = folder / name;
    fs::create_directories(fs::path(path).parent_path());
    io::put(path, text);
  }
  // Only version 2, with the process in /job.
  std::string group() {
    file("proc/self/mountinfo",
         "30 20 0:26 / " + (folder / "groups") + " rw - cgroup2 cgroup2 rw\n");
    file("proc/self/cgroup", "0::/job\n");
    return "groups/job/";
  }
  // As many GPUs as readings, at 0000:1a:00.0, 0000:2a:00.0, ..., all of them visible.
  void gpus(std::vector<monitor::GpuReading> readings) {
    auto sample = std::make_shared<monitor::GpuSample>();
    for (const monitor::GpuReading& reading : readings) {
      const int index = machine.gpus.count++;
      const std::string place = "0000:" + std::to_string(index + 1) + "a:00.0";
      machine.gpus.pci_addresses.push_back(place);
      machine.gpus.models.push_back({.name = "NVIDIA H100"});
      machine.nvml.gpus.push_back({.index = index, .pci_bus_id = place});
      sample->gpus.push_back(reading);
    }
    machine.nvml.newest = sample;
    machine.nvml.driver_version = "580.1";
    machine.gpus.cuda_version = 13000;
    machine.on_gpu = true;
    machine.ranks = machine.gpus.count;
  }

  TemporaryDirectory folder;
  std::map<std::string, std::string> variables;
  Machine machine;
};

// ------------------------------------------------------------------ host

TEST_F(Doctor, RanksFitTheCores) {
  EXPECT_EQ(check_cores(machine).status, Status::kOk);
  machine.quota = 1.5;
  const Check check = check_cores(machine);
  EXPECT_EQ(check.status, Status::kWarn);
  EXPECT_THAT(check.value, HasSubstr("1.5 cores for 2 ranks (affinity 0-3, cgroup quota 1.50"));
  EXPECT_THAT(check.remedy, HasSubstr("at most 1 (--nproc-per-node)"));
}

TEST_F(Doctor, ThreadsFitTheCores) {
  EXPECT_THAT(check_threads(machine).value, HasSubstr("gives each rank 2 threads"));
  variables["OMP_NUM_THREADS"] = "2";
  EXPECT_EQ(check_threads(machine).status, Status::kOk);
  variables["OMP_NUM_THREADS"] = "3";
  const Check check = check_threads(machine);
  EXPECT_EQ(check.status, Status::kWarn);
  EXPECT_THAT(check.value, HasSubstr("6 threads on 4 cores"));
  EXPECT_THAT(check.remedy, HasSubstr("OMP_NUM_THREADS=2"));
  variables["OMP_NUM_THREADS"] = "many";
  EXPECT_EQ(check_threads(machine).status, Status::kWarn);
  // One thread each is right even where ranks outnumber the cores, which the other check reports.
  variables["OMP_NUM_THREADS"] = "1";
  machine.ranks = 7;
  EXPECT_EQ(check_threads(machine).status, Status::kOk);
}

TEST_F(Doctor, MemoryIsWhatHostAndGroupLeave) {
  file("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n");
  Check check = check_memory(machine);
  EXPECT_EQ(check.status, Status::kOk);
  EXPECT_THAT(check.value,
              HasSubstr("4.0 GiB free of 8.0 GiB (no cgroup limit): 2.0 GiB for each"));
  const std::string job = group();
  file(job + "memory.max", "1073741824\n");
  file(job + "memory.current", "536870912\n");
  check = check_memory(machine);
  EXPECT_EQ(check.status, Status::kWarn);
  EXPECT_THAT(check.value, HasSubstr("cgroup limit 1.0 GiB, of which 512 MiB are free"));
  EXPECT_THAT(check.remedy, HasSubstr("docker --memory"));
  machine.ranks = 3;
  EXPECT_EQ(check_memory(machine).status, Status::kFail);
}

TEST_F(Doctor, AMissingShmMattersToNccl) {
  machine.shm = folder / "none";
  EXPECT_EQ(check_shm(machine).status, Status::kWarn);
  gpus({{}, {}});
  const Check check = check_shm(machine);
  EXPECT_EQ(check.status, Status::kFail);
  EXPECT_THAT(check.remedy, HasSubstr("--shm-size=1g"));
}

TEST_F(Doctor, OpenFilesFollowTheRanks) {
  machine.open_files = machine.open_files_max = 1024;
  EXPECT_EQ(check_open_files(machine).status, Status::kOk);
  machine.open_files = 256;
  EXPECT_EQ(check_open_files(machine).status, Status::kWarn);
  EXPECT_THAT(check_open_files(machine).remedy, HasSubstr("ulimit -n 65536"));
  machine.open_files = 20;
  EXPECT_EQ(check_open_files(machine).status, Status::kFail) << "of a rank";
  machine.open_files = machine.open_files_max = 256;
  machine.ranks = 64;
  EXPECT_EQ(check_open_files(machine).status, Status::kFail) << "of the launcher";
  EXPECT_THAT(check_open_files(machine).remedy, HasSubstr("limits.conf"));
}

TEST_F(Doctor, ProcessesAreLimitedByUserAndGroup) {
  machine.processes = 20;
  EXPECT_EQ(check_processes(machine).status, Status::kFail);
  machine.root = true;
  EXPECT_EQ(check_processes(machine).status, Status::kOk);
  const std::string job = group();
  file(job + "pids.max", "100\n");
  file(job + "pids.current", "90\n");
  const Check check = check_processes(machine);
  EXPECT_EQ(check.status, Status::kFail);
  EXPECT_THAT(check.value, HasSubstr("limit of this user: 20 processes and threads (root is not "
                                     "bound by it); 10 left in the cgroup"));
  EXPECT_THAT(check.remedy, HasSubstr("--pids-limit"));
}

TEST_F(Doctor, TheOutputFolderNeedNotExistButMustBePossible) {
  EXPECT_EQ(check_disk(machine).status, Status::kSkip);
  machine.request.output_dir = folder / "a/b/c";
  EXPECT_THAT(check_disk(machine).value, HasSubstr(" free at " + folder.path()));
  file("plain", "");
  machine.request.output_dir = folder / "plain/out";
  const Check check = check_disk(machine);
  EXPECT_EQ(check.status, Status::kFail);
  EXPECT_THAT(check.value, HasSubstr("plain is not a folder"));
  machine.request.output_dir = "/proc/x";  // even root's writes fail there
  EXPECT_THAT(check_disk(machine).value,
              HasSubstr("/proc/x cannot be written: nothing can be made in /proc ("));
  EXPECT_THAT(check_disk(machine).remedy, HasSubstr("Choose another output_dir"));
}

// ------------------------------------------------------------------ GPUs

TEST_F(Doctor, WithoutGpusTheirChecksAreSkipped) {
  machine.gpus.reason = "libcuda.so.1 is not there (no NVIDIA driver)";
  for (const auto& check :
       {check_devices(machine), check_driver(machine), check_gpu_errors(machine),
        check_xid(machine), check_throttling(machine), check_gpu_memory(machine),
        check_gpu_per_rank(machine), check_cudnn(machine)})
    EXPECT_EQ(check.status, Status::kSkip) << check.name;
}

TEST_F(Doctor, GpusThatCudaDoesNotSeeAreAFailure) {
  gpus({{}, {}});
  EXPECT_THAT(check_devices(machine).value, HasSubstr("2 GPUs visible of 2: 2 x NVIDIA H100"));
  machine.gpus = {.reason = "cuInit failed"};
  EXPECT_EQ(check_devices(machine).status, Status::kFail);
  EXPECT_THAT(check_devices(machine).value, HasSubstr("NVML lists 2"));
  variables["CUDA_VISIBLE_DEVICES"] = "";
  EXPECT_EQ(check_devices(machine).status, Status::kSkip) << "hidden on purpose";
  variables.clear();
  machine.nvml = {};
  file("proc/driver/nvidia/version",
       "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.2  Release Build\n");
  EXPECT_THAT(check_devices(machine).value, HasSubstr("kernel's NVIDIA driver is loaded"));
  EXPECT_THAT(check_devices(machine).remedy, HasSubstr("--gpus all"));
}

TEST_F(Doctor, LibraryAndModuleMustBeOfOneDriver) {
  gpus({{}});
  EXPECT_THAT(check_driver(machine).value, HasSubstr("driver 580.1, CUDA 13.0"));
  file("proc/driver/nvidia/version",
       "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.2  Release Build\n");
  const Check check = check_driver(machine);
  EXPECT_EQ(check.status, Status::kFail);
  EXPECT_THAT(check.remedy, HasSubstr("Reboot"));
}

TEST_F(Doctor, EccErrorsAndLostCards) {
  gpus({{.ecc_corrected = 0, .ecc_uncorrected = 0}, {}});
  EXPECT_EQ(check_gpu_errors(machine).status, Status::kOk);
  machine.gpus = {};
  machine.nvml = {};
  gpus({{.ecc_corrected = 7, .ecc_uncorrected = 0}});
  EXPECT_EQ(check_gpu_errors(machine).status, Status::kWarn);
  machine.gpus = {};
  machine.nvml = {};
  gpus({{.ecc_uncorrected = 2}, {.problem = "GPU is lost"}});
  const Check check = check_gpu_errors(machine);
  EXPECT_EQ(check.status, Status::kFail);
  EXPECT_THAT(check.lines, ElementsAre("GPU 0 at 0000:1a:00.0: 2 uncorrected ECC errors",
                                       "GPU 1 at 0000:2a:00.0: GPU is lost"));
  // Another job's card is not this one's failure.
  machine.gpus.pci_addresses = {"0000:3a:00.0"};
  EXPECT_EQ(check_gpu_errors(machine).status, Status::kWarn);
}

TEST_F(Doctor, XidsNowAndInTheKernelLog) {
  gpus({{}});
  EXPECT_THAT(check_xid(machine).value, HasSubstr("may not read the kernel log"));
  machine.kernel_log = "<6>[1.0] eth0: up\n<3>[2.0] NVRM: Xid (PCI:0000:1a:00): 79, lost\n";
  Check check = check_xid(machine);
  EXPECT_EQ(check.status, Status::kWarn);
  EXPECT_THAT(check.lines, ElementsAre("NVRM: Xid (PCI:0000:1a:00): 79, lost"));
  machine.kernel_log = "<6>[1.0] eth0: up\n";
  EXPECT_EQ(check_xid(machine).status, Status::kOk);
  machine.nvml.xids = {{.gpu = 0, .xid = 48}};
  check = check_xid(machine);
  EXPECT_EQ(check.status, Status::kFail);
  EXPECT_THAT(check.lines, ElementsAre("GPU 0: Xid 48 now"));
}

TEST_F(Doctor, ThrottlingAndMemoryInUse) {
  gpus({{.clock_reasons = 0x001}, {.clock_reasons = 0x040}});
  const Check check = check_throttling(machine);
  EXPECT_EQ(check.status, Status::kWarn);
  ASSERT_EQ(check.lines.size(), 1u) << "an idle GPU is not throttled";
  EXPECT_THAT(check.lines[0], HasSubstr("GPU 1: hardware thermal slowdown"));
  EXPECT_EQ(check_gpu_memory(machine).status, Status::kOk);
  machine.gpus = {};
  machine.nvml = {};
  gpus({{.memory_used_bytes = 30ull << 30,
         .memory_total_bytes = 80ull << 30,
         .processes = {{.pid = 17}}}});
  EXPECT_EQ(check_gpu_memory(machine).status, Status::kWarn);
  EXPECT_THAT(check_gpu_memory(machine).lines,
              ElementsAre("GPU 0: 30.0 of 80.0 GiB in use by pid 17"));
}

TEST_F(Doctor, OneGpuForEachRank) {
  gpus({{}, {}});
  EXPECT_EQ(check_gpu_per_rank(machine).status, Status::kOk);
  machine.ranks = 1;
  EXPECT_EQ(check_gpu_per_rank(machine).status, Status::kWarn);
  EXPECT_THAT(check_gpu_per_rank(machine).remedy, HasSubstr("--nproc-per-node=gpu"));
  machine.ranks = 3;
  EXPECT_EQ(check_gpu_per_rank(machine).status, Status::kFail);
  EXPECT_THAT(check_gpu_per_rank(machine).value, HasSubstr("cuda:2"));
}

TEST_F(Doctor, ACudnnBeforeLibTorchsIsFound) {
  gpus({{}});
  EXPECT_EQ(check_cudnn(machine).status, Status::kOk);
  file("old/libcudnn.so.9", "");
  variables["LD_LIBRARY_PATH"] = (folder / "none") + "::" + (folder / "old");
  const Check check = check_cudnn(machine);
  EXPECT_EQ(check.status, Status::kWarn);
  EXPECT_THAT(check.remedy, HasSubstr("Remove " + (folder / "old") + " from LD_LIBRARY_PATH"));
  file("site-packages/nvidia/cudnn/lib/libcudnn.so.9", "");
  variables["LD_LIBRARY_PATH"] = folder / "site-packages/nvidia/cudnn/lib";
  EXPECT_EQ(check_cudnn(machine).status, Status::kOk) << "the wheel's own";
}

// ------------------------------------------------------------------ network

TEST_F(Doctor, OneHostNeedsNoMaster) {
  const auto checks = network_checks(machine);
  ASSERT_EQ(checks.size(), 3u);
  EXPECT_EQ(checks[0].status, Status::kSkip);
  EXPECT_EQ(checks[2].name, "port");
  EXPECT_EQ(checks[2].status, Status::kOk);
}

// ------------------------------------------------------------------ what a probe left

class Probe : public Doctor {
 protected:
  void rank(int number, double ms, bool right = true) {
    file("rank_" + std::to_string(number) + ".json",
         "{\"rank\":" + std::to_string(number) + ",\"device\":\"cpu\",\"right\":" +
             (right ? "true" : "false") + ",\"compute_ms\":" + std::to_string(ms) + "}");
  }
  void versions(const std::string& more = "") {
    file("versions.json",
         R"({"torch":"2.11.0","torch_library":"/py/torch/lib/libtorch_cpu.so")" + more + "}");
  }
  Check found(const std::string& name, const std::string& problem = "") {
    for (const Check& check : read_probe(machine, folder.path(), problem))
      if (check.name == name) return check;
    return {.name = "(missing)", .status = Status::kSkip};
  }
  static constexpr const char* kCuda =
      R"(,"cuda":13000,"nccl":"2.28.9","cudnn":91500,"cudnn_compiled":91500,"cudnn_library":)";
};

TEST_F(Probe, AHealthyPair) {
  rank(0, 10);
  rank(1, 11);
  versions();
  file("world.json", R"({"backend":"shm","device":"cpu","all_reduce":{"bytes":33554432,"ms":5.0,)"
                     R"("gb_per_s":6.7,"bus_gb_per_s":6.7,"right":true}})");
  for (const Check& check : read_probe(machine, folder.path(), ""))
    EXPECT_TRUE(check.status == Status::kOk || check.name == "p2p") << check.name << check.value;
  EXPECT_THAT(found("libtorch").value, HasSubstr("LibTorch 2.11.0 from /py/torch/lib"));
  EXPECT_THAT(found("all_reduce").value,
              HasSubstr("34 MB over 2 ranks by shm: 5.00 ms, 6.70 GB/s"));
  EXPECT_EQ(found("p2p").status, Status::kSkip);
  // The same figures of a machine that others use, which are not its own.
  for (const Check& check :
       read_probe(machine, folder.path(), "", "other programs used 1.2 of 2")) {
    const bool timed = check.name == "compute" || check.name == "all_reduce";
    EXPECT_EQ(check.status == Status::kWarn, timed) << check.name;
    if (!timed) continue;
    EXPECT_THAT(check.value, HasSubstr("; other programs used 1.2 of 2 meanwhile"));
    EXPECT_THAT(check.remedy, HasSubstr("on an idle machine"));
  }
}

TEST_F(Probe, WrongResultsAreFailures) {
  rank(0, 10);
  rank(1, 10, false);
  file("world.json", R"({"backend":"nccl","all_reduce":{"bytes":1,"ms":5.0,"gb_per_s":6.7,)"
                     R"("bus_gb_per_s":6.7,"right":false},"p2p":[{"from":0,"to":1,)"
                     R"("gb_per_s":20.0,"right":false}]})");
  EXPECT_EQ(found("compute").status, Status::kFail);
  EXPECT_THAT(found("compute").lines, ElementsAre("rank 1 (cpu) computed a wrong gradient"));
  EXPECT_EQ(found("all_reduce").status, Status::kFail);
  EXPECT_EQ(found("p2p").status, Status::kFail);
  EXPECT_THAT(found("p2p").lines, ElementsAre("cuda:0 to cuda:1: the copy differs"));
}

TEST_F(Probe, SlownessIsAWarning) {
  rank(0, 10);
  rank(1, 25);
  file("world.json", R"({"backend":"nccl","all_reduce":{"bytes":1,"ms":5.0,"gb_per_s":1.1,)"
                     R"("bus_gb_per_s":1.1,"right":true}})");
  EXPECT_EQ(found("compute").status, Status::kWarn);
  EXPECT_THAT(found("compute").value, HasSubstr("slowest: rank 1 (cpu)"));
  EXPECT_EQ(found("all_reduce").status, Status::kWarn);
  EXPECT_THAT(found("all_reduce").remedy, HasSubstr("NCCL_DEBUG=INFO"));
}

TEST_F(Probe, LibTorchsCudaMustNotBeNewerThanTheDrivers) {
  gpus({{}, {}});
  versions(std::string(kCuda) + "\"/py/nvidia/cudnn/lib/libcudnn.so.9\"");
  EXPECT_EQ(found("libtorch").status, Status::kOk);
  EXPECT_THAT(found("libtorch").value, HasSubstr("built for CUDA 13.0; NCCL 2.28.9"));
  EXPECT_EQ(found("cudnn").status, Status::kOk);
  machine.gpus.cuda_version = 12080;
  EXPECT_EQ(found("libtorch").status, Status::kFail);
  EXPECT_THAT(found("libtorch").remedy, HasSubstr("driver for CUDA 13.x or later"));
}

TEST_F(Probe, ABuildWithoutCudaIsNoticedWhereThereAreGpus) {
  versions();
  EXPECT_EQ(found("libtorch").status, Status::kOk);
  gpus({{}});
  EXPECT_EQ(found("libtorch").status, Status::kWarn);
}

TEST_F(Probe, ACudnnFromElsewhereIsNamed) {
  gpus({{}});
  versions(std::string(kCuda) + "\"/usr/lib/libcudnn.so.9\"");
  EXPECT_EQ(found("cudnn").status, Status::kWarn);
  EXPECT_THAT(found("cudnn").remedy, HasSubstr("Remove /usr/lib from LD_LIBRARY_PATH"));
}

TEST_F(Probe, RanksThatWorkAloneAreDistinguished) {
  rank(0, 10);
  rank(1, 10);
  EXPECT_EQ(found("compute", "did not finish").status, Status::kOk);
  EXPECT_EQ(found("probe", "did not finish").status, Status::kFail);
  EXPECT_THAT(found("probe", "did not finish").remedy, HasSubstr("Each rank alone works"));
  EXPECT_EQ(found("all_reduce", "did not finish").name, "(missing)");
  fs::remove(folder / "rank_1.json");
  EXPECT_EQ(found("compute", "failed").status, Status::kFail);
  EXPECT_THAT(found("compute", "failed").value, HasSubstr("1 of 2 ranks"));
  file("rank_1.json", "{\"rank\":1,\"dev");  // torn
  EXPECT_THAT(found("compute", "failed").value, HasSubstr("1 of 2 ranks"));
}

}  // namespace
}  // namespace lockstep::cli
