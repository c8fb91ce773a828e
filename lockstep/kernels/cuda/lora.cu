// An adapter with dropout. Its forward draws a bit for each element of the input, writes the bits
// and multiplies what stays with the narrow weight: the input is read once, and no dropped copy of
// it is written. Its backward is a product of rank 8 or 16 that is masked as it is written, and the
// gradient of the narrow weight from an input that is masked as it is read; there a thread has four
// columns of the narrow matrix in registers and goes down the rows.
#include <type_traits>

#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 4;  // per thread
constexpr int kTile = kThreads * kColumns;
constexpr int kRows = 64;  // their narrow values are in shared memory at a time

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

// The factors of four elements: `scale` where the bit is 1, else 0.
__device__ __forceinline__ void load_mask(const std::uint8_t* bits, std::int64_t at, float scale,
                                          float (&to)[4]) {
  const unsigned four = bits[at / 8] >> (at % 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = (four >> i & 1) != 0 ? scale : 0.0f;
}

// ---------------------------------------------------------------- forward

// Philox4x32 with seven rounds: 128 random bits of a counter and a key.
__device__ __forceinline__ uint4 random_bits(std::uint64_t counter, std::uint64_t key) {
  uint4 c{static_cast<unsigned>(counter), static_cast<unsigned>(counter >> 32), 0u, 0u};
  unsigned first = static_cast<unsigned>(key), second = static_cast<unsigned>(key >> 32);
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const std::uint64_t p = std::uint64_t{c.x} * 0xD2511F53u, q = std::uint64_t{c.z} * 0xCD9E8D57u;
    c = {static_cast<unsigned>(q >> 32) ^ c.y ^ first, static_cast<unsigned>(q),
         static_cast<unsigned>(p >> 32) ^ c.w ^ second, static_cast<unsigned>(p)};
    first += 0x9E3779B9u;
    second += 0xBB67AE85u;
  }
  return c;
}

// A bit for each of eight elements; `stays` is the share that stays, out of 2^16. Zeroes the other
// elements of `values`, four pairs of 16 bits.
__device__ __forceinline__ unsigned drop8(std::uint64_t counter, std::uint64_t key, unsigned stays,
                                          uint4& values) {
  const uint4 drawn = random_bits(counter, key);
  const unsigned words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
  unsigned* const pairs = &values.x;
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool low = (words[i] & 0xffffu) < stays, high = (words[i] >> 16) < stays;
    pairs[i] &= (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
    bits |= (low ? 1u : 0u) << (2 * i) | (high ? 2u : 0u) << (2 * i);
  }
  return bits;
}

template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2,
                                             unsigned a3, unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

constexpr int kInputRows = 32;  // per block: two tiles of 16
constexpr int kInputWarps = 8;  // each has every eighth chunk of 32 columns

// A matrix instruction takes 16 columns in an order of its own; the sum does not depend on the
// order as long as x and low have the same. So a lane takes eight neighbouring columns of a row in
// one access: lanes 4g to 4g + 3 have a chunk of 32 columns of row g.
template <typename T, int kRank>
__global__ void __launch_bounds__(kInputWarps* kWarpSize, 2)
    dropped_input_kernel(DroppedInput args, unsigned stays) {
  constexpr int kTiles = kInputRows / 16, kParts = kRank / 8;
  __shared__ float sums[kInputWarps][kInputRows][kRank + 1];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int group = lane / 4, quarter = lane % 4;
  const std::int64_t first = std::int64_t{blockIdx.x} * kInputRows;
  const auto* const x = static_cast<const T*>(args.x);
  const auto* const low = static_cast<const T*>(args.low);
  const std::uint64_t key = static_cast<std::uint64_t>(*args.seed);
  float sum[kTiles][kParts][4] = {};
#pragma unroll 2
  for (int chunk = warp; chunk < args.columns / 32; chunk += kInputWarps) {
    const int column = chunk * 32 + quarter * 8;
    uint4 values[kTiles][2] = {}, weights[kParts];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const std::int64_t row = first + group + 8 * i;
      if (row < args.rows)
        values[i / 2][i % 2] = *reinterpret_cast<const uint4*>(x + row * args.columns + column);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      weights[part] = *reinterpret_cast<const uint4*>(
          low + std::int64_t{part * 8 + group} * args.columns + column);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const std::int64_t row = first + group + 8 * i;
      const std::int64_t at = (row * args.columns + column) / 8;
      const unsigned bits = drop8(static_cast<std::uint64_t>(at), key, stays, values[i / 2][i % 2]);
      if (row < args.rows) args.bits[at] = static_cast<std::uint8_t>(bits);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 top = values[tile][0], bottom = values[tile][1];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint4 w = weights[part];
        multiply_add<T>(sum[tile][part], top.x, bottom.x, top.y, bottom.y, w.x, w.y);
        multiply_add<T>(sum[tile][part], top.z, bottom.z, top.w, bottom.w, w.z, w.w);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        sums[warp][tile * 16 + group + (k / 2) * 8][part * 8 + quarter * 2 + k % 2] =
            sum[tile][part][k];
  __syncthreads();
  for (int i = threadIdx.x; i < kInputRows * kRank; i += kInputWarps * kWarpSize) {
    const int row = i / kRank, column = i % kRank;
    if (first + row >= args.rows) continue;
    float total = 0;
#pragma unroll
    for (int k = 0; k < kInputWarps; ++k) total += sums[k][row][column];
    static_cast<T*>(args.narrow)[(first + row) * kRank + column] =
        static_cast<T>(total * args.scale);
  }
}

// ---------------------------------------------------------------- backward

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
    load_mask(args.bits, at, args.scale, factor);
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
      load_mask(args.bits, at, args.scale, factor);
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

bool covered(std::int64_t columns, int rank, Type type) {
  return columns % 32 == 0 && (rank == 8 || rank == 16) && type != Type::kFloat;
}

// Blocks of rows are the grid's x dimension, since y is limited to 65535.
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
cudaError_t with_half(Type type, Body&& body) {
  return type == Type::kHalf ? body(__half{}) : body(__nv_bfloat16{});
}

template <typename Body>
cudaError_t with_rank(int rank, Body&& body) {
  return rank == 8 ? body(std::integral_constant<int, 8>{})
                   : body(std::integral_constant<int, 16>{});
}

}  // namespace

bool lora_covers(std::int64_t columns, int rank, Type type) {
  return covered(columns, rank, type);
}

cudaError_t dropped_input(const DroppedInput& args, cudaStream_t stream) {
  if (!covered(args.columns, args.rank, args.type)) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>((args.rows + kInputRows - 1) / kInputRows);
  const auto stays = static_cast<unsigned>(args.keep * 65536.0f + 0.5f);
  return with_half(args.type, [&](auto type) {
    return with_rank(args.rank, [&](auto rank) {
      dropped_input_kernel<decltype(type), rank.value>
          <<<blocks, kInputWarps * kWarpSize, 0, stream>>>(args, stays);
      return cudaGetLastError();
    });
  });
}

cudaError_t dropped_product(const DroppedProduct& args, cudaStream_t stream) {
  if (!covered(args.columns, args.rank, args.type)) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((args.rows + kRows - 1) / kRows),
                  static_cast<unsigned>(tiles(args.columns)));
  return with_half(args.type, [&](auto type) {
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
  if (!covered(args.columns, args.rank, args.type)) return cudaErrorInvalidValue;
  const std::int64_t blocks = row_blocks(args.rows, args.columns);
  const std::int64_t rows_of_block = (args.rows + blocks - 1) / blocks;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles(args.columns)));
  const cudaError_t status = with_half(args.type, [&](auto type) {
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
