// `lockstep`: starts in milliseconds because it links no torch. Commands that need torch are in
// ../libexec beside it, in programs that replace this process (exec). The only source that knows
// the commit: a new one recompiles nothing else.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "lockstep/version.h"

namespace lockstep::cli {
namespace {

// A page of the documentation: beside an installed program, in the source tree of a build, or its
// name alone.
std::string documentation(const std::string& page) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const fs::path prefix = fs::read_symlink("/proc/self/exe", ignored).parent_path().parent_path();
  for (const fs::path& folder : {prefix / "share/doc/lockstep", prefix.parent_path()})
    if (fs::exists(folder / "docs/api.md", ignored)) return folder / page;
  return page;
}

std::string version_text() {
  return fmt::format(
      "lockstep {}\n"
      "commit {}\n"
      "torch {}\n"
      "compiler {}\n"
      "To report a problem, see {}.\n",
      LOCKSTEP_VERSION, LOCKSTEP_BUILT_FROM, LOCKSTEP_BUILT_WITH_TORCH, LOCKSTEP_BUILT_BY,
      documentation("CONTRIBUTING.md"));
}

struct Command {
  const char* name;
  const char* help;
  int (*run)(const Args& args);   // nullptr: in `program`
  const char* program = nullptr;  // the program of libexec that it needs
  const char* rest = nullptr;     // what works without that program; nullptr: nothing
};

constexpr Command kCommands[] = {
    {"run", "start a program as the ranks of one world (torchrun's flags)", run_command},
    {"doctor", "check this machine before a run, and explain a recorded one", doctor_command},
    {"env", "show rank, device, backend and every variable, and why", env_command},
    {"train", "train a bundled model as a file says, and resume", train_command, "lockstep-train"},
    {"generate", "continue a text with a trained model", nullptr, "lockstep-train"},
    {"checkpoint", "verify, show, compare, import and merge checkpoints", checkpoint_command,
     "lockstep-train", "verify, show and compare checkpoints"},
    {"config", "check training files; show their values and where each comes from", config_command},
    {"plan", "memory, strategy, step time and scaling of a training file, before it runs",
     plan_command},
    {"data", "tokenize text files into shards, and inspect them", data_command},
    {"monitor", "show a run in the terminal, or every GPU of this machine", monitor_command},
    {"dashboard", "serve the page of a recorded run, also after its end", dashboard_command},
    {"ledger", "show what the ranks of a failed or stalled run did last", ledger_command},
    {"report", "write the report of a run, or of two side by side, as an HTML page",
     report_command},
    {"bench", "measure launching, collectives and training against PyTorch", nullptr,
     "lockstep-bench"},
};

// A program that needs LibTorch, which may be missing: Python's wheel has none of them.
std::string program_path(const char* program) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  return self.parent_path().parent_path() / "libexec" / program;
}

// The text of --help, with the commands that this installation can run.
std::string help() {
  std::string text =
      "usage: lockstep COMMAND [arguments]\n\n"
      "Trains a LibTorch model on many processes and devices as if it were one.\n\n"
      "commands:\n";
  for (const Command& command : kCommands) {
    const bool whole =
        command.program == nullptr || ::access(program_path(command.program).c_str(), X_OK) == 0;
    const char* const about = whole ? command.help : command.rest;
    if (about != nullptr) text += fmt::format("  {:<12}{}\n", command.name, about);
  }
  return text + fmt::format(
                    "\n  lockstep COMMAND --help    the command's own flags\n"
                    "  lockstep --version         version, commit, LibTorch and compiler\n"
                    "\nDocumentation: {} and the folder {}.\nTo report a problem, see {}.\n",
                    documentation("README.md"), documentation("docs"),
                    documentation("CONTRIBUTING.md"));
}

int print(const std::string& text) {
  return std::fwrite(text.data(), 1, text.size(), stdout) == text.size() ? 0 : 1;
}

}  // namespace

int execute(const char* program, const Args& args) {
  const std::string path = program_path(program);
  std::vector<char*> arguments{const_cast<char*>("lockstep")};
  for (const std::string& arg : args) arguments.push_back(const_cast<char*>(arg.c_str()));
  arguments.push_back(nullptr);
  ::execv(path.c_str(), arguments.data());
  print_text(stderr,
             "lockstep: '{}' needs LibTorch and is in {}, which cannot be executed ({}). Was only "
             "the torch-free part built or installed?\n",
             args.front(), path, std::strerror(errno));
  return 1;
}

namespace {

[[noreturn]] void unknown_command(const std::string& arg) {
  std::vector<std::string> names;
  for (const Command& command : kCommands) names.push_back(command.name);
  throw UsageError("lockstep", "there is no command '{}'.{} 'lockstep --help' lists them.", arg,
                   did_you_mean(arg, names));
}

int dispatch(const Args& args) {
  if (args.empty()) {
    print_text(stderr, "{}", help());
    return 2;
  }
  const std::string& first = args.front();
  if (first == "--version" || first == "-V" || first == "version") return print(version_text());
  if (first == "--help" || first == "-h" || first == "help") return print(help());
  const auto command = std::find_if(std::begin(kCommands), std::end(kCommands),
                                    [&](const Command& c) { return first == c.name; });
  if (command == std::end(kCommands)) unknown_command(first);
  if (command->run == nullptr) return execute(command->program, args);
  return command->run(Args(args.begin() + 1, args.end()));
}

}  // namespace
}  // namespace lockstep::cli

int main(int argc, char** argv) {
  using namespace lockstep::cli;
  return guarded([&] { return dispatch(Args(argv + 1, argv + argc)); });
}
