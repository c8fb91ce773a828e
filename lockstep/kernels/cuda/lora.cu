// An adapter with dropout. Its forward draws a bit for each element of the input, writes the bits
// and multiplies what stays with the narrow weight: the input is read once, and no dropped copy of
// it is written. Its backward is a product of rank 8 or 16 that is masked as it is written, and the
// gradient of the narrow weight from an input that is masked as it is read. All three are matrix
// instructions on values that a lane loads or stores eight at a time.
#include <type_traits>

#include "lockstep/kernels/cuda/launch.h"
#include "lockstep/kernels/cuda/vector.cuh"

namespace lockstep::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kRows = 64;  // of a block of the product

// Zeroes the elements of eight, as four pairs of 16 bits, whose bit is 0.
__device__ __forceinline__ void keep(uint4& values, unsigned bits) {
  unsigned* const pairs = &values.x;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] &= ((bits >> (2 * i) & 1) != 0 ? 0xffffu : 0u) |
                ((bits >> (2 * i) & 2) != 0 ? 0xffff0000u : 0u);
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
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool low = (words[i] & 0xffffu) < stays, high = (words[i] >> 16) < stays;
    bits |= (low ? 1u : 0u) << (2 * i) | (high ? 2u : 0u) << (2 * i);
  }
  keep(values, bits);
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

// Few rows per block, so that a batch of some thousand tokens fills a GPU.
constexpr int kInputRows = 16;
constexpr int kInputWarps = 16;  // each has every sixteenth chunk of 32 columns

// A matrix instruction takes 16 columns in an order of its own; the sum does not depend on the
// order as long as x and low have the same. So a lane takes eight neighbouring columns of a row in
// one access: lanes 4g to 4g + 3 have a chunk of 32 columns of row g.
template <typename T, int kRank>
__global__ void __launch_bounds__(kInputWarps* kWarpSize, 1)
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

__device__ __forceinline__ unsigned pair_of(unsigned short first, unsigned short second) {
  return first | static_cast<unsigned>(second) << 16;
}

// A warp multiplies rows of `narrow`, 16 at a time, with 32 columns of `low`, which stay in its
// registers, in four instructions of eight columns. Which columns an instruction takes is free:
// instruction t has 8 q + 2 t and 8 q + 2 t + 1 of all q, so that lane 4 g + q ends with columns
// 8 q to 8 q + 7 of rows g and g + 8: one byte of bits and one access.
template <typename T, int kRank>
__global__ void __launch_bounds__(kThreads) dropped_product_kernel(DroppedProduct args) {
  const int lane = threadIdx.x % kWarpSize, group = lane / 4, quarter = lane % 4;
  const int strip = (blockIdx.y * kWarps + threadIdx.x / kWarpSize) * 32;
  if (strip >= args.columns) return;
  const auto* const low = static_cast<const unsigned short*>(args.low);
  const auto* const narrow = static_cast<const unsigned short*>(args.narrow);
  unsigned weights[4][kRank / 8];
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int half = 0; half < kRank / 8; ++half) {
      const std::int64_t at = std::int64_t{8 * half + 2 * quarter} * args.columns + strip +
                              group / 2 * 8 + 2 * t + group % 2;
      weights[t][half] = pair_of(low[at], low[at + args.columns]);
    }
  const std::int64_t first = std::int64_t{blockIdx.x} * kRows;
#pragma unroll
  for (int step = 0; step < kRows; step += 16) {
    unsigned left[4] = {};  // rows g, g + 8; then their upper half of the rank
    unsigned bits[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t row = first + step + group + 8 * i;
      if (row >= args.rows) continue;
      bits[i] = args.bits[(row * args.columns + strip) / 8 + quarter];
#pragma unroll
      for (int half = 0; half < kRank / 8; ++half)
        left[2 * half + i] =
            *reinterpret_cast<const unsigned*>(narrow + row * kRank + 8 * half + 2 * quarter);
    }
    float sum[4][4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t)
      multiply_add<T>(sum[t], left[0], left[1], left[2], left[3], weights[t][0],
                      kRank == 16 ? weights[t][kRank / 8 - 1] : 0u);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t row = first + step + group + 8 * i;
      if (row >= args.rows) continue;
      float out[8];
#pragma unroll
      for (int k = 0; k < 8; ++k)
        out[k] = (bits[i] >> k & 1) != 0 ? sum[k / 2][2 * i + k % 2] * args.scale : 0.0f;
      store8(static_cast<T*>(args.to), (row * args.columns + strip) / 8 + quarter, pack8<T>(out));
    }
  }
}

constexpr int kStrip = 64;  // columns of a block of the gradient

// A block has 64 columns and some rows, of which its warps take 16 by turns: lane 4 g + q loads the
// columns 8 g to 8 g + 7 of rows 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. Instruction t multiplies with
// the columns 8 g + t of all g.
template <typename T, int kRank>
__global__ void __launch_bounds__(kThreads, 2)
    dropped_gradient_kernel(DroppedGradient args, std::int64_t rows_of_block) {
  __shared__ alignas(16) float sums[kWarps][kRank][kStrip];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int group = lane / 4, quarter = lane % 4;
  const int column = blockIdx.y * kStrip + group * 8;
  const std::int64_t begin = blockIdx.x * rows_of_block;
  const std::int64_t end = begin + rows_of_block < args.rows ? begin + rows_of_block : args.rows;
  const auto* const narrow = static_cast<const unsigned short*>(args.narrow);
  const auto* const x = static_cast<const T*>(args.x);
  float sum[8][4] = {};
#pragma unroll 2
  for (std::int64_t first = begin + 16 * warp; first < end; first += 16 * kWarps) {
    uint4 values[4] = {};
    unsigned short left[4][kRank / 8] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t row = first + 2 * quarter + i / 2 * 8 + i % 2;
      if (row >= end) continue;
#pragma unroll
      for (int half = 0; half < kRank / 8; ++half)
        left[i][half] = narrow[row * kRank + 8 * half + group];
      if (column >= args.columns) continue;
      const std::int64_t at = row * args.columns + column;
      values[i] = *reinterpret_cast<const uint4*>(x + at);
      keep(values[i], args.bits[at / 8]);
    }
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const unsigned select = t % 2 == 0 ? 0x5410u : 0x7632u;
      const auto word = [&](int i) { return (&values[i].x)[t / 2]; };
      multiply_add<T>(sum[t], pair_of(left[0][0], left[1][0]),
                      kRank == 16 ? pair_of(left[0][kRank / 8 - 1], left[1][kRank / 8 - 1]) : 0u,
                      pair_of(left[2][0], left[3][0]),
                      kRank == 16 ? pair_of(left[2][kRank / 8 - 1], left[3][kRank / 8 - 1]) : 0u,
                      __byte_perm(word(0), word(1), select), __byte_perm(word(2), word(3), select));
    }
  }
#pragma unroll
  for (int t = 0; t < 8; ++t)
#pragma unroll
    for (int k = 0; k < 2 * (kRank / 8); ++k)
      sums[warp][group + k / 2 * 8][16 * quarter + k % 2 * 8 + t] = sum[t][k];
  __syncthreads();
  for (int i = threadIdx.x; i < kRank * kStrip; i += kThreads) {
    const int row = i / kStrip, at = blockIdx.y * kStrip + i % kStrip;
    if (at >= args.columns) continue;
    float total = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) total += sums[k][row][i % kStrip];
    args.partials[(std::int64_t{blockIdx.x} * kRank + row) * args.columns + at] =
        total * args.scale;
  }
}

// to = the sum of a few parts of `vectors` times four floats.
__global__ void add_few_kernel(const float4* parts, int count, int vectors, float4* to) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  float4 sum = parts[i];
  for (int part = 1; part < count; ++part) {
    const float4 next = parts[std::int64_t{part} * vectors + i];
    sum = {sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w};
  }
  to[i] = sum;
}

bool covered(std::int64_t columns, int rank, Type type) {
  return columns % 32 == 0 && (rank == 8 || rank == 16) && type != Type::kFloat;
}

int strips(int columns) {
  return (columns + kStrip - 1) / kStrip;
}

// Two blocks fit a multiprocessor; more would only write more partial sums.
std::int64_t row_blocks(std::int64_t rows, int columns) {
  const std::int64_t wanted = 2 * multiprocessors() / strips(columns);
  const std::int64_t most = (rows + 16 * kWarps - 1) / (16 * kWarps);
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
  // Rows are the grid's x dimension, since y is limited to 65535.
  const dim3 grid(static_cast<unsigned>((args.rows + kRows - 1) / kRows),
                  static_cast<unsigned>((args.columns + 32 * kWarps - 1) / (32 * kWarps)));
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
  const std::int64_t rows_of_block = ((args.rows + blocks - 1) / blocks + 15) / 16 * 16;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(strips(args.columns)));
  const cudaError_t status = with_half(args.type, [&](auto type) {
    return with_rank(args.rank, [&](auto rank) {
      dropped_gradient_kernel<decltype(type), rank.value>
          <<<grid, kThreads, 0, stream>>>(args, rows_of_block);
      return cudaGetLastError();
    });
  });
  if (status != cudaSuccess) return status;
  const int vectors = args.rank * args.columns / 4;
  add_few_kernel<<<(vectors + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      reinterpret_cast<const float4*>(args.partials), static_cast<int>(blocks), vectors,
      reinterpret_cast<float4*>(args.to));
  return cudaGetLastError();
}

}  // namespace lockstep::kernels::cuda
