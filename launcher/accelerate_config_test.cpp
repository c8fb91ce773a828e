// Accelerate's file: the flag or variable for each key, and every refusal with its location.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/flags.h"
#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

AccelerateLaunch read(const std::string& text) {
  return read_accelerate_config(parse_yaml(text, "acc.yaml"),
                                {"learning_rate", "ddp_bucket_cap_mb", "seed", "fsdp_config"});
}

std::string refusal(const std::string& text) {
  return message_of([&] { read(text); });
}

constexpr const char* kGenerated =
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_GPU\n"
    "downcast_bf16: 'no'\nenable_cpu_affinity: false\ngpu_ids: all\nmachine_rank: 0\n"
    "main_training_function: main\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 2\n"
    "rdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\n"
    "tpu_use_sudo: false\nuse_cpu: false\n";

TEST(AccelerateConfig, TheFileThatAccelerateWritesIsRead) {
  const AccelerateLaunch launch = read(kGenerated);
  EXPECT_THAT(launch.flags, ElementsAre("--nnodes=1", "--nproc-per-node=2", "--node-rank=0",
                                        "--rdzv-backend=static"));
  EXPECT_THAT(launch.environment, ElementsAre(Pair("ACCELERATE_MIXED_PRECISION", "bf16"),
                                              Pair("LOCKSTEP_DEVICE", "cuda")));
  EXPECT_EQ(launch.gpu_key, "acc.yaml:3:19: distributed_type is MULTI_GPU");
  EXPECT_THAT(launch.notes, IsEmpty());
}

TEST(AccelerateConfig, EveryKeyOfTheListIsRead) {
  for (const std::string& key : launcher_keys()) {
    const std::string message = refusal(key + ":\n");
    EXPECT_EQ(message, "(nothing thrown)") << key;
  }
}

// Accelerate writes empty sections for what was not chosen.
TEST(AccelerateConfig, EmptySectionsAreSkipped) {
  for (const char* key : {"fsdp_config", "deepspeed_config", "fp8_config"}) {
    EXPECT_EQ(refusal(std::string(key) + ": {}\n"), "(nothing thrown)") << key;
    EXPECT_EQ(refusal(std::string(key) + ":\n"), "(nothing thrown)") << key;
  }
}

// As `accelerate config` writes it for FSDP2, with a key of FSDP1 that has no effect.
TEST(AccelerateConfig, FsdpGoesToTheRanksAsAccelerateSendsIt) {
  const AccelerateLaunch launch = read(
      "distributed_type: FSDP\nuse_cpu: true\nfsdp_config:\n"
      "  fsdp_activation_checkpointing: false\n"
      "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
      "  fsdp_backward_prefetch: BACKWARD_PRE\n"
      "  fsdp_cpu_ram_efficient_loading: true\n"
      "  fsdp_offload_params: false\n"
      "  fsdp_reshard_after_forward: true\n"
      "  fsdp_state_dict_type: FULL_STATE_DICT\n"
      "  fsdp_transformer_layer_cls_to_wrap: GPT2Block\n"
      "  fsdp_version: 2\n");
  EXPECT_THAT(
      launch.environment,
      ElementsAre(Pair("ACCELERATE_USE_CPU", "true"), Pair("ACCELERATE_USE_FSDP", "true"),
                  Pair("FSDP_ACTIVATION_CHECKPOINTING", "false"),
                  Pair("FSDP_OFFLOAD_PARAMS", "false"), Pair("FSDP_RESHARD_AFTER_FORWARD", "true"),
                  Pair("FSDP_TRANSFORMER_CLS_TO_WRAP", "GPT2Block"), Pair("FSDP_VERSION", "2"),
                  Pair("LOCKSTEP_DEVICE", "cpu")));
  EXPECT_EQ(read("distributed_type: FSDP\n").gpu_key, "acc.yaml:1:19: distributed_type is FSDP");
}

TEST(AccelerateConfig, ItsFlagsCanBeParsed) {
  std::vector<std::string> flags = read(kGenerated).flags;
  flags.push_back("/proc/self/exe");  // some program that exists
  LaunchContext context;
  context.variable = [](const std::string&) { return std::nullopt; };
  const ParsedFlags parsed = parse_flags(flags, context);
  EXPECT_EQ(parsed.plan.nproc_per_node, 2);
  EXPECT_EQ(parsed.plan.nnodes, 1);
}

TEST(AccelerateConfig, SeveralMachinesShareTheProcesses) {
  const AccelerateLaunch launch = read(
      "num_machines: 2\nnum_processes: 8\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n"
      "main_process_port: 29501\n");
  EXPECT_THAT(launch.flags, ElementsAre("--nnodes=2", "--nproc-per-node=4", "--node-rank=1",
                                        "--master-addr=10.0.0.1", "--master-port=29501"));
}

TEST(AccelerateConfig, SwitchesAndDevices) {
  const AccelerateLaunch launch = read(
      "distributed_type: MULTI_CPU\nnum_processes: 2\ndebug: true\nenable_cpu_affinity: true\n");
  EXPECT_THAT(launch.environment,
              UnorderedElementsAre(Pair("ACCELERATE_USE_CPU", "true"),
                                   Pair("LOCKSTEP_DEVICE", "cpu"), Pair("LOCKSTEP_DEBUG", "1")));
  EXPECT_THAT(launch.flags, ElementsAre("--nproc-per-node=2", "--numa-binding=node"));
  EXPECT_THAT(read("gpu_ids: 0, 2\n").environment,
              ElementsAre(Pair("CUDA_VISIBLE_DEVICES", "0,2")));
  EXPECT_THAT(read("gpu_ids: 3\n").environment, ElementsAre(Pair("CUDA_VISIBLE_DEVICES", "3")));
  EXPECT_THAT(read("distributed_type: NO\n").flags, ElementsAre("--nproc-per-node=1"));
  EXPECT_THAT(read("main_training_function: train\n").notes,
              ElementsAre("acc.yaml:1:1: main_training_function has no effect: it names a function "
                          "of a notebook; programs are started."));
  EXPECT_THAT(read("downcast_bf16: 'yes'\n").notes, ElementsAre(HasSubstr("it is for TPUs")));
  EXPECT_THAT(read("").flags, IsEmpty());
}

struct Mistake {
  const char* name;
  std::string text;
  std::string expected;
};
class AccelerateMistake : public ::testing::TestWithParam<Mistake> {};
TEST_P(AccelerateMistake, IsNamedWithPlaceAndRemedy) {
  EXPECT_THAT(refusal(GetParam().text), HasSubstr("[config] acc.yaml:" + GetParam().expected));
}

const Mistake kMistakes[] = {
    {"TrainingKey", "num_processes: 2\nlearning_rate: 1e-4\n",
     "2:1: learning_rate belongs in the training file (`lockstep train FILE`), not in the "
     "launcher's. Move it there."},
    {"DdpKey", "ddp_bucket_cap_mb: 25\n", "1:1: ddp_bucket_cap_mb belongs in the training file"},
    {"Typo", "num_proceses: 2\n",
     "1:1: there is no key 'num_proceses' in the launcher's file. Did "
     "you mean num_processes?"},
    {"Type", "num_processes: two\n", "1:16: num_processes must be a whole number, and 'two' is"},
    {"Range", "num_processes: 0\n", "1:16: num_processes must be from 1 to 1000000, and 0 is not."},
    {"Bool", "use_cpu: yes\n", "1:10: use_cpu must be true or false, and 'yes' is a string here."},
    {"Environment", "compute_environment: AMAZON_SAGEMAKER\n",
     "1:22: compute_environment AMAZON_SAGEMAKER is not supported. Write LOCAL_MACHINE."},
    {"Distributed", "distributed_type: DEEPSPEED\n",
     "1:19: distributed_type DEEPSPEED is not supported. Write NO, MULTI_CPU, MULTI_GPU or FSDP."},
    {"DistributedTypo", "distributed_type: MULTI_GUP\n",
     "1:19: distributed_type MULTI_GUP is not supported. Write NO, MULTI_CPU, MULTI_GPU or FSDP. "
     "Did you mean MULTI_GPU?"},
    {"Section", "fsdp_config:\n  fsdp_offload_params: true\n",
     "1:1: fsdp_config belongs in the training file"},
    {"FsdpKey", "distributed_type: FSDP\nfsdp_config:\n  fsdp_min_num_params: 100\n",
     "3:24: fsdp_config.fsdp_min_num_params is not supported. Delete it."},
    {"FsdpVersion", "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n",
     "3:17: fsdp_config.fsdp_version 1 is not supported. Write fsdp_version: 2."},
    {"FsdpHybrid", "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n",
     "3:27: fsdp_config.fsdp_sharding_strategy HYBRID_SHARD is of PyTorch's first FSDP. Delete it, "
     "and write fsdp: hybrid_shard into the training file."},
    {"FsdpStrategy",
     "distributed_type: FSDP\nfsdp_config:\n  fsdp_reshard_after_forward: SHARD_GRAD_OP\n",
     "3:31: fsdp_config.fsdp_reshard_after_forward SHARD_GRAD_OP is of PyTorch's first FSDP. Write "
     "fsdp_reshard_after_forward: false."},
    {"FsdpMap", "distributed_type: FSDP\nfsdp_config: full_shard\n",
     "2:14: fsdp_config must be a map"},
    {"Precision", "mixed_precision: int8\n", "1:18: mixed_precision must be no, fp16, bf16 or fp8"},
    {"Uneven", "num_machines: 2\nnum_processes: 3\nmain_process_ip: h\n",
     "2:16: num_processes 3 cannot be shared equally by 2 machines: it counts the processes of all "
     "of them. Make it 2 or 4."},
    {"NoWithSeveral", "distributed_type: NO\nnum_processes: 2\n",
     "2:16: num_processes is 2, but distributed_type is NO."},
    {"MachineRank", "num_machines: 2\nmachine_rank: 2\nmain_process_ip: h\n",
     "2:15: machine_rank 2 does not exist with num_machines 2."},
    {"NoAddress", "num_machines: 2\nnum_processes: 2\n",
     "1:15: num_machines is 2, but there is no rendezvous address. Set main_process_ip"},
    {"Port", "main_process_port: 70000\n", "1:20: main_process_port must be from 0 to 65535"},
    {"Rendezvous", "rdzv_backend: etcd\n", "1:15: rdzv_backend must be static or c10d"},
    {"CpuAndGpu", "use_cpu: true\ndistributed_type: MULTI_GPU\n", "1:10: use_cpu is true, but"},
    {"GpuIds", "gpu_ids: a,b\n", "1:10: gpu_ids must be all or numbers such as 0,1"},
    {"Tpu", "tpu_use_sudo: true\n", "1:15: tpu_use_sudo is for TPUs, which are not supported."},
    {"TpuEnv", "tpu_env: [a]\n", "1:10: tpu_env is for TPUs, which are not supported."},
    {"NotAMap", "- a\n", "1:1: the launcher's file must be a map, but this is a list."},
};
INSTANTIATE_TEST_SUITE_P(AccelerateConfig, AccelerateMistake, ::testing::ValuesIn(kMistakes),
                         [](const auto& one) { return one.param.name; });

TEST(AccelerateConfig, AllMistakesAreReportedAtOnce) {
  const std::string message = refusal("num_processes: x\nseed: 1\n");
  EXPECT_THAT(message, HasSubstr("[config] 2 mistakes:\n  acc.yaml:2:1: seed belongs"));
  EXPECT_THAT(message, HasSubstr("\n  acc.yaml:1:16: num_processes must be"));
}

}  // namespace
}  // namespace lockstep::launch
