// The progress of a run: Hugging Face's trainer_state.json, and our additions for an exact resume
// (sampler.json). Without torch, so that `lockstep checkpoint show` can read it.
//
//   TrainerState state = parse_trainer_state(text, "checkpoint-40/trainer_state.json");
//   state.log_history.push_back({.step = 41, .epoch = 0.5, .values = {{"loss", 1.25}}});
//   dir.write("trainer_state.json", trainer_state_text(state));
//
// Values; copy them, and read them from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::train {

inline constexpr const char* kCheckpointPrefix = "checkpoint-";  // before the step

using Metrics = std::vector<std::pair<std::string, double>>;
const double* find_metric(const Metrics& metrics, std::string_view name);  // nullptr without one

struct LogEntry {
  std::int64_t step = 0;
  double epoch = 0;  // NaN: not known, in a user's own loop
  Metrics values{};
};

struct TrainerState {
  std::int64_t global_step = 0;
  double epoch = 0;
  std::int64_t max_steps = 0;
  std::int64_t num_train_epochs = 0;
  std::int64_t num_input_tokens_seen = 0;
  std::int64_t train_batch_size = 0;
  double logging_steps = 0;
  double eval_steps = 0;
  double save_steps = 0;
  std::optional<double> best_metric{};
  std::optional<std::int64_t> best_global_step{};
  std::optional<std::string> best_model_checkpoint{};
  std::int64_t patience_used = 0;  // for EarlyStopping: evaluations without a better metric
  std::vector<LogEntry> log_history{};
};

std::string trainer_state_text(const TrainerState& state);
// UsageError with file and location when it is invalid. Fields of Hugging Face alone are skipped.
TrainerState parse_trainer_state(std::string_view text, const std::string& name);

// A run's position in the data. The cursor counts samples of all ranks, so any number of ranks can
// continue from it; the other fields tell whether the data are the same.
struct DataPosition {
  std::int64_t epoch = 0;
  std::int64_t cursor = 0;
  std::int64_t seed = 0;
  std::int64_t world_size = 1;
  std::int64_t batch_size = 0;  // per rank
  std::int64_t accumulation = 1;
  std::int64_t dataset_size = 0;    // samples of an epoch's order
  std::int64_t order = 0;           // its checksum; 0: an older file, not checked
  std::int64_t epoch_ended = 0;     // 1: what is due after the epoch has been done
  std::int64_t evaluation_due = 0;  // 1: a stop signal came before it, or in it
  // Intra-op threads of rank 0, which decide how sums on the CPU are divided; 0: an older file.
  std::int64_t threads = 0;
};
std::string data_position_text(const DataPosition& position);
DataPosition parse_data_position(std::string_view text, const std::string& name);

// One object on one line: {"step": 41, "epoch": 0.5, "loss": 1.25}. What is not finite is null.
std::string log_entry_json(const LogEntry& entry, const std::string& run_name = {});
// The numbers of such a line. UsageError when it is not one.
LogEntry parse_log_entry(std::string_view text, const std::string& name);

}  // namespace lockstep::train
