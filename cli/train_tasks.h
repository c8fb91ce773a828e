// The models and datasets that `lockstep train` brings along, as a training file asks for them
// (task_config.h lists the keys).
//
//   TrainerTask task = make_task(read_task(arguments), arguments, world);
//
// UsageError for what only the files' contents show. Each rank calls it; the same on all.
#pragma once

#include "cli/task_config.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {

TrainerTask make_task(TaskConfig wanted, const TrainingArguments& arguments, const World& world);

}  // namespace lockstep::cli
