#include "lockstep/data/loader.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "lockstep/comm/mesh.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/data/prefetch.h"
#include "lockstep/data/window.h"

namespace lockstep::data {
namespace detail {
namespace {

using Clock = std::chrono::steady_clock;

std::string words_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

[[noreturn]] void throw_sample_error(std::int64_t index, const std::exception_ptr& cause) {
  throw SampleError(index, fmt::format("sample {} could not be loaded: {}", index, words_of(cause)),
                    cause);
}

// Finds the sample that get_batch() could not load: each is tried alone.
[[noreturn]] void blame(const Dataset& dataset, Indices indices, const RandomKey& key,
                        const std::exception_ptr& cause) {
  for (const std::int64_t index : indices) {
    try {
      SampleRandom random(key, index);
      dataset.get(index, random);
    } catch (...) {
      throw_sample_error(index, cause);
    }
  }
  throw SampleError(-1,
                    fmt::format("the batch of {} samples that begins with sample {} could not be "
                                "loaded, though each of them can: {}",
                                indices.size(), indices.front(), words_of(cause)),
                    cause);
}

Tail tail(const LoaderOptions& options) {
  if (options.evaluation) return Tail::kUneven;
  return options.drop_last ? Tail::kDrop : Tail::kRepeat;
}

void check_options(const LoaderOptions& options) {
  const auto refuse = [](const char* name, auto value, const char* wanted) {
    throw UsageError("loader", "{} is {}, and must be {}.", name, value, wanted);
  };
  if (options.batch_size < 1) refuse("batch_size", options.batch_size, "1 or more");
  if (options.num_workers < 0) refuse("num_workers", options.num_workers, "0 or more");
  if (options.num_workers > 1024) refuse("num_workers", options.num_workers, "at most 1024");
  if (options.prefetch_factor < 1) refuse("prefetch_factor", options.prefetch_factor, "1 or more");
  if (options.timeout.count() <= 0) refuse("timeout", options.timeout.count(), "above 0 ms");
  if (options.evaluation && options.drop_last)
    throw UsageError("loader",
                     "evaluation and drop_last contradict each other: one wants every sample once, "
                     "the other leaves some out. Set one of them.");
  if (options.sampler && options.shuffle)
    throw UsageError("loader",
                     "shuffle and a sampler are both set, and each is an order. Leave shuffle "
                     "off; a RandomSampler shuffles.");
}

}  // namespace

// A batch, and on a GPU the event that the training stream must wait for before it reads it.
struct Loaded {
  Batch batch{};
  BatchTiming timing{};
  std::optional<c10::Event> copy_began{};
  std::optional<c10::Event> copied{};
};

// Makes a batch on the device from indices. Const and independent of the loader: workers hold a
// pointer to it, and a hanging worker keeps it alive.
class BatchMaker {
 public:
  BatchMaker(DatasetPtr dataset, LoaderOptions options, c10::Device device)
      : dataset_(std::move(dataset)), options_(std::move(options)), device_(device) {
    if (!device_.is_cpu())
      side_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
  }

  Loaded make(Indices indices, const RandomKey& key) const {
    // Even for a dataset that computes on the device, all of a batch is made on one stream. The
    // guard also makes its device the current one.
    c10::OptionalStreamGuard stream;
    if (side_) stream.reset_stream(*side_);
    Loaded loaded;
    loaded.batch = load(indices, key, loaded.timing);
    // The record's figures per step must cover only training.
    if (!options_.evaluation) {
      ledger::add(ledger::Counter::kBatches);
      ledger::add(ledger::Counter::kLoadNs,
                  static_cast<std::uint64_t>((loaded.timing.load + loaded.timing.collate) * 1e9));
    }
    check(loaded.batch, indices);
    loaded.batch.indices.assign(indices.begin(), indices.end());
    if (side_) copy(loaded);
    return loaded;
  }

 private:
  Batch load(Indices indices, const RandomKey& key, BatchTiming& timing) const {
    const auto start = Clock::now();
    if (!options_.collate) {
      try {
        if (auto batch = dataset_->get_batch(indices, key)) {
          timing.load = seconds_since(start);
          return std::move(*batch);
        }
      } catch (...) {
        blame(*dataset_, indices, key, std::current_exception());
      }
    }
    std::vector<Example> examples;
    examples.reserve(indices.size());
    for (const std::int64_t index : indices) {
      try {
        SampleRandom random(key, index);
        examples.push_back(dataset_->get(index, random));
        examples.back().index = index;
      } catch (...) {
        throw_sample_error(index, std::current_exception());
      }
    }
    timing.load = seconds_since(start);
    const auto collating = Clock::now();
    try {
      Batch batch = options_.collate ? options_.collate(std::move(examples))
                                     : dataset_->collate(std::move(examples));
      timing.collate = seconds_since(collating);
      if (options_.collate && batch.tokens == 0)
        batch.tokens = count_tokens(batch.target, static_cast<std::int64_t>(indices.size()));
      return batch;
    } catch (...) {
      const auto cause = std::current_exception();
      throw SampleError(
          -1,
          fmt::format("the batch that begins with sample {} could not be collated: {}",
                      indices.front(), words_of(cause)),
          cause);
    }
  }

  void check(const Batch& batch, Indices indices) const {
    if (!batch.data.defined())
      throw SampleError(
          -1,
          fmt::format("the batch that begins with sample {} has no data. The dataset or "
                      "collate returned an undefined tensor.",
                      indices.front()),
          nullptr);
  }

  void copy(Loaded& loaded) const {
    const auto start = Clock::now();
    Batch& batch = loaded.batch;
    const auto pin = [](at::Tensor& tensor) {
      if (tensor.defined() && tensor.device().is_cpu()) tensor = tensor.pin_memory();
    };
    if (options_.pin_memory) {
      pin(batch.data);
      pin(batch.target);
    }
    // The flag asks for events that can be timed.
    loaded.copy_began.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    loaded.copied.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    loaded.copy_began->record(*side_);
    batch = batch.to(device_, /*non_blocking=*/options_.pin_memory);
    loaded.copied->record(*side_);
    loaded.timing.copy = seconds_since(start);
  }

  DatasetPtr dataset_;
  LoaderOptions options_;
  c10::Device device_;
  std::optional<c10::Stream> side_{};  // copies run during the computation
};

// Everything workers need to know about one epoch; they share it.
struct LoaderRound {
  std::vector<std::int64_t> indices;
  RandomKey key;
  std::int64_t batch_size = 1;
  std::int64_t batches = 0;

  Indices batch(std::int64_t number) const {
    const auto begin = static_cast<std::size_t>(number * batch_size);
    const auto size = std::min(static_cast<std::size_t>(batch_size), indices.size() - begin);
    return Indices(indices).subspan(begin, size);
  }
};

namespace {

// Makes the caller's stream wait for the copy; the caller itself does not.
void hand_over(Loaded& loaded, c10::Device device) {
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (loaded.copied->query())
    loaded.timing.transfer = loaded.copy_began->elapsedTime(*loaded.copied) / 1000;
  loaded.copied->block(current);
  // The memory came from the side stream's pool: it must not go back before this one is done.
  loaded.batch.data.record_stream(current);
  if (loaded.batch.target.defined()) loaded.batch.target.record_stream(current);
}

}  // namespace

// Used by one thread.
class LoaderImpl {
 public:
  LoaderImpl(DatasetPtr dataset, RankInfo info, LoaderOptions options, World world = {})
      : dataset_(std::move(dataset)),
        info_(info),
        options_(std::move(options)),
        world_(std::move(world)) {
    if (dataset_ == nullptr) throw UsageError("loader", "there is no dataset (nullptr).");
    check_options(options_);
    sampler_ = options_.sampler;
    if (!sampler_ && options_.shuffle)
      sampler_ = std::make_shared<RandomSampler>(dataset_->size(), options_.seed);
    if (!sampler_) sampler_ = std::make_shared<SequentialSampler>(dataset_->size());
    if (info_.device.is_cuda() && !info_.device.has_index()) info_.device.set_index(0);
    maker_ = std::make_shared<BatchMaker>(dataset_, options_, info_.device);
    state_ = {.epoch = 0, .cursor = 0, .seed = options_.seed, .size = sampler_->size()};
    share_size(sampler_->size(), 0, {info_.rank, info_.ranks});  // refuses a rank that is not there
    check_not_empty();
  }

  std::int64_t batches(std::int64_t cursor, int rank) const {
    const std::int64_t samples =
        share_size(sampler_->size(), cursor, {rank, info_.ranks, tail(options_)});
    const std::int64_t extra = options_.drop_last ? 0 : options_.batch_size - 1;
    return (samples + extra) / options_.batch_size;
  }

  std::int64_t batches_left(std::int64_t epoch) const {
    if (round_ && epoch == state_.epoch) return round_->batches - handed_out_;
    return batches(resume_ && epoch == state_.epoch ? state_.cursor : 0, info_.rank);
  }

  std::uint64_t open(std::int64_t epoch) {
    const bool complete = state_.cursor >= sampler_->size();
    if (resume_ && epoch != state_.epoch && !(complete && epoch == state_.epoch + 1))
      throw UsageError("loader",
                       "epoch {} was asked for, but the loaded state is in epoch {} at sample {}. "
                       "Start the loop at epoch {}.",
                       epoch, state_.epoch, state_.cursor, state_.epoch + (complete ? 1 : 0));
    if (epoch < 0) throw UsageError("loader", "there is no epoch {}.", epoch);
    close(ticket_);
    start_cursor_ = resume_ && epoch == state_.epoch ? state_.cursor : 0;
    resume_ = false;
    state_.epoch = epoch;
    state_.cursor = start_cursor_;
    handed_out_ = 0;

    auto round = std::make_shared<LoaderRound>();
    const std::vector<std::int64_t> order = sampler_->order(epoch);
    state_.order = order_checksum(order);
    round->indices = share_of(order, start_cursor_, {info_.rank, info_.ranks, tail(options_)});
    round->key = {options_.seed, epoch};
    round->batch_size = options_.batch_size;
    round->batches = batches(start_cursor_, info_.rank);
    const std::int64_t size = dataset_->size();
    for (const std::int64_t index : round->indices)
      if (index < 0 || index >= size)
        throw UsageError("loader", "the sampler gave index {} for a dataset of {} samples.", index,
                         size);
    round_ = round;
    if (options_.num_workers > 0) {
      if (!prefetcher_)
        prefetcher_ = std::make_unique<Prefetcher>(PrefetcherOptions{
            .workers = options_.num_workers,
            .ahead = std::int64_t{options_.num_workers} * options_.prefetch_factor});
      prefetcher_->start(round->batches, [maker = maker_, round](std::int64_t number) -> Thing {
        return std::make_shared<Loaded>(maker->make(round->batch(number), round->key));
      });
    }
    return ++ticket_;
  }

  std::optional<Batch> next(std::uint64_t ticket) {
    if (ticket != ticket_)
      throw UsageError(
          "loader",
          "this epoch has ended: another one was asked for since. A loader goes through "
          "one epoch at a time; make a second loader for a second loop.");
    if (!round_) return std::nullopt;
    if (handed_out_ == round_->batches) {
      // Even if there was no batch at all: the epoch has ended.
      state_.cursor = sampler_->size();
      finish_round();
      return std::nullopt;
    }
    const ledger::PhaseScope waiting(options_.evaluation ? ledger::Phase::kEvaluation
                                                         : ledger::Phase::kData);
    const auto start = Clock::now();
    Loaded loaded;
    try {
      loaded = take();
    } catch (...) {
      finish_round();
      throw;
    }
    if (loaded.copied) hand_over(loaded, info_.device);
    if (!options_.evaluation)
      ledger::add(ledger::Counter::kCopyNs,
                  static_cast<std::uint64_t>(loaded.timing.transfer * 1e9));
    loaded.timing.wait = seconds_since(start);
    timing_.last = loaded.timing;
    timing_.total.load += loaded.timing.load;
    timing_.total.collate += loaded.timing.collate;
    timing_.total.copy += loaded.timing.copy;
    timing_.total.transfer += loaded.timing.transfer;
    timing_.total.wait += loaded.timing.wait;
    ++timing_.batches;
    ++handed_out_;
    // Ranks that hold a whole model may evaluate alone, each on samples of its own.
    if (!options_.evaluation) lockstep::detail::note_samples(world_);
    // Samples excluded by drop_last, and repeated ones at the end, count with the last batch.
    state_.cursor = handed_out_ == round_->batches
                        ? sampler_->size()
                        : start_cursor_ + handed_out_ * options_.batch_size * info_.ranks;
    return std::move(loaded.batch);
  }

  void close(std::uint64_t ticket) noexcept {
    if (ticket != ticket_ || !round_) return;
    try {
      finish_round();
    } catch (const std::exception& error) {
      log::warning("loader", "an epoch could not be ended cleanly: {}", error.what());
    }
  }

  void load_state(const SamplerState& state) {
    check_state(state, sampler_->size(), options_.seed);
    if (state.order != 0 && state.order != order_sum(state.epoch))
      throw UsageError(
          "sampler",
          "the state was saved in another order of epoch {}'s samples: some would come "
          "twice and others never. Give the sampler the seed, weights and sizes that it "
          "had.",
          state.epoch);
    close(ticket_);
    ++ticket_;  // a loop that is under way must not continue
    state_ = state;
    state_.size = sampler_->size();
    resume_ = true;
  }

  const LoaderOptions& options() const { return options_; }
  const RankInfo& info() const { return info_; }
  const World& world() const { return world_; }
  std::int64_t dataset_size() const { return dataset_->size(); }
  std::int64_t order_sum(std::int64_t epoch) const {
    return order_checksum(sampler_->order(epoch));
  }
  const SamplerState& state() const { return state_; }
  const LoaderTiming& timing() const { return timing_; }

 private:
  // A loop over nothing ends at once, and looks like a run that was successful. A single rank may
  // have no batch (evaluation of fewer samples than ranks); rank 0 has as many as any.
  void check_not_empty() const {
    if (sampler_->size() == 0)
      throw UsageError("loader",
                       "there is nothing to load: {}. Check the path, split or filter that it was "
                       "made with.",
                       dataset_->size() == 0 ? "the dataset has no samples"
                                             : "the sampler's order has no samples");
    if (batches(0, 0) > 0) return;
    throw UsageError("loader",
                     "an epoch has no batch: {} samples over {} rank{} are {} per rank, fewer than "
                     "batch_size {}, and drop_last skips incomplete batches. Lower the batch size, "
                     "use fewer ranks, or set drop_last (Trainer: dataloader_drop_last) to false.",
                     sampler_->size(), info_.ranks, info_.ranks == 1 ? "" : "s",
                     sampler_->size() / info_.ranks, options_.batch_size);
  }

  Loaded take() {
    if (!prefetcher_) return maker_->make(round_->batch(handed_out_), round_->key);
    const Thing thing = prefetcher_->next(Deadline::after(options_.timeout));
    LOCKSTEP_ASSERT(thing != nullptr);
    return std::move(*std::static_pointer_cast<Loaded>(thing));
  }

  void finish_round() {
    round_.reset();
    if (!prefetcher_) return;
    prefetcher_->drop();
    if (!options_.persistent_workers) prefetcher_.reset();
  }

  DatasetPtr dataset_;
  RankInfo info_;
  LoaderOptions options_;
  World world_;  // over which windows count
  SamplerPtr sampler_;
  std::shared_ptr<const BatchMaker> maker_;
  std::unique_ptr<Prefetcher> prefetcher_;
  std::shared_ptr<const LoaderRound> round_;  // the current round; empty between epochs
  std::uint64_t ticket_ = 0;
  std::int64_t handed_out_ = 0;  // batches of this round
  std::int64_t start_cursor_ = 0;
  SamplerState state_;
  bool resume_ = false;  // the next epoch continues at state_'s cursor
  LoaderTiming timing_;
};

namespace {

std::string description(const LoaderImpl& impl) {
  const LoaderOptions& o = impl.options();
  // A caller's sampler has a seed of its own, and anything else: its order says it all.
  const std::string sampler =
      o.sampler ? fmt::format(", a sampler with the order {:016x}", impl.order_sum(0)) : "";
  return fmt::format(
      "{} samples, {} in an epoch's order, batch_size {}, seed {}, shuffle {}, drop_last {}, "
      "evaluation {}{}",
      impl.dataset_size(), impl.state().size, o.batch_size, o.seed, o.shuffle, o.drop_last,
      o.evaluation, sampler);
}

// Ranks with different sizes would take different numbers of steps, and the last step would hang.
void check_ranks(const std::vector<std::string>& all) {
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      throw UsageError("loader",
                       "ranks differ, so they would not make the same steps. Rank 0: {}. Rank {}: "
                       "{}. Give every rank the same dataset and options, or a world of one "
                       "(World{{}}) to a loader of one rank alone.",
                       all[0], rank, all[rank]);
}

}  // namespace

Loader make_loader(DatasetPtr dataset, RankInfo info, LoaderOptions options) {
  return Loader(std::make_shared<LoaderImpl>(std::move(dataset), info, std::move(options)));
}

}  // namespace detail

SampleError::SampleError(std::int64_t index, const std::string& text, std::exception_ptr cause)
    : Error("loader", text), index_(index), cause_(std::move(cause)) {}

Loader::Loader(std::shared_ptr<detail::LoaderImpl> impl) : impl_(std::move(impl)) {}
Loader::~Loader() = default;
Loader::Loader(Loader&&) noexcept = default;
Loader& Loader::operator=(Loader&&) noexcept = default;

Epoch Loader::epoch(std::int64_t epoch) {
  return Epoch(impl_, impl_->open(epoch));
}

Windows Loader::windows(std::int64_t epoch, const WindowOptions& options) {
  if (options.micro_batches < 1)
    throw UsageError("loader", "micro_batches is {}, and must be 1 or more.",
                     options.micro_batches);
  if (impl_->options().evaluation && impl_->world().size() > 1 &&
      options.weights == WindowWeights::kCounts)
    throw UsageError("loader",
                     "ranks of an evaluation may differ by a batch, and would wait for each other "
                     "to count a window. Use WindowWeights::kOwnCounts, or epoch().");
  return Windows(impl_, impl_->open(epoch), options);
}

std::int64_t Loader::batches_per_epoch() const {
  return impl_->batches(0, 0);
}

std::int64_t Loader::batches_left(std::int64_t epoch) const {
  return impl_->batches_left(epoch);
}

const LoaderOptions& Loader::options() const {
  return impl_->options();
}

c10::Device Loader::device() const {
  return impl_->info().device;
}

std::int64_t Loader::dataset_size() const {
  return impl_->dataset_size();
}

SamplerState Loader::state() const {
  return impl_->state();
}

void Loader::load_state(const SamplerState& state) {
  impl_->load_state(state);
}

LoaderTiming Loader::timing() const {
  return impl_->timing();
}

Epoch::~Epoch() {
  impl_->close(ticket_);
}

std::optional<Batch> Epoch::next() {
  return impl_->next(ticket_);
}

std::optional<Window> Windows::next() {
  std::vector<Batch> batches;
  do {
    std::optional<Batch> batch = epoch_.next();
    if (!batch) return std::nullopt;  // as the first one
    batches.push_back(std::move(*batch));
  } while (std::ssize(batches) < options_.micro_batches &&
           impl_->batches_left(impl_->state().epoch) > 0);
  return Window(std::move(batches), impl_->world(), options_.weights);
}

Loader loader(DatasetPtr dataset, World world, LoaderOptions options) {
  const detail::RankInfo info{world.rank(), world.size(), options.device.value_or(world.device())};
  const bool check = options.check_ranks && world.size() > 1;
  std::shared_ptr<detail::LoaderImpl> impl;
  const auto make = [&] {
    impl =
        std::make_shared<detail::LoaderImpl>(std::move(dataset), info, std::move(options), world);
    return check ? detail::description(*impl) : std::string();
  };
  if (!check) return make(), Loader(std::move(impl));
  // A rank whose options are refused must not leave the others waiting for it.
  const std::vector<std::string> all = agree(world, make);
  agree(world, [&] { detail::check_ranks(all); });
  return Loader(std::move(impl));
}

// ---------------------------------------------------------------- windows

namespace {

// The tokens that are weighed together: float64 on the device, at least 1.
at::Tensor total_of(std::int64_t tokens, World& ranks, WindowWeights weights) {
  at::Tensor total =
      at::full({}, static_cast<double>(tokens), at::dtype(at::kDouble).device(ranks.device()));
  if (weights == WindowWeights::kCounts && ranks.size() > 1) {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    ranks.all_reduce(total).wait();
  }
  return total.clamp_min_(1);
}

}  // namespace

Window::Window(std::vector<Batch> batches, World ranks, WindowWeights weights) {
  if (batches.empty())
    throw UsageError("Window",
                     "there are no micro-batches. Give a rank without data a batch whose tokens "
                     "are 0.");
  for (const Batch& batch : batches) {
    if (batch.tokens < 0)
      throw UsageError("Window", "a batch has {} tokens. Set how many its mean loss counts.",
                       batch.tokens);
    tokens_ += batch.tokens;
  }
  const at::Tensor total = total_of(tokens_, ranks, weights);
  // Gradients are averaged over the ranks.
  const int ranks_in_total = weights == WindowWeights::kCounts ? ranks.size() : 1;
  for (Batch& batch : batches) {
    // A mean over no targets is 0 / 0, and so is its derivative.
    if (batch.tokens == 0 && batch.target.defined()) batch.target = at::zeros_like(batch.target);
    const auto tokens = static_cast<double>(batch.tokens * ranks_in_total);
    const at::Tensor weight = at::full_like(total, tokens) / total;
    weight.unsafeGetTensorImpl()->set_wrapped_number(true);  // a product has the loss's type
    micro_batches_.push_back({std::move(batch), weight});
  }
  micro_batches_.back().last = true;
}

}  // namespace lockstep::data
