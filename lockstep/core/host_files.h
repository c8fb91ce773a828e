// Where the kernel's files are; tests put a made-up machine elsewhere.
//
//   read_file(files.proc + "/loadavg");
#pragma once

#include <string>

namespace lockstep {

struct HostFiles {
  std::string proc = "/proc";
  std::string sys = "/sys";
};

}  // namespace lockstep
