// The inside of Trainer. Files: trainer.cpp (the loop), trainer_setup.cpp (everything before the
// first step), trainer_report.cpp (logging, evaluation, what is best), trainer_save.cpp
// (checkpoints in and out).
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/io/folder_lock.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/schedule.h"
#include "lockstep/parallel/accumulation.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/train/agreement.h"
#include "lockstep/train/async_saver.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/metrics_log.h"
#include "lockstep/train/progress.h"
#include "lockstep/train/step_plan.h"
#include "lockstep/train/stop_signals.h"
#include "lockstep/train/trainer.h"

namespace lockstep::train {

// An error's text tells memory that is full from memory that was misused.
bool says_out_of_memory(const char* text);

class TrainerImpl {
 public:
  TrainerImpl(World world, TrainerTask task, TrainingArguments arguments);

  TrainResult train();
  Metrics evaluate();

  std::vector<std::shared_ptr<Observer>> observers;
  TrainerState state;

 private:
  using Clock = std::chrono::steady_clock;
  using Model = DistributedDataParallel<std::shared_ptr<torch::nn::Module>>;
  using Call = void (Observer::*)(Event&);

  // trainer_setup.cpp
  void set_switches();
  void prepare();
  void make_loader();
  double expected_count() const;
  void make_optimizer();
  std::string reason_to_shard();
  void make_outputs(const std::string& checkpoint);
  void find_batch_size();
  bool batch_fits(std::int64_t batch_size);
  std::vector<at::Tensor> memory_of_a_step() const;
  void check_disk();

  // trainer.cpp
  void run_epochs();
  void run_epoch(std::int64_t epoch);
  at::Tensor forward(const data::Batch& batch);
  bool micro_batch(const data::Batch& batch);
  void optimizer_step();
  void obey(int signal);
  void note_exchange();
  void after_step(Due due);
  bool over() const;
  void set_learning_rate();
  void update_epoch(std::int64_t batches_left);
  void finish();
  template <typename Body>
  auto with_memory_advice(Body&& body, bool evaluating = false);
  [[noreturn]] void out_of_memory(const std::string& what, bool evaluating = false) const;
  // Calls every observer; what they flag for is kept for the next exchange.
  void notify(Call call, const LogEntry* entry = nullptr, const std::string* path = nullptr,
              const std::string* text = nullptr);

  // trainer_report.cpp
  void count_window(const optim::StepResult& result);
  void log();
  void report(Metrics values);
  Metrics run_evaluation();  // trainer.cpp
  Metrics evaluate_all();
  bool hears_a_stop();
  bool evaluation_cut_off();
  double gain_of(double value) const;
  void evaluate_and_judge(Due& due);
  double mean_loss(const at::Tensor& totals);
  double tokens_since_log();
  void summarize();
  Metrics recorded_summary();
  void say_end();
  std::string stopped_by();

  // trainer_save.cpp
  io::FolderLock take_output_dir();
  std::string choose_checkpoint();
  void make_way(const std::string& checkpoint);
  void resume(const Checkpoint& checkpoint);
  void resume_restarted();
  void restore_random(const Checkpoint& checkpoint);
  void say_other_length(const Checkpoint& checkpoint) const;
  TensorDict random_state() const;
  std::chrono::duration<double> wait_for_saves(bool last);
  void end_save_before();
  void save();
  CheckpointContents contents(const std::vector<std::string>& random,
                              std::int64_t tokens_not_logged);
  DataPosition position() const;
  void collect_save();
  void alert(std::string text);
  void report_alerts();
  bool writes() const;
  void load_best();

  World world_;
  TrainerTask task_;
  TrainingArguments arguments_;
  std::int64_t accumulation_steps_ = 1;
  StepPlan plan_;
  std::optional<data::Loader> loader_;
  std::optional<data::Loader> eval_loader_;
  std::optional<Model> model_;
  std::unique_ptr<Accumulation> accumulation_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<optim::GradScaler> scaler_;
  std::optional<optim::Schedule> schedule_;
  std::optional<Agreement> agreement_;
  std::unique_ptr<StopSignals> signals_;
  std::unique_ptr<AsyncSaver> saver_;    // on ranks that write
  std::unique_ptr<MetricsLog> metrics_;  // on rank 0
  std::unique_ptr<Progress> progress_;   // on rank 0

  std::int64_t epoch_ = 0;
  bool epoch_ending_ = false;    // its last step is done, and what is due after it
  bool epoch_ended_ = false;     // everything that is due after the epoch has been done
  bool evaluation_due_ = false;  // a stop signal came before it, or in it
  StepFlags flags_;              // this rank's, for the next exchange
  StepFlags agreed_;             // everybody's
  int stop_signal_ = 0;
  bool stop_ = false;
  std::int64_t saved_step_ = -1;
  std::string committed_;
  std::string newest_;  // checkpoint that is whole, also one resumed from; on the leader
  std::int64_t durable_step_ = -1;   // the newest from which a run can continue; in the end on all
  std::int64_t lost_step_ = -1;      // of the newest save, where it failed; in the end on all
  std::vector<std::string> alerts_;  // of this rank, not yet told to all
  std::string durable_best_;         // on ranks that write

  Metrics summary_;
  double train_loss_ = 0;
  // Sums of (loss x count, count), float64 on the device.
  at::Tensor since_log_;
  at::Tensor since_start_;
  at::Tensor skipped_;
  at::Tensor grad_norm_;
  double learning_rate_ = 0;  // of the last step
  std::int64_t samples_ = 0;  // of this rank since the last log; every rank has as many
  std::int64_t last_log_step_ = 0;
  std::int64_t start_step_ = 0;
  Clock::time_point log_time_;
  Clock::time_point start_time_;
  Clock::time_point exchange_time_;
};

}  // namespace lockstep::train
