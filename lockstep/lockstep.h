// What most training programs name; README.md has a complete one. docs/api.md lists the headers for
// more: weight averages, SyncBatchNorm, activation checkpointing, token and instruction data,
// models.
#pragma once

#include "lockstep/comm/mesh.h"            // IWYU pragma: export
#include "lockstep/comm/numbers.h"         // IWYU pragma: export
#include "lockstep/comm/world.h"           // IWYU pragma: export
#include "lockstep/core/error.h"           // IWYU pragma: export
#include "lockstep/data/dataset.h"         // IWYU pragma: export
#include "lockstep/data/loader.h"          // IWYU pragma: export
#include "lockstep/data/sampler.h"         // IWYU pragma: export
#include "lockstep/data/window.h"          // IWYU pragma: export
#include "lockstep/optim/algorithms.h"     // IWYU pragma: export
#include "lockstep/optim/amp.h"            // IWYU pragma: export
#include "lockstep/optim/clip.h"           // IWYU pragma: export
#include "lockstep/optim/determinism.h"    // IWYU pragma: export
#include "lockstep/optim/optimizer.h"      // IWYU pragma: export
#include "lockstep/optim/schedule.h"       // IWYU pragma: export
#include "lockstep/parallel/ddp.h"         // IWYU pragma: export
#include "lockstep/run.h"                  // IWYU pragma: export
#include "lockstep/train/captured_step.h"  // IWYU pragma: export
#include "lockstep/train/run_log.h"        // IWYU pragma: export
#include "lockstep/train/save_resume.h"    // IWYU pragma: export
#include "lockstep/train/stop_request.h"   // IWYU pragma: export
#include "lockstep/train/trainer.h"        // IWYU pragma: export
#include "lockstep/version.h"              // IWYU pragma: export
