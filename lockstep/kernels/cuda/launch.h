// Declares the functions that table.h lists, for this folder's sources. Private to it.
#pragma once

#include <cuda_runtime.h>

#include "lockstep/kernels/cuda/arguments.h"
#include "lockstep/kernels/cuda/table.h"

namespace lockstep::kernels::cuda {

bool norm_covers(int columns);
std::int64_t norm_partials(std::int64_t rows, int columns);
cudaError_t norm_forward(const NormForward& args, cudaStream_t stream);
cudaError_t norm_backward(const NormBackward& args, cudaStream_t stream);

cudaError_t count_targets(const std::int64_t* targets, std::int64_t rows, std::int64_t ignore_index,
                          float* to, cudaStream_t stream);
cudaError_t cross_entropy(const CrossEntropy& args, cudaStream_t stream);
// bfloat16, up to 51200 columns, compute capability 9.0 or later.
cudaError_t cross_entropy_pipelined(const CrossEntropy& args, cudaStream_t stream);

std::int64_t column_sum_partials(std::int64_t rows, int columns);
cudaError_t column_sum(const ColumnSum& args, cudaStream_t stream);

cudaError_t swiglu_forward(const Swiglu& args, cudaStream_t stream);
cudaError_t swiglu_backward(const Swiglu& args, cudaStream_t stream);
cudaError_t rope(const Rope& args, cudaStream_t stream);
cudaError_t scale(void* data, std::int64_t size, Type type, const float* factor,
                  cudaStream_t stream);

bool lora_covers(std::int64_t columns, int rank, Type type);
cudaError_t dropped_input(const DroppedInput& args, cudaStream_t stream);
cudaError_t dropped_product(const DroppedProduct& args, cudaStream_t stream);
std::int64_t dropped_gradient_partials(std::int64_t rows, int columns, int rank);
cudaError_t dropped_gradient(const DroppedGradient& args, cudaStream_t stream);

cudaError_t nf4_decode(const Nf4Decode& args, cudaStream_t stream);

bool gemm(const Gemm& args, cudaStream_t stream, cudaError_t* status);

cudaError_t adamw_norm(const AdamStep& args, cudaStream_t stream);
cudaError_t adamw_update(const AdamStep& args, cudaStream_t stream);

cudaError_t fp8_amax(const Fp8Amax& args, cudaStream_t stream);
cudaError_t fp8_cast(const Fp8Cast& args, cudaStream_t stream);

}  // namespace lockstep::kernels::cuda
