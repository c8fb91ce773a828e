// What stands in the files that a training file names, read without torch.
//
// The long reading has the same owner as the short one (task_config.h). Training
// makes its dataset from these rows, and `lockstep config check` makes the same rows and throws
// them away, so that a record is torn, mistyped or too long for both or for neither.
//
//   const data::InstructionRows rows = read_instructions(task, task.data.path);   // UsageError
//
// Functions without state; call from any thread.
#pragma once

#include <string>

#include "cli/task_config.h"
#include "lockstep/data/instruction_rows.h"

namespace lockstep::cli {

// `path` is data.path or data.eval_path. Rows that the model has no positions for are refused.
data::InstructionRows read_instructions(const TaskConfig& task, const std::string& path,
                                        const data::ReadProgress& progress = {});
// What max_seq_len has cut off, in a sentence; empty: nothing.
std::string what_was_cut(const data::InstructionRows& rows);

}  // namespace lockstep::cli
