// write_divided: a checkpoint of a model that is divided over ranks, written by all of them.
//
//   const SaveOutcome outcome = write_divided(mesh, contents, {.output_dir = "out", .limit = 2});
//
// `contents` has the same tensors on every rank, divided (lockstep/nn/divided.h) or whole; all else
// of it counts on rank 0. Each rank writes the elements that it holds into the files that rank 0
// has laid out, in parallel and from where they are: nothing is gathered and nothing is copied on
// the CPU. The bytes are those of write_checkpoint() with the whole tensors. Rank 0 then sums the
// files up and commits the folder.
//
// Collective. Returns when the folder is durable, on every rank; ranks exchange meanwhile, so that
// the save's own progress bounds the wait. A full disk is an alert, with nothing committed. Other
// errors are thrown on every rank. On several hosts output_dir is on a file system that all mount.
#pragma once

#include <string>

#include "lockstep/comm/mesh.h"
#include "lockstep/train/async_saver.h"

namespace lockstep::train {

bool any_divided(const NamedTensors& tensors);

SaveOutcome write_divided(const Mesh& mesh, CheckpointContents contents,
                          const SaverOptions& options, const std::string& keep = {});

}  // namespace lockstep::train
