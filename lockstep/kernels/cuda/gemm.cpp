// Matrix products through cuBLASLt, with what follows them in the same kernel. The library is
// column-major, so each product is computed transposed: d^T = b^T a^T. Its heuristic's first
// algorithm is taken, once per shape and epilogue.
#include <cublasLt.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>

#include "lockstep/kernels/cuda/launch.h"

namespace lockstep::kernels::cuda {
namespace {

cudaDataType_t type_of(Type type) {
  switch (type) {
    case Type::kBfloat16:
      return CUDA_R_16BF;
    case Type::kHalf:
      return CUDA_R_16F;
    case Type::kFloat:
      break;
  }
  return CUDA_R_32F;
}

cudaDataType_t type_of(const GemmMatrix& matrix, Type type) {
  switch (matrix.fp8) {
    case Fp8::kE4m3:
      return CUDA_R_8F_E4M3;
    case Fp8::kE5m2:
      return CUDA_R_8F_E5M2;
    case Fp8::kNone:
      break;
  }
  return type_of(type);
}

cublasLtEpilogue_t epilogue_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kBias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::kGeluAuxBias:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::kDGelu:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::kNone:
      break;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

// The parameters on which the choice of an algorithm depends, including the device.
using Key = std::array<std::int64_t, 16>;

Key key_of(const Gemm& g, int device) {
  return {device,
          g.a.transposed,
          g.b.transposed,
          g.a.stride,
          g.b.stride,
          g.m,
          g.n,
          g.k,
          static_cast<int>(g.type),
          static_cast<int>(g.d_type),
          g.beta != 0,
          static_cast<int>(g.epilogue),
          static_cast<int>(g.a.fp8),
          static_cast<int>(g.b.fp8),
          g.fast_accumulation,
          static_cast<std::int64_t>(g.workspace_bytes)};
}

struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, d = nullptr;
  std::optional<cublasLtMatmulHeuristicResult_t> algorithm;
};

template <typename T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t which, T value) {
  cublasLtMatmulDescSetAttribute(operation, which, &value, sizeof value);
}

// The bias, the auxiliary matrix and scales are part of the library's descriptor, not of the call.
void set_pointers(const Plan& plan, const Gemm& g) {
  if (g.b.scale != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, g.b.scale);
  if (g.a.scale != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, g.a.scale);
  if (g.bias != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
  if (g.aux != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g.aux);
}

void describe(Plan& plan, const Gemm& g) {
  cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const bool first = g.b.transposed, second = g.a.transposed;
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, first ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, second ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(g.epilogue));
  if (g.bias != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(g.type));
  if (g.aux != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, g.n);
  if (g.fast_accumulation) set(plan.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, std::int8_t{1});
  set_pointers(plan, g);
  const auto layout = [](cublasLtMatrixLayout_t* to, cudaDataType_t type, std::int64_t rows,
                         std::int64_t columns, std::int64_t stride) {
    cublasLtMatrixLayoutCreate(to, type, static_cast<std::uint64_t>(rows),
                               static_cast<std::uint64_t>(columns), stride);
  };
  layout(&plan.first, type_of(g.b, g.type), first ? g.k : g.n, first ? g.n : g.k, g.b.stride);
  layout(&plan.second, type_of(g.a, g.type), second ? g.m : g.k, second ? g.k : g.m, g.a.stride);
  layout(&plan.d, type_of(g.d_type), g.n, g.m, g.n);
}

class Plans {
 public:
  // Null where the library offers nothing.
  const Plan* find(const Gemm& g, int device) {
    if (handles_.find(device) == handles_.end()) cublasLtCreate(&handles_[device]);
    const auto [at, fresh] = plans_.try_emplace(key_of(g, device));
    Plan& plan = at->second;
    if (fresh) {
      describe(plan, g);
      cublasLtMatmulPreference_t preference = nullptr;
      cublasLtMatmulPreferenceCreate(&preference);
      cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &g.workspace_bytes, sizeof g.workspace_bytes);
      // The library assumes 256 otherwise, which a slice of a tensor need not have.
      const std::uint32_t alignment = 16;
      for (const auto which :
           {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        cublasLtMatmulPreferenceSetAttribute(preference, which, &alignment, sizeof alignment);
      }
      cublasLtMatmulHeuristicResult_t best = {};
      int count = 0;
      const cublasStatus_t status =
          cublasLtMatmulAlgoGetHeuristic(handles_[device], plan.operation, plan.first, plan.second,
                                         plan.d, plan.d, preference, 1, &best, &count);
      cublasLtMatmulPreferenceDestroy(preference);
      if (status == CUBLAS_STATUS_SUCCESS && count > 0) plan.algorithm = best;
    }
    return plan.algorithm ? &plan : nullptr;
  }

  cublasLtHandle_t handle(int device) const { return handles_.at(device); }

 private:
  std::map<int, cublasLtHandle_t> handles_;
  std::map<Key, Plan> plans_;
};

}  // namespace

bool gemm(const Gemm& args, cudaStream_t stream, cudaError_t* status) {
  // Never deleted: the driver may be gone before static destructors run. The lock
  // also covers the call, because the pointers are set in a shared descriptor.
  static auto* const plans = new Plans;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  int device = 0;
  *status = cudaGetDevice(&device);
  if (*status != cudaSuccess) return true;
  const Plan* const plan = plans->find(args, device);
  if (plan == nullptr) return false;
  set_pointers(*plan, args);
  const float alpha = 1;
  const cublasStatus_t result =
      cublasLtMatmul(plans->handle(device), plan->operation, &alpha, args.b.data, plan->first,
                     args.a.data, plan->second, &args.beta, args.d, plan->d, args.d, plan->d,
                     &plan->algorithm->algo, args.workspace, args.workspace_bytes, stream);
  if (result == CUBLAS_STATUS_NOT_SUPPORTED) return false;
  *status = result == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
  return true;
}

}  // namespace lockstep::kernels::cuda
