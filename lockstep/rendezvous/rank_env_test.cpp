#include "lockstep/rendezvous/rank_env.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/rendezvous/store_client.h"

namespace lockstep {

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using Variables = std::map<std::string, std::string>;

// Sets these variables and no others during its lifetime.
class Environment {
 public:
  explicit Environment(const Variables& variables) {
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      const auto equals = text.find('=');
      before_[text.substr(0, equals)] = text.substr(equals + 1);
    }
    ::clearenv();
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() {
    ::clearenv();
    for (const auto& [name, value] : before_) ::setenv(name.c_str(), value.c_str(), 1);
  }

 private:
  Variables before_;
};

RankEnv read(const Variables& variables) {
  const Environment environment(variables);
  return read_rank_env();
}

std::string refusal(const Variables& variables) {
  return message_of([&] { read(variables); });
}

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"GROUP_RANK", "1"},
                             {"MASTER_ADDR", "n0"},
                             {"MASTER_PORT", "29400"},
                             {"TORCHELASTIC_RUN_ID", "none"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"OMPI_MCA_ess_base_jobid", "1957429249"},
                        {"PMIX_NAMESPACE", "1957429249"}};
const Variables kSrun = {{"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_ID", "3"},
                         {"SLURM_PROCID", "3"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NODEID", "1"},
                         {"SLURM_STEP_NUM_TASKS", "4"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                         {"SLURM_STEP_NODELIST", "gpu[07-08]"}};

TEST(RankEnv, NothingSetIsAWorldOfOne) {
  const RankEnv env = read({});
  EXPECT_TRUE(env.alone());
  EXPECT_EQ(env.source, "alone");
  EXPECT_EQ(env.local_world_size, 1);
  EXPECT_TRUE(read({{"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}}).alone());
  EXPECT_TRUE(read({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).alone());
}

TEST(RankEnv, Torchrun) {
  const RankEnv env = read(kTorchrun);
  EXPECT_EQ(env.source, "torchrun");
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 4);
  EXPECT_EQ(env.node, 1);
  EXPECT_EQ(env.master_addr, "n0");
  EXPECT_EQ(env.master_port, 29400);
  EXPECT_EQ(env.attempt, 2);
  EXPECT_TRUE(env.agent_store);
  EXPECT_TRUE(env.rendezvous_name.empty());
  EXPECT_FALSE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).agent_store);
  // --virtual-local-rank: every rank is local rank 0 of several.
  EXPECT_EQ(read(with(kTorchrun, {{"LOCAL_RANK", "0"}})).local_rank, 0);
}

TEST(RankEnv, ContradictionsAreRefusedByName) {
  EXPECT_THAT(refusal({{"RANK", "0"}}), StartsWith("[rank] RANK=0 is set but WORLD_SIZE is not."));
  EXPECT_THAT(refusal({{"WORLD_SIZE", "2"}}),
              StartsWith("[rank] WORLD_SIZE=2 is set but RANK is not."));
  EXPECT_THAT(refusal({{"LOCAL_RANK", "1"}}),
              AllOf(StartsWith("[rank] LOCAL_RANK=1 is set"), HasSubstr("CUDA_VISIBLE_DEVICES")));
  EXPECT_THAT(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
              StartsWith("[rank] RANK=2 does not exist in a world of WORLD_SIZE=2"));
  EXPECT_THAT(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}),
              StartsWith("[rank] WORLD_SIZE=0 is not a world."));
  EXPECT_THAT(refusal({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK=-1 is out of range"));
  EXPECT_THAT(refusal({{"RANK", "one"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("RANK='one' is not an integer"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"LOCAL_RANK", "4"}})),
              StartsWith("[rank] LOCAL_RANK=4 does not exist among LOCAL_WORLD_SIZE=4 ranks"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}})),
              StartsWith("[rank] LOCAL_WORLD_SIZE=9 contradicts WORLD_SIZE=8"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"MASTER_PORT", "70000"}})),
              HasSubstr("MASTER_PORT=70000 is out of range"));
}

TEST(RankEnv, ByHandOnOneHost) {
  ::testing::internal::CaptureStderr();
  RankEnv env = read({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}});
  read({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(env.source, "environment");
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_EQ(env.master_port, 29500);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_THAT(said, HasSubstr("MASTER_ADDR and MASTER_PORT are not set; using 127.0.0.1:29500"));
  EXPECT_EQ(said.find("MASTER_ADDR"), said.rfind("MASTER_ADDR")) << "said twice:\n" << said;
  // Without LOCAL_RANK, every rank is on this host.
  env = read({{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.node, 0);
  env = read(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "7"}});
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.master_port, 7);
}

TEST(RankEnv, APortThatIsNotSetIsSaid) {
  ::testing::internal::CaptureStderr();
  const RankEnv env = read({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("MASTER_PORT is not set; using"));
  EXPECT_EQ(env.master_port, 29500);
}

TEST(RankEnv, ByHandOnSeveralHosts) {
  const Variables base = {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}};
  EXPECT_THAT(refusal(with(base, {{"LOCAL_WORLD_SIZE", "2"}})),
              AllOf(HasSubstr("MASTER_ADDR is not"), HasSubstr("several hosts")));
  EXPECT_THAT(refusal(with(base, {{"LOCAL_WORLD_SIZE", "2"}, {"MASTER_PORT", "29500"}})),
              StartsWith("[rank] MASTER_PORT=29500 is set but MASTER_ADDR is not"));
  const RankEnv known = read(with(base, {{"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "n0"}}));
  EXPECT_EQ(known.node, 1);
  EXPECT_TRUE(known.local_size_known);
  EXPECT_TRUE(known.local_rank_known && known.node_known);
  const RankEnv unknown = read(with(base, {{"MASTER_ADDR", "n0"}}));
  EXPECT_FALSE(unknown.local_size_known);
  EXPECT_FALSE(unknown.node_known);
  EXPECT_TRUE(unknown.local_rank_known);
  EXPECT_EQ(unknown.local_rank, 1);
  // Nothing at all: the guess is one rank per host, and it is marked as a guess.
  const RankEnv guess = read({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "n0"}});
  EXPECT_FALSE(guess.local_rank_known || guess.local_size_known || guess.node_known);
  EXPECT_EQ(guess.local_rank, 0);
  EXPECT_EQ(guess.local_world_size, 1);
  EXPECT_EQ(guess.node, 3);
}

TEST(RankEnv, Kubernetes) {
  // One rank per pod; older operators call the first pod's master localhost.
  const Variables pod = {{"KUBERNETES_SERVICE_HOST", "10.0.0.1"},
                         {"RANK", "1"},
                         {"WORLD_SIZE", "3"},
                         {"MASTER_ADDR", "job-master-0"},
                         {"MASTER_PORT", "23456"}};
  RankEnv env = read(pod);
  EXPECT_EQ(env.local_rank, 0);
  EXPECT_EQ(env.local_world_size, 1);
  EXPECT_EQ(env.node, 1);
  env = read(with(pod, {{"RANK", "0"}, {"MASTER_ADDR", "localhost"}}));
  EXPECT_EQ(env.local_world_size, 1);
  EXPECT_THAT(refusal(with(pod, {{"PET_NPROC_PER_NODE", "4"}})),
              AllOf(StartsWith("[rank] PET_NPROC_PER_NODE=4 asks for a launcher"),
                    HasSubstr("lockstep run")));
  // Newer ones set only what a launcher reads.
  const Variables pet = {{"PET_NNODES", "2"},
                         {"PET_NODE_RANK", "1"},
                         {"PET_MASTER_ADDR", "j-0"},
                         {"PET_MASTER_PORT", "29400"}};
  env = read(pet);
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 2);
  EXPECT_EQ(env.local_world_size, 1);
  EXPECT_EQ(env.master_addr, "j-0");
  EXPECT_EQ(env.master_port, 29400);
  EXPECT_THAT(refusal({{"PET_NNODES", "2"}, {"PET_NODE_RANK", "1"}}),
              HasSubstr("PET_MASTER_ADDR is not"));
  EXPECT_THAT(refusal(with(pet, {{"PET_NNODES", "1:4"}})), HasSubstr("PET_NNODES='1:4'"));
  EXPECT_TRUE(read({{"PET_NNODES", "1"}, {"PET_NODE_RANK", "0"}}).alone());
}

TEST(RankEnv, Mpi) {
  const RankEnv env = read(kMpi);
  EXPECT_EQ(env.source, "mpirun");
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_EQ(env.master_port, 0);
  EXPECT_FALSE(env.rendezvous_name.empty());
  // The ranks of one job agree on the name, those of another have another.
  const Variables rank0 = {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}};
  EXPECT_EQ(read(with(kMpi, rank0)).rendezvous_name, env.rendezvous_name);
  EXPECT_NE(read(with(kMpi, {{"PMIX_NAMESPACE", "7"}})).rendezvous_name, env.rendezvous_name);
  const RankEnv settled = read(with(kMpi, {{"MASTER_ADDR", "n0"}, {"MASTER_PORT", "1234"}}));
  EXPECT_EQ(settled.master_port, 1234);
  EXPECT_TRUE(settled.rendezvous_name.empty());
}

TEST(RankEnv, MpiMistakes) {
  EXPECT_THAT(refusal(with(kMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                  {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}})),
              AllOf(HasSubstr("several hosts"), HasSubstr("MASTER_ADDR is not set"),
                    HasSubstr("OMPI_COMM_WORLD_LOCAL_SIZE=1")));
  EXPECT_THAT(refusal({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}),
              HasSubstr("MPI_LOCALNRANKS=(unset)"));
  EXPECT_THAT(refusal({{"OMPI_COMM_WORLD_RANK", "0"}}),
              HasSubstr("OMPI_COMM_WORLD_RANK=0 is set but OMPI_COMM_WORLD_SIZE is not"));
  EXPECT_THAT(refusal(with(kMpi, {{"RANK", "0"}, {"WORLD_SIZE", "1"}})),
              AllOf(HasSubstr("RANK=0 and WORLD_SIZE=1 are set"),
                    HasSubstr("OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2")));
  EXPECT_THAT(refusal(with(kMpi, {{"WORLD_SIZE", "4"}})),
              StartsWith("[rank] WORLD_SIZE=4 is set, but mpirun started"));
}

TEST(RankEnv, MpichJobIsNamedByItsProxy) {
  const Variables mpich = {
      {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
  const RankEnv env = read(mpich);
  EXPECT_EQ(env.source, "mpirun");
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_FALSE(env.rendezvous_name.empty());
  EXPECT_EQ(read(mpich).rendezvous_name, env.rendezvous_name);
}

TEST(RankEnv, Srun) {
  const RankEnv env = read(kSrun);
  EXPECT_EQ(env.source, "srun");
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.node, 1);
  EXPECT_EQ(env.master_addr, "gpu07");
  EXPECT_EQ(env.master_port, detail::port_of_step(77, 3));
  EXPECT_NE(detail::port_of_step(77, 4), env.master_port);
  EXPECT_NE(detail::port_of_step(78, 3), env.master_port);
  EXPECT_LT(detail::port_of_step(4'000'000'000, 4'000'000'000), 30000);
  const Variables one_node = {{"SLURM_STEP_TASKS_PER_NODE", "4"},
                              {"SLURM_NODEID", "0"},
                              {"SLURM_LOCALID", "3"},
                              {"SLURM_STEP_NODELIST", "gpu07"}};
  const RankEnv one = read(with(kSrun, one_node));
  EXPECT_EQ(one.local_world_size, 4);
  EXPECT_FALSE(one.rendezvous_name.empty());
  EXPECT_NE(read(with(kSrun, with(one_node, {{"SLURM_STEP_ID", "4"}}))).rendezvous_name,
            one.rendezvous_name);
  Variables no_list = kSrun;
  no_list.erase("SLURM_STEP_NODELIST");
  EXPECT_THAT(refusal(no_list), HasSubstr("SLURM_STEP_NODELIST is not set"));
  EXPECT_THAT(refusal({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}}),
              HasSubstr("neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS"));
}

TEST(RankEnv, AnSbatchScriptIsNotARank) {
  const Variables script = {{"SLURM_JOB_ID", "77"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}};
  EXPECT_EQ(read(script).source, "alone");
  // Nor is the shell of an interactive allocation, which runs in a reserved step.
  EXPECT_EQ(read(with(script, {{"SLURM_STEP_ID", "4294967290"}})).source, "alone");
}

TEST(RankEnv, TheNearestLauncherIsRight) {
  EXPECT_EQ(read(with(kSrun, kTorchrun)).source, "torchrun");
  EXPECT_EQ(read(with(kMpi, kTorchrun)).source, "torchrun");
  EXPECT_EQ(read(with(kSrun, kMpi)).source, "mpirun");
  const Variables ours = with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}});
  EXPECT_EQ(read(with(ours, {{"LOCKSTEP_RUN", "none"}})).source, "lockstep run");
  EXPECT_EQ(read(with(ours, {{"LOCKSTEP_RUN", "the outer one"}})).source, "torchrun");
  // A torchrun inside one of our ranks, with the same id.
  EXPECT_EQ(read(with(kTorchrun, {{"LOCKSTEP_RUN", "none"}})).source, "torchrun");
  // On one host our launcher hosts the store too; the port distinguishes the two.
  const std::string port = kTorchrun.at("MASTER_PORT");
  const Variables one_host = with(kTorchrun, {{"LOCKSTEP_RUN", "none"}});
  EXPECT_EQ(read(with(one_host, {{"LOCKSTEP_STORE_CHANNEL", "99:1:0:2:" + port}})).source,
            "lockstep run");
  EXPECT_EQ(read(with(one_host, {{"LOCKSTEP_STORE_CHANNEL", "99:1:0:2:1" + port}})).source,
            "torchrun");
  // srun --mpi=pmi2 names its ranks twice; MPICH's proxies under srun are not its ranks.
  EXPECT_EQ(read(with(kSrun, {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}})).source, "srun");
  const Variables hydra = {
      {"PMI_RANK", "1"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "8"}};
  EXPECT_EQ(read(with(kSrun, hydra)).rank, 1);
  // Variables set by hand inside srun start several ranks from one task; a line reports it.
  ::testing::internal::CaptureStderr();
  const RankEnv env = read(with(kSrun, {{"RANK", "0"}, {"WORLD_SIZE", "2"}}));
  EXPECT_EQ(env.world_size, 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("srun says rank 3 of 4"));
}

TEST(RankEnv, NodeLists) {
  using detail::first_host;
  EXPECT_EQ(first_host("n1"), "n1");
  EXPECT_EQ(first_host("n1,n2"), "n1");
  EXPECT_EQ(first_host("n[1-3,7]"), "n1");
  EXPECT_EQ(first_host("n[007-010]"), "n007");
  EXPECT_EQ(first_host("n[5]"), "n5");
  EXPECT_EQ(first_host("n[5,9-11].cluster,m[1-2]"), "n5.cluster");
  EXPECT_EQ(first_host("rack[2-3]-n[04,09]"), "rack2-n04");
  for (const std::string bad : {"", ",n1", "n[", "n[1", "n[]"}) {
    EXPECT_THROW(first_host(bad), UsageError) << bad;
  }
  using detail::tasks_on_node;
  EXPECT_EQ(tasks_on_node("4", 0), 4);
  EXPECT_EQ(tasks_on_node("2(x3),1", 2), 2);
  EXPECT_EQ(tasks_on_node("2(x3),1", 3), 1);
  EXPECT_THROW(tasks_on_node("2(x3),1", 4), UsageError);
  EXPECT_THROW(tasks_on_node("2(x", 0), UsageError);
  EXPECT_THROW(tasks_on_node("two", 0), UsageError);
}

TEST(RankEnv, TheStoreChannelIsForTheRankThatTheLauncherStarted) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  const Fd first(ends[0]), second(ends[1]);
  const std::string text = StoreChannel{ends[0], inode_of(ends[0]), 1, 2, 1234}.text();
  const Variables base = {{"RANK", "1"},
                          {"WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "127.0.0.1"},
                          {"MASTER_PORT", "1234"},
                          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                          {"LOCKSTEP_STORE_CHANNEL", text}};
  EXPECT_EQ(read(base).store_channel, ends[0]);
  // Another launcher has set the variables again: this is not our rank.
  EXPECT_EQ(read(with(base, {{"RANK", "0"}})).store_channel, -1);
  EXPECT_EQ(read(with(base, {{"WORLD_SIZE", "3"}})).store_channel, -1);
  EXPECT_EQ(read(with(base, {{"MASTER_PORT", "1235"}})).store_channel, -1);
  EXPECT_EQ(read(with(base, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).store_channel, -1);
  // The number now belongs to another socket.
  const std::string stale = StoreChannel{ends[1], inode_of(ends[0]), 1, 2, 1234}.text();
  EXPECT_EQ(read(with(base, {{"LOCKSTEP_STORE_CHANNEL", stale}})).store_channel, -1);
  EXPECT_EQ(read(with(base, {{"LOCKSTEP_STORE_CHANNEL", "nonsense"}})).store_channel, -1);
}

// ---------------------------------------------------------------- rendezvous

// Runs the body in a copy of this process; its text comes back through a pipe.
struct Forked {
  explicit Forked(const std::function<std::string()>& body) {
    pid = ::fork();
    if (pid != 0) return;
    std::string text;
    try {
      text = body();
    } catch (const std::exception& e) {
      text = e.what();
    }
    (void)!::write(pipe.write.get(), text.data(), text.size());
    ::_exit(0);
  }
  std::string result() {
    pipe.write.reset();
    ::waitpid(pid, nullptr, 0);
    char buffer[1024];
    const ssize_t n = ::read(pipe.read.get(), buffer, sizeof buffer);
    return std::string(buffer, n > 0 ? static_cast<std::size_t>(n) : 0);
  }
  Pipe pipe = make_pipe();
  pid_t pid = -1;
};

RankEnv rendezvous_of(const std::string& name, int rank, int world_size) {
  RankEnv env;
  env.rank = rank;
  env.world_size = world_size;
  env.master_addr = "127.0.0.1";
  env.rendezvous_name = "lockstep-test/" + std::to_string(::getppid()) + name;
  return env;
}

bool is_name_taken(const std::string& name) {
  return read_file("/proc/net/unix").find(name + '\n') != std::string::npos;
}

// Rank 0 ends when it has told all others its port: its process serves it.
std::string port_after_rendezvous(RankEnv env, int timeout_ms = 30'000) {
  static int calls = 0;
  const std::string name = fmt::format("{}/{}", env.rendezvous_name, calls++);
  rendezvous(env, timeout_ms);
  while (env.rank == 0 && is_name_taken(name)) ::usleep(1000);
  const bool right = env.rank == 0 ? env.store_fd >= 0 : env.store_fd < 0;
  return right && env.master_port > 0 ? std::to_string(env.master_port) : "wrong";
}

TEST(Rendezvous, TwoJobsAtOnceDoNotMix) {
  // Each rank connects twice, as a program with two worlds does.
  const auto twice = [](const std::string& job, int rank) {
    return [=] {
      const RankEnv env = rendezvous_of(job, rank, 3);
      if (rank == 2) ::usleep(100'000);
      const std::string first = port_after_rendezvous(env);
      return first + " " + port_after_rendezvous(env);
    };
  };
  std::vector<std::unique_ptr<Forked>> ranks;
  for (const int rank : {2, 1, 0}) {
    for (const std::string job : {"a", "b"}) {
      ranks.push_back(std::make_unique<Forked>(twice(job, rank)));
    }
  }
  std::vector<std::string> ports;
  for (auto& rank : ranks) ports.push_back(rank->result());
  for (std::size_t i = 2; i < ports.size(); ++i) EXPECT_EQ(ports[i], ports[i % 2]) << i;
  EXPECT_NE(ports[0], ports[1]);
  EXPECT_THAT(ports[0], ::testing::MatchesRegex("[0-9]+ [0-9]+"));
}

TEST(Rendezvous, ARankThatIsMissingDelaysNobody) {
  Forked host([]() -> std::string {
    RankEnv env = rendezvous_of("late", 0, 4);
    rendezvous(env, 60'000);
    for (;;) ::pause();
  });
  Forked peer([] { return port_after_rendezvous(rendezvous_of("late", 2, 4), 60'000); });
  EXPECT_THAT(peer.result(), ::testing::MatchesRegex("[0-9]+"));
  ::kill(host.pid, SIGKILL);
  EXPECT_EQ(host.result(), "");
  Forked alone([] { return port_after_rendezvous(rendezvous_of("nobody", 1, 2), 300); });
  EXPECT_THAT(alone.result(), StartsWith("[rank] rank 1 did not find rank 0 on this host within"));
}

TEST(Rendezvous, ANameTakenByAnotherRankZeroIsNotShared) {
  Forked first([] { return port_after_rendezvous(rendezvous_of("taken", 0, 2)); });
  const std::string name = "lockstep-test/" + std::to_string(::getpid()) + "taken/0";
  for (int i = 0; i < 3000 && !is_name_taken(name); ++i) ::usleep(10'000);
  Forked second([] { return port_after_rendezvous(rendezvous_of("taken", 0, 2), 200); });
  EXPECT_THAT(second.result(), HasSubstr("cannot take the rendezvous name"));
  Forked peer([] { return port_after_rendezvous(rendezvous_of("taken", 1, 2)); });
  EXPECT_EQ(peer.result(), first.result());
}

TEST(Rendezvous, AnotherUsersSocketIsNotBelieved) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to be two users";
  const std::string name = "lockstep-test/" + std::to_string(::getpid()) + "squat/0";
  Forked squatter([&] {
    if (::setuid(65534) != 0) return std::string("no");
    const Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
      return std::string("no");
    ::listen(fd.get(), 1);
    const Fd peer(::accept(fd.get(), nullptr, nullptr));
    return std::string("yes");
  });
  Forked peer([] { return port_after_rendezvous(rendezvous_of("squat", 1, 2), 20'000); });
  EXPECT_THAT(peer.result(), HasSubstr("is held by user 65534"));
  EXPECT_EQ(squatter.result(), "yes");
}

// ---------------------------------------------------------------- body_mark

namespace fs = std::filesystem;

class BodyMarkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("lockstep_body_mark_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
    file_ = folder_ / "error.json";
    for (const auto& [name, value] :
         std::map<std::string, std::string>{{"LOCKSTEP_RUN", "id"},
                                            {"TORCHELASTIC_RUN_ID", "id"},
                                            {"TORCHELASTIC_USE_AGENT_STORE", "False"},
                                            {"TORCHELASTIC_ERROR_FILE", file_}}) {
      ::setenv(name.c_str(), value.c_str(), 1);
      names_.push_back(name);
    }
  }
  void TearDown() override {
    for (const std::string& name : names_) ::unsetenv(name.c_str());
    fs::remove_all(folder_);
  }
  bool marked() const { return !fs::is_empty(folder_); }

  fs::path folder_;
  std::string file_;
  std::vector<std::string> names_;
};

TEST_F(BodyMarkTest, TheMarkStandsFromEnterToLeave) {
  EXPECT_FALSE(body_mark::take(file_));
  body_mark::set();
  EXPECT_TRUE(marked());
  body_mark::clear();
  EXPECT_FALSE(marked());
  body_mark::set();
  body_mark::set();
  EXPECT_TRUE(body_mark::take(file_));
  EXPECT_FALSE(body_mark::take(file_));
  EXPECT_FALSE(marked());
  EXPECT_FALSE(body_mark::take(""));
}

TEST_F(BodyMarkTest, OtherLaunchersFilesAreLeftAlone) {
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);  // torchrun
  body_mark::set();
  EXPECT_FALSE(marked());
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "False", 1);
  ::unsetenv("TORCHELASTIC_ERROR_FILE");
  body_mark::set();
  EXPECT_FALSE(marked());
}

TEST_F(BodyMarkTest, APlaceThatIsGoneIsNoError) {
  ::setenv("TORCHELASTIC_ERROR_FILE", (folder_ / "none" / "error.json").c_str(), 1);
  body_mark::set();
  body_mark::clear();
  EXPECT_FALSE(marked());
}

}  // namespace

}  // namespace lockstep
