#include "lockstep/train/metrics_reporter.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/ranges.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

#include "lockstep/comm/device.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/monitor/diagnosis.h"
#include "lockstep/monitor/rank_recorder.h"
#include "lockstep/monitor/run_record.h"
#include "lockstep/rendezvous/rank_env.h"

namespace lockstep::train {
namespace {

using Clock = std::chrono::steady_clock;

// Makes the host wait for the device.
double read_value(const at::Tensor& tensor) {
  ledger::add(ledger::Counter::kHostSyncs);
  const DeviceWait wait(tensor.device());
  return tensor.item<double>();
}

constexpr double kAll = 10000;  // shares are in 1/100 %

int share_of(double part, double whole) {
  return whole > 0 ? static_cast<int>(std::min(kAll, kAll * part / whole)) : 0;
}

// How much of the time since `before` was not spent in steps: evaluations and saves.
double aside_s(const ledger::Totals& before) {
  using ledger::Phase;
  const ledger::Totals spent = ledger::since(before, ledger::totals());
  return 1e-9 * static_cast<double>(spent.host_ns[ledger::index(Phase::kEvaluation)] +
                                    spent.host_ns[ledger::index(Phase::kSaving)]);
}

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

void MetricsReporter::open(std::int64_t resumed_at) {
  since_log_ = at::zeros({4}, at::dtype(at::kDouble).device(run_.world.device()));
  since_start_ = at::zeros_like(since_log_);
  skips_ = at::zeros({3}, since_log_.options());
  if (!run_.world.is_leader()) return;
  const TrainingArguments& a = run_.arguments;
  const bool tensorboard = std::ranges::any_of(
      a.report_to, [](const std::string& name) { return name == "tensorboard" || name == "all"; });
  file_ = std::make_unique<MetricsLog>(a.output_dir,
                                       MetricsLogOptions{.tensorboard = tensorboard,
                                                         .run_name = a.run_name.value_or(""),
                                                         .resumed_at = resumed_at});
  progress_ = std::make_unique<Progress>(ProgressOptions{.total_steps = run_.state.max_steps,
                                                         .done_steps = run_.state.global_step,
                                                         .bar = !a.disable_tqdm});
}

void MetricsReporter::start() {
  constexpr std::chrono::seconds kFirstAdvice{10};
  start_time_ = log_time_ = Clock::now();
  next_advice_ = start_time_ + kFirstAdvice;
  log_totals_ = ledger::totals();
  last_log_step_ = run_.state.global_step;
}

void MetricsReporter::count_batch(const data::Batch& batch) {
  // Token ids are integers of two dimensions (batch and sequence); images and class labels are not.
  const auto are_tokens = [](const at::Tensor& ids) {
    return ids.defined() && ids.dim() == 2 &&
           (ids.scalar_type() == at::kInt || ids.scalar_type() == at::kLong);
  };
  samples_ += batch.samples();
  input_tokens_ += are_tokens(batch.data)     ? batch.data.numel()
                   : are_tokens(batch.target) ? batch.target.numel()
                                              : batch.samples();
}

// Everything stays on the device.
void MetricsReporter::count(std::int64_t tokens, const at::Tensor& loss,
                            const optim::StepResult& result) {
  const torch::NoGradGuard no_grad;
  const at::Tensor count = at::full({}, static_cast<double>(tokens), since_log_.options());
  const at::Tensor finite = at::isfinite(loss);
  at::Tensor sum = loss, counted = count;
  if (run_.arguments.logging_nan_inf_filter) {
    // Not part of the mean, so that the log stays readable. Without a finite one it is NaN.
    sum = at::where(finite, loss, 0.0);
    counted = count * finite;
  }
  const at::Tensor input =
      at::full({}, static_cast<double>(std::exchange(input_tokens_, 0)), since_log_.options());
  const at::Tensor sums = at::stack({sum, count, counted, input});
  since_log_ += sums;
  since_start_ += sums;
  if (result.skipped.defined()) {
    const at::Tensor skipped = result.skipped.reshape({}).to(skips_.device(), at::kDouble);
    skips_.narrow(0, 0, 2).add_(at::stack({skipped, 1 - finite.reshape({}).to(at::kDouble)}));
    skips_[2].add_(1).mul_(skipped);
  }
  if (result.grad_norm.defined()) grad_norm_ = result.grad_norm;
}

// Evaluations, saves and logs are not part of a step.
Waits MetricsReporter::waits() const {
  using ledger::Phase;
  const auto spent = spent_s(monitor::interval_of(ledger::since(log_totals_, ledger::totals())));
  double steps = 0;
  for (const Phase phase : {Phase::kNone, Phase::kData, Phase::kForward, Phase::kBackward,
                            Phase::kCommunication, Phase::kOptimizer, Phase::kDeviceWait})
    steps += spent[ledger::index(phase)];
  return {.data = share_of(spent[ledger::index(Phase::kData)], steps),
          .communication = share_of(spent[ledger::index(Phase::kCommunication)], steps)};
}

// Once in a run. The advice is the doctor's: the same rules on the same record.
void MetricsReporter::advise() {
  const TrainingArguments& a = run_.arguments;
  if (advised_ || !a.record_run || !run_.world.is_leader()) return;
  try {
    const auto findings = monitor::diagnose(monitor::read_run(a.output_dir));
    if (findings.empty()) return;
    advised_ = true;
    log::info("trainer", "{} `lockstep doctor --run {}` says more.",
              monitor::finding_text(findings.front()), a.output_dir);
  } catch (const std::exception& error) {  // nothing was recorded
    log::debug("trainer", "{} Nothing is said about the speed of this run.", error.what());
  }
}

void MetricsReporter::show_step() {
  if (progress_) progress_->step(run_.state.global_step);
}

// Totals of all ranks.
MetricsReporter::Totals MetricsReporter::totals_of(const at::Tensor& sums) {
  at::Tensor all = sums;
  if (run_.batch_ranks() > 1) {
    all = sums.clone();
    run_.mesh.batch().all_reduce(all).wait();
  }
  ledger::add(ledger::Counter::kHostSyncs);
  {
    const DeviceWait wait(all.device());
    all = all.cpu();
  }
  const double loss = all[1].item<double>() > 0 ? all[0].item<double>() / all[2].item<double>() : 0;
  return {.input_tokens = all[3].item<double>(), .mean_loss = std::isnan(loss) ? NAN : loss};
}

// The share of the devices' arithmetic that training reaches, and this rank's memory on its GPU.
void MetricsReporter::add_device_figures(Metrics& values, double tokens_per_second) const {
  const double peak = run_.task.device_peak_flops * run_.world.size();
  if (peak > 0 && run_.task.flops_per_token > 0)
    values.emplace_back("mfu", tokens_per_second * run_.task.flops_per_token / peak);
  const c10::Device device = run_.world.device();
  if (device.is_cpu()) return;
  constexpr double kGiB = 1 << 30;
  const auto bytes =
      c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).allocated_bytes[0];
  values.emplace_back("gpu_memory_gib", static_cast<double>(bytes.current) / kGiB);
  values.emplace_back("gpu_memory_peak_gib", static_cast<double>(bytes.peak) / kGiB);
}

void MetricsReporter::log(double learning_rate) {
  TrainerState& state = run_.state;
  if (state.global_step == last_log_step_) return;
  const std::int64_t steps = state.global_step - std::exchange(last_log_step_, state.global_step);
  // Taken before reading: on a GPU most of the steps' time is spent in that wait, which belongs to
  // the next log's waits.
  const ledger::Totals before = std::exchange(log_totals_, ledger::totals());
  const auto [tokens, loss] = totals_of(since_log_);
  // Taken after reading: only now has a GPU computed the steps that the host had enqueued.
  const auto now = Clock::now();
  const double seconds =
      std::max(1e-9, seconds_between(std::exchange(log_time_, now), now) - aside_s(before));
  state.num_input_tokens_seen += static_cast<std::int64_t>(tokens);
  Metrics values{{"loss", loss}};
  if (grad_norm_.defined()) values.emplace_back("grad_norm", read_value(grad_norm_));
  values.emplace_back("learning_rate", learning_rate);
  const double samples = static_cast<double>(std::exchange(samples_, 0)) * run_.batch_ranks();
  values.emplace_back("samples_per_second", samples / seconds);
  if (tokens > samples * 1.5) values.emplace_back("tokens_per_second", tokens / seconds);
  add_device_figures(values, tokens / seconds);
  if (const Waits& waits = control_.waits(); waits.data >= 0) {
    values.emplace_back("data_wait_percent", waits.data / 100.0);
    if (run_.world.size() > 1 && waits.communication >= 0)
      values.emplace_back("communication_percent", waits.communication / 100.0);
  }
  const Skips skips = read_skips();
  if (skips.steps > 0) {
    values.emplace_back("skipped_steps", skips.steps);
    const std::string bad = bad_ranks(skips);
    // A loss scale is found by skipping steps.
    if (run_.world.is_leader() && (!run_.arguments.fp16 || !bad.empty()))
      log::warning("trainer",
                   "step {}: {} of the last {} steps had a gradient that is not finite and were "
                   "skipped on all ranks{}. Try a smaller learning rate.",
                   state.global_step, skips.steps, steps, bad);
  }
  since_log_.zero_();
  report(std::move(values));
  refuse_skips(skips.in_a_row, /*at_end=*/false);
  if (now >= next_advice_) {
    next_advice_ = now + (now - start_time_);  // a longer record takes longer to read
    advise();
  }
  ledger::add(ledger::Counter::kLogs);
}

MetricsReporter::Skips MetricsReporter::read_skips() {
  ledger::add(ledger::Counter::kHostSyncs);
  const DeviceWait wait(skips_.device());
  const at::Tensor here = skips_.cpu();
  const double* const read = here.const_data_ptr<double>();
  skipped_steps_ += read[0];
  const Skips skips{.steps = read[0], .bad_loss = read[1], .in_a_row = read[2]};
  skips_.narrow(0, 0, 2).zero_();
  return skips;
}

// ": the loss of rank 1 was not finite", or nothing where the gradients alone were not. Collective
// where steps were skipped, which all ranks know alike.
std::string MetricsReporter::bad_ranks(const Skips& skips) {
  const auto bad = all_gather_bytes(run_.world, skips.bad_loss > 0 ? "bad" : "");
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < bad.size(); ++rank)
    if (!bad[rank].empty()) ranks.push_back(static_cast<int>(rank));
  if (ranks.empty()) return "";
  return fmt::format(": the loss of rank{} {} was not finite", ranks.size() == 1 ? "" : "s",
                     fmt::join(ranks, ", "));
}

// All ranks throw, because all know the same of skipped steps. A run that continues an earlier one
// may end with a few that are skipped.
void MetricsReporter::refuse_skips(double in_a_row, bool at_end) {
  constexpr double kMostInARow = 100;
  // With fp16 the first steps are skipped until a scale is found, which halves from 2^16.
  const std::int64_t search = run_.arguments.fp16 ? 17 : 0;
  const bool none = at_end && run_.result.first_step == 0 && run_.state.global_step > search &&
                    skipped_steps_ == static_cast<double>(run_.state.global_step);
  if (in_a_row < kMostInARow && !none) return;
  throw Error("trainer",
              fmt::format("step {}: {} were skipped, because a gradient was not finite, so nothing "
                          "is trained{}. Probably the learning rate is too high, or the loss "
                          "divides by zero or takes the logarithm of zero. Look at the first "
                          "warning of skipped steps; try a smaller learning_rate or "
                          "max_grad_norm, bf16 in place of fp16, and other samples.",
                          run_.state.global_step,
                          none ? "all steps of this run"
                               : fmt::format("the last {} steps in a row", in_a_row),
                          none ? "" : " any more"));
}

void MetricsReporter::report(Metrics values) {
  TrainerState& state = run_.state;
  LogEntry entry{.step = state.global_step, .epoch = state.epoch, .values = std::move(values)};
  state.log_history.push_back(entry);
  if (file_) file_->write(entry);
  if (progress_) progress_->log(entry);
  control_.notify(&Observer::on_log, {.entry = &entry});
}

// The summary of a run that was complete before this call. Collective: the leader has the file.
Metrics MetricsReporter::recorded_summary() {
  std::string line;
  if (file_) {
    const auto recorded = newest_with(file_->path(), "train_loss");
    if (recorded && recorded->step == run_.state.global_step) line = log_entry_json(*recorded);
  }
  line = broadcast_bytes(run_.world, line);
  if (!line.empty()) return parse_log_entry(line, "metrics.jsonl").values;
  // Its last call was stopped, or the file is gone: the checkpoint has the losses that were logged.
  double sum = 0;
  std::int64_t before = 0;
  for (const LogEntry& entry : run_.state.log_history) {
    const double* loss = find_metric(entry.values, "loss");
    if (loss == nullptr || !std::isfinite(*loss)) continue;
    sum += *loss * static_cast<double>(entry.step - before);
    before = entry.step;
  }
  if (before == 0) return {};
  return {{"train_loss", sum / static_cast<double>(before)}};
}

void MetricsReporter::summarize() {
  TrainResult& result = run_.result;
  const double seconds = seconds_between(start_time_, Clock::now());
  const auto steps = static_cast<double>(run_.state.global_step - result.first_step);
  const bool stopped = control_.stop_signal() != 0;
  if (steps > 0) {
    result.train_loss = totals_of(since_start_).mean_loss;
    if (stopped) return;
    refuse_skips(read_skips().in_a_row, /*at_end=*/true);
    result.metrics = {{"train_runtime", seconds},
                      {"train_steps_per_second", steps / seconds},
                      {"train_loss", result.train_loss}};
    report(result.metrics);
  } else if (!stopped) {
    result.metrics = recorded_summary();
    const double* loss = find_metric(result.metrics, "train_loss");
    result.train_loss = loss != nullptr ? *loss : NAN;  // 0 would be the best there is
  }
}

void MetricsReporter::close() {
  progress_.reset();
  file_.reset();
}

// ---------------------------------------------------------------- the record of the run

monitor::RunFacts world_facts(const World& world) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  monitor::RunFacts facts;
  facts.world_size = world.size();
  facts.device = c10::DeviceTypeName(world.device().type(), /*lower_case=*/true);
  facts.backend = world.backend();
  facts.started_unix_s = std::chrono::duration<double>(now).count();
  facts.ranks_on_host = std::max(1, world.local_size());
  if (world.device().is_cuda()) facts.gpus_visible = static_cast<int>(torch::cuda::device_count());
  facts.threads_per_rank = at::get_num_threads();
  return facts;
}

Recording start_recording(World& world, const std::string& folder, const monitor::RunFacts& known,
                          bool record) {
  Recording recording{.facts = known};
  monitor::RunFacts& facts = recording.facts;
  std::error_code unknown;
  ledger::set_output_dir(std::filesystem::absolute(folder, unknown).string());
  // Every rank takes part in the exchanges, even one that records nothing. Ranks that are each
  // bound to a core of their own together have more cores than one of them may use.
  const bool one_host = world.local_size() == world.size();
  facts.cores = one_host ? cores_of_ranks(world) : allowed_cores();
  facts.hosts = static_cast<int>(all_reduce(world, world.node_rank(), ReduceOp::kMax)) + 1;
  // A launcher may start this rank again.
  facts.writer = monitor::process_identity(under_lockstep_run() ? ::getppid() : ::getpid());
  // After this exchange the folder is this run's on every rank: the ranks that write have
  // deleted an earlier run's record.
  agree(world, [&] {
    if (!world.is_leader() || !record) return;
    try {
      monitor::write_facts(folder, facts);
    } catch (const SystemError& error) {
      log::warning("record", "{} Training continues without a record.", error.what());
    }
  });
  if (record)
    recording.recorder = std::make_unique<monitor::RankRecorder>(
        monitor::RankRecorderOptions{.directory = folder,
                                     .rank = world.rank(),
                                     .host = world.node_rank(),
                                     .gpus = world.device().is_cuda() && world.local_rank() == 0});
  return recording;
}

void end_recording(const World& world, const std::string& folder, const std::string& failure) {
  if (!world.is_leader()) return;
  const std::string file = folder + "/" + monitor::kRecordFolder + "/run.json";
  try {
    monitor::RunFacts facts = monitor::parse_facts(read_file(file), file);
    facts.failure = failure;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    if (failure.empty()) facts.ended_unix_s = std::chrono::duration<double>(now).count();
    monitor::write_facts(folder, facts);
  } catch (const Error& error) {  // not there, or not writable any more
    log::warning("record", "{} The record does not say how the run ended.", error.what());
  }
}

}  // namespace lockstep::train
