// The rules of the command line and its error messages.
#include "launcher/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>

#include "launcher/process.h"
#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Args = std::vector<std::string>;
using Environment = std::map<std::string, std::string>;

Variables variables(Environment environment) {
  return [environment](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  };
}

// A machine with 12 cores and no GPU; its PATH is the usual one.
LaunchContext machine(Environment environment = {}) {
  environment.emplace("PATH", "/usr/bin:/bin");
  return {.variable = variables(environment),
          .cores = [] { return 12; },
          .gpus = [] { return Gpus{.reason = "no driver here"}; },
          .training_keys = {"learning_rate"}};
}

ParsedFlags parse(Args args, Environment environment = {}) {
  return parse_flags(args, machine(std::move(environment)));
}

LaunchPlan plan_of(Args flags, Environment environment = {}) {
  flags.push_back("/bin/true");
  return parse(std::move(flags), std::move(environment)).plan;
}

Args notes_of(Args flags, Environment environment = {}) {
  flags.push_back("/bin/true");
  return parse(std::move(flags), std::move(environment)).notes;
}

// The message of the UsageError, or "" if there is none.
std::string refusal(Args args, Environment environment = {}) {
  try {
    parse(std::move(args), std::move(environment));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

std::string refusal_of(Args flags, Environment environment = {}) {
  flags.push_back("/bin/true");
  return refusal(std::move(flags), std::move(environment));
}

std::string script_in(const TemporaryDirectory& folder, const std::string& name, mode_t mode) {
  const std::string path = folder.write(name, "#!/bin/sh\n");
  ::chmod(path.c_str(), mode);
  return path;
}

// ------------------------------------------------------------------ spelling

TEST(Spelling, DashesUnderscoresEqualsAndNextWordMeanTheSame) {
  for (const Args& args :
       {Args{"--nproc-per-node=3"}, Args{"--nproc_per_node=3"}, Args{"--nproc-per-node", "3"},
        Args{"--nproc_per_node", "3"}, Args{"--nproc-per=3"}, Args{"--np", "3"}}) {
    EXPECT_EQ(plan_of(args).nproc_per_node, 3) << args.front();
  }
}

TEST(Spelling, EveryFlagOfTheTableIsFoundByNameAndByVariable) {
  for (const FlagSpec& flag : flag_table()) {
    const std::string arg = fmt::format("--{}", flag.name);
    const Args args = flag.is_switch() ? Args{arg} : Args{arg, "1"};
    // Even if the value "1" is invalid, the flag itself is known.
    EXPECT_THAT(refusal_of(args), testing::Not(HasSubstr("there is no flag"))) << arg;
    EXPECT_EQ(flag.variable().rfind("PET_", 0), 0u);
  }
}

TEST(Spelling, LettersStandAloneJoinedOrWithTheirValue) {
  for (const Args& args : {Args{"-r", "3"}, Args{"-r3"}, Args{"-r=3"}, Args{"--redirects=3"}})
    EXPECT_EQ(plan_of(args).redirects.all, Streams::kAll) << args.front();
  const ParsedFlags parsed = parse({"-mr3", "timeit"});
  EXPECT_EQ(parsed.plan.redirects.all, Streams::kAll);
  EXPECT_THAT(parsed.plan.command, Contains("-m"));
}

TEST(Spelling, TheDashboardMayHaveAPortAfterAnEqualsSign) {
  EXPECT_EQ(plan_of({}).dashboard, std::nullopt);
  EXPECT_EQ(plan_of({"--dashboard"}).dashboard, "");
  EXPECT_EQ(plan_of({"--dashboard=8080"}).dashboard, "8080");
  EXPECT_EQ(plan_of({"--dash=[::1]:80"}).dashboard, "[::1]:80");
  // The rest is the program, even if it looks like a flag.
  EXPECT_THAT(parse({"--dashboard", "true", "8080"}).plan.command, Contains("8080"));
}

TEST(Spelling, TheLastOneCounts) {
  EXPECT_EQ(plan_of({"--max-restarts=1", "--max_restarts=2"}).max_restarts, 2);
}

TEST(Spelling, APrefixOfSeveralFlagsIsRefusedWithTheirNames) {
  const std::string text = refusal_of({"--rdzv=1"});
  EXPECT_THAT(text, HasSubstr("--rdzv could be --rdzv-backend, --rdzv-endpoint, --rdzv-id"));
  EXPECT_THAT(text, HasSubstr("Write more of it"));
}

TEST(Spelling, WhatTorchrunUnderstandsMeansTheSameHere) {
  std::vector<std::string> theirs{"help"};
  for (const FlagSpec& flag : flag_table()) {
    if (flag.torchrun) theirs.emplace_back(flag.name);
  }
  int checked = 0;
  for (const FlagSpec& flag : flag_table()) {
    for (std::size_t size = 1; flag.torchrun && size <= flag.name.size(); ++size) {
      const std::string prefix(flag.name.substr(0, size));
      const auto meant = std::ranges::count_if(
          theirs, [&](const auto& name) { return name.rfind(prefix, 0) == 0; });
      if (meant > 1) continue;
      const auto given = read_arguments({"--" + prefix + (flag.is_switch() ? "" : "=x")});
      EXPECT_TRUE(given.values.has(std::string(flag.name))) << prefix;
      ++checked;
    }
  }
  EXPECT_GT(checked, 200);
  // Our own flags are found where torchrun has nothing similar.
  EXPECT_EQ(plan_of({"--ti=7"}).timeout, std::chrono::seconds(7));
  EXPECT_EQ(plan_of({"--startu=7"}).startup_timeout, std::chrono::seconds(7));
}

TEST(Spelling, ATypoNamesTheNearestFlag) {
  EXPECT_THAT(refusal_of({"--nproc-per-mode=2"}),
              HasSubstr("[run] there is no flag --nproc-per-mode. Did you mean --nproc-per-node?"));
  for (const char* flag : {"--nprocs=2", "--num_processes=2", "-n", "-np"})
    EXPECT_THAT(refusal_of({flag, "2"}), HasSubstr("Did you mean --nproc-per-node?"));
  for (const char* flag : {"--gpu=2", "--gpus=2", "--devices=2", "--num_gpus=2", "--gpu_ids=0,1"})
    EXPECT_THAT(refusal_of({flag}), HasSubstr("Write --nproc-per-node=N for N ranks with a GPU"));
  EXPECT_THAT(refusal_of({"--num_machines=2"}), HasSubstr("Did you mean --nnodes?"));
  EXPECT_THAT(refusal_of({"--main_process_ip=h"}), HasSubstr("Did you mean --master-addr?"));
  EXPECT_THAT(refusal_of({"--max-restart_s=2"}), HasSubstr("Did you mean --max-restarts?"));
  EXPECT_THAT(refusal_of({"-nproc_per_node=2"}), HasSubstr("Did you mean --nproc-per-node?"));
  EXPECT_THAT(refusal_of({"-x"}), HasSubstr("there is no flag -x. Flags of the program go after"));
  EXPECT_THAT(refusal_of({"--epochs=10"}), HasSubstr("Flags of the program go after the program"));
}

TEST(Spelling, AFlagWithoutItsValueAndASwitchWithOneAreRefused) {
  EXPECT_THAT(refusal({"--nnodes"}), HasSubstr("--nnodes needs a value. Write --nnodes=VALUE."));
  EXPECT_THAT(refusal_of({"--role", "--standalone"}),
              HasSubstr("--role needs a value but '--standalone' follows"));
  EXPECT_THAT(refusal({"-r"}), HasSubstr("-r needs a value. Write -r VALUE."));
  EXPECT_THAT(refusal_of({"--standalone=1"}), HasSubstr("--standalone takes no value"));
}

TEST(Spelling, HelpIsOursBeforeTheProgramAndItsAfterwards) {
  EXPECT_TRUE(parse({"--help"}).help);
  EXPECT_TRUE(parse({"--nnodes=1", "-h", "anything"}).help);
  EXPECT_FALSE(parse({"/bin/true", "--help"}).help);
}

TEST(Flags, ReplaceGlooSaysWhenTorchDoesNotLoadWhatReplacesIt) {
  const Environment off = {{"TORCH_DEVICE_BACKEND_AUTOLOAD", "0"}};
  EXPECT_TRUE(plan_of({"--replace-gloo"}).replace_gloo);
  EXPECT_FALSE(plan_of({}).replace_gloo);
  EXPECT_THAT(notes_of({"--replace-gloo"}), IsEmpty());
  EXPECT_THAT(notes_of({}, off), IsEmpty());
  EXPECT_THAT(notes_of({"--replace-gloo"}, off),
              Contains(HasSubstr("--replace-gloo has no effect with "
                                 "TORCH_DEVICE_BACKEND_AUTOLOAD=0")));
}

// ------------------------------------------------------------------ PET_ variables

TEST(PetVariables, AFlagBeatsTheVariableBeatsTheDefault) {
  const Environment set = {{"PET_NPROC_PER_NODE", "5"}};
  EXPECT_EQ(plan_of({}).nproc_per_node, 1);
  EXPECT_EQ(plan_of({}, set).nproc_per_node, 5);
  EXPECT_EQ(plan_of({"--nproc-per-node=3"}, set).nproc_per_node, 3);
}

TEST(PetVariables, SwitchesReadTrueFalseAndEmpty) {
  for (const char* on : {"1", "true", "True", "yes", "on"})
    EXPECT_TRUE(plan_of({}, {{"PET_VIRTUAL_LOCAL_RANK", on}}).virtual_local_rank) << on;
  for (const char* off : {"", "0", "false", "no"})
    EXPECT_FALSE(plan_of({}, {{"PET_VIRTUAL_LOCAL_RANK", off}}).virtual_local_rank) << off;
  EXPECT_THAT(refusal_of({}, {{"PET_STANDALONE", "maybe"}}),
              HasSubstr("PET_STANDALONE='maybe' is neither true nor false"));
}

TEST(PetVariables, AnEmptyValueCountsAsUnset) {
  EXPECT_EQ(plan_of({}, {{"PET_MAX_RESTARTS", ""}, {"PET_NNODES", ""}}).max_restarts, 0);
}

TEST(PetVariables, AMistakeNamesTheVariable) {
  EXPECT_THAT(refusal_of({}, {{"PET_MAX_RESTARTS", "many"}}),
              HasSubstr("PET_MAX_RESTARTS='many' is not a whole number from 0"));
  EXPECT_THAT(refusal_of({}, {{"PET_LOGS_SPECS", "mine"}}), HasSubstr("PET_LOGS_SPECS is not"));
}

TEST(PetVariables, EveryHonouredValueFlagReadsItsVariable) {
  const LaunchPlan plan = plan_of({}, {{"PET_NNODES", "2"},
                                       {"PET_NODE_RANK", "1"},
                                       {"PET_MASTER_ADDR", "10.0.0.1"},
                                       {"PET_MASTER_PORT", "1234"},
                                       {"PET_RDZV_ID", "job7"},
                                       {"PET_RDZV_CONF", "timeout=9"},
                                       {"PET_LOCAL_ADDR", "10.0.0.2"},
                                       {"PET_TIMEOUT", "60"},
                                       {"PET_STARTUP_TIMEOUT", "20"},
                                       {"PET_SHUTDOWN_TIMEOUT", "2.5"},
                                       {"PET_ROLE", "trainer"},
                                       {"PET_REDIRECTS", "1"},
                                       {"PET_TEE", "0:2"},
                                       {"PET_LOCAL_RANKS_FILTER", "0"},
                                       {"PET_SIGNALS_TO_HANDLE", "SIGUSR1"},
                                       {"PET_NUMA_BINDING", "socket"},
                                       {"PET_LOG_DIR", "/logs"}});
  EXPECT_EQ(plan.nnodes, 2);
  EXPECT_EQ(plan.node_rank, 1);
  EXPECT_EQ(plan.master_addr, "10.0.0.1");
  EXPECT_EQ(plan.master_port, 1234);
  EXPECT_EQ(plan.run_id, "job7");
  EXPECT_EQ(plan.rendezvous_timeout, std::chrono::seconds(9));
  EXPECT_EQ(plan.local_addr, "10.0.0.2");
  EXPECT_EQ(plan.timeout, std::chrono::seconds(60));
  EXPECT_EQ(plan.startup_timeout, std::chrono::seconds(20));
  EXPECT_EQ(plan.shutdown_timeout, milliseconds(2500));
  EXPECT_EQ(plan.role, "trainer");
  EXPECT_EQ(plan.redirects.at(7), Streams::kOut);
  EXPECT_EQ(plan.tee.at(0), Streams::kErr);
  EXPECT_EQ(plan.tee.at(1), Streams::kNone);
  EXPECT_EQ(plan.local_ranks_filter, std::set<int>{0});
  EXPECT_THAT(plan.signals_to_handle, ElementsAre(SIGUSR1));
  EXPECT_EQ(plan.numa_binding, NumaBinding::kSocket);
  EXPECT_EQ(plan.log_dir, "/logs");
}

// ------------------------------------------------------------------ the world

TEST(World, NodesAreANumberOrAnEqualPair) {
  EXPECT_EQ(plan_of({}).nnodes, 1);
  EXPECT_EQ(plan_of({"--nnodes=3"}).nnodes, 3);
  EXPECT_EQ(plan_of({"--nnodes=2:2"}).nnodes, 2);
  EXPECT_THAT(refusal_of({"--nnodes=1:4"}),
              HasSubstr("--nnodes=1:4 asks for a world that changes its size, which is not "
                        "supported. Choose one number, e.g. --nnodes=4."));
  for (const char* bad : {"0", "two", "", "2:1", "1:2:3", "-1", "2x"})
    EXPECT_THAT(refusal_of({fmt::format("--nnodes={}", bad)}),
                HasSubstr("is not a number of hosts"))
        << bad;
}

TEST(World, HostsAndRanksAreReadAlike) {
  EXPECT_EQ(plan_of({"--nproc-per-node=2:2"}).nproc_per_node, 2);
  EXPECT_THAT(refusal_of({"--nproc-per-node=1:4"}),
              HasSubstr("--nproc-per-node=1:4 asks for a world that changes its size, which is not "
                        "supported. Choose one number, e.g. --nproc-per-node=4."));
  EXPECT_THAT(refusal_of({}, {{"PET_NNODES", "1:4"}}),
              HasSubstr("Choose one number, e.g. PET_NNODES=4."));
}

TEST(World, ALauncherInsideARankGetsALine) {
  const Environment rank{
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"TORCHELASTIC_RUN_ID", "a"}};
  EXPECT_THAT(notes_of({}, rank),
              ElementsAre(HasSubstr("inside rank 1 of 2 that torchrun has started")));
  Environment ours = rank;
  ours["LOCKSTEP_RUN"] = "a";
  EXPECT_THAT(notes_of({}, ours), ElementsAre(HasSubstr("of 2 that lockstep run has started")));
  // Kubernetes' jobs give the launcher of each pod such variables.
  EXPECT_THAT(notes_of({}, {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}}), IsEmpty());
}

TEST(World, MoreRanksThanAnyHostCanRunAreRefusedBeforeTheyAreStarted) {
  EXPECT_EQ(plan_of({"--nproc-per-node=4096"}).nproc_per_node, 4096);
  EXPECT_THAT(refusal_of({"--nproc-per-node=99999"}),
              HasSubstr("--nproc-per-node='99999' is not a number of ranks from 1 to 4096"));
}

TEST(World, RanksAreANumberOrWhatTheMachineHas) {
  EXPECT_EQ(plan_of({}).nproc_per_node, 1);
  EXPECT_EQ(plan_of({"--nproc-per-node=cpu"}).nproc_per_node, 12);
  EXPECT_EQ(plan_of({"--nproc-per-node=auto"}).nproc_per_node, 12);
  EXPECT_THAT(refusal_of({"--nproc-per-node=gpu"}),
              HasSubstr("--nproc-per-node=gpu, but there is no GPU: no driver here."));
  EXPECT_THAT(refusal_of({"--nproc-per-node=xpu"}), HasSubstr("=xpu is not supported"));
  for (const char* bad : {"0", "-2", "some", ""})
    EXPECT_THAT(refusal_of({fmt::format("--nproc-per-node={}", bad)}),
                HasSubstr("is not a number of ranks"))
        << bad;
  LaunchContext with_gpus = machine();
  with_gpus.gpus = [] { return Gpus{.count = 4}; };
  EXPECT_EQ(parse_flags({"--nproc-per-node=gpu", "/bin/true"}, with_gpus).plan.nproc_per_node, 4);
  EXPECT_EQ(parse_flags({"--nproc-per-node=auto", "/bin/true"}, with_gpus).plan.nproc_per_node, 4);
}

TEST(World, HasABoundedNumberOfRanks) {
  const auto world = [](const char* hosts, const char* ranks) {
    return std::vector<std::string>{fmt::format("--nnodes={}", hosts),
                                    fmt::format("--nproc-per-node={}", ranks), "--master-addr=n0",
                                    "--node-rank=0"};
  };
  EXPECT_EQ(plan_of(world("1000", "1000")).nproc_per_node, 1000);
  for (const auto& [hosts, ranks] :
       {std::pair{"1000", "1001"}, std::pair{"100000", "4000"}, std::pair{"1000000", "2"}})
    EXPECT_THAT(refusal_of(world(hosts, ranks)),
                HasSubstr(fmt::format("{} hosts with {} ranks each are more than 1000000 ranks",
                                      hosts, ranks)));
  EXPECT_THAT(refusal_of(world("1000001", "1")), HasSubstr("a number of hosts from 1 to 1000000"));
  EXPECT_THAT(refusal_of(world("1", "1000001")), HasSubstr("a number of ranks from 1 to 4096"));
}

TEST(World, TheMachineIsAskedOnlyWhenNeeded) {
  LaunchContext context = machine();
  context.gpus = []() -> Gpus { throw InternalError("test", "asked for GPUs"); };
  context.cores = []() -> int { throw InternalError("test", "asked for cores"); };
  EXPECT_EQ(parse_flags({"--nproc-per-node=2", "/bin/true"}, context).plan.nproc_per_node, 2);
}

TEST(World, OneHostTakesAFreePortAndARandomId) {
  const LaunchPlan first = plan_of({});
  EXPECT_EQ(first.rdzv_backend, "static");
  EXPECT_EQ(first.master_addr, "127.0.0.1");
  EXPECT_EQ(first.master_port, 0);
  const std::regex uuid("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}");
  EXPECT_TRUE(std::regex_match(first.run_id, uuid)) << first.run_id;
  EXPECT_NE(first.run_id, plan_of({}).run_id);
  EXPECT_EQ(plan_of({"--rdzv-id=mine"}).run_id, "mine");
  EXPECT_THAT(refusal_of({"--rdzv-id=a/b"}), HasSubstr("cannot name a log directory"));
  EXPECT_THAT(refusal_of({"--rdzv-id=.."}), HasSubstr("cannot name a log directory"));
}

TEST(World, SeveralHostsAgreeByDefault) {
  const LaunchPlan plan = plan_of({"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1"});
  EXPECT_EQ(plan.master_port, 29500);
  EXPECT_EQ(plan.run_id, "none");
  EXPECT_EQ(plan_of({"--nnodes=2", "--local-addr=[::2]"}).local_addr, "::2");
  EXPECT_THAT(refusal_of({"--nnodes=2", "--master-port=0"}),
              HasSubstr("port 0 means any free one, which the other hosts cannot know"));
}

TEST(World, SeveralHostsWithoutAddressOrRankGetALine) {
  const Args notes = notes_of({"--nnodes=2"});
  EXPECT_THAT(notes, Contains(HasSubstr("without --master-addr: only launchers on this host")));
  EXPECT_THAT(notes, Contains(HasSubstr("without --node-rank: this is node 0")));
  EXPECT_THAT(notes_of({"--nnodes=2", "--node-rank=0", "--master-addr=10.0.0.1"}), IsEmpty());
}

TEST(World, TasksOfSrunInSeparateWorldsGetALine) {
  const Environment two_nodes{{"SLURM_STEP_NUM_NODES", "2"}};
  EXPECT_THAT(notes_of({}, two_nodes),
              Contains(HasSubstr("srun started this launcher on 2 nodes, but --nnodes is 1")));
  EXPECT_THAT(notes_of({"--standalone"}, two_nodes), IsEmpty());
  EXPECT_THAT(notes_of({"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1"}, two_nodes),
              IsEmpty());
  EXPECT_THAT(notes_of({}, {{"SLURM_STEP_NUM_NODES", "1"}}), IsEmpty());
}

TEST(World, NodeRanksStayBelowTheNodes) {
  EXPECT_EQ(plan_of({"--nnodes=2", "--node-rank", "1"}).node_rank, 1);
  EXPECT_THAT(refusal_of({"--nnodes=2", "--node-rank=2"}),
              HasSubstr("--node-rank=2 but --nnodes=2: node ranks go from 0 to 1"));
  EXPECT_THAT(refusal_of({"--node-rank", "-1"}), HasSubstr("is not a whole number from 0"));
}

TEST(World, StandaloneChoosesEverythingItself) {
  const ParsedFlags parsed =
      parse({"--standalone", "--rdzv-id=x", "--master-port=99", "--node-rank=3", "/bin/true"});
  EXPECT_EQ(parsed.plan.rdzv_backend, "c10d");
  EXPECT_EQ(parsed.plan.master_port, 0);
  EXPECT_EQ(parsed.plan.master_addr, "127.0.0.1");
  EXPECT_EQ(parsed.plan.node_rank, 0);
  EXPECT_NE(parsed.plan.run_id, "x");
  EXPECT_THAT(parsed.notes, Contains("--rdzv-id=x is ignored with --standalone."));
  EXPECT_THAT(parsed.notes, Contains("--master-port=99 is ignored with --standalone."));
  EXPECT_THAT(refusal_of({"--standalone"}, {{"PET_NNODES", "2"}}),
              HasSubstr("--standalone is for one host, but PET_NNODES=2."));
}

TEST(World, AnOverriddenFlagIsStillChecked) {
  for (const char* other : {"--standalone", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1"}) {
    EXPECT_THAT(refusal_of({other, "--node-rank=one"}),
                HasSubstr("--node-rank='one' is not a whole number"));
    EXPECT_THAT(refusal_of({other, "--master-port=70000"}),
                HasSubstr("--master-port='70000' is not a whole number from 0 to 65535"));
  }
  EXPECT_THAT(refusal_of({"--standalone"}, {{"PET_NODE_RANK", "x"}}),
              HasSubstr("PET_NODE_RANK='x' is not a whole number"));
  EXPECT_THAT(refusal_of({"--standalone", "--rdzv-endpoint=h:port"}),
              HasSubstr("--rdzv-endpoint='h:port' is not HOST:PORT"));
  EXPECT_THAT(refusal_of({"--standalone", "--rdzv-backend=c11d"}),
              HasSubstr("--rdzv-backend='c11d' is not a rendezvous backend. Did you mean c10d?"));
  EXPECT_THAT(notes_of({"--standalone", "--rdzv-backend=etcd"}),
              Contains("--rdzv-backend=etcd is ignored with --standalone."));
  EXPECT_THAT(refusal_of({"--start-method=thread"}),
              HasSubstr("--start-method='thread' is not spawn, fork, forkserver."));
}

TEST(World, BackendsAreStaticAndOnOneHostC10d) {
  EXPECT_EQ(plan_of({"--rdzv-backend=c10d"}).rdzv_backend, "c10d");
  EXPECT_THAT(refusal_of({"--rdzv-backend=c10d", "--nnodes=2"}),
              HasSubstr("--rdzv-backend=c10d is supported on one host only"));
  EXPECT_THAT(refusal_of({"--rdzv-backend=etcd-v2"}),
              HasSubstr("--rdzv-backend='etcd-v2' is not supported. Use static"));
  EXPECT_THAT(notes_of({"--rdzv-backend=c10d", "--master-port=5"}),
              Contains(HasSubstr("--master-port=5 is ignored with the c10d backend")));
  EXPECT_THAT(notes_of({"--rdzv-backend=c10d", "--node-rank=1"}),
              Contains(HasSubstr("--node-rank=1 is ignored with the c10d backend")));
}

TEST(World, EndpointsHaveHostAndPort) {
  const LaunchPlan plan = plan_of({"--rdzv-endpoint=node1:777"});
  EXPECT_EQ(plan.master_addr, "node1");
  EXPECT_EQ(plan.master_port, 777);
  EXPECT_EQ(plan_of({"--rdzv-endpoint=node1"}).master_addr, "node1");
  EXPECT_EQ(plan_of({"--rdzv-endpoint=localhost:0", "--rdzv-backend=c10d"}).master_port, 0);
  EXPECT_EQ(plan_of({"--rdzv-endpoint=[::1]:99"}).master_addr, "::1");
  EXPECT_EQ(plan_of({"--rdzv-endpoint=[::1]:99"}).master_port, 99);
  EXPECT_EQ(plan_of({"--rdzv-endpoint=fe80::1"}).master_addr, "fe80::1");
  EXPECT_EQ(plan_of({"--master-addr=[::1]", "--master-port=8"}).master_addr, "::1");
  for (const char* bad : {"node1:many", "node1:70000", ":99"})
    EXPECT_THAT(refusal_of({fmt::format("--rdzv-endpoint={}", bad)}), HasSubstr("is not HOST:PORT"))
        << bad;
  EXPECT_THAT(refusal_of({"--master-port=70000"}), HasSubstr("is not a whole number from 0 to"));
  EXPECT_THAT(notes_of({"--rdzv-endpoint=a:1", "--master-addr=b"}),
              Contains("--master-addr=b is ignored because --rdzv-endpoint is given."));
}

TEST(World, RendezvousSettingsAreTimeoutOrExplained) {
  EXPECT_EQ(plan_of({}).rendezvous_timeout, std::chrono::seconds(300));
  EXPECT_EQ(plan_of({"--startup-timeout=20"}).rendezvous_timeout, std::chrono::seconds(20));
  EXPECT_EQ(plan_of({"--rdzv-conf=timeout=60"}).rendezvous_timeout, std::chrono::seconds(60));
  EXPECT_EQ(plan_of({"--rdzv-conf", "join_timeout=7, read_timeout=1"}).rendezvous_timeout,
            std::chrono::seconds(7));
  EXPECT_THAT(notes_of({"--rdzv-conf=read_timeout=1"}), Contains(HasSubstr("read_timeout is ign")));
  EXPECT_THAT(refusal_of({"--rdzv-conf=timeuot=1"}),
              HasSubstr("there is no setting 'timeuot'. Did you mean timeout?"));
  EXPECT_THAT(refusal_of({"--rdzv-conf=timeout"}), HasSubstr("'timeout' is not KEY=VALUE"));
  EXPECT_THAT(refusal_of({"--rdzv-conf=timeout=soon"}),
              HasSubstr("timeout='soon' is not a number"));
}

// ------------------------------------------------------------------ supervision and output

// ------------------------------------------------------------------ Accelerate's file

TEST(ConfigFile, FlagsBeatVariablesBeatTheFileBeatsDefaults) {
  const TemporaryDirectory place;
  const std::string file = place.write("acc.yaml",
                                       "num_processes: 3\nmain_process_port: 29511\n"
                                       "mixed_precision: bf16\nmain_training_function: train\n");
  const std::string flag = "--config_file=" + file;
  LaunchPlan plan = plan_of({flag});
  EXPECT_EQ(plan.nproc_per_node, 3);
  EXPECT_EQ(plan.master_port, 29511);
  EXPECT_THAT(plan.environment, ElementsAre(testing::Pair("ACCELERATE_MIXED_PRECISION", "bf16")));
  EXPECT_EQ(plan_of({}, {{"PET_CONFIG_FILE", file}}).nproc_per_node, 3);
  EXPECT_EQ(plan_of({flag}, {{"PET_NPROC_PER_NODE", "4"}}).nproc_per_node, 4);
  EXPECT_EQ(plan_of({"--nproc-per-node=5", flag}, {{"PET_NPROC_PER_NODE", "4"}}).nproc_per_node, 5);
  EXPECT_THAT(notes_of({flag}),
              ElementsAre(HasSubstr("acc.yaml:4:1: main_training_function has no effect")));
}

TEST(ConfigFile, StandaloneChoosesTheRendezvous) {
  const TemporaryDirectory place;
  const std::string file = place.write("acc.yaml",
                                       "num_machines: 2\nnum_processes: 4\nmachine_rank: 1\n"
                                       "main_process_ip: 10.0.0.1\nrdzv_backend: static\n");
  EXPECT_EQ(plan_of({"--config-file", file}).nnodes, 2);
  EXPECT_EQ(plan_of({"--config-file", file}).node_rank, 1);
  EXPECT_EQ(plan_of({"--config-file", file, "--node-rank=0"}).node_rank, 0);
  const LaunchPlan alone = plan_of({"--standalone", "--config-file", file});
  EXPECT_EQ(alone.nnodes, 1);
  EXPECT_EQ(alone.nproc_per_node, 2);
  EXPECT_EQ(alone.master_port, 0);
  EXPECT_THAT(notes_of({"--standalone", "--config-file", file}), IsEmpty());
}

TEST(ConfigFile, ItsGpusAreCounted) {
  const TemporaryDirectory place;
  const std::string file = place.write("acc.yaml", "gpu_ids: 1,3\n");
  const auto count = [&](Environment environment) {
    LaunchContext context = machine(std::move(environment));
    context.gpus = [] { return Gpus{.count = 8}; };
    return parse_flags({"--config-file=" + file, "--nproc-per-node=gpu", "/bin/true"}, context)
        .plan.nproc_per_node;
  };
  EXPECT_EQ(count({}), 2);
  EXPECT_EQ(count({{"CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7"}}), 8);
}

TEST(ConfigFile, MultiGpuNeedsAGpu) {
  const TemporaryDirectory place;
  const std::string file =
      place.write("acc.yaml", "num_processes: 2\ndistributed_type: MULTI_GPU\n");
  const Args flags = {"--config-file=" + file};
  EXPECT_THAT(
      refusal_of(flags),
      HasSubstr("acc.yaml:2:19: distributed_type is MULTI_GPU, but there is no GPU: no driver "
                "here. Check CUDA_VISIBLE_DEVICES and nvidia-smi, or write MULTI_CPU."));
  // The environment takes precedence over the file.
  EXPECT_EQ(plan_of(flags, {{"LOCKSTEP_DEVICE", "cpu"}}).nproc_per_node, 2);
  LaunchContext context = machine();
  context.gpus = [] { return Gpus{.count = 2}; };
  const LaunchPlan plan = parse_flags({flags[0], "/bin/true"}, context).plan;
  EXPECT_THAT(plan.environment, ElementsAre(testing::Pair("LOCKSTEP_DEVICE", "cuda")));
}

TEST(ConfigFile, MistakesHaveTheirPlace) {
  const TemporaryDirectory place;
  const std::string file =
      place.write("acc.yaml", "num_proceses: 2\nlearning_rate: 1e-4\nmachine_rank: x\n");
  const std::string text = refusal_of({"--config-file=" + file});
  EXPECT_THAT(text, HasSubstr("3 mistakes"));
  EXPECT_THAT(text, HasSubstr("acc.yaml:1:1: there is no key 'num_proceses'"));
  EXPECT_THAT(text, HasSubstr("acc.yaml:2:1: learning_rate belongs in the training file"));
  EXPECT_THAT(text, HasSubstr("acc.yaml:3:15: machine_rank must be"));
  EXPECT_THAT(refusal_of({"--config-file=/no/such.yaml"}), HasSubstr("/no/such.yaml cannot be"));
}

TEST(Supervision, NumbersAndSecondsAreChecked) {
  EXPECT_EQ(plan_of({"--max-restarts=3"}).max_restarts, 3);
  EXPECT_EQ(plan_of({"--shutdown-timeout=1.5"}).shutdown_timeout, milliseconds(1500));
  EXPECT_EQ(plan_of({"--shutdown_timeout", "0"}).shutdown_timeout, milliseconds(0));
  EXPECT_EQ(plan_of({}).stall_timeout, milliseconds(30'000));
  EXPECT_EQ(plan_of({"--stall-timeout=0"}).stall_timeout, milliseconds(0));
  EXPECT_EQ(plan_of({}).stall_action, StallAction::kWarn);
  EXPECT_EQ(plan_of({"--stall-action=stop"}).stall_action, StallAction::kStop);
  EXPECT_THAT(refusal_of({"--max-restarts=-1"}), HasSubstr("is not a whole number from 0"));
  EXPECT_THAT(refusal_of({"--monitor-interval=0"}), HasSubstr("is not a number of seconds of at"));
  EXPECT_THAT(refusal_of({"--shutdown-timeout=nan"}), HasSubstr("is not a number of seconds"));
  EXPECT_THAT(refusal_of({"--shutdown-timeout=5s"}), HasSubstr("--shutdown-timeout='5s' is not"));
}

TEST(Supervision, TheMonitorIntervalIsHonoured) {
  EXPECT_EQ(plan_of({}).monitor_interval, milliseconds(1000));
  EXPECT_EQ(plan_of({"--monitor-interval=0.25"}).monitor_interval, milliseconds(250));
  EXPECT_EQ(plan_of({}, {{"PET_MONITOR_INTERVAL", "5"}}).monitor_interval, milliseconds(5000));
  EXPECT_THAT(notes_of({"--monitor-interval=0.25"}), IsEmpty());
}

TEST(Supervision, TimeoutsOfTheRanksAreWholeSeconds) {
  EXPECT_EQ(plan_of({}).timeout.count(), 0);
  EXPECT_EQ(plan_of({"--timeout=7"}).timeout, std::chrono::seconds(7));
  EXPECT_EQ(plan_of({"--startup_timeout", "8"}).startup_timeout, std::chrono::seconds(8));
  for (const char* bad : {"0", "-1", "1.5", "soon", "31536001"}) {
    const std::string text = bad;
    EXPECT_THAT(refusal_of({"--timeout=" + text}),
                HasSubstr("--timeout='" + text + "' is not a whole number from 1 to 31536000"));
    EXPECT_THAT(refusal_of({"--startup-timeout=" + text}), HasSubstr("--startup-timeout='" + text));
  }
}

TEST(Supervision, SignalsAreNames) {
  EXPECT_THAT(plan_of({}).signals_to_handle, IsEmpty());
  EXPECT_THAT(plan_of({"--signals-to-handle=SIGTERM,USR1,sigusr2,TERM"}).signals_to_handle,
              ElementsAre(SIGTERM, SIGUSR1, SIGUSR2));
  EXPECT_THAT(refusal_of({"--signals-to-handle=SIGTREM"}),
              HasSubstr("'SIGTREM' is not a signal. Did you mean SIGTERM?"));
  EXPECT_THAT(refusal_of({"--signals-to-handle="}), HasSubstr("'' is not a signal"));
  EXPECT_THAT(refusal_of({"--signals-to-handle=KILL"}), HasSubstr("SIGKILL cannot be handled"));
}

TEST(Supervision, NumaBindingHasFourModes) {
  EXPECT_EQ(plan_of({}).numa_binding, NumaBinding::kNone);
  EXPECT_EQ(plan_of({"--numa-binding=node"}).numa_binding, NumaBinding::kNode);
  EXPECT_EQ(plan_of({"--numa-binding=exclusive"}).numa_binding, NumaBinding::kExclusive);
  EXPECT_EQ(plan_of({"--numa_binding", "core-complex"}).numa_binding, NumaBinding::kCoreComplex);
  EXPECT_THAT(refusal_of({"--numa-binding=core"}),
              HasSubstr("--numa-binding='core' is not node, socket, exclusive or core-complex."));
}

TEST(Output, StreamsAreOneNumberOrAMapOfRanks) {
  const StreamMap map = plan_of({"-t", "0:3,1:1,12:2", "--nproc-per-node=13"}).tee;
  EXPECT_EQ(map.at(0), Streams::kAll);
  EXPECT_EQ(map.at(1), Streams::kOut);
  EXPECT_EQ(map.at(2), Streams::kNone);
  EXPECT_EQ(map.at(12), Streams::kErr);
  EXPECT_EQ(plan_of({"-r3"}).redirects.at(99), Streams::kAll);
  EXPECT_THAT(refusal_of({"-r", "4"}),
              HasSubstr("--redirects='4': '4' is not 0 (none), 1 (stdout)"));
  EXPECT_THAT(refusal_of({"-r", "0:9"}), HasSubstr("--redirects='0:9': '9' is not 0 (none)"));
  EXPECT_THAT(refusal_of({"-t0:9"}), HasSubstr("--tee='0:9': '9' is not 0 (none)"));
  EXPECT_THAT(refusal_of({"--tee=a:1"}), HasSubstr("'a:1' is not <local rank>:<streams>"));
  EXPECT_THAT(refusal_of({"--tee=0:1,2"}), HasSubstr("'2' is not <local rank>:<streams>"));
  EXPECT_THAT(notes_of({"-r", "5:3"}),
              Contains("--redirects names local rank 5, but there are only 1."));
}

TEST(Output, TheLinePrefixIsOneOfThree) {
  EXPECT_EQ(plan_of({}).line_prefix, std::nullopt);
  EXPECT_EQ(plan_of({"--line-prefix=rank"}).line_prefix, LinePrefix::kRank);
  EXPECT_EQ(plan_of({"--line_prefix", "role"}).line_prefix, LinePrefix::kRole);
  EXPECT_EQ(plan_of({}, {{"PET_LINE_PREFIX", "none"}}).line_prefix, LinePrefix::kNone);
  EXPECT_THAT(refusal_of({"--line-prefix=nonne"}),
              HasSubstr("--line-prefix='nonne' is not rank, role or none. Did you mean none?"));
}

TEST(Output, RankFiltersAreNumbers) {
  EXPECT_EQ(plan_of({}).local_ranks_filter, std::nullopt);
  EXPECT_EQ(plan_of({"--local-ranks-filter=0,2", "--nproc-per-node=3"}).local_ranks_filter,
            (std::set<int>{0, 2}));
  EXPECT_EQ(plan_of({"--local-ranks-filter="}).local_ranks_filter, std::nullopt);
  EXPECT_THAT(refusal_of({"--local-ranks-filter=0,a"}), HasSubstr("'a' is not a local rank"));
  EXPECT_THAT(notes_of({"--local-ranks-filter=3"}), Contains(HasSubstr("but there are only 1")));
}

TEST(Output, DuplicateFiltersSplitAtSingleCommas) {
  const LaunchPlan plan =
      plan_of({"--duplicate-stdout-filters=apple,a,,b", "--duplicate_stderr_filters", "x"});
  EXPECT_THAT(plan.duplicate_stdout_filters, ElementsAre("apple", "a,b"));
  EXPECT_THAT(plan.duplicate_stderr_filters, ElementsAre("x"));
  EXPECT_THAT(plan_of({"--duplicate-stdout-filters="}).duplicate_stdout_filters, IsEmpty());
}

TEST(Output, ARelativeLogDirectoryBecomesAbsolute) {
  const std::string here = std::filesystem::current_path();
  EXPECT_EQ(plan_of({"--log-dir=logs"}).log_dir, here + "/logs");
  EXPECT_EQ(plan_of({"--log-dir=/a/../b"}).log_dir, "/b");
  EXPECT_EQ(plan_of({"--log-dir=~/x"}).log_dir, std::string(std::getenv("HOME")) + "/x");
  EXPECT_EQ(plan_of({}).log_dir, "");
  EXPECT_EQ(plan_of({"--record", "r"}).record_dir, here + "/r");
  EXPECT_EQ(plan_of({}).record_dir, "");
  EXPECT_TRUE(plan_of({"--doctor"}).doctor);
  EXPECT_FALSE(plan_of({}).doctor);
}

TEST(Treatments, IgnoredFlagsGiveALineAndRefusedOnesAnError) {
  EXPECT_THAT(notes_of({"--start-method=fork"}),
              ElementsAre(HasSubstr("--start-method is ignored: ranks are programs")));
  EXPECT_THAT(notes_of({"--event-log-handler=x"}), ElementsAre(HasSubstr("is ignored:")));
  EXPECT_THAT(notes_of({"--use-env"}), ElementsAre(HasSubstr("--use-env is ignored:")));
  EXPECT_THAT(refusal_of({"--logs-specs=x"}),
              HasSubstr("[run] --logs-specs is not supported: it names a Python plug-in"));
  EXPECT_THAT(notes_of({"--standalone", "--nproc-per-node=2"}), IsEmpty());
}

// ------------------------------------------------------------------ the program

TEST(Program, ArgumentsAfterItAreNotTouched) {
  const ParsedFlags parsed = parse({"--nproc-per-node=2", "/bin/echo", "--nproc-per-node=3", "--",
                                    "a b", "$$", "${local_rank}", "", "-h"});
  EXPECT_EQ(parsed.plan.nproc_per_node, 2);
  EXPECT_THAT(parsed.plan.command, ElementsAre("/bin/echo", "--nproc-per-node=3", "--", "a b", "$$",
                                               "${local_rank}", "", "-h"));
  EXPECT_THAT(parse({"--standalone", "--", "/bin/echo", "--"}).plan.command,
              ElementsAre("/bin/echo", "--"));
}

TEST(Program, PythonFilesAndModulesRunUnderPython) {
  const TemporaryDirectory directory;
  const std::string script = script_in(directory, "train.py", 0644);
  const std::string other = script_in(directory, "train", 0644);
  const std::string python = script_in(directory, "mypython", 0755);
  const Environment exec = {{"PYTHON_EXEC", python}};
  EXPECT_THAT(parse({script, "-x"}, exec).plan.command, ElementsAre(python, "-u", script, "-x"));
  EXPECT_THAT(parse({"-m", "pkg.train", "-x"}, exec).plan.command,
              ElementsAre(python, "-u", "-m", "pkg.train", "-x"));
  EXPECT_THAT(parse({"--run-path", "--no-python", other}, exec).plan.command,
              ElementsAre(python, "-u", other));
  EXPECT_THAT(parse({"mypython"}, {{"PATH", "/nowhere:" + directory.path()}}).plan.command,
              ElementsAre(python));
  EXPECT_THAT(
      parse({script}, {{"PYTHON_EXEC", "mypython"}, {"PATH", directory.path()}}).plan.command,
      ElementsAre(python, "-u", script));
  EXPECT_THAT(refusal({"-m", "x"}, {{"PYTHON_EXEC", "/no/python"}}),
              HasSubstr("the Python interpreter '/no/python' cannot be executed"));
  EXPECT_THAT(refusal({"-m", "x"}, {{"PATH", "/nowhere"}}),
              HasSubstr("the Python interpreter 'python3' cannot be executed"));
}

TEST(Program, OurOwnProgramIsFoundWithoutPath) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  EXPECT_THAT(
      parse({std::filesystem::path(self).filename(), "x"}, {{"PATH", "/nowhere"}}).plan.command,
      ElementsAre(self, "x"));
}

TEST(Program, NoPythonExecutesDirectly) {
  const TemporaryDirectory directory;
  const std::string script = script_in(directory, "run.py", 0755);
  EXPECT_THAT(parse({"--no-python", script}).plan.command, ElementsAre(script));
  EXPECT_THAT(refusal({"--no-python", "-m", "x"}), HasSubstr("contradict each other"));
}

TEST(Program, ADirectoryWithAMainFileRunsUnderPython) {
  const TemporaryDirectory directory;
  EXPECT_THAT(refusal({directory.path()}), HasSubstr("is a directory without __main__.py"));
  script_in(directory, "__main__.py", 0644);
  EXPECT_THAT(parse({directory.path(), "a"}).plan.command,
              ElementsAre(HasSubstr("python3"), "-u", directory.path(), "a"));
  EXPECT_THAT(refusal({"--no-python", directory.path()}), HasSubstr("is a directory"));
}

TEST(Program, WhatCannotRunIsSaidBeforeAnythingStarts) {
  const TemporaryDirectory directory;
  EXPECT_THAT(refusal({"--standalone"}), HasSubstr("no program was given. Usage:"));
  EXPECT_THAT(refusal({"./no/such"}), HasSubstr("the program './no/such' does not exist"));
  EXPECT_THAT(refusal({"no-such-program"}), HasSubstr("'no-such-program' is not on PATH"));
  EXPECT_THAT(refusal({"/no/such.py"}), HasSubstr("the script '/no/such.py' does not exist"));
  EXPECT_THAT(refusal({directory.path()}), HasSubstr("is a directory"));
  EXPECT_THAT(refusal({script_in(directory, "plain", 0644)}), HasSubstr("is not executable"));
  // A training file and a source are no programs, whether they are there or not.
  for (const std::string& file : {std::string("t.yaml"), script_in(directory, "t.yml", 0644)})
    EXPECT_THAT(refusal({file}), HasSubstr("no program. Use lockstep train " + file));
  EXPECT_THAT(refusal({"main.cpp"}), HasSubstr("'main.cpp' is the source of a program. Build it"));
  const std::string runnable = script_in(directory, "run.yaml", 0755);
  EXPECT_THAT(parse({runnable}).plan.command, ElementsAre(runnable));
  const std::filesystem::path before = std::filesystem::current_path();
  script_in(directory, "here", 0755);
  std::filesystem::current_path(directory.path());
  const std::string text = refusal({"here"});
  std::filesystem::current_path(before);
  EXPECT_THAT(text, HasSubstr("There is one in this directory: write ./here."));
}

TEST(Program, AnUnreadableScriptIsRefused) {
  const TemporaryDirectory directory;
  const std::string script = script_in(directory, "a.py", 0000);
  ::chmod(directory.path().c_str(), 0755);
  // In a child that gives up root, which may read everything.
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool dropped = ::geteuid() != 0 || ::setuid(65534) == 0;
    const std::string text = refusal({script});
    ::_exit(dropped && text.find("cannot be read") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// ------------------------------------------------------------------ texts

TEST(Texts, HelpNamesEveryFlagWithinOneHundredColumns) {
  const std::string help = run_help();
  for (const FlagSpec& flag : flag_table())
    EXPECT_THAT(help, HasSubstr(fmt::format("--{}", flag.name)));
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
}

}  // namespace
}  // namespace lockstep::launch
