#include "launcher/host.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <set>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::launch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A made-up machine under a temporary directory.
struct Machine {
  void write(const std::string& path, const std::string& text) const {
    folder.write(path, text + '\n');
  }

  TemporaryDirectory folder;
  std::string root = folder.path();
  HostFiles files{root + "/proc", root + "/sys"};
};

// ------------------------------------------------------------------ cores

class Cgroups : public testing::Test {
 protected:
  void mount_v2(const std::string& shown = "/") {
    machine_.write("/proc/self/mountinfo", "31 23 0:28 " + shown + " " + machine_.root +
                                               "/cg rw,relatime shared:5 - cgroup2 cgroup2 rw");
  }
  Machine machine_;
};

TEST_F(Cgroups, WithoutAnyThereIsNoQuota) {
  EXPECT_EQ(cgroup_quota_cores(machine_.files), std::nullopt);
  mount_v2();
  machine_.write("/proc/self/cgroup", "0::/a");
  machine_.write("/cg/a/cpu.max", "max 100000");
  EXPECT_EQ(cgroup_quota_cores(machine_.files), std::nullopt);
}

TEST_F(Cgroups, TheTightestLevelOfVersionTwoCounts) {
  mount_v2();
  machine_.write("/proc/self/cgroup", "0::/slice/job");
  machine_.write("/cg/slice/job/cpu.max", "400000 100000");
  EXPECT_EQ(cgroup_quota_cores(machine_.files), 4.0);
  machine_.write("/cg/slice/cpu.max", "150000 100000");
  EXPECT_EQ(cgroup_quota_cores(machine_.files), 1.5);
  machine_.write("/cg/cpu.max", "50000 100000");
  EXPECT_EQ(cgroup_quota_cores(machine_.files), 0.5);
}

TEST_F(Cgroups, AContainerSeesItsOwnPartOnly) {
  mount_v2("/docker/abc");
  machine_.write("/proc/self/cgroup", "0::/docker/abc/inner");
  machine_.write("/cg/inner/cpu.max", "300000 100000");
  EXPECT_EQ(cgroup_quota_cores(machine_.files), 3.0);
  machine_.write("/cg/cpu.max", "200000 100000");
  EXPECT_EQ(cgroup_quota_cores(machine_.files), 2.0);
  machine_.write("/proc/self/cgroup", "0::/../elsewhere");
  EXPECT_EQ(cgroup_quota_cores(machine_.files), 2.0);
}

TEST_F(Cgroups, VersionOneIsReadFromTheCpuController) {
  machine_.write("/proc/self/mountinfo", "32 31 0:29 / " + machine_.root +
                                             "/memory rw - cgroup cgroup rw,memory\n" +
                                             "33 31 0:30 / " + machine_.root +
                                             "/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct");
  machine_.write("/proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/job\n0::/");
  machine_.write("/memory/m/cpu.cfs_quota_us", "100000");
  machine_.write("/memory/m/cpu.cfs_period_us", "100000");
  machine_.write("/cpu/job/cpu.cfs_quota_us", "-1");
  machine_.write("/cpu/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cgroup_quota_cores(machine_.files), std::nullopt);
  machine_.write("/cpu/job/cpu.cfs_quota_us", "250000");
  EXPECT_EQ(cgroup_quota_cores(machine_.files), 2.5);
}

TEST(Cores, AffinityIsHonoured) {
  const std::vector<int> before = allowed_cpus();
  ASSERT_FALSE(before.empty());
  EXPECT_GE(allowed_cores(), 1);
  EXPECT_LE(allowed_cores(), static_cast<int>(before.size()));
  EXPECT_EQ(threads_per_rank(1), allowed_cores());
  EXPECT_EQ(threads_per_rank(1'000'000), 1);
  // In a child, so that the other tests keep their CPUs.
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const std::vector<int> one = {before.back()};
    const bool bound = CpuMask(one).apply();
    ::_exit(bound && allowed_cpus() == one && allowed_cores() == 1 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Cores, AnEmptyOrForeignMaskFails) {
  EXPECT_FALSE(CpuMask({}).apply());
  EXPECT_FALSE(CpuMask({4000}).apply());
}

// ------------------------------------------------------------------ GPUs

class FakeCuda : public testing::Test {
 protected:
  ~FakeCuda() override { ::unsetenv("FAKE_CUDA"); }
  static Gpus ask(const char* behaviour, int timeout_ms = 30'000) {
    ::setenv("FAKE_CUDA", behaviour, 1);
    return find_gpus(timeout_ms, LOCKSTEP_FAKE_CUDA);
  }
};

TEST_F(FakeCuda, CountsDevicesAndTheirPlaces) {
  const Gpus gpus = ask("");
  EXPECT_EQ(gpus.count, 2);
  EXPECT_THAT(gpus.pci_addresses, ElementsAre("0000:1a:00.0", "0000:2a:00.0"));
  EXPECT_EQ(gpus.reason, "");
  EXPECT_EQ(gpus.cuda_version, 13000);
}

TEST_F(FakeCuda, SaysWhatEachIs) {
  const Gpus gpus = ask("");
  ASSERT_EQ(gpus.models.size(), 2u);
  EXPECT_EQ(gpus.models[1].name, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(gpus.models[1].memory_bytes, (std::uint64_t{79} << 30) + 1);
  EXPECT_EQ(gpus.models[1].multiprocessors, 132);
  EXPECT_EQ(gpus.models[1].clock_khz, 1'830'000);
  EXPECT_EQ(gpus.models[1].capability_major, 9);
  EXPECT_EQ(gpus.models[1].capability_minor, 0);
  const Gpus partly = ask("one without memory");
  EXPECT_EQ(partly.count, 2);
  EXPECT_TRUE(partly.models.empty());
}

TEST_F(FakeCuda, SaysWhyThereAreNone) {
  EXPECT_EQ(ask("none").count, 0);
  EXPECT_EQ(ask("none").reason, "the driver shows no device");
  EXPECT_EQ(ask("broken").reason, "cuInit failed with CUDA_ERROR_UNKNOWN");
  EXPECT_EQ(ask("crash").reason, "the CUDA driver ended the process");
  EXPECT_EQ(find_gpus(30'000, "libno-such-driver.so").reason,
            "libno-such-driver.so is not there (no NVIDIA driver)");
  EXPECT_THAT(find_gpus(30'000, "libc.so.6").reason, HasSubstr("is not a CUDA driver"));
}

TEST_F(FakeCuda, ADriverThatHangsCostsTheDeadline) {
  const auto start = std::chrono::steady_clock::now();
  const Gpus gpus = ask("hang", 200);
  EXPECT_EQ(gpus.reason, "the CUDA driver did not answer within 200 ms");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "the child was not reaped";
}

TEST(RealGpus, AnswerIsConsistent) {
  const Gpus gpus = find_gpus();
  EXPECT_EQ(static_cast<std::size_t>(gpus.count), gpus.pci_addresses.size());
  EXPECT_EQ(gpus.count == 0, !gpus.reason.empty());
}

// ------------------------------------------------------------------ interfaces

TEST(Interfaces, TheLoopbackLeadsToThisHost) {
  for (const char* host : {"127.0.0.1", "localhost", "127.0.1.1", "[127.0.0.1]"}) {
    const Interface route = interface_towards(host);
    EXPECT_TRUE(route.loopback) << host;
    EXPECT_EQ(route.name, "lo") << host;
  }
}

TEST(Interfaces, AnAddressElsewhereLeavesByAnotherInterface) {
  // 192.0.2.0/24 is reserved for documentation: routed like any foreign host, but nobody answers.
  try {
    const Interface route = interface_towards("192.0.2.1");
    EXPECT_FALSE(route.loopback);
    EXPECT_EQ(interface_towards(route.address).name, route.name)
        << "an own address is its carrier's";
  } catch (const SystemError& error) {
    EXPECT_THAT(error.what(), HasSubstr("there is no network route to '192.0.2.1'"));
  }
}

TEST(Interfaces, ANameThatDoesNotResolveIsTheUsersMistake) {
  EXPECT_THAT(message_of([] { interface_towards("no-such-host.invalid"); }),
              AllOf(HasSubstr("[host] the address 'no-such-host.invalid' does not resolve"),
                    HasSubstr("--master-addr")));
}

// ------------------------------------------------------------------ NUMA

// Two sockets with two nodes each, four cores of two threads a node (cpu and cpu+16), one cache for
// every two cores; GPUs 0-3 on nodes 0, 1, 1, 3.
struct BigMachine : Machine {
  BigMachine() {
    write("/sys/devices/system/node/online", "0-3");
    for (int node = 0; node < 4; ++node) {
      const int first = node * 4;
      write(fmt::format("/sys/devices/system/node/node{}/cpulist", node),
            fmt::format("{}-{},{}-{}", first, first + 3, first + 16, first + 19));
    }
    for (int cpu = 0; cpu < 32; ++cpu) add_cpu(cpu);
    const int nodes[] = {0, 1, 1, 3};
    for (int gpu = 0; gpu < 4; ++gpu) {
      gpus.push_back(fmt::format("0000:{}0:00.0", gpu + 1));
      write("/sys/bus/pci/devices/" + gpus.back() + "/numa_node", fmt::format("{}", nodes[gpu]));
    }
  }

  void add_cpu(int cpu) const {
    const int core = cpu % 16;
    const std::string base = fmt::format("/sys/devices/system/cpu/cpu{}", cpu);
    write(base + "/topology/physical_package_id", fmt::format("{}", core / 8));
    write(base + "/topology/thread_siblings_list", fmt::format("{},{}", core, core + 16));
    const int first = core / 2 * 2;
    add_cache(base + "/cache/index0", "Data", 1, fmt::format("{},{}", core, core + 16));
    add_cache(base + "/cache/index1", "Instruction", 4, "0-31");
    add_cache(base + "/cache/index3", "Unified", 3,
              fmt::format("{}-{},{}-{}", first, first + 1, first + 16, first + 17));
  }

  void add_cache(const std::string& path, const std::string& type, int level,
                 const std::string& shared) const {
    write(path + "/type", type);
    write(path + "/level", fmt::format("{}", level));
    write(path + "/shared_cpu_list", shared);
  }

  std::vector<std::string> gpus;
};

class Numa : public testing::Test {
 protected:
  static void SetUpTestSuite() { machine_ = std::make_unique<BigMachine>(); }
  static void TearDownTestSuite() { machine_.reset(); }

  std::string bound(NumaBinding binding, int rank, int ranks, std::vector<std::string> gpus,
                    const std::string& allowed = "0-31") const {
    return cpu_list_text(cpus_for_rank({.binding = binding,
                                        .local_rank = rank,
                                        .local_ranks = ranks,
                                        .gpu_pci_addresses = std::move(gpus),
                                        .allowed = parse_cpu_list(allowed)},
                                       files_));
  }

  static std::unique_ptr<BigMachine> machine_;
  std::vector<std::string> gpus_ = machine_->gpus;
  HostFiles files_ = machine_->files;
};

std::unique_ptr<BigMachine> Numa::machine_;

TEST_F(Numa, NodeOfTheGpu) {
  EXPECT_EQ(bound(NumaBinding::kNode, 0, 4, gpus_), "0-3,16-19");
  EXPECT_EQ(bound(NumaBinding::kNode, 2, 4, gpus_), "4-7,20-23");
  EXPECT_EQ(bound(NumaBinding::kNode, 3, 4, gpus_), "12-15,28-31");
  EXPECT_EQ(bound(NumaBinding::kNode, 4, 5, gpus_), "0-3,16-19") << "ranks beyond the GPUs";
}

TEST_F(Numa, SocketOfTheGpu) {
  EXPECT_EQ(bound(NumaBinding::kSocket, 1, 4, gpus_), "0-7,16-23");
  EXPECT_EQ(bound(NumaBinding::kSocket, 3, 4, gpus_), "8-15,24-31");
}

TEST_F(Numa, ExclusiveSharesTheNodesCoresAmongItsGpus) {
  EXPECT_EQ(bound(NumaBinding::kExclusive, 0, 4, gpus_), "0-3,16-19");
  EXPECT_EQ(bound(NumaBinding::kExclusive, 1, 4, gpus_), "4-5,20-21");
  EXPECT_EQ(bound(NumaBinding::kExclusive, 2, 4, gpus_), "6-7,22-23");
  // Three cores for two GPUs: the first gets two of them.
  EXPECT_EQ(bound(NumaBinding::kExclusive, 1, 4, gpus_, "0-6,16-22"), "4-5,20-21");
  EXPECT_EQ(bound(NumaBinding::kExclusive, 2, 4, gpus_, "0-6,16-22"), "6,22");
}

TEST_F(Numa, ExclusiveWithTooFewCoresIsRefused) {
  EXPECT_THAT(message_of([&] { bound(NumaBinding::kExclusive, 2, 4, gpus_, "0-4"); }),
              HasSubstr("NUMA node 1 has 1 allowed cores for 2 ranks"));
}

TEST_F(Numa, CoreComplexTakesOneCacheEach) {
  EXPECT_EQ(bound(NumaBinding::kCoreComplex, 1, 4, gpus_), "4-5,20-21");
  EXPECT_EQ(bound(NumaBinding::kCoreComplex, 2, 4, gpus_), "6-7,22-23");
  // The fuller cache comes first.
  EXPECT_EQ(bound(NumaBinding::kCoreComplex, 1, 4, gpus_, "4,6-7,12"), "6-7");
}

TEST_F(Numa, WithoutGpusTheRanksSpreadOverTheNodes) {
  EXPECT_EQ(bound(NumaBinding::kNode, 0, 2, {}), "0-3,16-19");
  EXPECT_EQ(bound(NumaBinding::kNode, 1, 2, {}), "8-11,24-27");
  EXPECT_EQ(bound(NumaBinding::kExclusive, 1, 8, {}), "2-3,18-19");
}

TEST_F(Numa, ANodeWithoutAllowedCpusIsRefused) {
  EXPECT_THAT(message_of([&] { bound(NumaBinding::kNode, 3, 4, gpus_, "0-3"); }),
              HasSubstr("local rank 3 belongs to NUMA node 3, where this process is allowed no CPU "
                        "(allowed: 0-3)"));
}

TEST_F(Numa, NoBindingAndNoNumaLeaveTheCpusAlone) {
  EXPECT_EQ(bound(NumaBinding::kNone, 1, 4, gpus_, "2-5"), "2-5");
  files_.sys = machine_->root + "/nothing";
  EXPECT_EQ(bound(NumaBinding::kNode, 1, 4, gpus_, "2-5"), "2-5");
}

TEST(CpuLists, ReadAndWriteTheKernelsNotation) {
  EXPECT_THAT(parse_cpu_list("0-2,5, 8-9\n"), ElementsAre(0, 1, 2, 5, 8, 9));
  EXPECT_THAT(parse_cpu_list(""), IsEmpty());
  EXPECT_EQ(cpu_list_text({0, 1, 2, 5, 8, 9}), "0-2,5,8-9");
  EXPECT_EQ(cpu_list_text({}), "");
}

TEST(Signals, NamesAndNumbersMatch) {
  EXPECT_EQ(signal_name(SIGKILL), "SIGKILL");
  EXPECT_EQ(signal_name(SIGTRAP), "SIGTRAP");
  EXPECT_EQ(signal_name(SIGSYS), "SIGSYS");
  EXPECT_EQ(signal_name(200), "signal 200");
  EXPECT_EQ(signal_number("SIGUSR1"), SIGUSR1);
  EXPECT_EQ(signal_number("usr2"), SIGUSR2);
  EXPECT_EQ(signal_number("SIGNOTHING"), std::nullopt);
}

// ---------------------------------------------------------------- ports

// Whether another process can use a port that the launcher holds.

// What another user's program, or a second job, would do.
Fd take_port(const char* host, int port, bool reuse_port = false) {
  const std::string text(host);
  const bool six = text.find(':') != std::string::npos;
  Fd fd(::socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (reuse_port) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = htons(static_cast<std::uint16_t>(port));
  ::inet_pton(AF_INET, host, &four.sin_addr);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = four.sin_port;
  ::inet_pton(AF_INET6, host, &address.sin6_addr);
  const int bound = six ? ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address)
                        : ::bind(fd.get(), reinterpret_cast<sockaddr*>(&four), sizeof four);
  if (bound != 0) fd.reset();
  return fd;
}

TEST(HeldPort, NobodyCanBindItWhetherItListensOrNot) {
  std::vector<HeldPort> held;
  std::set<int> numbers;
  for (int i = 0; i < 200; ++i) {
    held.push_back(HeldPort::any(Reach::kLoopback));
    numbers.insert(held.back().number());
  }
  EXPECT_EQ(numbers.size(), 200u);
  held.push_back(HeldPort::any(Reach::kNetwork));
  const bool has_ipv6 = held[0].sockets().size() == 2;
  for (const int round : {0, 1, 2}) {
    for (const int i : {0, 200}) {
      const HeldPort& port = held[static_cast<std::size_t>(i)];
      if (round == 1) port.listen();
      if (round == 2) port.stop_listening();
      for (const char* host : {"127.0.0.1", "0.0.0.0", "::", "::1"}) {
        if (std::strcmp(host, "::1") == 0 && !has_ipv6) continue;
        for (const bool reuse_port : {false, true})
          EXPECT_FALSE(take_port(host, port.number(), reuse_port)) << host << " " << round;
      }
    }
  }
}

TEST(HeldPort, AnAskedPortThatIsInUseNamesWhoHasIt) {
  const HeldPort free = HeldPort::any();
  const auto refusal = [&] { return message_of([&] { HeldPort::exactly(free.number()); }); };
  const std::string flag = fmt::format("--master-port={} cannot be used: ", free.number());
  EXPECT_THAT(refusal(), HasSubstr(flag + "another process has bound it. Choose another port"));
  free.listen();
  EXPECT_THAT(refusal(), HasSubstr(flag + fmt::format("pid {} (", ::getpid())));
  EXPECT_THAT(refusal(), HasSubstr(" listens there. Choose another port"));
}

// The end that closes first remembers a connection for a minute.
TEST(HeldPort, AnAskedPortIsTakenBesideWhatAnEarlierRunLeft) {
  int number = 0;
  Fd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  {
    const HeldPort earlier = HeldPort::any(Reach::kIpv4Loopback);
    number = earlier.number();
    earlier.listen();
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(number));
    ASSERT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    const Fd accepted(::accept(earlier.sockets()[0].get(), nullptr, nullptr));
    ASSERT_TRUE(accepted);
  }
  char byte = 0;
  EXPECT_EQ(::read(client.get(), &byte, 1), 0);
  client.reset();
  const HeldPort port = HeldPort::exactly(number, Reach::kLoopback);
  EXPECT_FALSE(take_port("127.0.0.1", number));  // although SO_REUSEADDR was needed
  port.listen();
  EXPECT_FALSE(take_port("127.0.0.1", number));
}

// Another process may bind a socket to a port before the launcher does.
TEST(HeldPort, ASocketThatWasBoundBeforeCannotListen) {
  const int number = HeldPort::any(Reach::kIpv4Loopback).number();
  const Fd prepared = take_port("127.0.0.1", number);
  ASSERT_TRUE(prepared);
  const HeldPort port = HeldPort::exactly(number, Reach::kLoopback);
  EXPECT_NE(::listen(prepared.get(), 5), 0);
  port.listen();
  EXPECT_NE(::listen(prepared.get(), 5), 0);
  port.stop_listening();
  EXPECT_NE(::listen(prepared.get(), 5), 0);
}

}  // namespace

}  // namespace lockstep::launch
