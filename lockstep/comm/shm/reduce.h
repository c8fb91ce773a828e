// The arithmetic of the engine: several arrays into one, written to several places.
//
// inputs[0..n) are combined element by element in that order and the result goes to all outputs;
// an output may be one of the inputs (the same address), but must not overlap one otherwise.
// Arrays need no alignment. Half types are added up as float and rounded once, to nearest even, and
// a NaN stays a NaN. An average is the sum divided by n as a correctly rounded division, so for two
// ranks (and every power of two) nothing is lost; an average of integers is the 64-bit sum divided
// by n towards zero. An element's result depends on its inputs alone, not on its place in the
// array: cutting an array anywhere gives the same bits.
//
//   combine(DType::kF32, Op::kSum, {inputs, 2, outputs, 2, count});
//
// The sum is bound by memory latency, so copies of other arrays (`moves`) are interleaved with it:
// their loads are then outstanding together with those of the sum.
//
// Sums and averages of float, half and bfloat16 are vectorised for the processor at hand; the rest
// are plain loops. Pure functions: any thread may call them.
#pragma once

#include "lockstep/comm/shm/arrays.h"  // IWYU pragma: export
#include "lockstep/comm/shm/types.h"

namespace lockstep::shm {

// The pair must be supported.
void combine(DType dtype, Op op, const Arrays& arrays);

}  // namespace lockstep::shm
