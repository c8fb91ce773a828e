// The models and datasets that come with `lockstep train`, as a training file asks for them
// (task_config.h lists the keys).
//
//   const Mesh mesh = mesh_for(world, arguments);
//   TrainerTask task = make_task(read_task(arguments), arguments, mesh);
//
// Under fsdp and in a pipeline a language model is divided while it is made. UsageError for what
// only the files' contents show. Every rank calls it, with the same arguments.
#pragma once

#include "cli/task_config.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {

TrainerTask make_task(TaskConfig wanted, const TrainingArguments& arguments, const Mesh& mesh);

}  // namespace lockstep::cli
