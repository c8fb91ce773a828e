// What every backend must be able to do, and the suite that runs it on one rank of a world.
//
// The cases (operation x reduction x dtype) are written down by hand, not computed from the
// library's own idea of what is supported. The suite fails when fewer of them ran, so an operation
// or a dtype cannot get lost silently.
//
//   conformance                        worlds of 1, 2, 3, 4 and 7 threads, the whole table
//   conformance --world-from-env       one rank of a world that a launcher started, any backend
//   conformance --quick                a part of the table
//
// LOCKSTEP_CONFORMANCE_BACKEND names the backend to insist on (otherwise gloo for threads, and what
// the device decides for ranks).
// On a machine with one GPU, two NCCL ranks share it:
//   export LOCKSTEP_SHARE_DEVICE=1
//   lockstep run --nproc-per-node=2 build/bin/tests/conformance --world-from-env
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::conformance {

enum class Operation {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kSendRecv,
  kBatch
};
const char* name(Operation operation);
bool reduces(Operation operation);

// kSymmetric: like kLarge, in memory that all ranks map where the backend has it.
enum class Shape { kEmpty, kOne, kOdd, kLarge, kNonContiguous, kSymmetric };
const char* name(Shape shape);

inline constexpr std::array kOperations = {
    Operation::kAllReduce, Operation::kReduce, Operation::kReduceScatter, Operation::kBroadcast,
    Operation::kAllGather, Operation::kGather, Operation::kScatter,       Operation::kAllToAll,
    Operation::kSendRecv,  Operation::kBatch};
inline constexpr std::array kReductions = {ReduceOp::kSum, ReduceOp::kAvg,     ReduceOp::kMin,
                                           ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAnd,
                                           ReduceOp::kOr,  ReduceOp::kXor};
inline constexpr std::array kShapes = {Shape::kEmpty, Shape::kOne,           Shape::kOdd,
                                       Shape::kLarge, Shape::kNonContiguous, Shape::kSymmetric};
inline constexpr std::array kDtypes = {
    at::kByte,     at::kChar,  at::kShort,  at::kInt,  at::kLong,         at::kHalf,
    at::kBFloat16, at::kFloat, at::kDouble, at::kBool, at::kComplexFloat, at::kComplexDouble};

struct Case {
  Operation operation;
  ReduceOp op;  // kSum where the operation does not reduce
  at::ScalarType dtype;
  Shape shape;
  std::string text() const;
};
// In a fixed order, the same on every rank.
std::vector<Case> supported_cases();
// Pairs without a meaning: these must be refused with UsageError, not computed.
std::vector<Case> refused_cases();

struct Report {
  int ran = 0;      // cases of the table that were carried out and compared
  int refused = 0;  // pairs without a meaning that were refused as they must be
  int extra = 0;    // example values, numbers, bytes, structure
  std::vector<std::string> failures;
};

struct SuiteOptions {
  int64_t large = 20'011;  // elements of the large shape
  bool every_case = true;  // false: each (operation, dtype) once or twice, for a quick look
};

// Every rank calls it with the same options. Tensors are made on `device`.
Report run_suite(World& world, c10::Device device, const SuiteOptions& options = {});

// How many cases run_suite has to carry out for these options.
int cases_due(const SuiteOptions& options);

// ---------------------------------------------------------------- the table

const char* name(Operation operation) {
  static constexpr const char* kNames[] = {"all_reduce", "reduce", "reduce_scatter", "broadcast",
                                           "all_gather", "gather", "scatter",        "all_to_all",
                                           "send/recv",  "batch"};
  return kNames[static_cast<std::size_t>(operation)];
}

bool reduces(Operation operation) {
  return operation == Operation::kAllReduce || operation == Operation::kReduce ||
         operation == Operation::kReduceScatter;
}

const char* name(Shape shape) {
  static constexpr const char* kNames[] = {"empty",          "one",      "odd", "large",
                                           "non-contiguous", "symmetric"};
  return kNames[static_cast<std::size_t>(shape)];
}

namespace {

// One row: these reductions for these dtypes, identically on every backend, because World emulates
// what a backend lacks. Operations that only move bytes take every dtype.
struct Row {
  std::vector<at::ScalarType> dtypes;
  std::vector<ReduceOp> reductions;
};

const std::vector<Row>& reduction_table() {
  static const std::vector<Row> table = {
      {{at::kByte, at::kChar, at::kShort, at::kInt, at::kLong},
       {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
        ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor}},
      {{at::kHalf, at::kBFloat16, at::kFloat, at::kDouble},
       {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}},
      {{at::kBool},
       {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAnd,
        ReduceOp::kOr, ReduceOp::kXor}},
      {{at::kComplexFloat, at::kComplexDouble}, {ReduceOp::kSum, ReduceOp::kAvg}},
  };
  return table;
}

bool supported(Operation operation, at::ScalarType dtype, ReduceOp op) {
  if (!reduces(operation)) return op == ReduceOp::kSum;
  return std::any_of(reduction_table().begin(), reduction_table().end(), [&](const Row& row) {
    return std::find(row.dtypes.begin(), row.dtypes.end(), dtype) != row.dtypes.end() &&
           std::find(row.reductions.begin(), row.reductions.end(), op) != row.reductions.end();
  });
}

}  // namespace

std::string Case::text() const {
  return fmt::format("{}{}{} {} {}", name(operation), reduces(operation) ? " " : "",
                     reduces(operation) ? lockstep::detail::name(op) : "", c10::toString(dtype),
                     name(shape));
}

std::vector<Case> supported_cases() {
  std::vector<Case> cases;
  for (const auto operation : kOperations) {
    for (const auto op : kReductions) {
      for (const auto dtype : kDtypes) {
        if (!supported(operation, dtype, op)) continue;
        for (const auto shape : kShapes) cases.push_back({operation, op, dtype, shape});
      }
    }
  }
  return cases;
}

std::vector<Case> refused_cases() {
  std::vector<Case> cases;
  for (const auto operation : kOperations) {
    if (!reduces(operation)) continue;
    for (const auto op : kReductions) {
      for (const auto dtype : kDtypes) {
        if (!supported(operation, dtype, op)) cases.push_back({operation, op, dtype, Shape::kOdd});
      }
    }
  }
  return cases;
}

// ---------------------------------------------------------------- the suite

namespace {

// After how many ranks the numbers of make_values() repeat.
int period(at::ScalarType dtype, ReduceOp op) {
  return dtype == at::kBool ? 3 : op == ReduceOp::kProduct ? 2 : 5;
}

// Small whole numbers, so that sums, products and averages over seven ranks are exact in every
// dtype and a wrong rank, element or order shows. Negative ones where the dtype has them: integer
// averages round towards zero.
at::Tensor make_values(const std::vector<int64_t>& shape, at::ScalarType dtype, int rank,
                       ReduceOp op) {
  const int64_t count =
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  at::Tensor index = at::arange(count, at::kLong);
  at::Tensor number = index.mul(7).add(rank * 3 + 1).remainder(5);
  if (op == ReduceOp::kProduct) {
    number = index.add(rank).remainder(2).add(1);
  } else if (dtype != at::kByte && dtype != at::kBool) {
    number = number.sub(2);
  }
  if (dtype == at::kBool) number = index.add(rank).remainder(3).eq(0).to(at::kLong);
  at::Tensor result = number.to(dtype == at::kComplexFloat ? at::kComplexDouble : dtype);
  if (result.is_complex())
    result = at::complex(number.to(at::kDouble), number.add(1).to(at::kDouble));
  return result.to(dtype).view(shape);
}

// The same, made once for all ranks of this process and all cases. Read-only.
at::Tensor values(const std::vector<int64_t>& shape, at::ScalarType dtype, int rank, ReduceOp op) {
  using Key = std::tuple<std::vector<int64_t>, at::ScalarType, int, bool>;
  static std::mutex mutex;
  static std::map<Key, at::Tensor> made;
  const int kind = rank % period(dtype, op);
  const Key key{shape, dtype, kind, op == ReduceOp::kProduct};
  const std::lock_guard lock(mutex);
  at::Tensor& found = made[key];
  if (!found.defined()) found = make_values(shape, dtype, kind, op);
  return found;
}

// The reference: one rank's view of all ranks' inputs, reduced in the widest type.
at::Tensor reduced(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  const bool whole = at::isIntegralType(dtype, /*includeBool=*/true);
  const auto wide = inputs[0].is_complex() ? at::kComplexDouble : whole ? at::kLong : at::kDouble;
  at::Tensor result = inputs[0].to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor next = inputs[i].to(wide);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result.add_(next);
        break;
      case ReduceOp::kMin:
        result = at::minimum(result, next);
        break;
      case ReduceOp::kMax:
        result = at::maximum(result, next);
        break;
      case ReduceOp::kProduct:
        result.mul_(next);
        break;
      case ReduceOp::kAnd:
        result.bitwise_and_(next);
        break;
      case ReduceOp::kOr:
        result.bitwise_or_(next);
        break;
      case ReduceOp::kXor:
        result.bitwise_xor_(next);
        break;
    }
  }
  const auto count = static_cast<int64_t>(inputs.size());
  if (op == ReduceOp::kAvg) {
    if (whole) {
      result.div_(count, "trunc");
    } else {
      result.div_(count);
    }
  }
  if (dtype == at::kBool) return result.ne(0);
  return result.to(dtype);
}

class Suite {
 public:
  Suite(World& world, c10::Device device, const SuiteOptions& options)
      : world_(world), device_(device), options_(options) {
    // Large enough for every tensor of a case, in the widest dtype.
    const int64_t tensors = 2 * world.size() + 2;
    const int64_t bytes = tensors * (options.large * 16 + kAlignment);
    arena_ = device == world.device() ? world.symmetric_empty({bytes}, at::kByte)
                                      : at::empty({bytes}, at::dtype(at::kByte).device(device));
  }

  Report run(const std::vector<Case>& cases) {
    for (const auto& each : cases) {
      current_ = each;
      used_ = 0;
      carry_out();
      ++report_.ran;
    }
    for (const auto& each : refused_cases()) {
      current_ = each;
      refuse();
    }
    lesson();
    numbers_and_bytes();
    structure();
    return report_;
  }

 private:
  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }

  std::vector<int64_t> shape() const {
    switch (current_.shape) {
      case Shape::kEmpty:
        return {0};
      case Shape::kOne:
        return {};
      case Shape::kOdd:
        return {13};
      case Shape::kLarge:
      case Shape::kSymmetric:
        return {options_.large};
      case Shape::kNonContiguous:
        return {5, 6};
    }
    return {};
  }

  // What rank `from` contributes, computed on any rank; `salt` distinguishes tensors of one rank.
  at::Tensor input_of(int from, int salt = 0) const {
    return values(shape(), current_.dtype, from + 11 * salt, current_.op);
  }

  // On the device under test; with strides, or in the arena, where the case asks for them.
  at::Tensor place(const at::Tensor& tensor) {
    if (current_.shape == Shape::kSymmetric) return place_in_arena(tensor);
    at::Tensor there = tensor.to(device_);
    if (current_.shape != Shape::kNonContiguous) return there.clone();
    std::vector<int64_t> strided = tensor.sizes().vec();
    strided.back() *= 2;
    at::Tensor base = at::full(strided, 1, there.options());
    at::Tensor view = base.slice(-1, 0, strided.back(), 2);
    view.copy_(there);
    return view;
  }
  at::Tensor blank(const at::Tensor& like) { return place(at::zeros_like(like)); }

  at::Tensor place_in_arena(const at::Tensor& tensor) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    at::Tensor there = arena_.narrow(0, used_, bytes).view(tensor.scalar_type());
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return there.view(tensor.sizes()).copy_(tensor);
  }

  void expect(const at::Tensor& got, const at::Tensor& wanted, const std::string& what = "") {
    const bool rounded =
        current_.op == ReduceOp::kAvg && (wanted.is_floating_point() || wanted.is_complex());
    // An average may be rounded once more on the way (NCCL scales before it adds).
    const double tolerance = wanted.scalar_type() == at::kBFloat16 ? 0.04
                             : wanted.scalar_type() == at::kHalf   ? 0.005
                                                                   : 1e-6;
    const auto result = rounded ? testing::tensors_near(got, wanted, tolerance)
                                : testing::tensors_equal(got, wanted);
    if (!result) fail(fmt::format("{} {}", what, result.message()));
  }
  void expect(bool good, const std::string& what) {
    if (!good) fail(what);
  }
  void fail(const std::string& why) {
    report_.failures.push_back(
        fmt::format("rank {} of {}: {}: {}", rank(), size(), current_.text(), why));
  }

  std::vector<at::Tensor> all_inputs(int salt = 0) const {
    std::vector<at::Tensor> all;
    for (int from = 0; from < size(); ++from) all.push_back(input_of(from, salt));
    return all;
  }

  void carry_out() {
    static constexpr void (Suite::*kBodies[])() = {
        &Suite::all_reduce, &Suite::reduce, &Suite::reduce_scatter, &Suite::broadcast,
        &Suite::all_gather, &Suite::gather, &Suite::scatter,        &Suite::all_to_all,
        &Suite::send_recv,  &Suite::batch};
    (this->*kBodies[static_cast<std::size_t>(current_.operation)])();
  }

  int root() const { return size() - 1; }

  void all_reduce() {
    at::Tensor x = place(input_of(rank()));
    world_.all_reduce(x, current_.op).wait();
    expect(x, reduced(all_inputs(), current_.op));
  }

  void reduce() {
    at::Tensor x = place(input_of(rank()));
    world_.reduce(x, root(), current_.op).wait();
    if (rank() == root()) expect(x, reduced(all_inputs(), current_.op));
  }

  void reduce_scatter() {
    std::vector<at::Tensor> mine;
    for (int part = 0; part < size(); ++part) mine.push_back(input_of(rank(), part));
    at::Tensor output = blank(mine[0]);
    world_.reduce_scatter(output, place(at::stack(mine)), current_.op).wait();
    expect(output, reduced(all_inputs(rank()), current_.op));
  }

  void broadcast() {
    at::Tensor x = rank() == root() ? place(input_of(root())) : blank(input_of(root()));
    world_.broadcast(x, root()).wait();
    expect(x, input_of(root()));
  }

  void all_gather() {
    at::Tensor output = blank(at::stack(all_inputs()));
    world_.all_gather(output, place(input_of(rank()))).wait();
    expect(output, at::stack(all_inputs()));
  }

  void gather() {
    std::vector<at::Tensor> outputs;
    if (rank() == root()) {
      for (int from = 0; from < size(); ++from) outputs.push_back(blank(input_of(from)));
    }
    world_.gather(outputs, place(input_of(rank())), root()).wait();
    for (std::size_t from = 0; from < outputs.size(); ++from)
      expect(outputs[from], input_of(static_cast<int>(from)));
  }

  void scatter() {
    std::vector<at::Tensor> inputs;
    if (rank() == root()) {
      for (int to = 0; to < size(); ++to) inputs.push_back(place(input_of(root(), to)));
    }
    at::Tensor output = blank(input_of(root()));
    world_.scatter(output, inputs, root()).wait();
    expect(output, input_of(root(), rank()));
  }

  // Every pair exchanges a different number of elements: the message from i to j has i + 2j +
  // shape.
  void all_to_all() {
    const auto message = [this](int from, int to) {
      if (current_.shape != Shape::kOdd) return input_of(from, to);
      return values({from + 2 * to}, current_.dtype, from * 5 + to, current_.op);
    };
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    for (int other = 0; other < size(); ++other) {
      inputs.push_back(place(message(rank(), other)));
      outputs.push_back(blank(message(other, rank())));
    }
    world_.all_to_all(outputs, inputs).wait();
    for (int from = 0; from < size(); ++from)
      expect(outputs[static_cast<std::size_t>(from)], message(from, rank()));
  }

  // Around a ring, one after the other: rank 0 sends first, the rest receive first.
  void send_recv() {
    const int next = (rank() + 1) % size();
    const int previous = (rank() + size() - 1) % size();
    at::Tensor out = place(input_of(rank()));
    at::Tensor in = blank(input_of(previous));
    if (rank() == 0) {
      Work sending = world_.send(out, next);
      world_.recv(in, previous).wait();
      sending.wait();
    } else {
      world_.recv(in, previous).wait();
      world_.send(out, next).wait();
    }
    expect(in, input_of(previous));
  }

  // Both directions at once, which blocking messages could not do.
  void batch() {
    const int next = (rank() + 1) % size();
    const int previous = (rank() + size() - 1) % size();
    at::Tensor in = blank(input_of(previous));
    world_
        .batch_isend_irecv(
            {{P2p::Kind::kSend, place(input_of(rank())), next}, {P2p::Kind::kRecv, in, previous}})
        .wait();
    expect(in, input_of(previous));
  }

  void refuse() {
    at::Tensor x = place(input_of(rank()));
    std::vector<at::Tensor> stacked(static_cast<std::size_t>(size()), x);
    try {
      if (current_.operation == Operation::kAllReduce) world_.all_reduce(x, current_.op).wait();
      if (current_.operation == Operation::kReduce) world_.reduce(x, 0, current_.op).wait();
      if (current_.operation == Operation::kReduceScatter)
        world_.reduce_scatter(x, at::stack(stacked), current_.op).wait();
      fail("has no meaning, but was not refused");
    } catch (const UsageError&) {
      ++report_.refused;
    }
  }

  // Worked examples with known values.
  void lesson() {
    current_ = {Operation::kBroadcast, ReduceOp::kSum, at::kFloat, Shape::kOdd};
    world_.barrier();
    const at::Tensor one_two_three = at::tensor({1.f, 2.f, 3.f});
    at::Tensor x = (rank() == 0 ? one_two_three : at::zeros({3})).to(device_, false, true);
    world_.broadcast(x, 0).wait();
    expect(x, one_two_three, "lesson: broadcast");

    at::Tensor sum = at::full({1}, rank(), at::kLong).to(device_);
    world_.all_reduce(sum).wait();
    expect(sum, at::full({1}, size() * (size() - 1) / 2, at::kLong), "lesson: sum of ranks");

    std::vector<at::Tensor> gathered;
    if (rank() == 0) {
      for (int from = 0; from < size(); ++from)
        gathered.push_back(at::zeros({1}, at::kLong).to(device_));
    }
    world_.gather(gathered, at::full({1}, rank(), at::kLong).to(device_), 0).wait();
    for (std::size_t from = 0; from < gathered.size(); ++from)
      expect(gathered[from], at::full({1}, static_cast<int64_t>(from), at::kLong),
             "lesson: gather");
    report_.extra += 3;
  }

  void numbers_and_bytes() {
    const double n = size();
    expect(lockstep::all_reduce(world_, rank()) == n * (n - 1) / 2, "sum of numbers");
    expect(lockstep::all_reduce(world_, rank(), ReduceOp::kAvg) == (n - 1) / 2, "mean of numbers");
    expect(lockstep::all_reduce(world_, rank() + 1, ReduceOp::kMin) == 1, "min of numbers");
    expect(lockstep::all_reduce(world_, rank(), ReduceOp::kMax) == n - 1, "max of numbers");
    expect(any_rank(world_, rank() == root()), "any");
    expect(all_ranks(world_, rank() == root()) == (size() == 1), "all");
    expect(all_ranks(world_, true) && !any_rank(world_, false), "all true, any false");
    const std::string text("a\0b", 3);
    expect(broadcast_bytes(world_, rank() == root() ? text : "other", root()) == text, "bytes");
    expect(broadcast_bytes(world_, "").empty(), "no bytes");
    const auto all = all_gather_bytes(world_, std::string(static_cast<std::size_t>(rank()), 'x'));
    for (std::size_t from = 0; from < all.size(); ++from)
      expect(all[from] == std::string(from, 'x'), "gathered bytes");
    // Ranks contribute 0, 1, 2, ... rows.
    const auto varied = world_.all_gather_v(at::full({rank(), 2}, rank(), device_));
    for (std::size_t from = 0; from < varied.size(); ++from) {
      const auto rows = static_cast<int64_t>(from);
      expect(varied[from], at::full({rows, 2}, rows, at::kLong).to(varied[from].scalar_type()),
             "rows of different number");
    }
    report_.extra += 11;
  }

  void structure() {
    auto half = world_.split(rank() % 2, -rank());
    expect(half.has_value(), "split");
    const int members = (size() + (rank() % 2 == 0 ? 1 : 0)) / 2;
    expect(half && half->size() == members, "split: size");
    // The key reverses the order.
    expect(half && half->rank() == members - 1 - rank() / 2, "split: order");
    at::Tensor x = at::ones({3}).to(device_);
    if (half) half->all_reduce(x).wait();
    expect(x, at::full({3}, static_cast<float>(members)), "split: all_reduce");
    expect(world_.split(rank() == 0 ? -1 : 3).has_value() == (rank() != 0), "split: none");
    int runs = 0;
    leader_first(world_, [&] { ++runs; });
    expect(runs == 1, "leader_first");
    report_.extra += 6;
  }

  World& world_;
  const c10::Device device_;
  const SuiteOptions options_;
  static constexpr int64_t kAlignment = 64;
  at::Tensor arena_;
  int64_t used_ = 0;  // in the arena, by the current case
  Case current_{};
  Report report_;
};

std::vector<Case> chosen_cases(const SuiteOptions& options) {
  std::vector<Case> cases = supported_cases();
  if (options.every_case) return cases;
  std::erase_if(cases, [](const Case& each) {
    const bool plain = each.op == ReduceOp::kSum || each.op == ReduceOp::kAvg;
    return !plain || (each.shape != Shape::kOdd && each.shape != Shape::kNonContiguous &&
                      each.shape != Shape::kSymmetric);
  });
  return cases;
}

}  // namespace

int cases_due(const SuiteOptions& options) {
  // Counted from the table's rows, not from the list that is run.
  int pairs = 0;
  for (const auto& row : reduction_table()) {
    int reductions = 0;
    for (const auto op : row.reductions) {
      if (options.every_case || op == ReduceOp::kSum || op == ReduceOp::kAvg) ++reductions;
    }
    pairs += 3 * reductions * static_cast<int>(row.dtypes.size());
  }
  const int moves = static_cast<int>(kOperations.size()) - 3;
  pairs += moves * static_cast<int>(kDtypes.size());
  return pairs * (options.every_case ? static_cast<int>(kShapes.size()) : 3);
}

Report run_suite(World& world, c10::Device device, const SuiteOptions& options) {
  return Suite(world, device, options).run(chosen_cases(options));
}

// ---------------------------------------------------------------- the program

namespace {

struct Outcome {
  int worlds = 0;
  int failures = 0;
};

void print(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

// One rank's report: the count of cases is part of the outcome.
void judge(const Report& report, const World& world, const SuiteOptions& options,
           Outcome& outcome) {
  const int due = cases_due(options);
  if (report.ran < due) {
    print(fmt::format("FAILED rank {}: only {} of {} cases of the support table ran", world.rank(),
                      report.ran, due));
    ++outcome.failures;
  }
  for (const auto& failure : report.failures) print("FAILED " + failure);
  outcome.failures += static_cast<int>(report.failures.size());
  if (world.is_leader()) {
    print(fmt::format("{} on {}, world of {}: {} of {} cases, {} skipped, {} refusals, {} others",
                      world.backend(), world.device().str(), world.size(), report.ran, due,
                      due - report.ran, report.refused, report.extra));
    ++outcome.worlds;
  }
}

int run_threads_mode(const SuiteOptions& options) {
  Outcome outcome;
  std::mutex mutex;
  for (const int size : {1, 2, 3, 4, 7}) {
    const auto begin = std::chrono::steady_clock::now();
    const auto body = [&](World& world) {
      const Report report = run_suite(world, world.device(), options);
      const std::lock_guard lock(mutex);
      judge(report, world, options, outcome);
    };
    testing::ThreadOptions threads;
    threads.world.backend = env::get("LOCKSTEP_CONFORMANCE_BACKEND").value_or("gloo");
    testing::run_threads(size, body, threads);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    print(fmt::format("  {:.1f} s", seconds.count()));
  }
  if (outcome.worlds != 5) ++outcome.failures;
  print(outcome.failures == 0 ? "conformance: passed" : "conformance: FAILED");
  return outcome.failures == 0 ? 0 : 1;
}

int run_environment_mode(SuiteOptions options) {
  WorldOptions world_options;
  if (const auto backend = env::get("LOCKSTEP_CONFORMANCE_BACKEND"))
    world_options.backend = *backend;
  World world = World::from_env(world_options);
  Outcome outcome;
  judge(run_suite(world, world.device(), options), world, options, outcome);
  if (!world.device().is_cpu()) {
    // Tensors of the host travel in the same world, by another backend.
    options.every_case = false;
    const Report report = run_suite(world, c10::Device(c10::kCPU), options);
    judge(report, world, options, outcome);
  }
  const double failures = all_reduce(world, outcome.failures);
  world.finish();
  if (world.is_leader()) print(failures == 0 ? "conformance: passed" : "conformance: FAILED");
  return outcome.failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lockstep::conformance

int main(int argc, char** argv) {
  using namespace lockstep::conformance;
  at::set_num_threads(1);  // ranks share the cores; helper threads would only get in their way
  SuiteOptions options;
  bool from_env = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--world-from-env") {
      from_env = true;
    } else if (arg == "--quick") {
      options.every_case = false;
    } else {
      std::fprintf(stderr, "usage: conformance [--world-from-env] [--quick]\n");
      return 2;
    }
  }
  try {
    return from_env ? run_environment_mode(options) : run_threads_mode(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
