#include "lockstep/parallel/pipeline.h"

#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/nn/divided.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/divided.h"
#include "lockstep/parallel/pipeline_impl.h"

namespace lockstep::parallel {
namespace {

using Kind = PipelineStep::Kind;

// ---------------------------------------------------------------- a window

// What a border needs to be known by, as a message: type, gradient, dimensions, sizes.
constexpr std::int64_t kHeader = 16;

at::Tensor to_header(const Border& border, c10::Device device) {
  std::vector<std::int64_t> values{static_cast<std::int64_t>(border.dtype), border.needs_gradient,
                                   static_cast<std::int64_t>(border.sizes.size())};
  values.insert(values.end(), border.sizes.begin(), border.sizes.end());
  if (values.size() > kHeader)
    throw UsageError(kPipeline, "a stage returned a tensor of {} dimensions, and {} are the most.",
                     border.sizes.size(), kHeader - 3);
  values.resize(kHeader);
  return at::tensor(values, at::kLong).to(device);
}

Border from_header(const at::Tensor& message) {
  const at::Tensor header = message.cpu();
  const std::int64_t* const v = header.const_data_ptr<std::int64_t>();
  return {.sizes = {v + 3, v + 3 + v[2]},
          .dtype = static_cast<at::ScalarType>(v[0]),
          .needs_gradient = v[1] != 0};
}

// The whole model is the stage again when it ends.
class StageScope {
 public:
  StageScope(nn::Staged& module, nn::Staged::Stage stage) : module_(module) {
    module_.set_stage(std::move(stage));
  }
  ~StageScope() { module_.set_stage({}); }
  StageScope(const StageScope&) = delete;
  StageScope& operator=(const StageScope&) = delete;

 private:
  nn::Staged& module_;
};

void wait_for(Work& work) {
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  work.wait();
}

// Runs this rank's steps. Of each stage and micro-batch that is under way it has the input, as a
// leaf of the graph, and the output.
class WindowRun {
 public:
  WindowRun(PipelineImpl& model, const std::vector<PipelineImpl::Pass>& passes)
      : model_(model), passes_(passes), line_(model.line()), losses_(passes.size()) {}

  void run(const std::vector<PipelineStep>& steps) {
    for (const PipelineStep& step : steps) run(step);
    for (Work& send : sends_) wait_for(send);
  }

  // The losses of all micro-batches, in double, on every rank of the pipeline.
  std::vector<at::Tensor> losses() {
    const at::NoGradGuard no_grad;
    at::Tensor all = at::zeros({static_cast<std::int64_t>(passes_.size())},
                               at::dtype(at::kDouble).device(line_.device()));
    const int last = (model_.stages() - 1) % line_.size();
    if (line_.rank() == last)
      for (std::size_t k = 0; k < losses_.size(); ++k)
        all[static_cast<std::int64_t>(k)].copy_(losses_[k].reshape({}));
    if (line_.size() > 1) line_.broadcast(all, last).wait();
    return all.unbind(0);
  }

 private:
  struct Flight {
    at::Tensor input, output, output_gradient, input_gradient;
    Work input_arrives, gradient_arrives;
  };

  void run(const PipelineStep& step) {
    switch (step.kind) {
      case Kind::kForward:
        return forward(step);
      case Kind::kBackward:
        return backward(step);
      case Kind::kSendOutput:
        return send_output(step);
      case Kind::kRecvInput:
        return receive_input(step);
      case Kind::kSendGradient:
        return send_gradient(step);
      case Kind::kRecvGradient:
        return receive_gradient(step);
    }
  }

  Flight& flight(int stage, int micro_batch) { return flights_[{stage, micro_batch}]; }
  Flight& flight(const PipelineStep& step) { return flight(step.stage, step.micro_batch); }
  const PipelineImpl::Pass& pass(const PipelineStep& step) const {
    return passes_[static_cast<std::size_t>(step.micro_batch)];
  }
  bool is_last(int stage) const { return stage == model_.stages() - 1; }

  void forward(const PipelineStep& step) {
    Flight& here = flight(step);
    wait_for(here.input_arrives);
    if (step.stage > 0)
      here.input.set_requires_grad(model_.border(step.stage - 1, pass(step).sizes)->needs_gradient);
    const ledger::PhaseScope phase(ledger::Phase::kForward);
    const StageScope scope(model_.module(), model_.stage(step.stage, here.input));
    here.output = pass(step).forward();
    if (is_last(step.stage)) {
      if (here.output.numel() != 1)
        throw UsageError(kPipeline,
                         "the loss has {} elements. It must be the mean over the micro-batch.",
                         here.output.numel());
      losses_[static_cast<std::size_t>(step.micro_batch)] = here.output.detach();
      here.output = pass(step).weigh(here.output);
    } else {
      settle_border(step);
      if (line_.size() == 1) flight(step.stage + 1, step.micro_batch).input = here.output.detach();
    }
  }

  // The first output for samples of a size says what the next stage has to expect.
  void settle_border(const PipelineStep& step) {
    const at::Tensor& output = flight(step).output;
    const Border now{output.sizes().vec(), output.scalar_type(), output.requires_grad()};
    const Border* const agreed = model_.border(step.stage, pass(step).sizes);
    new_border_ = agreed == nullptr;
    if (new_border_) model_.agree(step.stage, pass(step).sizes, now);
    if (new_border_ || *agreed == now) return;
    const auto text = [](const Border& b) {
      return fmt::format("{} [{}]{}", c10::toString(b.dtype), fmt::join(b.sizes, ", "),
                         b.needs_gradient ? "" : " without a gradient");
    };
    throw UsageError(kPipeline,
                     "rank {}: stage {} returned {} for micro-batch {}, and {} before, so that the "
                     "next stage waits for the wrong message. Give passes whose samples differ in "
                     "shape their sizes (Pass::sizes, MicroBatch::sizes).",
                     line_.rank(), step.stage, text(now), step.micro_batch, text(*agreed));
  }

  void backward(const PipelineStep& step) {
    Flight& here = flight(step);
    wait_for(here.gradient_arrives);
    const ledger::PhaseScope phase(ledger::Phase::kBackward);
    if (is_last(step.stage)) {
      if (here.output.defined()) here.output.backward();
    } else if (here.output.requires_grad()) {
      torch::autograd::backward({here.output}, {here.output_gradient});
    }
    Flight done = std::move(here);
    flights_.erase({step.stage, step.micro_batch});
    if (step.stage == 0 || !done.input.requires_grad()) return;
    at::Tensor gradient = done.input.grad();
    // A micro-batch without targets, or a stage that does not use its input.
    if (!gradient.defined()) gradient = at::zeros_like(done.input);
    if (line_.size() == 1)
      flight(step.stage - 1, step.micro_batch).output_gradient = gradient;
    else
      flight(step).input_gradient = gradient;
  }

  void send_output(const PipelineStep& step) {
    const at::Tensor output = flight(step).output.detach().contiguous();
    if (new_border_)
      send(to_header(*model_.border(step.stage, pass(step).sizes), line_.device()), step.peer);
    send(output, step.peer);
  }

  void receive_input(const PipelineStep& step) {
    const std::vector<std::int64_t>& sizes = pass(step).sizes;
    if (model_.border(step.stage - 1, sizes) == nullptr) {
      const at::Tensor header = at::empty({kHeader}, at::dtype(at::kLong).device(line_.device()));
      Work arrives = line_.recv(header, step.peer);
      wait_for(arrives);
      model_.agree(step.stage - 1, sizes, from_header(header));
    }
    const Border& border = *model_.border(step.stage - 1, sizes);
    Flight& here = flight(step);
    here.input = at::empty(border.sizes, at::dtype(border.dtype).device(line_.device()));
    here.input_arrives = line_.recv(here.input, step.peer);
  }

  void send_gradient(const PipelineStep& step) {
    const auto found = flights_.find({step.stage, step.micro_batch});
    if (found == flights_.end()) return;  // the stage before needs none
    send(found->second.input_gradient.contiguous(), step.peer);
    flights_.erase(found);
  }

  void receive_gradient(const PipelineStep& step) {
    Flight& here = flight(step);
    if (!here.output.requires_grad()) return;
    here.output_gradient = at::empty(here.output.sizes(), here.output.options());
    here.gradient_arrives = line_.recv(here.output_gradient, step.peer);
  }

  // A message that was sent holds its tensor no longer than it must.
  void send(const at::Tensor& tensor, int peer) {
    std::erase_if(sends_, [](const Work& work) { return work.done(); });
    sends_.push_back(line_.send(tensor, peer));
  }

  PipelineImpl& model_;
  const std::vector<PipelineImpl::Pass>& passes_;
  World& line_;
  std::vector<at::Tensor> losses_;
  std::map<std::pair<int, int>, Flight> flights_;  // by stage and micro-batch
  std::vector<Work> sends_;
  bool new_border_ = false;  // that of the forward before: the next stage does not know it yet
};

}  // namespace

// ---------------------------------------------------------------- the module

PipelineImpl::PipelineImpl(torch::nn::Module& module, Mesh mesh, PipelineOptions options)
    : mesh_(std::move(mesh)),
      line_(mesh_["pipeline"]),
      options_(options),
      staged_(dynamic_cast<nn::Staged*>(&module)) {
  if (options_.stages_per_rank == 0)
    options_.stages_per_rank = options_.schedule == PipelineSchedule::kInterleaved1F1B ? 2 : 1;
  const auto refusal = refusal_of([&] { check(module); });
  const auto other = find_other_line(
      mesh_.world(), {.component = kPipeline, .what = "this module", .refusal = refusal},
      describe());
  if (other)
    throw UsageError(kPipeline,
                     "rank {} has '{}', but rank 0 has '{}'. Ranks hold stages of one model. Build "
                     "the same one, with the same options, on every rank.",
                     other->rank, other->here, other->first);
  model_.broadcast(mesh_.world(), 0);
  const at::NoGradGuard no_grad;
  for (StagedParameter& p : parameters_) {
    if (p.mine) continue;
    own_memory(p.tensor);
    p.freed = nn::storage_that_throws(
        p.tensor.nbytes(), p.tensor.device(),
        fmt::format("[{}] parameter '{}' was used on a rank whose stages do not have it. "
                    "Run forward and backward by run_window() or Accumulation, and hold "
                    "gathered() while you use parameters.",
                    kPipeline, p.name));
  }
  free_others();
}

void PipelineImpl::check(torch::nn::Module& module) {
  if (staged_ == nullptr)
    throw UsageError(kPipeline,
                     "the module {} cannot be computed in stages. Derive it from nn::Staged "
                     "(lockstep/nn/staged.h), as the bundled language models are.",
                     module.name());
  if (mesh_.size("shard") > 1 || mesh_.size("tensor") > 1)
    throw UsageError(kPipeline,
                     "the mesh ({}) has ranks along axes other than 'data' and 'pipeline'. Leave "
                     "them out.",
                     mesh_.text());
  const bool interleaves = options_.schedule == PipelineSchedule::kInterleaved1F1B;
  if (options_.stages_per_rank < 1 || (options_.stages_per_rank > 1 && !interleaves))
    throw UsageError(kPipeline,
                     "stages_per_rank = {} with the schedule {}. Ranks have several stages with "
                     "Interleaved1F1B alone; leave it out, or choose that schedule.",
                     options_.stages_per_rank, name(options_.schedule));
  const nn::Staged::Parts parts = staged_->parts();
  const int blocks = static_cast<int>(parts.blocks.size());
  if (blocks < stages())
    throw UsageError(kPipeline,
                     "{} stages ({} ranks x {}), and the model has {} blocks. Every stage needs "
                     "one. Use fewer ranks along 'pipeline'{}.",
                     stages(), line_.size(), options_.stages_per_rank, blocks,
                     interleaves ? ", fewer stages_per_rank, or the schedule 1F1B" : "");
  model_ = ModelTensors(parameters_of(module), buffers_of(module), {});
  begins_ = split_blocks(blocks, stages());
  assign_parts(parts);
}

void PipelineImpl::assign_parts(const nn::Staged::Parts& parts) {
  std::unordered_map<at::TensorImpl*, std::size_t> index;
  for (const ModelParameter& p : model_.parameters()) {
    index.emplace(p.tensor.unsafeGetTensorImpl(), parameters_.size());
    parameters_.push_back({.name = p.name, .tensor = p.tensor});
  }
  const auto give = [&](const std::vector<at::Tensor>& tensors, int stage) {
    for (const at::Tensor& tensor : tensors) {
      const auto found = index.find(tensor.unsafeGetTensorImpl());
      if (found == index.end()) continue;  // a buffer
      std::vector<int>& holders = parameters_[found->second].holders;
      const int rank = stage % line_.size();
      if (std::ranges::find(holders, rank) == holders.end()) holders.push_back(rank);
    }
  };
  give(parts.first, 0);
  for (int stage = 0; stage < stages(); ++stage)
    for (int i = begins_[static_cast<std::size_t>(stage)];
         i < begins_[static_cast<std::size_t>(stage) + 1]; ++i)
      give(parts.blocks[static_cast<std::size_t>(i)], stage);
  give(parts.last, stages() - 1);
  for (StagedParameter& p : parameters_) {
    if (p.holders.empty())
      throw UsageError(kPipeline,
                       "parameter '{}' is in none of the module's parts(). Name what computes with "
                       "it: first, a block, or last.",
                       p.name);
    std::ranges::sort(p.holders);
    p.mine = std::ranges::find(p.holders, line_.rank()) != p.holders.end();
  }
}

std::string PipelineImpl::describe() const {
  std::string text = fmt::format("schedule: {}\nstages_per_rank: {}\n", name(options_.schedule),
                                 options_.stages_per_rank);
  for (const StagedParameter& p : parameters_)
    text += fmt::format("{}: {}, shape [{}]{}, rank {}\n", p.name,
                        c10::toString(p.tensor.scalar_type()), fmt::join(p.tensor.sizes(), ", "),
                        p.tensor.requires_grad() ? "" : ", frozen", fmt::join(p.holders, " and "));
  return text + model_.describe_buffers();
}

// The hooks refuse functions that look at all gradients, such as clip_grad_norm_: a rank has those
// of its stages.
void PipelineImpl::install() {
  if (line_.size() == 1) return;
  const std::weak_ptr<PipelineImpl> self = weak_from_this();
  using Variables = std::vector<at::Tensor>;
  for (const StagedParameter& p : parameters_) {
    if (!p.mine || !p.tensor.requires_grad()) continue;
    accumulators_.push_back(torch::autograd::impl::grad_accumulator(p.tensor));
    accumulators_.back()->add_post_hook(std::make_unique<optim::GradientHook>(
        [](const Variables& outputs, const Variables&) -> Variables { return outputs; },
        [self] {
          const auto alive = self.lock();
          return alive && !alive->stepping;
        }));
  }
}

nn::Staged::Stage PipelineImpl::stage(int index, at::Tensor input) const {
  const auto at = static_cast<std::size_t>(index);
  return {.begin = static_cast<std::size_t>(begins_[at]),
          .end = static_cast<std::size_t>(begins_[at + 1]),
          .first = index == 0,
          .last = index == stages() - 1,
          .input = std::move(input)};
}

const Border* PipelineImpl::border(int index, const std::vector<std::int64_t>& sizes) const {
  const auto found = borders_.find({index, sizes});
  return found == borders_.end() ? nullptr : &found->second;
}

void PipelineImpl::agree(int index, const std::vector<std::int64_t>& sizes, Border border) {
  borders_.insert_or_assign({index, sizes}, std::move(border));
}

// ---------------------------------------------------------------- memory

void PipelineImpl::free_others() {
  if (!std::exchange(whole_, false)) return;
  for (const StagedParameter& p : parameters_)
    if (!p.mine) p.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(p.freed);
}

void PipelineImpl::gather_others() {
  if (std::exchange(whole_, true)) return;
  const at::NoGradGuard no_grad;
  std::vector<std::vector<at::Tensor>> from(static_cast<std::size_t>(line_.size()));
  for (const StagedParameter& p : parameters_) {
    if (!p.mine)
      p.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
          at::empty(p.tensor.sizes(), p.tensor.options()).storage());
    // A copy of a weight that stages share stays as it is, so that verify_parameters() sees it.
    const bool copy = p.mine && p.holders[0] != line_.rank();
    from[static_cast<std::size_t>(p.holders[0])].push_back(copy ? at::empty_like(p.tensor)
                                                                : p.tensor.detach());
  }
  for (int rank = 0; rank < line_.size(); ++rank)
    if (!from[static_cast<std::size_t>(rank)].empty())
      broadcast_coalesced(line_, from[static_cast<std::size_t>(rank)], rank);
}

std::shared_ptr<void> PipelineImpl::gathered() {
  if (line_.size() > 1) gather_others();
  std::shared_ptr<void> held = held_.lock();
  if (!held) held_ = held = std::make_shared<int>();
  return held;
}

// ---------------------------------------------------------------- a window's passes and its end

std::vector<at::Tensor> PipelineImpl::run_window(const std::vector<Pass>& passes) {
  if (passes.empty())
    throw UsageError(kPipeline, "a window without micro-batches. Give run_window() at least one.");
  if (held_.expired()) free_others();
  const auto found = programs_.find(passes.size());
  if (found == programs_.end()) {
    auto programs =
        pipeline_programs(options_.schedule, {.ranks = line_.size(),
                                              .stages_per_rank = options_.stages_per_rank,
                                              .micro_batches = static_cast<int>(passes.size())});
    programs_[passes.size()] = std::move(programs[static_cast<std::size_t>(line_.rank())]);
  }
  std::vector<at::Tensor> losses;
  try {
    WindowRun window(*this, passes);
    window.run(programs_[passes.size()]);
    losses = window.losses();
  } catch (const std::exception& error) {
    // The others wait for messages that will not come.
    if (line_.size() > 1)
      line_.abort(fmt::format("stage {} failed: {}", line_.rank(), error.what()));
    throw;
  }
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  const at::NoGradGuard no_grad;
  add_shared_gradients();
  average_gradients();
  return losses;
}

// Every holder adds the gradients of all, in rank order, so that their copies stay the same.
void PipelineImpl::add_shared_gradients() {
  std::vector<P2p> messages;
  std::vector<std::pair<at::Tensor, std::vector<at::Tensor>>> sums;
  for (const StagedParameter& p : parameters_) {
    if (!p.mine || p.holders.size() == 1 || !p.tensor.requires_grad()) continue;
    at::Tensor own = p.tensor.grad();
    if (!own.defined()) own = at::zeros_like(p.tensor);
    auto& terms = sums.emplace_back(p.tensor, std::vector<at::Tensor>{}).second;
    for (const int holder : p.holders) {
      const bool here = holder == line_.rank();
      terms.push_back(here ? own.contiguous() : at::empty_like(own, at::MemoryFormat::Contiguous));
      if (here) continue;
      messages.push_back({P2p::Kind::kSend, own.contiguous(), holder});
      messages.push_back({P2p::Kind::kRecv, terms.back(), holder});
    }
  }
  if (messages.empty()) return;
  line_.batch_isend_irecv(std::move(messages)).wait();
  for (auto& [tensor, terms] : sums) {
    at::Tensor sum = terms[0].clone();
    for (std::size_t i = 1; i < terms.size(); ++i) sum.add_(terms[i]);
    tensor.mutable_grad() = sum;
  }
}

// Over the ranks that hold copies of these stages, several parameters at a time. A parameter that
// some of them did not use counts as zero there.
void PipelineImpl::average_gradients() {
  World& copies = mesh_.batch();
  if (copies.size() == 1) return;
  std::vector<at::Tensor> mine;
  for (const StagedParameter& p : parameters_)
    if (p.mine && p.tensor.requires_grad()) mine.push_back(p.tensor);
  if (mine.empty()) return;
  at::Tensor used = at::zeros({static_cast<std::int64_t>(mine.size())}, at::kFloat);
  for (std::size_t i = 0; i < mine.size(); ++i)
    used[static_cast<std::int64_t>(i)] = mine[i].grad().defined() ? 1 : 0;
  used = used.to(copies.device());
  copies.all_reduce(used, ReduceOp::kMax).wait();
  used = used.cpu();
  constexpr std::int64_t kElements = std::int64_t{1} << 23;
  std::vector<at::Tensor> bucket;
  std::int64_t elements = 0;
  const auto reduce = [&] {
    if (bucket.empty()) return;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& grad : bucket) flat.push_back(grad.reshape({-1}));
    const at::Tensor all = at::cat(flat);
    copies.all_reduce(all, ReduceOp::kAvg).wait();
    std::int64_t offset = 0;
    for (const at::Tensor& grad : bucket) {
      grad.copy_(all.narrow(0, offset, grad.numel()).view(grad.sizes()));
      offset += grad.numel();
    }
    bucket.clear();
    elements = 0;
  };
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (used[static_cast<std::int64_t>(i)].item<float>() == 0) continue;
    at::Tensor& grad = mine[i].mutable_grad();
    if (!grad.defined()) grad = at::zeros_like(mine[i]);
    if (!bucket.empty() && bucket[0].scalar_type() != grad.scalar_type()) reduce();
    bucket.push_back(grad);
    elements += grad.numel();
    if (elements >= kElements) reduce();
  }
  reduce();
}

void PipelineImpl::verify_parameters() {
  Fingerprints mine;
  for (const StagedParameter& p : parameters_)
    if (p.mine) mine.add(p.name, p.tensor.detach());
  if (mesh_.batch().size() > 1)
    require_same(mesh_.batch(), kPipeline, "parameter", " along 'data'", mine);
  // Every rank sends the fingerprints of what it shares, and compares with the first holder's.
  std::string sent;
  for (const StagedParameter& p : parameters_)
    if (p.holders.size() > 1)
      sent += fmt::format("{} ", p.mine ? fingerprint(p.tensor.detach()) : 0);
  const std::vector<std::string> all = all_gather_bytes(line_, sent);
  std::vector<std::istringstream> words(all.begin(), all.end());
  std::string differs;
  for (const StagedParameter& p : parameters_) {
    if (p.holders.size() < 2) continue;
    std::vector<std::uint64_t> values(all.size());
    for (std::size_t rank = 0; rank < all.size(); ++rank) words[rank] >> values[rank];
    for (const int holder : p.holders)
      if (values[static_cast<std::size_t>(holder)] !=
          values[static_cast<std::size_t>(p.holders[0])])
        differs = p.name;
  }
  if (!differs.empty())
    throw CommError(kPipeline,
                    fmt::format("the copies of '{}', which stages share, differ. Something "
                                "changed one of them outside the optimizer's step. Resume from a "
                                "checkpoint.",
                                differs));
}

void PipelineImpl::verify_buffers() {
  require_same(mesh_.world(), kPipeline, "buffer", "", model_.buffer_fingerprints());
}

}  // namespace lockstep::parallel

// ---------------------------------------------------------------- Pipeline

namespace lockstep {

Pipeline::Pipeline(torch::nn::Module& module, Mesh mesh, PipelineOptions options)
    : impl_(std::make_shared<parallel::PipelineImpl>(module, std::move(mesh), options)) {
  impl_->install();
}

Pipeline::~Pipeline() = default;

const Mesh& Pipeline::mesh() const {
  return impl_->mesh();
}

std::string Pipeline::text() const {
  return fmt::format("in {} pipeline stage{} ({})", impl_->stages(),
                     impl_->stages() == 1 ? "" : "s", parallel::name(impl_->options().schedule));
}

std::unique_ptr<optim::Optimizer> Pipeline::make_optimizer(std::vector<optim::ParamGroup> groups,
                                                           bool sharded) {
  if (sharded) check_shardable();
  return parallel::make_pipeline_optimizer(impl_, std::move(groups));
}

void Pipeline::check_shardable() const {
  throw UsageError(parallel::kPipeline,
                   "each stage has its optimizer's state, which is not divided further. Leave "
                   "shard_optimizer out.");
}

std::vector<at::Tensor> Pipeline::run_window(const std::vector<Pass>& passes) {
  return impl_->run_window(passes);
}

void Pipeline::backward(const at::Tensor&, bool) {
  throw UsageError(parallel::kPipeline,
                   "the passes of a step run together. Give Accumulation::backward() a function "
                   "that computes the loss, or call run_window().");
}

std::shared_ptr<void> Pipeline::gathered() {
  return impl_->gathered();
}

void Pipeline::verify_parameters() {
  impl_->verify_parameters();
}

void Pipeline::verify_buffers() {
  impl_->verify_buffers();
}

void Pipeline::set_bucket_cap_mb(std::optional<double>) {
  throw UsageError(parallel::kPipeline,
                   "there are no buckets whose size could be changed. Leave it out.");
}

std::vector<std::string> Pipeline::parameter_names() const {
  std::vector<std::string> names;
  for (const parallel::StagedParameter& p : impl_->parameters())
    if (p.mine) names.push_back(p.name);
  return names;
}

}  // namespace lockstep
