// The benchmarks of `lockstep bench NAME`, and where they find their peers.
#pragma once

#include <string>

namespace lockstep::bench {

int launch_main(int argc, char** argv);
int ddp_main(int argc, char** argv);
int overlap_main(int argc, char** argv);
int allreduce_main(int argc, char** argv);
int loader_main(int argc, char** argv);

// The rank's side of `launch`: one all-reduce, printed by rank 0.
int allreduce_once_main();
// A rank of `allreduce`.
int allreduce_rank_main(int argc, char** argv);

// A Python script of bench/peers; looked for beside the source tree and in the install tree.
std::string peer(const std::string& file);
// A program by its path relative to this one's directory.
std::string program_beside(const std::string& relative);
// The interpreter the build was configured with, for peers.
std::string default_python();

}  // namespace lockstep::bench
