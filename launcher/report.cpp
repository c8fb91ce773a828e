#include "launcher/report.h"

#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <regex>
#include <string_view>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/symbols.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {
namespace {

constexpr std::size_t kErrorFileBytes = 4u << 20;
constexpr std::size_t kMessageBytes = 8u << 10;
constexpr std::size_t kStackLines = 100;
constexpr std::size_t kStackLineBytes = 1000;
constexpr std::size_t kLastLinesOfExplained = 5;
// Enough for a message with its advice. The line for a control descriptor must fit a pipe in one
// write, and those of all ranks one message to another host.
constexpr std::size_t kLineBytes = 1000;
constexpr std::string_view kKilledBy = "killed by ";

std::string shortened(std::string_view text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  return std::string(utf8_prefix(text, max_bytes)) + " ...";
}

std::string first_line(const std::string& message) {
  return shortened(std::string_view(message).substr(0, message.find('\n')), kLineBytes);
}

// The file may come from any program, so repeated keys are tolerated; the first one counts.
Node parse_error_file(const std::string& text) {
  Problems twice;
  return parse_json(text, "error file", {.bytes = kErrorFileBytes, .depth = 128}, &twice);
}

std::vector<std::string> texts_of(const Node& json) {
  std::vector<std::string> texts;
  for (const Node& item : json.items) texts.push_back(plain_text(item));
  return texts;
}

std::vector<std::string> bounded(std::vector<std::string> lines) {
  if (lines.size() > kStackLines) lines.resize(kStackLines);
  for (std::string& line : lines)
    if (line.size() > kStackLineBytes) line.resize(kStackLineBytes);
  return lines;
}

void read_stack(const Node& extra, ErrorFile& file) {
  for (const char* key : {"cpp_stack", "py_callstack"}) {
    const Entry* found = extra.find(key);
    if (found == nullptr) continue;
    const Node& stack = found->value;
    const auto lines = stack.is(NodeKind::kList) ? texts_of(stack) : lines_of(plain_text(stack));
    const auto shown = key == std::string_view("cpp_stack") ? brief_stack(lines) : lines;
    file.stack.insert(file.stack.end(), shown.begin(), shown.end());
    const bool folded = std::ranges::any_of(
        shown, [](const std::string& line) { return line.starts_with("... "); });
    if (folded) file.all_frames = bounded(lines);
  }
  file.stack = bounded(std::move(file.stack));
}

// Reads torchrun's two formats, and a bare string.
void read_forms(const Node& json, ErrorFile& file) {
  const auto read_time = [&file](const Node& map) {
    const Entry* entry = map.find("timestamp");
    if (entry == nullptr) return;
    const Node& time = entry->value;
    file.time = time_or_zero(time.is(NodeKind::kString) ? std::strtod(time.text.c_str(), nullptr)
                                                        : time.real);
  };
  const Entry* message = json.find("message");
  if (message == nullptr) {
    file.message = plain_text(json);
    if (!json.is(NodeKind::kString)) file.problem = "has no field \"message\"";
    return;
  }
  if (!message->value.is(NodeKind::kMap)) {
    file.message = plain_text(message->value);
    read_time(json);
    return;
  }
  if (const Entry* text = message->value.find("message")) file.message = plain_text(text->value);
  const Entry* extra = message->value.find("extraInfo");
  if (extra == nullptr) return;
  read_time(extra->value);
  const Entry* consequence = extra->value.find("consequence");
  file.consequence = consequence != nullptr && consequence->value.boolean;
  read_stack(extra->value, file);
}

// Messages that gloo throws on a thread of its own, where the program cannot catch them.
bool is_mismatch(const RankFailure& failure) {
  for (const char* text : {"collective mismatch", "op.preamble."})
    if (failure.message.find(text) != std::string::npos) return true;
  return false;
}

// "2026-11-17 07:08:08.087 info rank 0 [world] ...", as core/log.h writes it.
bool is_ordinary_log_line(const std::string& line) {
  static const std::regex kBeginning(R"(^\d{4}-[^ ]{5} [^ ]{8}\.\d{3} (info|debug|trace) )");
  return std::regex_search(line, kBeginning, std::regex_constants::match_continuous);
}

// Whether the message or stack has this line of stderr ("lockstep: rank 1 on n1: ...", "  at f()").
bool is_said_already(const RankFailure& failure, std::string_view line) {
  constexpr std::size_t kCut = 500;  // by OutputStream::last_lines
  std::string text = trim(line);
  if (text.empty() || is_ordinary_log_line(text)) return true;
  if (text.rfind("... ", 0) == 0 && text.ends_with(" more frames")) return true;
  const bool frame = text.rfind("at ", 0) == 0;
  if (frame) text.erase(0, 3);
  for (const std::string& known : failure.stack) {
    if (trim(known) == text || (line.size() == kCut && known.rfind(text, 0) == 0)) return true;
  }
  const auto message = lines_of(failure.message);
  if (message.empty() || frame) return false;
  if (text.rfind("lockstep: ", 0) == 0 && text.ends_with(": " + message.front())) return true;
  if (message.front().starts_with('[') && text.ends_with(" " + message.front())) return true;
  return std::ranges::any_of(message,
                             [&](const std::string& known) { return trim(known) == text; });
}

void add_block(std::string& text, const char* title, const std::vector<std::string>& lines) {
  if (lines.empty()) return;
  text += fmt::format("\n  {}:", title);
  for (const std::string& line : lines) text += fmt::format("\n    {}", line);
}

// A message without its rank and times, to compare those of several ranks.
std::string essence(const std::string& message, int rank) {
  const std::regex differs(fmt::format("rank {}(?![0-9])|[0-9]+(?= ms)", rank));
  return std::regex_replace(first_line(message), differs, "#");
}

bool say_the_same(const LaterFailure& a, const LaterFailure& b) {
  return a.message == b.message || essence(a.message, a.rank) == essence(b.message, b.rank);
}

// The rank's position. The calls that differ are omitted if the message says that a rank has
// returned from its body, because that rank has no call.
std::vector<std::string> standing_of(const RankFailure& failure) {
  std::vector<std::string> lines = failure.standing;
  if (failure.message.find("has returned from its body") == std::string::npos) return lines;
  const auto calls = std::ranges::find_if(
      lines, [](const std::string& line) { return line.starts_with("first call that differs"); });
  lines.erase(calls, lines.end());
  return lines;
}

// Later failures, with "the same" in place of the first one's message.
std::vector<std::string> others_of(const RankFailure& failure) {
  std::vector<std::string> others = failure.others;
  if (failure.message.empty()) return others;
  const std::string same = ": " + first_line(failure.message);
  for (std::string& other : others)
    if (other.ends_with(same)) other.replace(other.size() - same.size(), same.size(), ": the same");
  return others;
}

// "killed by SIGSEGV", then "killed by SIGSEGV at address 0x0": what both say is said once.
std::string joined(const std::string& text, const std::string& message) {
  const std::string signal = message.substr(0, message.find(' ', kKilledBy.size()));
  if (!message.starts_with(kKilledBy) || text.find(signal) == std::string::npos)
    return text + ": " + message;
  return text + message.substr(signal.size());
}

// The first line has cause and advice, because other tools often show only that.
std::string first_lines(const RankFailure& failure) {
  std::string text = fmt::format("[launch] {}", failure.headline());
  std::vector<std::string> message = lines_of(failure.message);
  const std::string hint = hint_for(failure);
  if (message.empty() || is_mismatch(failure)) {
    if (!hint.empty()) text += fmt::format(". {}", hint);
    add_block(text, "message", message);
    return text;
  }
  text = joined(text, message.front());
  for (std::size_t i = 1; i < message.size(); ++i) text += fmt::format("\n    {}", message[i]);
  if (!hint.empty()) text += fmt::format("\n  hint: {}", hint);
  return text;
}

}  // namespace

double time_or_zero(double seconds) {
  constexpr double kYear5000_s = 1e11;
  return seconds > 0 && seconds < kYear5000_s ? seconds : 0;
}

ErrorFile read_error_file(const std::string& path) {
  ErrorFile file;
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 || info.st_size == 0) return file;
  file.present = true;
  const double modified =
      static_cast<double>(info.st_mtim.tv_sec) + 1e-9 * static_cast<double>(info.st_mtim.tv_nsec);
  try {
    const std::string text = read_file(path, kErrorFileBytes);
    try {
      read_forms(parse_error_file(text), file);
    } catch (const UsageError&) {
      file.problem = "is not valid JSON";
      file.message = text;
    }
  } catch (const std::exception& error) {
    file.problem = fmt::format("cannot be read ({})", error.what());
  }
  if (file.message.size() > kMessageBytes) file.message.resize(kMessageBytes);
  // Whole seconds cannot distinguish cause and consequence.
  if (file.time <= 0 ||
      (file.time == std::floor(file.time) && modified >= file.time && modified < file.time + 2))
    file.time = modified;
  return file;
}

std::string RankFailure::headline() const {
  if (rank < 0) return fmt::format("the run failed: {}", cause);
  return fmt::format("rank {} on {} {}: {}", rank, host, stopped ? "stopped on request" : "failed",
                     cause);
}

std::string with_message(const std::string& text, const std::string& message) {
  return message.empty() ? text : joined(text, first_line(message));
}

std::string shell_text(const std::vector<std::string>& command) {
  constexpr std::size_t kMaxBytes = 300;
  constexpr std::string_view kPlain = "_./-=:,+@%";
  std::string text;
  for (const std::string& word : command) {
    if (!text.empty()) text += ' ';
    const bool plain = !word.empty() && std::ranges::all_of(word, [&](unsigned char c) {
      return std::isalnum(c) != 0 || kPlain.find(static_cast<char>(c)) != std::string_view::npos;
    });
    if (plain) {
      text += word;
      continue;
    }
    text += '\'';
    for (const unsigned char c : word) {
      if (c == '\'') text += "'\\'";
      text += std::iscntrl(c) != 0 ? ' ' : static_cast<char>(c);
    }
    text += '\'';
  }
  return shortened(text, kMaxBytes);
}

void add_error_file(RankFailure& failure, const ErrorFile& file) {
  if (!file.present) return;
  failure.message = file.message;
  failure.stack = file.stack;
  if (file.time > 0) failure.time = file.time;
  if (!file.problem.empty()) failure.note = "its error file " + file.problem;
}

void add_last_lines(RankFailure& failure, const std::vector<std::string>& lines, std::size_t most) {
  failure.last_lines.clear();
  const bool explained = !failure.message.empty() || !failure.stack.empty();
  for (const std::string& line : lines) {
    if (!explained || !is_said_already(failure, line)) failure.last_lines.push_back(line);
  }
  auto& guard = failure.last_lines;
  if (explained) most = std::min(most, kLastLinesOfExplained);
  if (guard.size() > most) guard.erase(guard.begin(), guard.end() - static_cast<long>(most));
}

std::string control_line(const RankFailure& failure) {
  const std::string cause = shortened(with_message(failure.cause, failure.message), kLineBytes);
  return to_json(map_node({{"failed", map_node({{"rank", integer_node(failure.rank)},
                                                {"host", text_node(failure.host)},
                                                {"cause", text_node(cause)}})}})) +
         "\n";
}

std::vector<std::string> later_lines(const RankFailure& first, std::vector<LaterFailure> failures) {
  std::ranges::stable_sort(failures,
                           [](const auto& a, const auto& b) { return a.later_s < b.later_s; });
  std::vector<std::string> lines;
  while (!failures.empty()) {
    const LaterFailure head = failures.front();
    std::vector<int> ranks;
    double later_s = 0;
    std::erase_if(failures, [&](const LaterFailure& each) {
      if (each.how != head.how || !say_the_same(each, head)) return false;
      ranks.push_back(each.rank);
      later_s = std::max(later_s, each.later_s);
      return true;
    });
    std::ranges::sort(ranks);
    const bool same =
        !head.message.empty() && say_the_same(head, {first.rank, "", 0, first.message});
    lines.push_back(
        with_message(fmt::format("{} {} {}, {:.2f} s later", ranks.size() == 1 ? "rank" : "ranks",
                                 ranges_text(ranks), head.how, later_s),
                     same ? "the same" : head.message));
  }
  return lines;
}

std::string write_stacks(const std::string& path, const std::vector<RankFailure>& errors) {
  std::string text;
  for (const RankFailure& each : errors) {
    const ErrorFile file = read_error_file(each.error_file);
    if (file.all_frames.empty()) continue;
    text +=
        fmt::format("rank {} (pid {}) on {}: {}\n", each.rank, each.pid, each.host, each.message);
    for (const std::string& frame : file.all_frames) text += fmt::format("    {}\n", frame);
  }
  if (text.empty()) return {};
  try {
    write_file_atomically(path, text);
  } catch (const std::exception&) {  // the report then names no file
    return {};
  }
  return path;
}

std::vector<std::string> error_lines(const std::vector<RankFailure>& errors) {
  std::vector<std::string> lines;
  for (const RankFailure& each : errors) {
    if (each.message.empty() || read_error_file(each.error_file).consequence) continue;
    lines.push_back(
        with_message(fmt::format("[launch] rank {} {}", each.rank, each.cause), each.message));
  }
  return lines;
}

std::string hint_for(const RankFailure& failure) {
  const auto died_of = [&failure](const char* name) {
    return failure.cause.find(name) != std::string::npos;
  };
  if (is_mismatch(failure))
    return "The ranks have probably called different operations, or the same one with other "
           "shapes or dtypes, as when one has fewer batches or a call is inside `if (rank == 0)`. "
           "LOCKSTEP_DEBUG=1 compares every call and names the one that differs.";
  if (failure.message.find("DefaultCPUAllocator: not enough memory") != std::string::npos)
    return "The host, or the limit of this process (ulimit -v), has no memory left: use a smaller "
           "batch, fewer loader workers or fewer ranks on this host.";
  if (failure.cause == kEarlyExitCause)
    return "Its process ended inside the body of lockstep::run(): look for std::exit(), _exit() or "
           "a return from main() that this rank reaches and the others do not.";
  if (died_of("SIGKILL"))
    return "SIGKILL comes from outside: often the kernel's out-of-memory killer (see dmesg; then "
           "use a smaller batch, fewer loader workers or fewer ranks on this host), a scheduler's "
           "limit, or a person.";
  if (died_of("SIGBUS")) return "SIGBUS is often a full /dev/shm or a truncated mapped file.";
  if (died_of("SIGSYS"))
    return "SIGSYS comes from a filter of system calls (seccomp): see the profile of the container "
           "or of the scheduler.";
  if (died_of("SIGILL"))
    return "SIGILL is often a program that was compiled for a newer processor (-march=native).";
  if (died_of("SIGSEGV") || died_of("SIGABRT") || died_of("SIGTRAP"))
    return "Run the program under a debugger, or allow core files (ulimit -c unlimited).";
  return {};
}

std::string failure_report(const RankFailure& failure) {
  std::string text = first_lines(failure);
  add_block(text, "stack", failure.stack);
  if (!failure.stacks.empty()) text += fmt::format("\n  every frame: {}", failure.stacks);
  if (failure.rank >= 0) {
    text += fmt::format(
        "\n  rank {} (local rank {}, pid {}, host {}), {:.2f} s after the start of "
        "attempt {}",
        failure.rank, failure.local_rank, failure.pid, failure.host, failure.after_s,
        failure.attempt);
    if (failure.cause.starts_with(fmt::format("exited with code {}", failure.code)))
      text += fmt::format(", with exit code {}", failure.code);
  }
  if (!failure.program.empty()) text += fmt::format("\n  program: {}", failure.program);
  if (!failure.error_file.empty()) text += fmt::format("\n  error file: {}", failure.error_file);
  add_block(text, "last lines of its stderr", failure.last_lines);
  add_block(text, "where it was", standing_of(failure));
  add_block(text, "failed after it", others_of(failure));
  add_block(text, "ended because of it", failure.victims);
  if (!failure.ended_before.empty()) {
    const bool one = failure.ended_before.size() == 1;
    text += fmt::format("\n  {} {} had ended with exit code 0 before", one ? "rank" : "ranks",
                        fmt::join(failure.ended_before, ", "));
  }
  if (!failure.note.empty()) text += fmt::format("\n  note: {}", failure.note);
  if (!failure.logs.empty())
    text += fmt::format("\n  logs: {}{}", failure.logs,
                        failure.standing.empty()
                            ? ""
                            : fmt::format(" (lockstep ledger {})", shell_text({failure.logs})));
  return text;
}

std::string pass_on_error_file(const RankFailure& failure, const std::string& rank_file,
                               const std::string& own_file) {
  try {
    Node json;
    struct stat info {};
    Problems unreadable;
    if (!rank_file.empty() && ::stat(rank_file.c_str(), &info) == 0)
      unreadable.attempt([&] { json = parse_error_file(read_file(rank_file, kErrorFileBytes)); });
    if (json.find("message") == nullptr) {
      const Node extra =
          map_node({{"timestamp", text_node(std::to_string(static_cast<long long>(failure.time)))},
                    {"rank", integer_node(failure.rank)},
                    {"cpp_stack", texts_node(failure.stack)}});
      const std::string text = failure.message.empty() ? failure.headline() : failure.message;
      json =
          map_node({{"message", map_node({{"message", text_node(text)}, {"extraInfo", extra}})}});
    }
    for (Entry& entry : json.entries) {
      if (entry.key != "message" || !entry.value.is(NodeKind::kMap)) continue;
      std::erase_if(entry.value.entries, [](const Entry& old) { return old.key == "errorCode"; });
      entry.value.entries.push_back({"errorCode", {}, integer_node(failure.code)});
    }
    write_file_atomically(own_file, to_json(json));
    return {};
  } catch (const std::exception& error) {
    return fmt::format("[launch] {} (TORCHELASTIC_ERROR_FILE) was not written: {}", own_file,
                       error.what());
  }
}

}  // namespace lockstep::launch
