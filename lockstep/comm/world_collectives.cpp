// The operations on tensors: checks, staging, and emulation of what a backend lacks.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "lockstep/comm/types.h"
#include "lockstep/comm/world_impl.h"
#include "lockstep/core/error.h"

namespace lockstep {

using detail::Backend;
using detail::OperationInfo;
using detail::WorldImpl;
using State = std::shared_ptr<detail::WorkState>;

// ---------------------------------------------------------------- reductions

namespace {

// How a reduction is carried out when a backend does not have it as such. World offers every
// (dtype, op) pair that has a meaning; backends offer fewer. Integer averages are summed in 64 bits
// and rounded towards zero; booleans are numbers 0 and 1.
struct ReductionPlan {
  at::ScalarType wire;     // what travels
  ReduceOp op;             // what the backend is asked for
  bool divide = false;     // by the world's size, afterwards
  bool by_gather = false;  // the backend has no such reduction: gather all, reduce here, rank order
  bool reinterpret = false;  // `wire` is the same memory (bool as bytes, complex as real pairs)
};

bool is_integer(at::ScalarType dtype) {
  return dtype == at::kByte || dtype == at::kChar || dtype == at::kShort || dtype == at::kInt ||
         dtype == at::kLong;
}
bool is_real(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat ||
         dtype == at::kDouble;
}
bool is_complex(at::ScalarType dtype) {
  return dtype == at::kComplexFloat || dtype == at::kComplexDouble;
}

// False for pairs without a meaning: bitwise on floats, averages of booleans.
bool reduction_exists(at::ScalarType dtype, ReduceOp op) {
  if (dtype == at::kBool) return op != ReduceOp::kAvg;
  if (is_integer(dtype)) return true;
  if (is_real(dtype)) return !detail::is_bitwise(op);
  return is_complex(dtype) && (op == ReduceOp::kSum || op == ReduceOp::kAvg);
}

ReductionPlan plan_reduction(at::ScalarType dtype, ReduceOp op, const Backend& backend) {
  LOCKSTEP_ASSERT(reduction_exists(dtype, op));
  ReductionPlan plan{dtype, op};
  if (dtype == at::kBool) {
    plan.wire = at::kByte;
    plan.reinterpret = true;
    const bool disjunction = op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kOr;
    if (op != ReduceOp::kXor) plan.op = disjunction ? ReduceOp::kMax : ReduceOp::kMin;
  } else if (is_complex(dtype)) {
    plan.wire = dtype == at::kComplexFloat ? at::kFloat : at::kDouble;
    plan.reinterpret = true;
  } else if (is_integer(dtype) && op == ReduceOp::kAvg && !backend.reduces(dtype, op)) {
    plan.wire = at::kLong;
    plan.op = ReduceOp::kSum;
    plan.divide = true;
  } else if (dtype == at::kShort && !backend.reduces(at::kShort, op)) {
    plan.wire = at::kInt;
  }
  plan.by_gather = !backend.reduces(plan.wire, plan.op);
  return plan;
}

// Reduces the rows of `rows` ({n, ...}) in order.
at::Tensor reduce_rows(const at::Tensor& rows, ReduceOp op) {
  at::Tensor result = rows[0].clone();
  for (int64_t i = 1; i < rows.size(0); ++i) {
    const at::Tensor row = rows[i];
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result.add_(row);
        break;
      case ReduceOp::kMin:
        result = at::minimum(result, row);
        break;
      case ReduceOp::kMax:
        result = at::maximum(result, row);
        break;
      case ReduceOp::kProduct:
        result.mul_(row);
        break;
      case ReduceOp::kAnd:
        result.bitwise_and_(row);
        break;
      case ReduceOp::kOr:
        result.bitwise_or_(row);
        break;
      case ReduceOp::kXor:
        result.bitwise_xor_(row);
        break;
    }
  }
  if (op == ReduceOp::kAvg) result.div_(rows.size(0));
  return result;
}

}  // namespace

// ---------------------------------------------------------------- helpers

namespace {

constexpr const char* kComponent = "world";

void check_tensor(const at::Tensor& tensor, const char* operation) {
  if (!tensor.defined()) {
    throw UsageError(kComponent, "{}: the tensor is undefined. Pass one that has been created.",
                     operation);
  }
  if (tensor.layout() != at::kStrided) {
    throw UsageError(kComponent,
                     "{}: the tensor is sparse. Exchange its indices and values, or make it dense.",
                     operation);
  }
}

void check_rank(const WorldImpl& impl, int rank, const char* operation) {
  if (rank < 0 || rank >= impl.identity.size) {
    throw UsageError(kComponent, "{}: rank {} does not exist in a world of {} (ranks 0 to {}).",
                     operation, rank, impl.identity.size, impl.identity.size - 1);
  }
}

void check_pair(const at::Tensor& large, const at::Tensor& small, int64_t times,
                const char* operation) {
  check_tensor(large, operation);
  check_tensor(small, operation);
  if (large.numel() != times * small.numel() || large.scalar_type() != small.scalar_type()) {
    throw UsageError(
        kComponent,
        "{}: {} elements of {} do not fit {} times {} elements of {}. The large tensor "
        "must have shape {{size, ...the small one's shape}} and the same dtype.",
        operation, large.numel(), c10::toString(large.scalar_type()), times, small.numel(),
        c10::toString(small.scalar_type()));
  }
}

void check_list(const std::vector<at::Tensor>& list, const at::Tensor& like, int size,
                const char* operation) {
  if (static_cast<int>(list.size()) != size) {
    throw UsageError(kComponent,
                     "{}: the list has {} tensors, but the world has {} ranks. Give one "
                     "tensor per rank.",
                     operation, list.size(), size);
  }
  for (const auto& tensor : list) check_pair(tensor, like, 1, operation);
}

// For gather and scatter: the root gives one tensor per rank, and the other ranks give no list.
void check_root_list(const WorldImpl& impl, const std::vector<at::Tensor>& list,
                     const at::Tensor& like, int root, bool gathers) {
  const char* const operation = gathers ? "gather" : "scatter";
  check_rank(impl, root, operation);
  check_tensor(like, operation);
  if (impl.identity.rank == root) return check_list(list, like, impl.identity.size, operation);
  if (list.empty()) return;
  throw UsageError(kComponent,
                   "{}: rank {} gave {} {}, but only root {} {}. Pass an empty list elsewhere.",
                   operation, impl.identity.rank, list.size(), gathers ? "outputs" : "inputs", root,
                   gathers ? "receives" : "sends");
}

// Memory as a backend wants it (flat, contiguous, where the backend works), and the way back.
struct StagedTensor {
  at::Tensor original;
  at::Tensor memory;  // the original itself, or a copy of its shape
  at::Tensor flat;    // an alias of memory, as it travels
  bool copied() const { return !memory.is_same(original); }
};

// `fill`: the values matter on entry (not for pure outputs).
StagedTensor stage(const at::Tensor& tensor, const Backend& backend, const ReductionPlan& plan,
                   bool fill = true) {
  const bool moves = backend.device_type() != tensor.device().type();
  const bool converts = !plan.reinterpret && tensor.scalar_type() != plan.wire;
  const bool copies = moves || converts || !tensor.is_contiguous();
  // A view costs as much as a small operation through shared memory, so it is made only if needed.
  // (Steps after the operation need a handle that outlives it.)
  if (!copies && backend.takes_memory() && tensor.dim() == 1 && tensor.scalar_type() == plan.wire &&
      !plan.divide && !plan.by_gather)
    return {tensor, tensor, tensor};
  const at::Tensor plain = tensor.detach();
  StagedTensor staged{plain, plain, {}};
  if (copies) {
    auto options = plain.options();
    if (moves) options = options.device(backend.device_type());
    if (converts) options = options.dtype(plan.wire);
    staged.memory = at::empty(plain.sizes(), options);
    if (fill) staged.memory.copy_(plain);
  }
  staged.flat = staged.memory.view({-1});
  if (plan.reinterpret && staged.flat.scalar_type() != plan.wire) {
    const bool real_pairs = staged.flat.is_complex() && plan.wire != at::kByte;
    staged.flat =
        real_pairs ? at::view_as_real(staged.flat).view({-1}) : staged.flat.view(plan.wire);
  }
  return staged;
}

StagedTensor stage_bytes(const at::Tensor& tensor, const Backend& backend, bool fill = true) {
  return stage(tensor, backend, {.wire = at::kByte, .op = ReduceOp::kSum, .reinterpret = true},
               fill);
}

std::vector<StagedTensor> stage_all(const std::vector<at::Tensor>& tensors, const Backend& backend,
                                    bool fill) {
  std::vector<StagedTensor> staged;
  for (const auto& tensor : tensors) staged.push_back(stage_bytes(tensor, backend, fill));
  return staged;
}

std::vector<at::Tensor> flat_of(const std::vector<StagedTensor>& staged) {
  std::vector<at::Tensor> flat;
  for (const auto& each : staged) flat.push_back(each.flat);
  return flat;
}

// The current stream of the device that holds the tensor; nothing on the CPU, which has none.
std::optional<c10::Stream> stream_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

// The last step for outputs once their bytes have arrived; none if they arrived in place.
void return_to_caller(const State& state, std::vector<StagedTensor> outputs) {
  std::erase_if(outputs, [](const StagedTensor& each) { return !each.copied(); });
  if (outputs.empty()) return;
  const auto stream = stream_of(outputs.front().original);
  state->finish_with(
      [outputs = std::move(outputs)] {
        const at::NoGradGuard no_grad;
        for (const auto& each : outputs) each.original.copy_(each.memory);
      },
      stream);
}

void check_reduction(const at::Tensor& tensor, ReduceOp op, const char* operation) {
  if (reduction_exists(tensor.scalar_type(), op)) return;
  throw UsageError(kComponent,
                   "{}: '{}' of {} tensors has no meaning here. Convert the tensor to "
                   "another dtype or choose another reduction.",
                   operation, detail::name(op), c10::toString(tensor.scalar_type()));
}

// Increments the version, as every in-place operation does: autograd then refuses a backward that
// needs the earlier contents.
void count_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Operations that need no communication: nothing to do, or a copy in a world of one.
Work done(const State& state) {
  state->complete();
  return Work(state);
}

Work copied(const State& state, const at::Tensor& output, const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  output.detach().copy_(input.detach().view(output.sizes()));
  return done(state);
}

// Messages a rank sends to itself are queued until it receives them. Sends of a batch come first.
void deliver_to_self(WorldImpl& impl, const std::vector<P2p>& messages) {
  const at::NoGradGuard no_grad;
  const int self = impl.identity.rank;
  for (const auto& message : messages) {
    if (message.peer == self && message.kind == P2p::Kind::kSend)
      impl.self_messages.push_back(message.tensor.detach().clone());
  }
  for (const auto& message : messages) {
    if (message.peer != self || message.kind != P2p::Kind::kRecv) continue;
    if (impl.self_messages.empty()) {
      throw UsageError(kComponent,
                       "recv: rank {} receives from itself, but has sent nothing. Send "
                       "first, or put both into one batch.",
                       self);
    }
    check_pair(message.tensor, impl.self_messages.front(), 1, "recv");
    message.tensor.detach().copy_(impl.self_messages.front().view(message.tensor.sizes()));
    impl.self_messages.pop_front();
  }
}

OperationInfo info_of(const char* operation, const at::Tensor& tensor, int peer = -1) {
  return {operation, 0, tensor.scalar_type(), tensor.numel(), peer, !tensor.is_cpu()};
}

std::string fingerprint(const at::Tensor& tensor, const std::string& extra = "") {
  return fmt::format("{} [{}] {}", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "), extra);
}

}  // namespace

// ---------------------------------------------------------------- reductions

namespace {

// The steps after the bytes have travelled: reduce gathered rows, divide, convert, copy back.
void finish_reduction(const State& state, const ReductionPlan& plan, const StagedTensor& staged,
                      const at::Tensor& rows, int size) {
  if (!plan.by_gather && !plan.divide && !staged.copied()) return;
  state->finish_with(
      [=] {
        const at::NoGradGuard no_grad;
        if (rows.defined()) staged.flat.copy_(reduce_rows(rows, plan.op));
        if (plan.divide) staged.flat.div_(size, "trunc");
        if (staged.copied()) staged.original.copy_(staged.memory);
      },
      stream_of(staged.original));
}

at::Tensor bytes_of(const at::Tensor& flat) {
  return flat.scalar_type() == at::kByte ? flat : flat.view(at::kByte);
}

}  // namespace

Work World::all_reduce(at::Tensor tensor, ReduceOp op) {
  const ledger::CallSite here;
  check_tensor(tensor, "all_reduce");
  check_reduction(tensor, op, "all_reduce");
  const State state = impl_->start(info_of("all_reduce", tensor),
                                   [&] { return fingerprint(tensor, detail::name(op)); });
  if (impl_->alone() || tensor.numel() == 0) return done(state);
  Backend& backend = impl_->backend_for(tensor);
  count_write(tensor);
  const ReductionPlan plan = plan_reduction(tensor.scalar_type(), op, backend);
  const StagedTensor staged = stage(tensor, backend, plan);
  at::Tensor rows;
  if (plan.by_gather) rows = at::empty({size(), staged.flat.numel()}, staged.flat.options());
  finish_reduction(state, plan, staged, rows, size());
  impl_->launch(state, [&] {
    if (plan.by_gather) {
      backend.all_gather(state, bytes_of(rows.view({-1})), bytes_of(staged.flat));
    } else {
      backend.all_reduce(state, staged.flat, plan.op);
    }
  });
  return Work(state);
}

Work World::reduce(at::Tensor tensor, int root, ReduceOp op) {
  const ledger::CallSite here;
  check_rank(*impl_, root, "reduce");
  check_tensor(tensor, "reduce");
  check_reduction(tensor, op, "reduce");
  const State state = impl_->start(info_of("reduce", tensor, root), [&] {
    return fingerprint(tensor, fmt::format("{} root {}", detail::name(op), root));
  });
  if (impl_->alone() || tensor.numel() == 0) return done(state);
  Backend& backend = impl_->backend_for(tensor);
  if (rank() == root) count_write(tensor);
  const ReductionPlan plan = plan_reduction(tensor.scalar_type(), op, backend);
  const StagedTensor staged = stage(tensor, backend, plan);
  at::Tensor rows;
  if (plan.by_gather) rows = at::empty({size(), staged.flat.numel()}, staged.flat.options());
  if (rank() == root) finish_reduction(state, plan, staged, rows, size());
  impl_->launch(state, [&] {
    if (plan.by_gather) {
      backend.all_gather(state, bytes_of(rows.view({-1})), bytes_of(staged.flat));
    } else {
      backend.reduce(state, staged.flat, root, plan.op);
    }
  });
  return Work(state);
}

Work World::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) {
  const ledger::CallSite here;
  check_pair(input, output, size(), "reduce_scatter");
  check_reduction(input, op, "reduce_scatter");
  const State state = impl_->start(info_of("reduce_scatter", input),
                                   [&] { return fingerprint(input, detail::name(op)); });
  if (input.numel() == 0) return done(state);
  if (impl_->alone()) return copied(state, output, input);
  Backend& backend = impl_->backend_for(input);
  count_write(output);
  const ReductionPlan plan = plan_reduction(input.scalar_type(), op, backend);
  const StagedTensor from = stage(input, backend, plan);
  const StagedTensor to = stage(output, backend, plan, /*fill=*/false);
  at::Tensor rows;
  at::Tensor mine;
  if (plan.by_gather) {
    rows = at::empty({size(), from.flat.numel()}, from.flat.options());
    mine = rows.narrow(1, rank() * to.flat.numel(), to.flat.numel());
  }
  finish_reduction(state, plan, to, mine, size());
  state->keep_alive({from.flat});
  impl_->launch(state, [&] {
    if (plan.by_gather) {
      backend.all_gather(state, bytes_of(rows.view({-1})), bytes_of(from.flat));
    } else {
      backend.reduce_scatter(state, to.flat, from.flat, plan.op);
    }
  });
  return Work(state);
}

// ---------------------------------------------------------------- moving bytes

Work World::broadcast(at::Tensor tensor, int root) {
  const ledger::CallSite here;
  check_rank(*impl_, root, "broadcast");
  check_tensor(tensor, "broadcast");
  const State state = impl_->start(info_of("broadcast", tensor, root), [&] {
    return fingerprint(tensor, fmt::format("root {}", root));
  });
  if (impl_->alone() || tensor.numel() == 0) return done(state);
  Backend& backend = impl_->backend_for(tensor);
  if (rank() != root) count_write(tensor);
  const StagedTensor staged = stage_bytes(tensor, backend, rank() == root);
  if (rank() != root) return_to_caller(state, {staged});
  impl_->launch(state, [&] { backend.broadcast(state, staged.flat, root); });
  return Work(state);
}

Work World::all_gather(at::Tensor output, at::Tensor input) {
  const ledger::CallSite here;
  check_pair(output, input, size(), "all_gather");
  const State state =
      impl_->start(info_of("all_gather", input), [&] { return fingerprint(input); });
  if (input.numel() == 0) return done(state);
  if (impl_->alone()) return copied(state, output, input);
  Backend& backend = impl_->backend_for(input);
  count_write(output);
  const StagedTensor from = stage_bytes(input, backend);
  const StagedTensor to = stage_bytes(output, backend, /*fill=*/false);
  return_to_caller(state, {to});
  state->keep_alive({from.flat});
  impl_->launch(state, [&] { backend.all_gather(state, to.flat, from.flat); });
  return Work(state);
}

Work World::gather(std::vector<at::Tensor> outputs, at::Tensor input, int root) {
  const ledger::CallSite here;
  check_root_list(*impl_, outputs, input, root, /*gathers=*/true);
  const State state = impl_->start(info_of("gather", input, root), [&] {
    return fingerprint(input, fmt::format("root {}", root));
  });
  if (input.numel() == 0) return done(state);
  if (impl_->alone()) return copied(state, outputs[0], input);
  Backend& backend = impl_->backend_for(input);
  for (const auto& output : outputs) count_write(output);
  const StagedTensor from = stage_bytes(input, backend);
  const std::vector<StagedTensor> to = stage_all(outputs, backend, /*fill=*/false);
  return_to_caller(state, to);
  state->keep_alive({from.flat});
  impl_->launch(state, [&] { backend.gather(state, flat_of(to), from.flat, root); });
  return Work(state);
}

Work World::scatter(at::Tensor output, std::vector<at::Tensor> inputs, int root) {
  const ledger::CallSite here;
  check_root_list(*impl_, inputs, output, root, /*gathers=*/false);
  const State state = impl_->start(info_of("scatter", output, root), [&] {
    return fingerprint(output, fmt::format("root {}", root));
  });
  if (output.numel() == 0) return done(state);
  if (impl_->alone()) return copied(state, output, inputs[0]);
  Backend& backend = impl_->backend_for(output);
  count_write(output);
  const StagedTensor to = stage_bytes(output, backend, /*fill=*/false);
  const std::vector<StagedTensor> from = stage_all(inputs, backend, /*fill=*/true);
  return_to_caller(state, {to});
  state->keep_alive(flat_of(from));
  impl_->launch(state, [&] { backend.scatter(state, to.flat, flat_of(from), root); });
  return Work(state);
}

Work World::all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
  const ledger::CallSite here;
  const auto size_of = static_cast<std::size_t>(size());
  if (outputs.size() != size_of || inputs.size() != size_of) {
    throw UsageError(kComponent,
                     "all_to_all: {} outputs and {} inputs in a world of {}. Give one "
                     "tensor per rank in both lists.",
                     outputs.size(), inputs.size(), size());
  }
  for (const auto& tensor : outputs) check_tensor(tensor, "all_to_all");
  for (const auto& tensor : inputs) check_tensor(tensor, "all_to_all");
  // Sizes may differ from rank to rank, so only the dtype has to agree.
  const State state = impl_->start(info_of("all_to_all", inputs[0]), [&] {
    return std::string(c10::toString(inputs[0].scalar_type()));
  });
  check_pair(outputs[static_cast<std::size_t>(rank())], inputs[static_cast<std::size_t>(rank())], 1,
             "all_to_all");
  if (impl_->alone()) return copied(state, outputs[0], inputs[0]);
  Backend& backend = impl_->backend_for(inputs[0]);
  for (const auto& output : outputs) count_write(output);
  const std::vector<StagedTensor> from = stage_all(inputs, backend, /*fill=*/true);
  const std::vector<StagedTensor> to = stage_all(outputs, backend, /*fill=*/false);
  return_to_caller(state, to);
  state->keep_alive(flat_of(from));
  impl_->launch(state, [&] { backend.all_to_all(state, flat_of(to), flat_of(from)); });
  return Work(state);
}

// ---------------------------------------------------------------- shared memory

std::vector<at::Tensor> World::symmetric(at::IntArrayRef sizes, at::ScalarType dtype) {
  const ledger::CallSite here;
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  const OperationInfo info{"symmetric", 0, dtype, c10::multiply_integers(sizes), -1};
  const State state = impl_->start(
      info, [&] { return fmt::format("{} [{}]", c10::toString(dtype), fmt::join(sizes, ", ")); });
  std::vector<at::Tensor> parts;
  if (!impl_->alone() && bytes > 0) parts = impl_->host->symmetric(bytes, state->deadline());
  for (auto& part : parts) part = part.view(dtype).view(sizes);
  state->complete();
  return parts;
}

at::Tensor World::symmetric_empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  const ledger::CallSite here;
  if (device().is_cpu()) {
    if (const auto parts = symmetric(sizes, dtype); !parts.empty())
      return parts[static_cast<std::size_t>(rank())];
  }
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device()));
}

// ---------------------------------------------------------------- messages

Work World::send(at::Tensor tensor, int peer) {
  const ledger::CallSite here;
  return batch_isend_irecv({{P2p::Kind::kSend, std::move(tensor), peer}});
}

Work World::recv(at::Tensor tensor, int peer) {
  const ledger::CallSite here;
  return batch_isend_irecv({{P2p::Kind::kRecv, std::move(tensor), peer}});
}

Work World::batch_isend_irecv(std::vector<P2p> messages) {
  const ledger::CallSite here;
  const bool single = messages.size() == 1;
  const char* operation = !single                                ? "batch"
                          : messages[0].kind == P2p::Kind::kSend ? "send"
                                                                 : "recv";
  for (const auto& message : messages) {
    check_rank(*impl_, message.peer, operation);
    check_tensor(message.tensor, operation);
  }
  if (messages.empty()) return Work();
  const State state =
      impl_->start_message(info_of(operation, messages[0].tensor, single ? messages[0].peer : -1));
  deliver_to_self(*impl_, messages);
  std::erase_if(messages, [&](const P2p& message) {
    return message.peer == rank() || message.tensor.numel() == 0;
  });
  if (messages.empty()) return done(state);
  Backend& backend = impl_->backend_for(messages[0].tensor);
  std::vector<StagedTensor> received;
  std::vector<at::Tensor> alive;
  for (auto& message : messages) {
    const bool sends = message.kind == P2p::Kind::kSend;
    if (!sends) count_write(message.tensor);
    const StagedTensor staged = stage_bytes(message.tensor, backend, sends);
    message.tensor = staged.flat;
    alive.push_back(staged.flat);
    if (!sends) received.push_back(staged);
  }
  return_to_caller(state, std::move(received));
  state->keep_alive(std::move(alive));
  impl_->launch(state, [&] { backend.point_to_point(state, std::move(messages)); });
  return Work(state);
}

// ---------------------------------------------------------------- names

const char* detail::name(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "avg", "min", "max", "product", "and", "or", "xor"};
  return kNames[static_cast<std::size_t>(op)];
}

bool detail::is_bitwise(ReduceOp op) {
  return op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
}

}  // namespace lockstep
