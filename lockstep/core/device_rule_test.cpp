#include "lockstep/core/device_rule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/core/thrown_for_test.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A machine with some GPUs, and nothing in the environment that has a say.
class DeviceRuleTest : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : {"LOCKSTEP_DEVICE", "LOCKSTEP_BACKEND", "LOCKSTEP_SHARE_DEVICE"})
      ::unsetenv(name);
  }
  static DeviceRequest on(int gpus, int local_rank) {
    return {.local_rank = local_rank, .visible_gpus = [gpus] { return gpus; }};
  }
  static std::string refusal(const DeviceRequest& request) {
    return message_of([&] { apply_device_rule(request); });
  }
};

TEST_F(DeviceRuleTest, TheMachineDecides) {
  EXPECT_EQ(apply_device_rule(on(0, 0)).device(), "cpu");
  EXPECT_EQ(apply_device_rule(on(0, 0)).backend, "shm");
  EXPECT_TRUE(apply_device_rule(on(0, 0)).automatic) << "gloo between hosts";
  EXPECT_EQ(apply_device_rule(on(0, 0)).reason, "no CUDA device is visible");
  const DeviceRule second = apply_device_rule(on(2, 1));
  EXPECT_EQ(second.device(), "cuda:1");
  EXPECT_EQ(second.backend, "nccl");
  EXPECT_FALSE(second.automatic);
  EXPECT_EQ(second.problem, "");
  EXPECT_EQ(apply_device_rule(on(2, -1)).device(), "cuda:0") << "the local rank is not known yet";
  DeviceRequest request = on(1, 0);
  request.cuda_built = false;
  EXPECT_EQ(apply_device_rule(request).reason,
            "1 CUDA device is visible, but this build has no CUDA plug-in");
}

TEST_F(DeviceRuleTest, TheEnvironmentDecidesBeforeIt) {
  ::setenv("LOCKSTEP_BACKEND", "gloo", 1);
  EXPECT_EQ(apply_device_rule(on(2, 1)).device(), "cpu");
  ::setenv("LOCKSTEP_BACKEND", "shm", 1);
  EXPECT_FALSE(apply_device_rule(on(2, 1)).automatic) << "asked for: nothing takes its place";
  ::setenv("LOCKSTEP_BACKEND", "gloo", 1);
  ::setenv("LOCKSTEP_DEVICE", "cuda", 1);
  EXPECT_EQ(apply_device_rule(on(2, 1)).device(), "cuda:1");
  EXPECT_EQ(apply_device_rule(on(2, 1)).backend, "gloo");
  ::setenv("LOCKSTEP_DEVICE", "cuda:0", 1);
  EXPECT_EQ(apply_device_rule(on(2, 1)).device(), "cuda:0");
  EXPECT_EQ(apply_device_rule(on(2, 1)).reason, "LOCKSTEP_DEVICE=cuda:0");
}

TEST_F(DeviceRuleTest, TheProgramDecidesBeforeBoth) {
  ::setenv("LOCKSTEP_DEVICE", "cuda", 1);
  ::setenv("LOCKSTEP_BACKEND", "nccl", 1);
  DeviceRequest request = on(2, 1);
  request.device = "cpu";
  request.backend = "gloo";
  request.visible_gpus = [] {
    ADD_FAILURE() << "the driver is not asked for a CPU";
    return 0;
  };
  EXPECT_EQ(apply_device_rule(request).device(), "cpu");
  EXPECT_EQ(apply_device_rule(request).backend, "gloo");
}

TEST_F(DeviceRuleTest, MoreRanksThanGpus) {
  EXPECT_THAT(apply_device_rule(on(2, 3)).problem,
              HasSubstr("local rank 3 wants cuda:3, but 2 CUDA devices are visible."));
  EXPECT_THAT(apply_device_rule(on(1, 1)).problem, HasSubstr("but 1 CUDA device is visible."));
  DeviceRequest request = on(2, 3);
  request.share = true;
  EXPECT_EQ(apply_device_rule(request).device(), "cuda:1");
  EXPECT_EQ(apply_device_rule(request).problem, "");
  ::setenv("LOCKSTEP_SHARE_DEVICE", "1", 1);
  EXPECT_EQ(apply_device_rule(on(2, 2)).device(), "cuda:0");
}

TEST_F(DeviceRuleTest, WhatDoesNotExist) {
  DeviceRequest request = on(0, 0);
  request.backend = "nccl";
  EXPECT_THAT(apply_device_rule(request).problem,
              AllOf(HasSubstr("backend nccl needs a CUDA device"),
                    HasSubstr("(no CUDA device is visible). Use shm (ranks of one host) or gloo")));
  request.visible_gpus = [] { return 1; };
  request.cuda_built = false;
  EXPECT_THAT(apply_device_rule(request).problem,
              AllOf(HasSubstr("this build has no CUDA plug-in"), HasSubstr("Use shm")));
  request = on(0, 0);
  request.device = "cuda";
  request.backend = "nccl";
  EXPECT_THAT(apply_device_rule(request).problem, HasSubstr("(with backend shm or gloo)"));
  request = on(0, 0);
  request.backend = "mpi";
  EXPECT_THAT(refusal(request), HasSubstr("there is no backend 'mpi'"));
  for (const char* device : {"tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:99999", "CPU"}) {
    ::setenv("LOCKSTEP_DEVICE", device, 1);
    EXPECT_THAT(refusal(on(0, 0)), HasSubstr("is not a device. Use cpu, cuda or cuda:N."));
  }
}

TEST(IdleGpus, AreSaidWithTheLaunchLineWhereALauncherWasForgotten) {
  EXPECT_THAT(idle_gpus_warning(1, false, 2),
              AllOf(HasSubstr("2 GPUs are visible but this is a world of one: 1 will be idle."),
                    HasSubstr("lockstep run --nproc-per-node=2 <program>")));
  EXPECT_THAT(idle_gpus_warning(1, false, 8), HasSubstr("7 will be idle. Start it with lockstep"));
  EXPECT_EQ(idle_gpus_warning(1, false, 1), "");
  EXPECT_EQ(idle_gpus_warning(1, false, 0), "") << "a rank on the CPU";
  EXPECT_EQ(idle_gpus_warning(2, false, 4), "") << "it was launched";
  EXPECT_EQ(idle_gpus_warning(1, true, 2), "") << "the program named its device";
}

}  // namespace
}  // namespace lockstep
