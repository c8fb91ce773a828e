// The models and datasets that come with `lockstep train`, as a training file asks for them
// (task_config.h lists the keys).
//
//   TrainerTask task = make_task(read_task(arguments), arguments, world);
//
// UsageError for what only the files' contents show. Every rank calls it, with the same arguments.
#pragma once

#include "cli/task_config.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {

TrainerTask make_task(TaskConfig wanted, const TrainingArguments& arguments, const World& world);

}  // namespace lockstep::cli
