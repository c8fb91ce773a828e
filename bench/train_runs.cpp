#include "bench/train_runs.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "bench/harness.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::bench {
namespace {

constexpr std::chrono::hours kTimeout{2};
constexpr std::size_t kShownLines = 12;

std::string last_lines(const std::string& path) {
  const std::vector<std::string> lines = split(read_file(path), '\n');
  std::string shown;
  for (std::size_t i = lines.size() - std::min(kShownLines, lines.size()); i < lines.size(); ++i)
    shown += "\n  " + lines[i];
  return shown;
}

TrainFigures read_figures(const std::string& path) {
  TrainFigures figures;
  for (const std::string& line : split(read_file(path), '\n')) {
    const train::LogEntry entry = train::parse_log_entry(line, path);
    const auto value = [&](const char* name) { return train::find_metric(entry.values, name); };
    if (const double* loss = value("loss")) figures.losses.push_back(*loss);
    if (const double* rate = value("samples_per_second"))
      figures.samples_per_second.push_back(*rate);
    if (const double* rate = value("tokens_per_second")) figures.tokens_per_second.push_back(*rate);
    if (const double* seconds = value("train_runtime")) figures.runtime_s = *seconds;
    if (const double* loss = value("train_loss")) figures.train_loss = *loss;
  }
  return figures;
}

}  // namespace

double TrainFigures::settled(const std::vector<double>& logged) {
  if (logged.size() < 2)
    throw Error("bench", "a run has logged less than twice. Give it more --steps");
  return median({logged.begin() + 1, logged.end()});
}

std::vector<std::string> short_run(std::int64_t steps, std::int64_t logging_steps) {
  return {fmt::format("--max_steps={}", steps),
          fmt::format("--logging_steps={}", std::max<std::int64_t>(1, logging_steps)),
          "--logging_strategy=steps",
          "--logging_first_step=false",
          "--lr_scheduler_type=constant",
          "--lr_scheduler_kwargs=none",
          "--warmup_steps=0",
          "--eval_strategy=no",
          "--eval_on_start=false",
          "--early_stopping_patience=none",
          "--load_best_model_at_end=false",
          "--save_strategy=no",
          "--enable_jit_checkpoint=false",
          "--report_to=none",
          "--disable_tqdm=true",
          "--auto_find_batch_size=false",
          "--elastic_gpu=false",
          "--resume_from_checkpoint=never"};
}

bool on_cpu(const TrainingArguments& arguments) {
  return arguments.use_cpu || env::get("LOCKSTEP_DEVICE") == "cpu" || cuda_device_count() == 0;
}

TrainFigures run_train(const TrainJob& job, const std::string& folder) {
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string output = folder + ".log";
  const Fd log(::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!log) throw SystemError("bench", fmt::format("cannot write '{}'", output), errno);
  std::vector<std::string> arguments{"train"};
  if (job.ranks > 1) arguments.push_back(fmt::format("--nproc-per-node={}", job.ranks));
  if (!job.file.empty()) arguments.push_back(job.file);
  arguments.insert(arguments.end(), job.flags.begin(), job.flags.end());
  arguments.push_back("--output_dir=" + folder);
  launch::Process process = start_lockstep(arguments, job.environment, log.get());
  const bool in_time = ended(process, kTimeout);
  if (!in_time) stop(process);
  const auto ending = in_time ? process.reap() : std::nullopt;
  if (!ending || !ending->ok())
    throw Error("bench",
                fmt::format("lockstep train of '{}' failed ({}). Its last lines:{}", job.name,
                            ending ? ending->text() : "it took too long", last_lines(output)));
  const TrainFigures figures = read_figures(folder + "/metrics.jsonl");
  if (!(figures.runtime_s > 0))
    throw Error("bench", fmt::format("lockstep train of '{}' left no train_runtime in {}", job.name,
                                     folder));
  return figures;
}

}  // namespace lockstep::bench
