// The line of log_gpu_memory(), in processes of their own: the sampler is one for each process.
#include "lockstep/monitor/gpu_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <thread>

#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

// What the body writes to stderr in a child that ends by exit(), as a program does.
std::string stderr_of(const std::string& library, const std::function<void()>& body) {
  const std::string folder = std::filesystem::temp_directory_path() /
                             ("lockstep_gpu_memory_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/script") << "devices 2\n0 used 33554432000\n0 total 85899345920\n"
                                       "1 used lost\n1 total 85899345920\n";
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("LOCKSTEP_NVML", library.c_str(), 1);
    ::setenv("FAKE_NVML_SCRIPT", (folder + "/script").c_str(), 1);
    if (std::freopen((folder + "/stderr").c_str(), "w", stderr) == nullptr) ::_exit(1);
    body();
    std::exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  const std::string text = read_file(folder + "/stderr");
  std::filesystem::remove_all(folder);
  return text;
}

std::size_t lines_in(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST(LogGpuMemory, OneLineInAnIntervalHoweverOftenItIsCalled) {
  const std::string text = stderr_of(LOCKSTEP_FAKE_NVML_NEW, [] {
    for (int step = 0; step < 1000; ++step) log_gpu_memory();
  });
  EXPECT_THAT(text, HasSubstr("[gpu] memory: GPU 0 31.2 of 80.0 GiB, GPU 1 GPU is lost: "));
  EXPECT_EQ(text.find("memory: "), text.rfind("memory: "));
}

TEST(LogGpuMemory, TheNextIntervalHasALineAgain) {
  const std::string text = stderr_of(LOCKSTEP_FAKE_NVML_NEW, [] {
    for (int step = 0; step < 3; ++step) {
      log_gpu_memory(10ms);
      std::this_thread::sleep_for(20ms);
    }
  });
  EXPECT_NE(text.find("memory: "), text.rfind("memory: "));
}

TEST(LogGpuMemory, WithoutAGpuItSaysSoOnce) {
  const std::string text = stderr_of("/nowhere/libnvidia-ml.so.1", [] {
    for (int step = 0; step < 5; ++step) log_gpu_memory(0ms);
  });
  EXPECT_THAT(text, HasSubstr("there is no memory of a GPU to show: [nvml] /nowhere/"));
  EXPECT_EQ(lines_in(text), 1u);
}

TEST(LogGpuMemory, OtherRanksAreSilentAndAskNoDriver) {
  const std::string text = stderr_of(LOCKSTEP_FAKE_NVML_NEW, [] {
    log::set_rank(1, 2);
    log_gpu_memory();
    std::ifstream maps("/proc/self/maps");
    const std::string all{std::istreambuf_iterator<char>(maps), {}};
    if (all.find("libnvidia-ml") != std::string::npos) std::exit(3);
  });
  EXPECT_EQ(text, "");
}

}  // namespace
}  // namespace lockstep
