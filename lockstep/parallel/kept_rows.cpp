#include "lockstep/parallel/kept_rows.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <iterator>
#include <utility>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"
#include "lockstep/parallel/sharding.h"

namespace lockstep::parallel {
namespace {

// Of a few elements: torch::optim::SGD writes past the version counters. On a device it would wait.
std::uint64_t print_of_some(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.numel() == 0) return 0;
  const auto* const bytes = static_cast<const char*>(tensor.const_data_ptr());
  const auto size = static_cast<std::size_t>(tensor.element_size());
  const auto count = static_cast<std::size_t>(tensor.numel());
  std::array<char, 3 * sizeof(c10::complex<double>)> some{};
  std::memcpy(some.data(), bytes, size);
  std::memcpy(some.data() + size, bytes + count / 2 * size, size);
  std::memcpy(some.data() + 2 * size, bytes + (count - 1) * size, size);
  return fingerprint(some.data(), 3 * size);
}

}  // namespace

const char* name(Shard shard) {
  if (shard == Shard::kState) return "kState";
  return shard == Shard::kGradients ? "kGradients" : "kAll";
}

const char* divided_by(Shard shard) {
  if (shard == Shard::kState) return "state";
  return shard == Shard::kGradients ? "gradients and state" : "fully";
}

void check_mode(const FullyShardOptions& options, const std::string& divided_further) {
  if (options.shard == Shard::kAll) return;
  const std::string other = options.param_dtype   ? "param_dtype"
                            : options.cpu_offload ? "cpu_offload"
                                                  : divided_further;
  if (!other.empty())
    throw UsageError(kFullyShard,
                     "Shard::{} keeps parameters whole and as they are, and does not go with {}. "
                     "Use Shard::kAll, or leave that out.",
                     name(options.shard), other);
}

void check_shardable(const torch::nn::Module& module) {
  const std::vector<std::string> sparse = sparse_embeddings(module);
  if (!sparse.empty())
    throw UsageError(kFullyShard,
                     "parameter '{}' belongs to a sparse embedding, whose gradients are not "
                     "divided by rows. Make it dense (sparse = false), or use "
                     "DistributedDataParallel (shard_optimizer: false).",
                     sparse.front());
  ModelTensors(parameters_of(module), buffers_of(module), {}).check_own_memory();
}

KeptRows::KeptRows(std::vector<ShardUnit>& units, World& shard, bool shared)
    : shard_(shard), shared_(shared), debug_(env::get_bool("LOCKSTEP_DEBUG").value_or(false)) {
  for (ShardUnit& unit : units) {
    std::vector<std::vector<ShardedParameter*>> of_unit;
    for (ShardedParameter& p : unit.parameters()) {
      kept_.push_back({.p = &p});
      auto found = std::ranges::find_if(of_unit, [&](const auto& members) {
        return members[0]->tensor.scalar_type() == p.tensor.scalar_type() &&
               members[0]->tensor.device() == p.tensor.device();
      });
      if (found == of_unit.end()) found = of_unit.emplace(found);
      found->push_back(&p);
    }
    for (auto& members : of_unit) messages_.push_back(std::move(members));
  }
}

KeptRows::~KeptRows() {
  if (!shared_) return;
  const at::NoGradGuard no_grad;
  try {
    for (const Kept& kept : kept_)
      if (kept.p->tensor.storage().is_alias_of(kept.p->storage))
        kept.p->tensor.set_data(kept.p->tensor.detach().clone());
  } catch (const std::exception& e) {
    log::warning(kFullyShard, "the model could not be given its own memory back: {}", e.what());
  }
}

// A message is copied while the next one is under way.
void KeptRows::publish() {
  if (!shared_ && shard_.size() > 1) {
    const at::NoGradGuard no_grad;
    Message before;
    for (const auto& members : messages_) {
      Message message;
      std::ranges::copy_if(members, std::back_inserter(message.members),
                           [](const auto* p) { return p->tensor.requires_grad(); });
      if (message.members.empty()) continue;
      begin(message);
      end(before);
      before = std::move(message);
    }
    end(before);
  }
}

void KeptRows::remember() {
  for (Kept& kept : kept_) {
    kept.version = kept.p->tensor._version();
    kept.print = print_of(kept.p->tensor);
  }
  written_ = 0;
}

std::uint64_t KeptRows::print_of(const at::Tensor& tensor) const {
  return debug_ ? fingerprint(tensor) : print_of_some(tensor);
}

// Memory of one's own may be written and restored, as it is in order to look at averages.
bool KeptRows::written(const Kept& kept) const {
  const at::Tensor& tensor = kept.p->tensor;
  if (!shared_ && !tensor.requires_grad()) return false;  // is neither stepped nor sent
  const bool counts = shared_ || !tensor.is_cpu();
  return (counts && tensor._version() != kept.version) || print_of(tensor) != kept.print;
}

void KeptRows::begin(Message& message) const {
  std::int64_t length = 0;
  for (const ShardedParameter* const p : message.members) length += p->cut.padded();
  const at::Tensor rows =
      at::zeros({length}, message.members[0]->tensor.options().requires_grad(false));
  std::int64_t offset = 0;
  for (const ShardedParameter* const p : message.members) {
    const at::Tensor& mine = p->rows->values;
    rows.narrow(0, offset, mine.numel()).copy_(mine);
    offset += p->cut.padded();
  }
  message.parts = at::empty({shard_.size(), length}, rows.options());
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);  // shm copies here
  message.work = shard_.all_gather(message.parts, rows);
}

void KeptRows::end(Message& message) {
  if (message.members.empty()) return;
  {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    message.work.wait();
  }
  std::int64_t offset = 0;
  for (const ShardedParameter* const p : message.members) {
    copy_from_parts(p->cut, message.parts.narrow(1, offset, p->cut.padded()), p->tensor.detach());
    offset += p->cut.padded();
  }
}

void KeptRows::check_forms() const {
  for (const Kept& kept : kept_) {
    const ShardedParameter& p = *kept.p;
    const auto moved = [&](const std::string& to) {
      throw UsageError(kFullyShard,
                       "parameter '{}' was {} after the model was divided. Change the model first, "
                       "then make FullyShard and its optimizer.",
                       p.name, to);
    };
    if (p.tensor.scalar_type() != p.shard.scalar_type())
      moved(fmt::format("moved to {}", c10::toString(p.tensor.scalar_type())));
    if (p.tensor.device() != p.shard.device()) moved("moved to " + p.tensor.device().str());
    if (p.tensor.numel() != p.cut.rows * p.cut.row_size)
      moved(fmt::format("given the shape [{}]", fmt::join(p.tensor.sizes(), ", ")));
  }
}

Fingerprints KeptRows::fingerprints() const {
  Fingerprints prints;
  for (const Kept& kept : kept_) prints.add(kept.p->name, kept.p->tensor);
  return prints;
}

// Memory that all ranks map is always equal, whoever wrote it.
void KeptRows::verify(World& world) const {
  require_same(world,
               {.component = kFullyShard,
                .what = "verify_parameters()",
                .refusal = refusal_of([this] { check(); })},
               "parameter", "", fingerprints());
}

void KeptRows::check_equal(World& world, const ModelTensors& model) const {
  const Check check{
      .component = kFullyShard, .what = "sync_from_model()", .refusal = refusal_of([&] {
                                                               check_forms();
                                                               model.check_own_memory();
                                                             })};
  if (const auto difference = find_difference(world, check, fingerprints()))
    throw UsageError(kFullyShard,
                     "sync_from_model(): parameter '{}' on {} is not what it is on rank 0. Perhaps "
                     "weights were loaded on some ranks only, or from different files. Load the "
                     "same ones on every rank.",
                     difference->name, show_ranks(difference->ranks));
}

void KeptRows::check() const {
  check_forms();
  for (const Kept& kept : kept_) {
    const ShardedParameter& p = *kept.p;
    if (!p.tensor.storage().is_alias_of(p.storage))
      throw UsageError(kFullyShard,
                       "parameter '{}' was given other memory (set_data, torch::load), so that its "
                       "rows cannot be stepped. Call the optimizer's sync_from_model() on every "
                       "rank after loading weights.",
                       p.name);
    if (written(kept))
      throw UsageError(kFullyShard,
                       "parameter '{}' was written between steps, by something else than step(). "
                       "Another optimizer (torch::optim) must not step it: its gradient is this "
                       "rank's own. After loading weights on every rank call the optimizer's "
                       "sync_from_model().",
                       p.name);
  }
}

void KeptRows::check_backward() {
  const auto found =
      std::ranges::find_if(kept_, [this](const Kept& kept) { return written(kept); });
  if (found == kept_.end()) return;
  std::vector<std::uint64_t> all;
  for (const Kept& kept : kept_) {
    all.push_back(static_cast<std::uint64_t>(kept.p->tensor._version()));
    all.push_back(print_of(kept.p->tensor));
  }
  const std::uint64_t now = fingerprint(all.data(), all.size() * sizeof(std::uint64_t));
  const std::uint64_t before = std::exchange(written_, now);
  if (before == 0 || before == now) return;
  throw UsageError(kFullyShard,
                   "parameter '{}' is written between backward passes, and step() is not called. "
                   "Perhaps a torch::optim optimizer steps the model: gradients are this rank's "
                   "own, and averaged by the optimizer of make_optimizer() alone. Call its step(); "
                   "after loading weights on every rank call its sync_from_model().",
                   found->p->name);
}

// Of what all ranks map each rank writes its own rows.
void KeptRows::take_back() {
  const at::NoGradGuard no_grad;
  for (const Kept& kept : kept_) {
    const ShardedParameter& p = *kept.p;
    if (p.tensor.storage().is_alias_of(p.storage)) continue;
    const at::Tensor given = p.tensor.detach().contiguous();
    at::Tensor whole = at::empty({0}, p.tensor.options().requires_grad(false));
    whole.set_(p.storage, 0, given.sizes(), given.strides());
    const at::Tensor flat = given.view({-1});
    if (shared_)
      at::Tensor(p.rows->values).copy_(flat.narrow(0, p.rows->begin, p.rows->values.numel()));
    else
      whole.copy_(given);
    p.tensor.set_data(whole);
  }
}

}  // namespace lockstep::parallel
