// The contents of the files that a training file names, read without torch.
//
// As in task_config.h, `lockstep train` and `lockstep config check` share the code: training makes
// its dataset from these rows, and the check makes the same rows and discards them. So both refuse
// the same records.
//
//   const data::InstructionRows rows = read_instructions(task, task.data.path);   // UsageError
//
// Functions without state; call from any thread.
#pragma once

#include <string>

#include "cli/task_config.h"
#include "lockstep/data/instruction_file.h"

namespace lockstep::cli {

// `path` is data.path or data.eval_path. Rows that the model has no positions for are refused.
data::InstructionRows read_instructions(const TaskConfig& task, const std::string& path,
                                        const data::ReadProgress& progress = {});
// One sentence about what max_seq_len truncated; empty: nothing.
std::string what_was_cut(const data::InstructionRows& rows);

}  // namespace lockstep::cli
