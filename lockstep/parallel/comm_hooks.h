// Ready-made communication hooks, with PyTorch's arithmetic.
//
//   model.register_comm_hook(lockstep::hooks::bf16_compress());
#pragma once

#include "lockstep/parallel/reducer.h"

namespace lockstep::hooks {

CommHook all_reduce();     // what happens without a hook
CommHook fp16_compress();  // halves the bytes; float16 on the wire
CommHook bf16_compress();

}  // namespace lockstep::hooks
