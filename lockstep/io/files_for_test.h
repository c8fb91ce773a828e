// A directory that goes away with the test, and files put into it without ceremony.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "lockstep/core/folder_for_test.h"
#include "lockstep/core/thrown_for_test.h"

namespace lockstep::io {

using lockstep::TemporaryDirectory;

inline void put(const std::string& path, const std::string& contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << contents;
  ASSERT_TRUE(file.good()) << path;
}

inline std::string get(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

using lockstep::message_of;

}  // namespace lockstep::io
