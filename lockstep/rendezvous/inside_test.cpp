// The mark of a rank that is inside its body.
#include "lockstep/rendezvous/inside.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class InsideTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("lockstep_inside_" + std::to_string(::getpid()));
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

TEST_F(InsideTest, TheMarkStandsFromEnterToLeave) {
  EXPECT_FALSE(inside::take_mark(file_));
  inside::enter();
  EXPECT_TRUE(marked());
  inside::leave();
  EXPECT_FALSE(marked());
  inside::enter();
  inside::enter();
  EXPECT_TRUE(inside::take_mark(file_));
  EXPECT_FALSE(inside::take_mark(file_));
  EXPECT_FALSE(marked());
  EXPECT_FALSE(inside::take_mark(""));
}

TEST_F(InsideTest, OtherLaunchersFilesAreLeftAlone) {
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);  // torchrun
  inside::enter();
  EXPECT_FALSE(marked());
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "False", 1);
  ::unsetenv("TORCHELASTIC_ERROR_FILE");
  inside::enter();
  EXPECT_FALSE(marked());
}

TEST_F(InsideTest, APlaceThatIsGoneIsNoError) {
  ::setenv("TORCHELASTIC_ERROR_FILE", (folder_ / "none" / "error.json").c_str(), 1);
  inside::enter();
  inside::leave();
  EXPECT_FALSE(marked());
}

}  // namespace
}  // namespace lockstep
