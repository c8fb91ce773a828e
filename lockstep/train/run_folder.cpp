// CheckpointManager before the first step: which run owns output_dir, which checkpoint the run
// continues from, and whether others are in its way.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/io/file.h"
#include "lockstep/train/checkpoint_manager.h"
#include "lockstep/train/folder_owner.h"
#include "lockstep/train/run_checks.h"

namespace lockstep::train {
namespace {

// Names the run whose attempt has begun in output_dir.
std::string run_file(const TrainingArguments& a) {
  return a.output_dir + "/.run_id";
}

std::string launchers_run() {
  return env::get("TORCHELASTIC_RUN_ID").value_or("");
}

std::int64_t restarts() {
  return env::get_int("TORCHELASTIC_RESTART_COUNT").value_or(0);
}

// Collective. The previous attempt may have died before it began to write: then no file names this
// run, and this attempt begins as that one did.
void resume_restarted(RunContext& run) {
  TrainingArguments& a = run.arguments;
  const std::string asked = a.resume_from_checkpoint.value_or("");
  if (restarts() == 0 || asked == "auto") return;
  std::string answer;
  if (run.world.is_leader()) {
    try {
      const bool ours = read_file(run_file(a)) == launchers_run();
      // Before its first checkpoint it begins again from the folder that it was given.
      if (ours && asked == "never")
        answer = asked;
      else if (ours && (asked.empty() || find_checkpoint(a.output_dir, "auto").step >= 0))
        answer = "auto";
    } catch (const SystemError& e) {
      log::info("trainer", "no attempt of this run has begun in {} ({})", a.output_dir, e.what());
    }
  }
  answer = broadcast_bytes(run.world, answer);
  if (answer == "never") a.overwrite_output_dir = true;  // of what it has saved itself
  if (answer != "auto") return;
  a.resume_from_checkpoint = answer;
  if (run.world.is_leader())
    log::info("trainer",
              "attempt {} of this run resumes from its newest checkpoint (not with --resume never)",
              restarts());
}

io::Newest newest_up_to(const std::string& output_dir, std::int64_t most) {
  io::Newest found = io::newest_valid(output_dir, kCheckpointPrefix, most);
  for (const io::PassedOver& passed : found.passed_over)
    log::warning("checkpoint", "{} is passed over: {}", passed.path, passed.reason);
  if (!found.remark.empty()) log::warning("checkpoint", "{}: {}", found.path, found.remark);
  return found;
}

// With save_on_each_node every host has folders of its own, and one may have lost its newest. The
// run continues from the newest step that is complete on all of them; empty: there is none.
std::string newest_on_all(RunContext& run) {
  const std::string& folder = run.arguments.output_dir;
  std::optional<io::Newest> mine;
  for (std::int64_t most = std::numeric_limits<std::int64_t>::max();;) {
    const auto answers = agree(run.world, [&]() -> std::string {
      if (!run.writes()) return {};
      if (!mine || mine->step > most) mine = newest_up_to(folder, most);
      return fmt::format("{} {}", mine->step, mine->path);
    });
    std::vector<std::int64_t> steps;
    for (const std::string& text : answers)
      if (!text.empty()) steps.push_back(std::stoll(text));
    const auto [lowest, highest] = std::ranges::minmax(steps);
    if (lowest < 0) {
      if (run.world.is_leader()) {
        const bool damaged = mine && !mine->passed_over.empty();
        log::info("checkpoint", "{} has no checkpoint{}: a new run", folder,
                  run.arguments.save_on_each_node ? " that is whole on every host"
                  : damaged                       ? " that is whole"
                                                  : "");
      }
      return {};
    }
    if (lowest == highest) return answers[0].substr(answers[0].find(' ') + 1);
    if (run.writes() && mine->step > lowest)
      log::warning("checkpoint", "{} is passed over: another host has no whole one of that step",
                   mine->path);
    most = lowest;
  }
}

// Also deletes what the writer of an earlier run left when it died.
void sweep_output_dir(const RunContext& run) {
  if (!run.writes()) return;
  for (const std::string& path : io::sweep(run.arguments.output_dir).removed)
    log::info("checkpoint", "removed {}, which a run that died has left", path);
}

}  // namespace

// The leader goes first, so that writers that share its folder recognise their own run.
io::FolderLock CheckpointManager::lock() {
  io::FolderLock lock;
  World& world = run_.world;
  const std::string& folder = run_.arguments.output_dir;
  const auto tokens = agree(world, [&]() -> std::string {
    if (!world.is_leader()) return {};
    const std::string token = new_lock_token();
    lock = lock_output_dir(folder, token);
    return token;
  });
  if (!run_.arguments.save_on_each_node) return lock;
  agree(world, [&] {
    if (run_.writes() && !world.is_leader()) lock = lock_output_dir(folder, tokens[0]);
  });
  return lock;
}

std::string CheckpointManager::choose() {
  resume_restarted(run_);
  const std::string flag = run_.arguments.resume_from_checkpoint.value_or("never");
  RunStart start;
  if (flag == "auto") {
    start = {.checkpoint = newest_on_all(run_), .newest = true};
  } else if (flag != "never") {
    agree(run_.world, [&] {
      if (run_.writes()) find_checkpoint(run_.arguments.output_dir, flag);
    });
    start.checkpoint = flag;
  }
  begin_at(start);
  return start.checkpoint;
}

// A start that is refused leaves everything in place.
void CheckpointManager::begin_at(const RunStart& start) {
  const TrainingArguments& a = run_.arguments;
  agree(run_.world, [&] {
    if (!run_.writes()) return;
    if (!a.overwrite_output_dir)
      refuse_others(a.output_dir, other_checkpoints(a.output_dir, start));
    in_place_ = continues_in(a.output_dir, start);
  });
  start_ = start;
  if (restarts() == 0 && run_.world.is_leader()) ::unlink(run_file(a).c_str());
  sweep_output_dir(run_);
}

// Only once it is certain that the run begins.
void CheckpointManager::claim_output_dir() const {
  const TrainingArguments& a = run_.arguments;
  remove_others(other_checkpoints(a.output_dir, start_));
  if (!in_place_) remove_record(a.output_dir);
  if (run_.world.is_leader() && env::get_int("TORCHELASTIC_MAX_RESTARTS").value_or(0) > 0)
    write_file_atomically(run_file(a), launchers_run());
}

}  // namespace lockstep::train
