// The CUDA kernels, as a table of functions that the CUDA plug-in provides (docs/adr/0002). They
// take pointers and sizes, know no tensors, allocate nothing, wait for nothing and can be captured
// in a CUDA graph. This header needs no CUDA.
//
//   const Table* table = cuda::table();               // null: no plug-in is loaded
//   const int status = table->swiglu_forward(args, stream);
//
// A status is 0 or a cudaError_t; error_text() names it. Sums have a fixed order on one GPU model:
// the same bits in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "lockstep/kernels/cuda/arguments.h"

namespace lockstep::kernels::cuda {

// The arguments of matrix products and of casts to fp8, with the rules of arguments.h.
//
//   table->gemm({.a = {x, columns, false}, .b = {w, columns, true}, .d = y, ...}, stream, &status);
//   table->fp8_amax({.from = x, .amax = bits, ...}, stream);   // bits were zero
//   table->fp8_cast({.from = x, .amax = bits, .to = bytes, .scale = scale, ...}, stream);

enum class Epilogue : int {
  kNone,
  kBias,         // . + bias
  kGeluAuxBias,  // gelu(. + bias), and . + bias to aux
  kDGelu,        // . * gelu'(aux)
};

// The format of an 8-bit matrix's elements.
enum class Fp8 : int { kNone, kE4m3, kE5m2 };

// A row-major matrix; `transposed` when the memory holds the transpose.
struct GemmMatrix {
  const void* data;
  std::int64_t stride;  // from one row in memory to the next
  bool transposed;
  Fp8 fp8 = Fp8::kNone;          // tensor cores require a untransposed and b transposed
  const float* scale = nullptr;  // on the device, for fp8: what elements are multiplied by
};
// d [m, n] = a [m, k] b [k, n] + beta d, summed in float.
struct Gemm {
  GemmMatrix a, b;
  void* d;
  const void* bias;  // [n]
  void* aux;         // [m, n]
  void* workspace;
  std::size_t workspace_bytes;
  std::int64_t m, n, k;
  float beta;
  Epilogue epilogue;
  Type type;                       // for a, b, bias and aux; with fp8 for bias alone
  Type d_type;                     // the same or float
  bool fast_accumulation = false;  // for fp8: accumulates in fewer bits
};

// The largest magnitudes of a matrix, as the bits of floats: NaN is above infinity.
struct Fp8Amax {
  const void* from;          // [rows, columns]
  std::uint32_t* amax;       // [1], or by row [rows]; raised to at least what is found
  std::uint32_t* by_column;  // by row: [columns]; else null
  std::int64_t rows;
  int columns;  // a multiple of 8
  Type type;
};

// to = from * (largest fp8 / amax), rounded to nearest even; scale = its inverse.
struct Fp8Cast {
  const void* from;                // [rows, columns]
  const std::uint32_t* amax;       // of Fp8Amax
  const std::uint32_t* by_column;  // by row: the scales of the transpose; else null
  void* to;                        // [rows, columns]; or null
  void* transposed;                // [columns, stride], of which padded_rows are written; or null
  float* scale;                    // [1], or by row [rows]
  float* transposed_scale;         // by row: [columns]; else null
  std::int64_t rows;
  std::int64_t padded_rows;  // rows, rounded up to a multiple of 16: the rest is zeros
  std::int64_t stride;       // a multiple of 16
  int columns;               // a multiple of 8
  Type type;
  Fp8 fp8;
};

// ---------------------------------------------------------------- the table

class Graph;  // below

constexpr int kTableVersion = 7;
constexpr const char* kTableEntry = "lockstep_cuda_kernels";

struct Table {
  int version;
  const char* (*error_text)(int status);
  void* (*current_stream)(int device);
  bool (*norm_covers)(int columns);
  std::int64_t (*norm_partials)(std::int64_t rows, int columns);
  int (*norm_forward)(const NormForward&, void* stream);
  int (*norm_backward)(const NormBackward&, void* stream);
  // to[0] = the number of targets that are not ignored, to[1] = 1 / to[0], or 1 if to[0] is 0.
  int (*count_targets)(const std::int64_t* targets, std::int64_t rows, std::int64_t ignore_index,
                       float* to, void* stream);
  int (*cross_entropy)(const CrossEntropy&, void* stream);
  std::int64_t (*column_sum_partials)(std::int64_t rows, int columns);
  int (*column_sum)(const ColumnSum&, void* stream);
  int (*swiglu_forward)(const Swiglu&, void* stream);
  int (*swiglu_backward)(const Swiglu&, void* stream);
  int (*rope)(const Rope&, void* stream);
  // data *= *factor; data is not touched where the factor is 1.
  int (*scale)(void* data, std::int64_t size, Type type, const float* factor, void* stream);
  bool (*lora_covers)(std::int64_t columns, int rank, Type type);
  int (*dropped_input)(const DroppedInput&, void* stream);
  int (*dropped_product)(const DroppedProduct&, void* stream);
  std::int64_t (*dropped_gradient_partials)(std::int64_t rows, int columns, int rank);
  int (*dropped_gradient)(const DroppedGradient&, void* stream);
  int (*nf4_decode)(const Nf4Decode&, void* stream);
  // False if the library has no algorithm for these types and shapes; sets *status otherwise.
  bool (*gemm)(const Gemm&, void* stream, int* status);
  // The norm of all gradients, then the update with it.
  int (*adamw_norm)(const AdamStep&, void* stream);
  int (*adamw_update)(const AdamStep&, void* stream);
  int (*fp8_amax)(const Fp8Amax&, void* stream);
  int (*fp8_cast)(const Fp8Cast&, void* stream);
  int (*compute_capability)(int device);     // 90 for 9.0
  Graph* (*make_graph)(const Graph* other);  // owned by the caller
};

// The loaded plug-in's table; null without a plug-in, for the reason in unavailable_reason().
const Table* table();
const char* unavailable_reason();

// ---------------------------------------------------------------- CUDA graphs
//
// Work that is recorded once and launched again as a whole.
//
//   const auto graph = cuda::make_graph();            // null: no plug-in is loaded
//   cuda::Capture capture{*graph};                    // on the current stream, not the default one
//   ... launches, on this thread and on those of autograd ...
//   capture.end();                                    // nothing has run yet
//   graph->replay();                                  // on the current stream, as often as wanted
//
// Memory that is allocated during the capture belongs to the graph and has the same addresses in
// every replay. An exception between the two ends the capture without a graph; the destructor of
// Capture does that. One capture at a time in a process.

class Graph {
 public:
  virtual ~Graph() = default;
  virtual void begin() = 0;
  virtual void end() = 0;
  virtual void replay() = 0;
};

// `other`: a graph to share memory with. Results that one leaves for the other, or for the caller,
// must be held by tensors from its capture on; either graph may overwrite the rest.
std::unique_ptr<Graph> make_graph(const Graph* other = nullptr);

class Capture {
 public:
  explicit Capture(Graph& graph);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Calls the actions given to after_capture().
  void end();

 private:
  Graph& graph_;
  bool ended_ = false;
};

// Whether the process is between a Capture's construction and its end.
bool capturing();
// During a capture nothing may wait for the device, as a copy from pageable memory does. So data
// that replays need from the host is copied by an action after the capture's end.
void after_capture(std::function<void()> action);

}  // namespace lockstep::kernels::cuda
