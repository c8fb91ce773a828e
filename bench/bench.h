// The benchmarks of `lockstep bench NAME`, and the ranks that they start (processes.h).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lockstep::bench {

using Main = int(int argc, char** argv);
Main launch_main, allreduce_main, step_main, train_main, loader_main, kernels_main, recipes_main,
    scale_main, dp_vs_ddp_main, presets_main, ablation_main;

// A rank's main: connects to the others according to its settings, and serves orders on a socket.
using RankMain = int(const nlohmann::json& settings, const std::string& orders);
RankMain allreduce_rank, step_rank, model_rank, dp_vs_ddp_rank;

// The rank's side of `launch`: one all-reduce, printed by rank 0.
int allreduce_once_main();

}  // namespace lockstep::bench
