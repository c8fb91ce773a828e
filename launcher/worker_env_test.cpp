#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "launcher/worker.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::launch {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::Key;
using testing::Not;
using testing::Pair;

using Environment = std::map<std::string, std::string>;

Variables variables_of(Environment environment) {
  return [environment](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  };
}

LaunchPlan two_by_four() {
  LaunchPlan plan;
  plan.nnodes = 2;
  plan.node_rank = 1;
  plan.nproc_per_node = 4;
  plan.run_id = "job";
  plan.role = "trainer";
  plan.max_restarts = 3;
  return plan;
}

WorkerInfo third() {
  WorkerInfo place;
  place.local_rank = 2;
  place.layout = {.first_rank = 4, .world_size = 8, .first_role_rank = 1, .role_world_size = 5};
  place.attempt = 1;
  place.master_addr = "127.0.0.1";
  place.master_port = 1234;
  place.error_file = "/logs/error.json";
  place.control_fd = 7;
  place.store_channel = "9:123:2:4:1234";
  place.interface = "eth0";
  place.threads = 6;
  place.ledger = "11:456";
  return place;
}

TEST(WorkerEnvironment, WhatTheFileSaysYieldsToWhatIsSet) {
  LaunchPlan plan = two_by_four();
  plan.environment = {{"CUDA_VISIBLE_DEVICES", "4,5,6,7"}, {"LOCKSTEP_DEBUG", "1"}};
  const Environment set =
      worker_environment(plan, third(), variables_of({{"LOCKSTEP_DEBUG", "0"}}));
  EXPECT_THAT(set, Contains(Pair("CUDA_VISIBLE_DEVICES", "4,5,6,7")));
  EXPECT_THAT(set, Not(Contains(Key("LOCKSTEP_DEBUG"))));
  plan.virtual_local_rank = true;
  EXPECT_EQ(worker_environment(plan, third(), variables_of({})).at("CUDA_VISIBLE_DEVICES"), "6");
}

TEST(WorkerEnvironment, GlooIsReplacedWhereItIsAskedForAndInheritedElsewhere) {
  LaunchPlan plan = two_by_four();
  const auto off = variables_of({{"LOCKSTEP_REPLACE_GLOO", "0"}});
  EXPECT_THAT(worker_environment(plan, third(), off), Not(Contains(Key("LOCKSTEP_REPLACE_GLOO"))));
  plan.replace_gloo = true;
  EXPECT_EQ(worker_environment(plan, third(), off).at("LOCKSTEP_REPLACE_GLOO"), "1");
}

TEST(WorkerEnvironment, IsTorchrunsAndTheLauncherHostsTheStore) {
  const Environment stale = {{"RANK", "99"}, {"WORLD_SIZE", "99"}, {"MASTER_PORT", "1"}};
  const Environment set = worker_environment(two_by_four(), third(), variables_of(stale));
  const Environment expected = {{"RANK", "6"},
                                {"LOCAL_RANK", "2"},
                                {"ROLE_RANK", "3"},
                                {"GROUP_RANK", "1"},
                                {"WORLD_SIZE", "8"},
                                {"LOCAL_WORLD_SIZE", "4"},
                                {"ROLE_WORLD_SIZE", "5"},
                                {"GROUP_WORLD_SIZE", "2"},
                                {"ROLE_NAME", "trainer"},
                                {"MASTER_ADDR", "127.0.0.1"},
                                {"MASTER_PORT", "1234"},
                                {"TORCHELASTIC_RESTART_COUNT", "1"},
                                {"TORCHELASTIC_MAX_RESTARTS", "3"},
                                {"TORCHELASTIC_RUN_ID", "job"},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                {"TORCHELASTIC_ERROR_FILE", "/logs/error.json"},
                                {"TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
                                {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
                                {"OMP_NUM_THREADS", "6"},
                                {"GLOO_SOCKET_IFNAME", "eth0"},
                                {"NCCL_SOCKET_IFNAME", "=eth0"},
                                {"LOCKSTEP_RUN", "job"},
                                {"LOCKSTEP_CONTROL_FD", "7"},
                                {"LOCKSTEP_TERMINAL", ""},
                                {"LOCKSTEP_LEDGER", "11:456"},
                                {"LOCKSTEP_STORE_CHANNEL", "9:123:2:4:1234"}};
  EXPECT_EQ(set, expected);
}

TEST(WorkerEnvironment, KeepsWhatTheCallerChose) {
  const Environment chosen = {{"OMP_NUM_THREADS", "2"},
                              {"GLOO_SOCKET_IFNAME", "ib0"},
                              {"NCCL_SOCKET_IFNAME", "ib"},
                              {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"}};
  const Environment set = worker_environment(two_by_four(), third(), variables_of(chosen));
  for (const auto& [name, value] : chosen) EXPECT_THAT(set, Not(Contains(Key(name)))) << name;
  // An empty variable counts as unset.
  EXPECT_THAT(worker_environment(two_by_four(), third(), variables_of({{"OMP_NUM_THREADS", ""}})),
              Contains(Pair("OMP_NUM_THREADS", "6")));
}

TEST(WorkerEnvironment, WithoutDescriptorsTheirVariablesAreRemoved) {
  WorkerInfo place = third();
  place.control_fd = -1;
  place.ledger = "";
  place.interface = "";
  place.threads = 0;
  const Environment set = worker_environment(two_by_four(), place, variables_of({}));
  EXPECT_THAT(set, Contains(Pair("LOCKSTEP_CONTROL_FD", "")));
  EXPECT_THAT(set, Contains(Pair("LOCKSTEP_LEDGER", "")));
  EXPECT_THAT(set, Not(Contains(Key("GLOO_SOCKET_IFNAME"))));
  EXPECT_THAT(set, Not(Contains(Key("OMP_NUM_THREADS"))));
}

TEST(WorkerEnvironment, VirtualLocalRankShowsOneDevice) {
  LaunchPlan plan = two_by_four();
  plan.virtual_local_rank = true;
  const Environment plain = worker_environment(plan, third(), variables_of({}));
  EXPECT_THAT(plain, Contains(Pair("LOCAL_RANK", "0")));
  EXPECT_THAT(plain, Contains(Pair("RANK", "6")));
  EXPECT_THAT(plain, Contains(Pair("CUDA_VISIBLE_DEVICES", "2")));
  const Environment visible = {{"CUDA_VISIBLE_DEVICES", "4, GPU-abc ,7"}};
  EXPECT_THAT(worker_environment(plan, third(), variables_of(visible)),
              Contains(Pair("CUDA_VISIBLE_DEVICES", "7")));
  for (const char* few : {"4,5", ""}) {
    const Environment devices = {{"CUDA_VISIBLE_DEVICES", few}};
    EXPECT_THAT(message_of([&] { worker_environment(plan, third(), variables_of(devices)); }),
                HasSubstr("--virtual-local-rank: local rank 2 has no GPU"));
  }
}

TEST(WorkerEnvironment, TimeoutsAreSetWhereTheyWereGiven) {
  LaunchPlan plan = two_by_four();
  plan.timeout = std::chrono::seconds(60);
  const Environment callers = {{"LOCKSTEP_TIMEOUT_S", "7"}, {"LOCKSTEP_STARTUP_TIMEOUT_S", "8"}};
  const Environment set = worker_environment(plan, third(), variables_of(callers));
  EXPECT_THAT(set, Contains(Pair("LOCKSTEP_TIMEOUT_S", "60")));
  EXPECT_THAT(set, Not(Contains(Key("LOCKSTEP_STARTUP_TIMEOUT_S"))));
  plan.startup_timeout = std::chrono::seconds(20);
  EXPECT_THAT(worker_environment(plan, third(), variables_of(callers)),
              Contains(Pair("LOCKSTEP_STARTUP_TIMEOUT_S", "20")));
}

TEST(WorkerEnvironment, SignalsAreGivenByName) {
  LaunchPlan plan = two_by_four();
  plan.signals_to_handle = {SIGTERM, SIGUSR1};
  EXPECT_THAT(worker_environment(plan, third(), variables_of({})),
              Contains(Pair("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1")));
}

}  // namespace
}  // namespace lockstep::launch
