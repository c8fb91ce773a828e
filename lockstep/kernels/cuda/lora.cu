// The adapter's share of a backward with dropout: a product of rank 8 or 16 that is masked as it is
// written, and the gradient of the narrow weight from an input that is masked as it is read. A
// thread has four columns of the narrow matrix in registers and goes down the rows.
#include <type_traits>

#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 4;  // of a thread
constexpr int kTile = kThreads * kColumns;
constexpr int kRows = 64;  // whose narrow values are in shared memory at a time

template <typename T>
struct alignas(sizeof(T) * 4) Vector4 {
  typename PairOf<T>::Pair pair[2];
};

template <typename T>
__device__ __forceinline__ void load4(const void* from, std::int64_t at, float (&to)[4]) {
  const auto four = *reinterpret_cast<const Vector4<T>*>(static_cast<const T*>(from) + at);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 two = to_floats(four.pair[i]);
    to[2 * i] = two.x;
    to[2 * i + 1] = two.y;
  }
}

template <typename T>
__device__ __forceinline__ void store4(void* to, std::int64_t at, const float (&from)[4]) {
  Vector4<T> four;
#pragma unroll
  for (int i = 0; i < 2; ++i) four.pair[i] = PairOf<T>::make(from[2 * i], from[2 * i + 1]);
  *reinterpret_cast<Vector4<T>*>(static_cast<T*>(to) + at) = four;
}

// The factors of four elements: `scale` where the mask has a 1, else 0.
__device__ __forceinline__ void load_mask(const std::uint8_t* mask, std::int64_t at, float scale,
                                          float (&to)[4]) {
  const uchar4 four = *reinterpret_cast<const uchar4*>(mask + at);
  to[0] = four.x != 0 ? scale : 0.0f;
  to[1] = four.y != 0 ? scale : 0.0f;
  to[2] = four.z != 0 ? scale : 0.0f;
  to[3] = four.w != 0 ? scale : 0.0f;
}

// narrow[first .. first + count) to shared memory as floats.
template <typename T, int kRank>
__device__ __forceinline__ void share_rows(const void* narrow, std::int64_t first, int count,
                                           float (&shared)[kRows][kRank]) {
  __syncthreads();
  const T* const from = static_cast<const T*>(narrow) + first * kRank;
  for (int i = threadIdx.x; i < count * kRank; i += kThreads)
    (&shared[0][0])[i] = static_cast<float>(from[i]);
  __syncthreads();
}

template <typename T, int kRank>
__global__ void __launch_bounds__(kThreads, 2) dropped_product_kernel(DroppedProduct args) {
  __shared__ alignas(16) float shared[kRows][kRank];
  const std::int64_t first = std::int64_t{blockIdx.x} * kRows;
  const int count = static_cast<int>(args.rows - first < kRows ? args.rows - first : kRows);
  share_rows<T, kRank>(args.narrow, first, count, shared);
  const int column = blockIdx.y * kTile + threadIdx.x * kColumns;
  if (column >= args.columns) return;
  float low[kRank][kColumns];
#pragma unroll
  for (int r = 0; r < kRank; ++r)
    load4<T>(args.low, std::int64_t{r} * args.columns + column, low[r]);
#pragma unroll 4
  for (int row = 0; row < count; ++row) {
    const std::int64_t at = (first + row) * args.columns + column;
    float factor[kColumns], sum[kColumns] = {};
    load_mask(args.mask, at, args.scale, factor);
#pragma unroll
    for (int r = 0; r < kRank; ++r)
#pragma unroll
      for (int k = 0; k < kColumns; ++k) sum[k] += shared[row][r] * low[r][k];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) sum[k] *= factor[k];
    store4<T>(args.to, at, sum);
  }
}

template <typename T, int kRank>
__global__ void __launch_bounds__(kThreads, 2)
    dropped_gradient_kernel(DroppedGradient args, std::int64_t rows_of_block) {
  __shared__ alignas(16) float shared[kRows][kRank];
  const int column = blockIdx.y * kTile + threadIdx.x * kColumns;
  const bool mine = column < args.columns;
  const std::int64_t begin = blockIdx.x * rows_of_block;
  const std::int64_t end = begin + rows_of_block < args.rows ? begin + rows_of_block : args.rows;
  float sum[kRank][kColumns] = {};
  for (std::int64_t first = begin; first < end; first += kRows) {
    const int count = static_cast<int>(end - first < kRows ? end - first : kRows);
    share_rows<T, kRank>(args.narrow, first, count, shared);
    if (!mine) continue;
#pragma unroll 4
    for (int row = 0; row < count; ++row) {
      const std::int64_t at = (first + row) * args.columns + column;
      float factor[kColumns], x[kColumns];
      load_mask(args.mask, at, args.scale, factor);
      load4<T>(args.x, at, x);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) x[k] *= factor[k];
#pragma unroll
      for (int r = 0; r < kRank; ++r)
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sum[r][k] += shared[row][r] * x[k];
    }
  }
  if (!mine) return;
  float* const to = args.partials + std::int64_t{blockIdx.x} * kRank * args.columns;
#pragma unroll
  for (int r = 0; r < kRank; ++r)
    store4<float>(to, std::int64_t{r} * args.columns + column, sum[r]);
}

bool covered(std::int64_t columns, int rank) {
  return columns % kColumns == 0 && (rank == 8 || rank == 16);
}

// The rows' blocks are the grid's x, since its y ends at 65535.
int tiles(int columns) {
  return (columns + kTile - 1) / kTile;
}

// Two blocks fit a multiprocessor; more would only write more partial sums.
std::int64_t row_blocks(std::int64_t rows, int columns) {
  const std::int64_t wanted = 2 * multiprocessors() / tiles(columns);
  const std::int64_t most = (rows + kRows - 1) / kRows;
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

template <typename Body>
cudaError_t with_rank(int rank, Body&& body) {
  return rank == 8 ? body(std::integral_constant<int, 8>{})
                   : body(std::integral_constant<int, 16>{});
}

}  // namespace

bool lora_covers(std::int64_t columns, int rank) {
  return covered(columns, rank);
}

cudaError_t dropped_product(const DroppedProduct& args, cudaStream_t stream) {
  if (!covered(args.columns, args.rank)) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((args.rows + kRows - 1) / kRows),
                  static_cast<unsigned>(tiles(args.columns)));
  return with_type(args.type, [&](auto type) {
    return with_rank(args.rank, [&](auto rank) {
      dropped_product_kernel<decltype(type), rank.value><<<grid, kThreads, 0, stream>>>(args);
      return cudaGetLastError();
    });
  });
}

std::int64_t dropped_gradient_partials(std::int64_t rows, int columns, int rank) {
  return row_blocks(rows, columns) * rank * columns;
}

cudaError_t dropped_gradient(const DroppedGradient& args, cudaStream_t stream) {
  if (!covered(args.columns, args.rank)) return cudaErrorInvalidValue;
  const std::int64_t blocks = row_blocks(args.rows, args.columns);
  const std::int64_t rows_of_block = (args.rows + blocks - 1) / blocks;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles(args.columns)));
  const cudaError_t status = with_type(args.type, [&](auto type) {
    return with_rank(args.rank, [&](auto rank) {
      dropped_gradient_kernel<decltype(type), rank.value>
          <<<grid, kThreads, 0, stream>>>(args, rows_of_block);
      return cudaGetLastError();
    });
  });
  if (status != cudaSuccess) return status;
  return add_parts(args.partials, static_cast<int>(blocks), args.rank * args.columns, 1,
                   {{args.to, nullptr, nullptr}}, stream);
}

}  // namespace lockstep::kernels::cuda
