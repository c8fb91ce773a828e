// The benchmarks of `lockstep bench NAME`, and where they find their peers.
#pragma once

#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace lockstep::bench {

int launch_main(int argc, char** argv);
int ddp_main(int argc, char** argv);
int overlap_main(int argc, char** argv);
int allreduce_main(int argc, char** argv);
int step_main(int argc, char** argv);
int train_main(int argc, char** argv);
int loader_main(int argc, char** argv);
int kernels_main(int argc, char** argv);
int gpt_main(int argc, char** argv);
int lora_main(int argc, char** argv);
int resnet_main(int argc, char** argv);
int scale_main(int argc, char** argv);
int recipes_main(int argc, char** argv);

// The rank's side of `launch`: one all-reduce, printed by rank 0.
int allreduce_once_main();
// A rank of `allreduce`.
int allreduce_rank_main(int argc, char** argv);
// A rank of `step`.
int step_rank_main(int argc, char** argv);
// A rank of `train` that is not written in Python.
int train_rank_main(int argc, char** argv);
// Our side of `gpt`, `lora` and `resnet`.
int model_rank_main(int argc, char** argv);

// Parses the arguments of a benchmark, whose name is argv[0]. Returns an exit code when the program
// must end: 0 after --help, which shows every option with its default, 2 after a usage error, which
// is reported in one line.
std::optional<int> parse_arguments(CLI::App& app, int argc, char** argv);

// For an option's check(): what is wrong with its value; empty when nothing is.
std::string positive_problem(const std::string& value);  // a number above zero
std::string device_problem(const std::string& value);    // cpu, cuda or cuda:N

// Loads CUDA if the device is a CUDA device. UsageError when there is none.
void prepare_device(const std::string& device);

// A Python script of bench/peers; looked for beside the source tree and in the install tree.
std::string peer(const std::string& file);
// A program by its path relative to this one's directory.
std::string program_beside(const std::string& relative);
// The interpreter the build was configured with, for peers.
std::string default_python();

}  // namespace lockstep::bench
