// The commands of lockstep-train. argv[0] is the command's name.
#pragma once

namespace lockstep::cli {

int train_main(int argc, char** argv);              // train.cpp
int generate_main(int argc, char** argv);           // generate.cpp
int checkpoint_import_main(int argc, char** argv);  // checkpoint_import.cpp
int checkpoint_merge_main(int argc, char** argv);   // checkpoint_merge.cpp
int plan_probe_main(int argc, char** argv);         // train.cpp; `lockstep plan --probe` starts it
int doctor_probe_main(int argc, char** argv);       // probe_ranks.cpp; `lockstep doctor` starts it

}  // namespace lockstep::cli
