// The table of flags, and the first half of parsing: arguments and PET_ variables become texts.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>
#include <sstream>
#include <utility>

#include "launcher/flags.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {

namespace {

std::string with_dashes(std::string name) {
  std::ranges::replace(name, '_', '-');
  return name;
}

constexpr std::string_view kRanks = "Did you mean --nproc-per-node?";
constexpr std::string_view kRanksOfGpus =
    "Write --nproc-per-node=N for N ranks with a GPU each; CUDA_VISIBLE_DEVICES=0,2 says which "
    "GPUs.";

// Flags of mpirun, mp.spawn, Accelerate, DeepSpeed and Lightning, and what to write here instead.
constexpr std::pair<std::string_view, std::string_view> kFlagsOfOthers[] = {
    {"n", kRanks},
    {"np", kRanks},
    {"nprocs", kRanks},
    {"num-processes", kRanks},
    {"gpu", kRanksOfGpus},
    {"gpus", kRanksOfGpus},
    {"num-gpus", kRanksOfGpus},
    {"gpu-ids", kRanksOfGpus},
    {"devices", kRanksOfGpus},
    {"multi-gpu", kRanksOfGpus},
    {"num-nodes", "Did you mean --nnodes?"},
    {"num-machines", "Did you mean --nnodes?"},
    {"machine-rank", "Did you mean --node-rank?"},
    {"main-process-ip", "Did you mean --master-addr?"},
    {"main-process-port", "Did you mean --master-port?"},
    {"hostfile", "Start it on every host, with --nnodes, --node-rank and --master-addr."},
};

std::string suggestion_for(const std::string& name) {
  if (const auto hint = hint_for_flag(name); !hint.empty()) return fmt::format(" {}", hint);
  std::vector<std::string> names{"help"};
  for (const FlagSpec& flag : flag_table()) names.emplace_back(flag.name);
  return name.size() > 1 ? did_you_mean(name, names, "--") : "";
}

class ArgumentReader {
 public:
  explicit ArgumentReader(const std::vector<std::string>& args) : args_(args) {}

  GivenArguments read() {
    while (next_ < args_.size() && !given_.help) {
      const std::string& arg = args_[next_];
      if (arg == "--") {
        ++next_;
        break;
      }
      if (arg.size() < 2 || arg[0] != '-') break;
      ++next_;
      if (arg.rfind("--", 0) == 0) {
        read_long(arg);
      } else {
        read_letters(arg);
      }
    }
    given_.program.assign(args_.begin() + static_cast<std::ptrdiff_t>(next_), args_.end());
    return std::move(given_);
  }

 private:
  void read_long(const std::string& arg) {
    const auto equals = arg.find('=');
    const std::string name =
        with_dashes(arg.substr(2, equals == std::string::npos ? equals : equals - 2));
    const FlagSpec* flag = match(name, arg);
    if (flag == nullptr) {
      given_.help = true;
      return;
    }
    const std::string origin = fmt::format("--{}", flag->name);
    if (!flag->is_switch()) {
      given_.values.set(
          *flag, equals != std::string::npos ? arg.substr(equals + 1) : value_argument(origin),
          origin);
    } else if (equals == std::string::npos) {
      given_.values.set(*flag, "1", origin);
    } else if (!flag->optional_value.empty()) {
      given_.values.set(*flag, arg.substr(equals + 1), origin);
    } else {
      throw UsageError("run", "{} takes no value ('{}' was given). Write {} alone.", origin, arg,
                       origin);
    }
  }

  // The flag that `name` is a prefix of; null for help.
  const FlagSpec* match(const std::string& name, const std::string& arg) const {
    const std::vector<const FlagSpec*> found = flags_named(name);
    const bool help = !name.empty() && std::string_view("help").substr(0, name.size()) == name;
    if (help && found.empty()) return nullptr;
    if (found.size() == 1) return found.front();
    if (found.empty()) refuse(arg.substr(0, arg.find('=')), name);
    std::vector<std::string> meanings;
    for (const FlagSpec* flag : found) meanings.push_back(fmt::format("--{}", flag->name));
    throw UsageError("run", "--{} could be {}. Write more of it.", name, fmt::join(meanings, ", "));
  }

  void read_letters(const std::string& arg) {
    for (std::size_t i = 1; i < arg.size(); ++i) {
      if (arg[i] == 'h') {
        given_.help = true;
        return;
      }
      const auto table = flag_table();
      const auto flag =
          std::ranges::find_if(table, [&](const FlagSpec& f) { return f.letter == arg[i]; });
      if (flag == table.end()) refuse(arg, with_dashes(arg.substr(1, arg.find('=') - 1)));
      const std::string origin = fmt::format("-{}", arg[i]);
      if (flag->is_switch()) {
        given_.values.set(*flag, "1", origin);
        continue;
      }
      std::string rest = arg.substr(i + 1);
      if (!rest.empty() && rest[0] == '=') rest.erase(0, 1);
      if (rest.empty()) rest = value_argument(origin);
      given_.values.set(*flag, rest, fmt::format("--{}", flag->name));
      return;
    }
  }

  [[noreturn]] static void refuse(const std::string& arg, const std::string& name) {
    throw UsageError("run",
                     "there is no flag {}.{} Flags of the program go after the program; "
                     "'lockstep run --help' lists ours.",
                     arg, suggestion_for(name));
  }

  // The next argument, unless it is another flag.
  std::string value_argument(const std::string& origin) {
    const bool there = next_ < args_.size();
    const std::string arg = there ? args_[next_] : "";
    if (!there || (arg.size() > 1 && arg[0] == '-' && !to_int(arg))) {
      throw UsageError("run", "{} needs a value{}. Write {}{}VALUE.", origin,
                       there ? fmt::format(" but '{}' follows", arg) : "", origin,
                       origin.rfind("--", 0) == 0 ? "=" : " ");
    }
    ++next_;
    return arg;
  }

  const std::vector<std::string>& args_;
  std::size_t next_ = 0;
  GivenArguments given_;
};

}  // namespace

std::vector<const FlagSpec*> flags_named(std::string_view name) {
  std::vector<const FlagSpec*> found;
  for (const FlagSpec& flag : flag_table()) {
    if (flag.name == name) return {&flag};
    if (flag.name.starts_with(name)) found.push_back(&flag);
  }
  // A prefix that is unique in torchrun means the same here, whatever flags we add.
  std::vector<const FlagSpec*> theirs;
  std::ranges::copy_if(found, std::back_inserter(theirs),
                       [](const FlagSpec* flag) { return flag->torchrun; });
  return theirs.size() == 1 ? theirs : found;
}

std::string_view hint_for_flag(const std::string& name) {
  const auto* const found = std::ranges::find(
      kFlagsOfOthers, with_dashes(name), [](const auto& pair) { return std::string(pair.first); });
  return found == std::end(kFlagsOfOthers) ? std::string_view() : found->second;
}

std::optional<int> to_int(std::string_view text) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

void Values::set(const FlagSpec& flag, std::string text, std::string origin) {
  values_[std::string(flag.name)] = {std::move(text), std::move(origin)};
}

const Given* Values::find(const std::string& name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

std::string Values::text(const std::string& name, std::string fallback) const {
  const Given* given = find(name);
  return given != nullptr ? given->text : fallback;
}

int Values::number(const std::string& name, int fallback, int min, int max) const {
  const Given* given = find(name);
  if (given == nullptr) return fallback;
  const auto value = to_int(given->text);
  if (!value || *value < min || *value > max) {
    throw UsageError("run", "{}='{}' is not a whole number from {} to {}.", given->origin,
                     given->text, min, max);
  }
  return *value;
}

std::chrono::milliseconds Values::seconds(const std::string& name,
                                          std::chrono::milliseconds fallback, double min_s) const {
  constexpr double kMax_s = 365.0 * 24 * 3600;
  const Given* given = find(name);
  if (given == nullptr) return fallback;
  double value = 0;
  const char* end = given->text.data() + given->text.size();
  const auto [stop, error] = std::from_chars(given->text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= min_s) || value > kMax_s) {
    throw UsageError("run", "{}='{}' is not a number of seconds of at least {}.", given->origin,
                     given->text, min_s);
  }
  return std::chrono::milliseconds(std::llround(value * 1000));
}

GivenArguments read_arguments(const std::vector<std::string>& args) {
  return ArgumentReader(args).read();
}

void fill_from_variables(Values& values, const Variables& variable) {
  for (const FlagSpec& flag : flag_table()) {
    if (values.has(std::string(flag.name))) continue;
    const std::string name = flag.variable();
    const auto text = variable(name);
    if (!text || text->empty()) continue;
    // A port or address begins with a digit or "[" and is longer than "1" and "0".
    const bool word = text->size() == 1 || std::isalpha(static_cast<unsigned char>(text->front()));
    if (!flag.is_switch() || (!flag.optional_value.empty() && !word)) {
      values.set(flag, *text, name);
    } else if (env::parse_bool(*text, name)) {
      values.set(flag, "1", name);
    }
  }
}

// ---------------------------------------------------------------- the table, and its texts

namespace {

constexpr auto kHonoured = Treatment::kHonoured;
constexpr auto kIgnored = Treatment::kIgnored;
constexpr auto kRefused = Treatment::kRefused;

constexpr FlagSpec kFlags[] = {
    {"config-file", "FILE", "Accelerate's YAML file; flags, then PET_ variables, take precedence",
     false},
    {"nnodes", "N", "hosts; N or N:N (a real range is refused)"},
    {"nproc-per-node", "N|auto|cpu|gpu",
     "ranks on this host; auto: one per GPU, or per core without GPUs"},
    {"standalone", "", "one host, free port, random run id; overrides --rdzv-* and --master-*"},
    {"rdzv-backend", "static|c10d",
     "rendezvous of the hosts: static (any number of hosts) or c10d (one host)"},
    {"rdzv-endpoint", "HOST[:PORT]", "where node 0 listens; overrides --master-*"},
    {"rdzv-id", "ID", "run id, names the log directory (default: random on one host)"},
    {"rdzv-conf", "K=V,...",
     "timeout or join_timeout: seconds to wait for the other hosts (--startup-timeout)"},
    {"node-rank", "N", "this host's number, 0 is the master"},
    {"master-addr", "HOST", "address of host 0 (127.0.0.1)"},
    {"master-port", "PORT", "its port (one host: a free one; several: 29500)"},
    {"local-addr", "ADDR",
     "address at which other hosts reach this one (default: found by routing)"},
    {"secret-file", "FILE",
     "several hosts: only launchers with this secret join, over TLS; mode 0600, the same "
     "contents on every host (default: LOCKSTEP_SECRET_FILE)",
     false},
    {"max-restarts", "N",
     "restart all ranks after a failure, or after the loss of a host that comes back (0); not "
     "after a rank stopped on request (exit code 143) or reported a usage error (2)"},
    {"shutdown-timeout", "SECONDS", "from SIGTERM to SIGKILL when ranks are stopped (30)", false},
    {"stall-timeout", "SECONDS",
     "if no rank makes progress for this long and for ten median steps, print a table of the "
     "ranks' positions and which is behind (30); 0: no table, and no ledgers unless --doctor, "
     "--record or --dashboard needs them",
     false},
    {"stall-action", "warn|stop", "after that table: continue, or fail the run (warn)", false},
    {"doctor", "",
     "report on stderr what slows the ranks down and how to fix it, while they run and at the "
     "end; works for any program, with more detail for one that uses Lockstep",
     false},
    {"dashboard", "",
     "serve a page that shows the ranks of this host while they run; prints its address with an "
     "access token (a free port of 127.0.0.1)",
     false, '\0', kHonoured, "[=[ADDRESS:]PORT]"},
    {"record", "DIR",
     "record how each rank uses time and resources in DIR/monitor, for lockstep doctor --run DIR "
     "and lockstep report DIR",
     false},
    {"monitor-interval", "SECONDS",
     "ranks are not polled; a rank that exits early with code 0 has failed if others still run "
     "after this time (1)"},
    {"timeout", "SECONDS",
     "LOCKSTEP_TIMEOUT_S: deadline of a rank's operation, such as an all-reduce (1800)", false},
    {"startup-timeout", "SECONDS",
     "LOCKSTEP_STARTUP_TIMEOUT_S: deadline for the launchers of all hosts to connect, then "
     "for all ranks to connect (300)",
     false},
    {"signals-to-handle", "SIG,...",
     "signals that stop the run, forwarded to the ranks (SIGTERM,SIGINT,SIGHUP,SIGQUIT); SIGUSR1 "
     "and SIGUSR2 are only forwarded, to ranks that handle them"},
    {"role", "NAME", "ROLE_NAME of the ranks (default)"},
    {"module", "", "the program is a Python module, as in python -m", true, 'm'},
    {"no-python", "", "execute the program directly, even a .py file"},
    {"run-path", "", "the program is a Python file whatever its name; overrides --no-python"},
    {"log-dir", "DIR",
     "keep logs and error files under DIR/<run id>_<random>/, a new directory for each run"},
    {"redirects", "STREAMS", "to files only: 1 stdout, 2 stderr, 3 both; or per rank: 0:3,1:2",
     true, 'r'},
    {"tee", "STREAMS", "to files and the console (same values)", true, 't'},
    {"line-prefix", "rank|role|none",
     "prefix of each console line: [0], [role0]: or nothing (default: none with one "
     "local rank, else rank; with --tee the teed lines have [role0]:, the others nothing)",
     false},
    {"local-ranks-filter", "R,...", "only these local ranks reach the console"},
    {"duplicate-stdout-filters", "WORD,...",
     "copy stdout lines with any of these strings to one more file (',,' is a comma)"},
    {"duplicate-stderr-filters", "WORD,...", "the same for stderr"},
    {"numa-binding", "node|socket|exclusive|core-complex", "bind each rank to CPUs near its GPU"},
    {"virtual-local-rank", "", "each rank sees only its own GPU, as device 0, and LOCAL_RANK=0"},
    {"replace-gloo", "",
     "Python ranks with the package lockstep_torch: groups that are asked for as gloo use "
     "shared memory where all their ranks are on one host (LOCKSTEP_REPLACE_GLOO=1)",
     false},
    {"start-method", "spawn|fork|forkserver",
     "ranks are programs of their own, started by fork and exec", true, '\0', kIgnored},
    {"event-log-handler", "NAME",
     "event handlers are Python plug-ins; events are on stderr and in error.json", true, '\0',
     kIgnored},
    {"use-env", "", "LOCAL_RANK is always in the environment, never an argument", false, '\0',
     kIgnored},
    {"logs-specs", "NAME",
     "it names a Python plug-in that would replace the log files; use --log-dir with "
     "--redirects or --tee",
     true, '\0', kRefused},
};

std::string spelling(const FlagSpec& flag) {
  std::string text = flag.letter != '\0' ? fmt::format("-{}, ", flag.letter) : "";
  text += fmt::format("--{}", flag.name);
  if (!flag.is_switch()) text += fmt::format(" {}", flag.value_name);
  text += flag.optional_value;
  return text;
}

// "  --flag VALUE       help", the help wrapped at 100 columns under itself.
std::string entry(const std::string& left, std::string_view help) {
  constexpr std::size_t kColumn = 30;
  constexpr std::size_t kWidth = 100;
  std::string text = "  " + left;
  std::size_t column = text.size();
  const auto next_line = [&] {
    text += '\n' + std::string(kColumn, ' ');
    column = kColumn;
  };
  if (column + 2 > kColumn) next_line();
  text.append(kColumn - column, ' ');
  column = kColumn;
  std::istringstream stream{std::string(help)};
  for (std::string word; stream >> word;) {
    if (column > kColumn && column + word.size() >= kWidth) next_line();
    if (column > kColumn) text += ' ', ++column;
    text += word;
    column += word.size();
  }
  return text + '\n';
}

std::string section(std::string_view title, Treatment treatment) {
  std::string text = fmt::format("\n{}:\n", title);
  for (const FlagSpec& flag : kFlags) {
    if (flag.treatment == treatment) text += entry(spelling(flag), flag.help);
  }
  return text;
}

}  // namespace

std::string FlagSpec::variable() const {
  std::string text = "PET_";
  for (const char c : name)
    text += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

std::span<const FlagSpec> flag_table() {
  return kFlags;
}

std::string run_help() {
  std::string text =
      "usage: lockstep run [flags] PROGRAM [arguments]\n\n"
      "Starts PROGRAM as the ranks of one world on this host (and, with --nnodes, on others), "
      "gives\n"
      "each rank its identity, watches them, and ends with the first failing rank's exit code.\n"
      "A .py file, or a directory with __main__.py, runs under python3 -u (PYTHON_EXEC names "
      "another\n"
      "interpreter), anything else is executed directly. Arguments after PROGRAM reach it "
      "untouched.\n\n"
      "The flags are torchrun's. Dashes may be underscores, a unique prefix is enough, and a flag\n"
      "that is not given is read from PET_<NAME>, e.g. PET_NPROC_PER_NODE=4, and then from the "
      "file\n"
      "of --config-file.\n";
  text += section("flags", kHonoured);
  text += entry("-h, --help", "print this text");
  text += section("accepted and ignored, with a line that says so", kIgnored);
  text += section("refused", kRefused);
  text +=
      "\nexamples:\n"
      "  lockstep run --standalone --nproc-per-node=4 ./train --lr=0.1\n"
      "  lockstep run --nproc-per-node=gpu train.py\n"
      "  lockstep run --nnodes=2 --node-rank=0 --master-addr=10.0.0.1 --nproc-per-node=8 ./train\n";
  return text;
}

}  // namespace lockstep::launch
