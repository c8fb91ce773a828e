#include "launcher/program.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <system_error>

#include "launcher/process.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

enum class FileKind { kMissing, kDirectory, kPlain, kExecutable };

FileKind kind_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return FileKind::kMissing;
  if (S_ISDIR(status.st_mode)) return FileKind::kDirectory;
  return ::access(path.c_str(), X_OK) == 0 ? FileKind::kExecutable : FileKind::kPlain;
}

// What Python runs as a program: `python3 folder`.
bool has_main(const std::string& folder) {
  return kind_of(folder) == FileKind::kDirectory &&
         kind_of(folder + "/__main__.py") != FileKind::kMissing;
}

// The file to execute, or an error that says what is wrong with it.
std::string executable(const std::string& program, const Variables& variable) {
  if (program.find('/') == std::string::npos) {
    if (const auto found = find_program(program, variable("PATH"))) return *found;
    // `lockstep run lockstep env` works wherever lockstep is.
    std::error_code ignored;
    const auto self = std::filesystem::read_symlink("/proc/self/exe", ignored);
    if (self.filename() == program) return self.string();
    const bool here = kind_of(program) != FileKind::kMissing;
    throw UsageError("run", "the program '{}' is not on PATH.{}", program,
                     here ? fmt::format(" There is one in this directory: write ./{}.", program)
                          : " Check the spelling, or write its path.");
  }
  switch (kind_of(program)) {
    case FileKind::kExecutable:
      return program;
    case FileKind::kMissing:
      throw UsageError("run",
                       "the program '{}' does not exist. Check the path; the current "
                       "directory is '{}'.",
                       program, std::filesystem::current_path().string());
    case FileKind::kDirectory:
      throw UsageError("run",
                       "the program '{}' is a directory without __main__.py. A Python package runs "
                       "with -m.",
                       program);
    case FileKind::kPlain:
      break;
  }
  throw UsageError("run",
                   "the program '{}' is not executable. Run chmod +x on it; for a Python file "
                   "without .py in its name use --run-path.",
                   program);
}

// The interpreter of the virtual environment that this launcher was installed into, which need not
// be activated; nothing elsewhere.
std::optional<std::string> own_interpreter() {
  std::error_code ignored;
  const auto folder = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path();
  const std::string candidate = folder / "python3";
  if (kind_of(folder.parent_path() / "pyvenv.cfg") == FileKind::kMissing) return std::nullopt;
  return kind_of(candidate) == FileKind::kExecutable ? std::optional(candidate) : std::nullopt;
}

std::string interpreter(const Variables& variable) {
  const std::string name = variable("PYTHON_EXEC").value_or("");
  if (name.empty()) {
    if (const auto own = own_interpreter()) return *own;
  }
  try {
    return executable(name.empty() ? "python3" : name, variable);
  } catch (const UsageError&) {
    throw UsageError("run",
                     "the Python interpreter '{}' cannot be executed. Install python3, or set "
                     "PYTHON_EXEC to one.",
                     name.empty() ? "python3" : name);
  }
}

}  // namespace

bool runs_python(const std::vector<std::string>& command) {
  return !command.empty() &&
         std::filesystem::path(command.front()).filename().string().starts_with("python");
}

std::vector<std::string> resolve_command(const ProgramRequest& request, const Variables& variable) {
  const std::vector<std::string>& program = request.args;
  if (program.empty()) {
    throw UsageError("run",
                     "no program was given. Usage: lockstep run [flags] PROGRAM [arguments].");
  }
  const bool module = request.module && !request.run_path;
  const bool no_python = request.no_python && !request.run_path;
  if (module && no_python) {
    throw UsageError("run",
                     "-m (--module) and --no-python contradict each other: a module runs under "
                     "Python. Drop one of them.");
  }
  const std::string& name = program.front();
  const bool file = request.run_path ||
                    (name.size() > 3 && name.compare(name.size() - 3, 3, ".py") == 0) ||
                    (!no_python && has_main(name));
  std::vector<std::string> command;
  if (module) {
    command = {interpreter(variable), "-u", "-m", name};
  } else if (file && !no_python) {
    if (kind_of(name) == FileKind::kMissing) {
      throw UsageError("run",
                       "the script '{}' does not exist. Check the path; the current "
                       "directory is '{}'.",
                       name, std::filesystem::current_path().string());
    }
    if (::access(name.c_str(), R_OK) != 0)
      throw UsageError("run", "the script '{}' cannot be read. Check its permissions.", name);
    command = {interpreter(variable), "-u", name};
  } else {
    command = {executable(name, variable)};
  }
  command.insert(command.end(), program.begin() + 1, program.end());
  return command;
}

}  // namespace lockstep::launch
