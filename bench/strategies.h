// The benchmarks that compare ways to spread training over devices, and the processes they start.
#pragma once

namespace lockstep::bench {

int dp_vs_ddp_main(int argc, char** argv);
int presets_main(int argc, char** argv);
int ablation_main(int argc, char** argv);
int timeline_main(int argc, char** argv);

// Either side of `dp-vs-ddp`.
int dp_vs_ddp_rank_main(int argc, char** argv);
// A process of `timeline`.
int timeline_rank_main(int argc, char** argv);

}  // namespace lockstep::bench
