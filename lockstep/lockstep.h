// Everything a training program needs. See README.md for a 25-line program.
#pragma once

#include "lockstep/comm/world.h"                  // IWYU pragma: export
#include "lockstep/core/error.h"                  // IWYU pragma: export
#include "lockstep/data/dataset.h"                // IWYU pragma: export
#include "lockstep/data/instruction.h"            // IWYU pragma: export
#include "lockstep/data/loader.h"                 // IWYU pragma: export
#include "lockstep/data/profile.h"                // IWYU pragma: export
#include "lockstep/data/sampler.h"                // IWYU pragma: export
#include "lockstep/data/token_shards.h"           // IWYU pragma: export
#include "lockstep/optim/adamw.h"                 // IWYU pragma: export
#include "lockstep/optim/sgd.h"                   // IWYU pragma: export
#include "lockstep/parallel/checkpoint.h"         // IWYU pragma: export
#include "lockstep/parallel/comm_hooks.h"         // IWYU pragma: export
#include "lockstep/parallel/ddp.h"                // IWYU pragma: export
#include "lockstep/parallel/sharded_optimizer.h"  // IWYU pragma: export
#include "lockstep/parallel/sync_batch_norm.h"    // IWYU pragma: export
#include "lockstep/run.h"                         // IWYU pragma: export
