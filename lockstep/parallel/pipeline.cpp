#include "lockstep/parallel/pipeline.h"

#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/nn/block.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/fully_shard_impl.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/prepared_block.h"
#include "lockstep/parallel/sharding.h"

namespace lockstep::parallel {

// The type, sizes and gradient of a tensor that one stage sends to the next.
struct Border {
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool needs_gradient = false;
  bool operator==(const Border&) const = default;
};

// Which rank holds what of a Pipeline's module, and what its windows have agreed on. The tensors of
// a rank, their gradients and its optimizer are FullyShardImpl's, with one rank along "shard" or
// several. One thread.
class PipelineImpl : public std::enable_shared_from_this<PipelineImpl> {
 public:
  using Pass = Parallelism::Pass;

  PipelineImpl(torch::nn::Module& module, Mesh mesh, PipelineOptions options);

  const Mesh& mesh() const { return mesh_; }
  World& line() const { return line_; }  // the ranks along "pipeline"
  const PipelineOptions& options() const { return options_; }
  const std::shared_ptr<FullyShardImpl>& shards() const { return shards_; }
  nn::Staged& module() const { return *staged_; }
  int stages() const { return line_.size() * options_.stages_per_rank; }
  nn::Staged::Stage stage(int index, at::Tensor input) const;
  // What stage `index` returns for samples of these sizes; null: not agreed yet. With and without
  // gradients it may be something else.
  const Border* border(int index, const std::vector<std::int64_t>& sizes) const;
  void agree(int index, const std::vector<std::int64_t>& sizes, Border border);

  std::vector<at::Tensor> run_window(const std::vector<Pass>& passes);
  void verify_buffers();

 private:
  void check(torch::nn::Module& module);
  void check_window(std::size_t micro_batches);
  std::string describe(const torch::nn::Module& module) const;
  Holders assign_parts(const nn::Staged::Parts& parts);
  const std::vector<PipelineStep>& program(std::size_t micro_batches);
  void add_shared_gradients();
  void sync_buffers();

  Mesh mesh_;
  World& line_;
  PipelineOptions options_;
  nn::Staged* staged_;
  ModelTensors model_;
  std::vector<int> begins_;                               // split_blocks()
  std::map<int, std::vector<at::Tensor>> stage_tensors_;  // of this rank's stages
  Holders holders_;
  std::unique_ptr<TensorSlices> slices_;  // until `shards_` has them
  std::shared_ptr<FullyShardImpl> shards_;
  std::vector<NamedTensor> buffers_;
  std::vector<std::uint64_t> buffers_agreed_;  // their fingerprints
  std::map<std::tuple<int, bool, std::vector<std::int64_t>>, Border> borders_;
  std::map<std::pair<std::size_t, bool>, std::vector<PipelineStep>> programs_;
};

namespace {

using Kind = PipelineStep::Kind;

// ---------------------------------------------------------------- a window

// The description of a border as a message: type, gradient, dimensions, sizes.
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

// Runs this rank's steps. For each stage and micro-batch in progress it holds the input, as a leaf
// of the graph, and the output; without gradients until the output was sent.
class WindowRun {
 public:
  WindowRun(PipelineImpl& model, const std::vector<PipelineImpl::Pass>& passes)
      : model_(model),
        passes_(passes),
        line_(model.line()),
        trains_(at::GradMode::is_enabled()),
        losses_(passes.size()) {}

  void run(const std::vector<PipelineStep>& steps) {
    const auto is_backward = [](const PipelineStep& step) { return step.kind == Kind::kBackward; };
    auto backwards = std::ranges::count_if(steps, is_backward);
    for (const PipelineStep& step : steps) {
      last_backward_ = is_backward(step) && --backwards == 0;
      run(step);
    }
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
    model_.shards()->before_forward(step.stage);
    here.output = pass(step).forward();
    if (is_last(step.stage)) {
      take_loss(step);
    } else {
      settle_border(step);
      if (line_.size() == 1) flight(step.stage + 1, step.micro_batch).input = here.output.detach();
    }
    if (!trains_ && (is_last(step.stage) || line_.size() == 1))
      flights_.erase({step.stage, step.micro_batch});
  }

  void take_loss(const PipelineStep& step) {
    Flight& here = flight(step);
    if (here.output.numel() != 1)
      throw UsageError(kPipeline,
                       "the loss has {} elements. It must be the mean over the micro-batch.",
                       here.output.numel());
    losses_[static_cast<std::size_t>(step.micro_batch)] = here.output.detach();
    if (!trains_) return;
    here.output = pass(step).weigh(here.output);
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
                     "shape their sizes (Pass::sizes).",
                     line_.rank(), step.stage, text(now), step.micro_batch, text(*agreed));
  }

  void backward(const PipelineStep& step) {
    Flight& here = flight(step);
    wait_for(here.gradient_arrives);
    const ledger::PhaseScope phase(ledger::Phase::kBackward);
    // Ranks along "shard" run it together, so a rank without targets runs it too.
    model_.shards()->backward(
        [&] {
          if (here.output.requires_grad())
            torch::autograd::backward({here.output}, {here.output_gradient});
        },
        last_backward_, step.stage);
    Flight done = std::move(here);
    flights_.erase({step.stage, step.micro_batch});
    if (step.stage == 0 || !done.input.requires_grad()) return;
    at::Tensor gradient = done.input.grad();
    // A stage that does not use its input.
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
    if (!trains_) flights_.erase({step.stage, step.micro_batch});
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
  bool trains_;
  bool last_backward_ = false;  // of this rank in the window
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
      describe(module));
  if (other)
    throw UsageError(kPipeline,
                     "rank {} has '{}', but rank 0 has '{}'. Ranks hold stages of one model. Build "
                     "the same one, with the same options, on every rank.",
                     other->rank, other->here, other->first);
  model_.broadcast(mesh_.world(), 0);
  buffers_ = buffers_of(module);
  buffers_agreed_ = model_.buffer_fingerprints().values;
  // One rank along "shard": gradients are averaged once, in the order of data parallelism.
  FullyShardOptions sharding = options_.shard;
  sharding.reduce_every_backward &= mesh_.size("shard") > 1;
  if (slices_) slices_->cut();
  shards_ = std::make_shared<FullyShardImpl>(
      module, mesh_, sharding, FullyShardImpl::OfPipeline{holders_, std::move(slices_)});
  for (const auto& [index, tensors] : stage_tensors_) shards_->add_stage(index, tensors);
  shards_->install();
}

void PipelineImpl::check(torch::nn::Module& module) {
  if (staged_ == nullptr)
    throw UsageError(kPipeline,
                     "the module {} cannot be computed in stages. Derive it from nn::Staged "
                     "(lockstep/nn/block.h), as the bundled language models are.",
                     module.name());
  check_mode(options_.shard, "stages of a Pipeline");
  if (mesh_.size("tensor") > 1) slices_ = std::make_unique<TensorSlices>(module, mesh_["tensor"]);
  check_blocks(module, mesh_, kPipeline);
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
                     "{} stages ({} ranks x {}), and the model has {} block{}. Every stage needs "
                     "one. Use fewer ranks along 'pipeline' (pipeline_parallel_degree){}.",
                     stages(), line_.size(), options_.stages_per_rank, blocks,
                     blocks == 1 ? "" : "s",
                     interleaves ? ", fewer PipelineOptions::stages_per_rank, or the schedule 1F1B "
                                   "(pipeline_parallel_schedule)"
                                 : "");
  model_ = ModelTensors(parameters_of(module), buffers_of(module), {});
  begins_ = split_blocks(blocks, stages());
  holders_ = assign_parts(parts);
}

Holders PipelineImpl::assign_parts(const nn::Staged::Parts& parts) {
  Holders holders;
  const auto give = [&](const std::vector<at::Tensor>& tensors, int stage) {
    const int rank = stage % line_.size();
    for (const at::Tensor& tensor : tensors) {
      std::vector<int>& held = holders[tensor.unsafeGetTensorImpl()];
      if (std::ranges::find(held, rank) == held.end()) held.push_back(rank);
    }
    if (rank != line_.rank()) return;
    std::vector<at::Tensor>& own = stage_tensors_[stage];
    own.insert(own.end(), tensors.begin(), tensors.end());
  };
  give(parts.first, 0);
  for (int stage = 0; stage < stages(); ++stage)
    for (int i = begins_[static_cast<std::size_t>(stage)];
         i < begins_[static_cast<std::size_t>(stage) + 1]; ++i)
      give(parts.blocks[static_cast<std::size_t>(i)], stage);
  give(parts.last, stages() - 1);
  for (auto& [tensor, held] : holders) std::ranges::sort(held);
  for (const ModelParameter& p : model_.parameters())
    if (!holders.contains(p.tensor.unsafeGetTensorImpl()))
      throw UsageError(kPipeline,
                       "parameter '{}' is in none of the module's parts(). Name what computes with "
                       "it: first, a block, or last.",
                       p.name);
  return holders;
}

std::string PipelineImpl::describe(const torch::nn::Module& module) const {
  const FullyShardOptions& sharding = options_.shard;
  std::string text = fmt::format(
      "schedule: {}\nstages_per_rank: {}\nshard: {}\nreshard_after_forward: {}\n"
      "reduce_every_backward: {}\ncpu_offload: {}\n",
      name(options_.schedule), options_.stages_per_rank, name(sharding.shard),
      sharding.reshard_after_forward, sharding.reduce_every_backward, sharding.cpu_offload);
  for (const auto& type : {sharding.param_dtype, sharding.reduce_dtype})
    text += fmt::format("travels as: {}\n", type ? c10::toString(*type) : "its own type");
  for (const ModelParameter& p : model_.parameters()) {
    const auto held = holders_.find(p.tensor.unsafeGetTensorImpl());
    if (held == holders_.end()) break;  // it was refused
    text += fmt::format(
        "{}: {}, shape [{}]{}, rank {}\n", p.name, c10::toString(p.tensor.scalar_type()),
        fmt::join(nn::whole_sizes(p.tensor), ", "), p.tensor.requires_grad() ? "" : ", frozen",
        fmt::join(held->second, " and "));
  }
  if (slices_) text += slices_->describe();
  return text + model_.describe_buffers() + describe_prepared(module);
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
  const auto found = borders_.find({index, at::GradMode::is_enabled(), sizes});
  return found == borders_.end() ? nullptr : &found->second;
}

void PipelineImpl::agree(int index, const std::vector<std::int64_t>& sizes, Border border) {
  borders_.insert_or_assign({index, at::GradMode::is_enabled(), sizes}, std::move(border));
}

// ---------------------------------------------------------------- a window's passes and its end

// Ranks that compute a micro-batch together have equally many: otherwise some would wait for
// messages that nobody sends. The numbers go through the hosts' memory and wait for no device.
void PipelineImpl::check_window(std::size_t micro_batches) {
  auto refusal = refusal_of([&] {
    if (micro_batches == 0)
      throw UsageError(kPipeline,
                       "a window without micro-batches. Give run_window() at least one.");
  });
  // What is refused along one axis is refused along the next.
  for (const char* const axis : {"pipeline", "shard", "tensor"}) {
    if (mesh_.size(axis) == 1) continue;
    refusal = refusal_of([&] {
      const auto other = find_other_line(
          mesh_[axis], {.component = kPipeline, .what = "this window", .refusal = refusal},
          std::to_string(micro_batches));
      if (other)
        throw UsageError(kPipeline,
                         "along '{}', rank {} has a window of {} micro-batches and rank 0 one of "
                         "{}, and they compute each micro-batch together. Ranks along 'pipeline' "
                         "and 'tensor' must see the same batches: make the loader with "
                         "mesh.batch().",
                         axis, other->rank, other->here, other->first);
    });
  }
  if (refusal) std::rethrow_exception(refusal);
}

std::vector<at::Tensor> PipelineImpl::run_window(const std::vector<Pass>& passes) {
  check_window(passes.size());
  const bool trains = at::GradMode::is_enabled();
  std::vector<at::Tensor> losses;
  shards_->begin_window();
  try {
    WindowRun window(*this, passes);
    window.run(program(passes.size()));
    losses = window.losses();
  } catch (const std::exception& error) {
    // The others wait for messages that will not come.
    if (line_.size() > 1)
      line_.abort(fmt::format("stage {} failed: {}", line_.rank(), error.what()));
    throw;
  }
  shards_->end_window();
  if (!trains) return losses;
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  const at::NoGradGuard no_grad;
  add_shared_gradients();
  shards_->watch_gradients();
  sync_buffers();
  return losses;
}

// Without gradients: the forwards, and their messages in the order that they have.
const std::vector<PipelineStep>& PipelineImpl::program(std::size_t micro_batches) {
  const bool trains = at::GradMode::is_enabled();
  std::vector<PipelineStep>& steps = programs_[{micro_batches, trains}];
  if (!steps.empty()) return steps;
  auto all =
      pipeline_programs(options_.schedule, {.ranks = line_.size(),
                                            .stages_per_rank = options_.stages_per_rank,
                                            .micro_batches = static_cast<int>(micro_batches)});
  steps = std::move(all[static_cast<std::size_t>(line_.rank())]);
  if (!trains)
    std::erase_if(steps, [](const PipelineStep& step) {
      return step.kind == Kind::kBackward || step.kind == Kind::kSendGradient ||
             step.kind == Kind::kRecvGradient;
    });
  return steps;
}

// Every holder adds the gradients of all, in rank order, so that their copies stay the same.
void PipelineImpl::add_shared_gradients() {
  std::vector<P2p> messages;
  std::vector<std::pair<at::Tensor, std::vector<at::Tensor>>> sums;
  for (const ShardedParameter* const p : shards_->parameters()) {
    if (p->absent || p->holders.size() == 1 || !p->tensor.requires_grad()) continue;
    if (p->shard.numel() == 0) continue;  // on all holders: they divide it alike
    at::Tensor own = p->tensor.grad();
    if (!own.defined()) own = at::zeros(p->shard.sizes(), p->shard.options().requires_grad(false));
    auto& terms = sums.emplace_back(p->tensor, std::vector<at::Tensor>{}).second;
    for (const int holder : p->holders) {
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

// Along "data" and "shard" the first rank's count, as in data parallelism. Nobody says which stage
// a buffer is of: it is of the one that has changed it.
void PipelineImpl::sync_buffers() {
  if (buffers_.empty()) return;
  model_.broadcast_buffers(mesh_.batch(), 0);
  if (line_.size() == 1) return;
  const std::vector<std::uint64_t> now = model_.buffer_fingerprints().values;
  const at::Tensor mine = at::zeros({static_cast<std::int64_t>(now.size()), 2}, at::kLong);
  for (std::size_t i = 0; i < now.size(); ++i) {
    mine[static_cast<std::int64_t>(i)][0] = now[i] != buffers_agreed_[i];
    mine[static_cast<std::int64_t>(i)][1] = static_cast<std::int64_t>(now[i]);
  }
  const std::vector<at::Tensor> all = line_.all_gather(mine.to(line_.device()));
  std::map<int, std::vector<at::Tensor>> from;
  for (std::size_t i = 0; i < now.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    std::vector<int> changed;
    bool differ = false;
    for (int rank = 0; rank < line_.size(); ++rank) {
      const at::Tensor row = all[static_cast<std::size_t>(rank)][at].cpu();
      if (row[0].item<std::int64_t>() == 0) continue;
      changed.push_back(rank);
      const auto value = static_cast<std::uint64_t>(row[1].item<std::int64_t>());
      differ |= std::exchange(buffers_agreed_[i], value) != value && changed.size() > 1;
    }
    if (differ)
      throw UsageError(kPipeline,
                       "buffer '{}' was changed by the stages of {} to different values, so that "
                       "nobody knows which to save. Let one block change it.",
                       buffers_[i].name, show_ranks(changed));
    if (!changed.empty()) from[changed[0]].push_back(buffers_[i].tensor);
  }
  for (const auto& [rank, tensors] : from) broadcast_coalesced(line_, tensors, rank);
}

void PipelineImpl::verify_buffers() {
  require_same(mesh_.world(), {.component = kPipeline, .what = "this comparison"}, "buffer", "",
               model_.buffer_fingerprints());
}

}  // namespace lockstep::parallel

// ---------------------------------------------------------------- Pipeline

namespace lockstep {

Pipeline::Pipeline(torch::nn::Module& module, Mesh mesh, PipelineOptions options)
    : impl_(std::make_shared<parallel::PipelineImpl>(module, std::move(mesh), options)) {}

Pipeline::~Pipeline() {
  impl_->shards()->uninstall();
}

const Mesh& Pipeline::mesh() const {
  return impl_->mesh();
}

std::string Pipeline::text() const {
  const int ranks = mesh().size("shard");
  return fmt::format("in {} pipeline stage{} ({}){}{}{}", impl_->stages(),
                     impl_->stages() == 1 ? "" : "s", parallel::name(impl_->options().schedule),
                     ranks > 1 ? fmt::format(", fully sharded over {} ranks", ranks) : "",
                     impl_->shards()->offloads() ? ", offloaded to the CPU" : "",
                     parallel::slices_text(mesh()));
}

std::unique_ptr<optim::Optimizer> Pipeline::make_optimizer(std::vector<optim::ParamGroup> groups) {
  return parallel::make_fully_shard_optimizer(impl_->shards(), std::move(groups));
}

std::vector<at::Tensor> Pipeline::run_window(const std::vector<Pass>& passes) {
  detail::check_samples(mesh(), parallel::kPipeline);
  std::vector<at::Tensor> losses = impl_->run_window(passes);
  if (at::GradMode::is_enabled()) count_passes(passes.size(), /*last=*/true);
  return losses;
}

void Pipeline::backward(const at::Tensor&, bool) {
  throw UsageError(parallel::kPipeline,
                   "the passes of a step run together. Give run_window() functions that compute "
                   "their losses.");
}

std::shared_ptr<void> Pipeline::gathered() {
  return impl_->shards()->gathered();
}

bool Pipeline::divided() const {
  return mesh().size("pipeline") > 1 || mesh().size("tensor") > 1 || impl_->shards()->divides();
}

void Pipeline::verify_parameters() {
  impl_->shards()->verify_parameters();
}

void Pipeline::verify_buffers() {
  impl_->verify_buffers();
}

std::string Pipeline::unavailable_for_capture() const {
  return "the stages of a pipeline exchange messages inside a step";
}

std::vector<std::string> Pipeline::parameter_names() const {
  std::vector<std::string> names;
  for (const parallel::ShardedParameter* const p : impl_->shards()->parameters())
    if (!p->absent) names.push_back(p->name);
  return names;
}

PipelinedConstruction::PipelinedConstruction(Mesh mesh, int blocks, PipelineOptions options) {
  const int ranks = mesh.size("pipeline");
  const int interleaved = options.schedule == PipelineSchedule::kInterleaved1F1B ? 2 : 1;
  const int stages = ranks * (options.stages_per_rank == 0 ? interleaved : options.stages_per_rank);
  nn::BlockObserver take;
  // With fewer blocks than stages there is no pipeline: it says so.
  if (blocks >= stages && mesh.world().size() > 1)
    take = [mesh, ranks, begins = parallel::split_blocks(blocks, stages), next = 0,
            offloads = parallel::offloads_from(mesh, options.shard.cpu_offload)](
               torch::nn::Module& block) mutable {
      if (next == begins.back())
        throw UsageError(parallel::kPipeline,
                         "the model has more blocks than the {} that PipelinedConstruction was "
                         "made for. Give it their number.",
                         next);
      const auto after = std::ranges::upper_bound(begins, next++);
      const auto stage = static_cast<int>(after - begins.begin()) - 1;
      parallel::prepare_block(block, mesh, stage % ranks == mesh.rank("pipeline"), offloads);
    };
  before_ = nn::observe_blocks(std::move(take));
}

PipelinedConstruction::~PipelinedConstruction() {
  nn::observe_blocks(std::move(before_));
}

}  // namespace lockstep
