// `lockstep config`: which values a run would train with and why, without training.
#include "lockstep/train/config.h"

#include <fmt/format.h>

#include <cstdio>
#include <optional>

#include "cli/commands.h"
#include "cli/plan.h"
#include "cli/task_config.h"
#include "launcher/flags.h"
#include "launcher/host.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/text.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::cli {
namespace {

// A few lines for each key with `part` in its name ("model.n_layer"); empty: there is none.
std::string task_keys_help(std::string_view part = "") {
  std::string text;
  for (const train::SectionKey& key : train::section_keys()) {
    const std::string name = key.full_name();
    if (name.find(part) == name.npos) continue;
    text += fmt::format("  {:<32} {}{}\n{:36}[{}{}]\n", name,
                        key.of.empty() ? "" : fmt::format("({}) ", key.of), key.help, "",
                        key.accepts, key.fallback.empty() ? "" : fmt::format("; {}", key.fallback));
  }
  return text;
}

// The rows of a table.
std::string task_keys_markdown() {
  std::string text = "| key | of | accepted | default | meaning |\n|---|---|---|---|---|\n";
  for (const train::SectionKey& key : train::section_keys())
    text += fmt::format("| `{}` | {} | {} | {} | {} |\n", key.full_name(), key.of, key.accepts,
                        key.fallback, key.help);
  return text;
}

// With elastic_gpu, the batch at which it would begin with this number of ranks.
TrainingArguments planned(const TrainingArguments& a, int copies) {
  return a.elastic_gpu ? with_shared_batch(a, copies) : a;
}

std::string batch_text(const TrainingArguments& a, int world_size) {
  const int copies = train::batch_ranks(a, world_size);
  return train::effective_batch_text(planned(a, copies), copies);
}

constexpr const char* kConfigHelp =
    "usage: lockstep config show [FILE] [--all] [--json] [--world-size N] [--KEY VALUE ...]\n"
    "       lockstep config check FILE [--launcher | --own-program] [--world-size N] "
    "[--KEY VALUE ...]\n"
    "       lockstep config keys [PART ...] [--markdown]\n\n"
    "show    the values a run would use and where each comes from; without --all, those that are\n"
    "        not defaults\n"
    "check   0 when `lockstep train` can use the file, 2 with every mistake otherwise, also in\n"
    "        model: and data:, the files they name and their contents; --own-program: those\n"
    "        are another program's, and not looked at; --launcher: Accelerate's file, and the "
    "flags\n"
    "        it stands for\n"
    "keys    every key, or those with PART in their name: what it accepts, its default, its "
    "meaning\n\n"
    "Order: defaults < preset < file < LOCKSTEP_<KEY> in the environment < --KEY VALUE.\n"
    "--world-size N compares the effective batch with the presets' at N ranks.\n";

struct ConfigRequest {
  Args names;  // files, presets
  Args flags;  // --KEY VALUE
  bool all = false;
  bool json = false;
  bool launcher = false;
  bool markdown = false;
  bool own_program = false;
  std::optional<int> world_size;
};

ConfigRequest parse_config(const Args& args) {
  ConfigRequest request;
  Flags flags("config");
  flags.toggle("--all", request.all);
  flags.toggle("--json", request.json);
  flags.toggle("--launcher", request.launcher);
  flags.toggle("--own-program", request.own_program);
  flags.toggle("--markdown", request.markdown);
  flags.integer("--world-size", request.world_size, 1, 100'000, "a value. Write --world-size=N");
  request.flags = flags.read(Args(args.begin() + 1, args.end()), /*keys=*/true);
  request.names = train::take_names(request.flags);
  return request;
}

void say_notes(const std::vector<std::string>& notes) {
  for (const std::string& note : notes) print_text(stderr, "note: {}\n", note);
}

int show_config(const ConfigRequest& request) {
  if (request.names.size() > 1)
    throw UsageError("config", "show takes one file, and '{}' is a second.", request.names[1]);
  const train::Config config = train::load_config(request.names.empty() ? "" : request.names[0],
                                                  request.flags, launch::launcher_keys());
  if (request.json) {
    print_text("{}\n", train::config_json(config));
    return 0;
  }
  say_notes(config.notes);
  print_text("{}", train::config_text(config, request.all));
  if (request.world_size) {
    const int copies = train::batch_ranks(config.arguments, *request.world_size);
    print_text("{}", train::preset_comparison(planned(config.arguments, copies), copies));
  }
  return 0;
}

// A file is often checked on another machine than it is trained on.
void note_precision(const TrainingArguments& arguments) {
  try {
    const bool cpu = env::get("LOCKSTEP_DEVICE") == "cpu" || launch::find_gpus().count == 0;
    train::check_precision(arguments, cpu);
  } catch (const UsageError& error) {
    print_text(stderr, "note: on this machine training is refused: {}\n", error.what());
  }
}

// A file or folder that may not be read is one mistake among others.
template <typename Read>
void attempt(Problems& problems, const Read& read) {
  try {
    problems.attempt(read);
  } catch (const SystemError& error) {
    problems.add(error.what());
  }
}

// Reads the files as training would, and discards what it reads.
void check_contents(const TaskConfig& task, Problems& problems) {
  const DataConfig& data = task.data;
  for (const std::string& path : {data.path, data.eval_path}) {
    if (data.name != "instructions" || path.empty()) continue;
    attempt(problems, [&] {
      const std::string cut = what_was_cut(read_instructions(task, path, ReadingProgress(path)));
      if (!cut.empty()) print_text(stderr, "note: {}\n", cut);
    });
    if (data.eval_path == data.path) break;
  }
}

void check_disk(const TaskConfig& task, const train::Config& config, Problems& problems) {
  attempt(problems, [&] {
    const train::CheckpointSize size{.model = checkpoint_bytes(task),
                                     .optimizer = training_of(config, task).state_bytes.value()};
    train::check_room(config.arguments, size, /*two=*/false);
  });
}

int check_config(const ConfigRequest& request) {
  if (request.names.size() != 1)
    throw UsageError("config", "check takes one file. Write lockstep config check FILE.");
  const std::string& file = request.names[0];
  if (request.launcher) {
    const launch::AccelerateLaunch launch =
        launch::load_accelerate_config(file, train::training_keys());
    say_notes(launch.notes);
    print_text("{} can be used: lockstep run {}\n", file, fmt::join(launch.flags, " "));
    for (const auto& [name, value] : launch.environment) print_text("  {}={}\n", name, value);
    return 0;
  }
  Problems problems;
  const train::Config config =
      train::load_config(file, request.flags, launch::launcher_keys(), &problems);
  say_notes(config.notes);
  if (!request.own_program) {
    const std::size_t before = problems.size();
    const TaskConfig task = read_task(config.arguments, TaskFiles::kChecked, problems);
    say_notes(task.notes);
    const bool right = problems.size() == before;
    if (!right && !config.arguments.model && !config.arguments.data)
      say_notes(
          {"without model: and data: this may be the file of a program of its own, which "
           "`lockstep config check --own-program` checks"});
    if (task.data_is_right) check_contents(task, problems);
    if (right) check_disk(task, config, problems);
  }
  Problems resume;
  resume.attempt(
      [&] { train::check_resume(config.arguments.resume_from_checkpoint.value_or("never")); });
  for (const std::string& text : resume.texts())
    problems.add(fmt::format("{}: {}", config.setting("resume_from_checkpoint").where, text));
  problems.raise();
  if (config.arguments.fp16) note_precision(config.arguments);
  if (request.world_size) print_text("{}\n", batch_text(config.arguments, *request.world_size));
  print_text("{} can be used\n", file);
  return 0;
}

// Lists all of them without a name.
int show_keys(const ConfigRequest& request) {
  if (!request.flags.empty() || (request.markdown && !request.names.empty()))
    throw UsageError("config", "keys takes names of keys or parts of them, and --markdown alone.");
  if (request.markdown || request.names.empty()) {
    if (request.markdown)
      print_text("{}\n{}", train::keys_markdown(), task_keys_markdown());
    else
      print_text("{}\nof `lockstep train`:\n{}", train::keys_help(), task_keys_help());
    return 0;
  }
  for (const std::string& name : request.names) {
    const std::string text = train::keys_help(name) + task_keys_help(name);
    if (text.empty())
      throw UsageError("config",
                       "there is no key with '{}' in its name.{} 'lockstep config keys' "
                       "lists them all.",
                       name, did_you_mean(name, train::key_names()));
    print_text("{}", text);
  }
  return 0;
}

}  // namespace

int config_command(const Args& args) {
  if (print_help(args, kConfigHelp)) return 0;
  if (args.empty()) {
    print_text(stderr, "{}", kConfigHelp);
    return 2;
  }
  const std::string& action = args.front();
  const ConfigRequest request = parse_config(args);
  if (action == "show") return show_config(request);
  if (action == "check") return check_config(request);
  if (action == "keys") return show_keys(request);
  const std::vector<std::string> actions = {"show", "check", "keys"};
  throw UsageError("config", "there is no action '{}'.{} 'lockstep config --help' lists them.",
                   action, did_you_mean(action, actions));
}

}  // namespace lockstep::cli
