#include "lockstep/launch/report.h"

#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/launch/flag_values.h"

namespace lockstep::launch {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kErrorFileBytes = 4u << 20;
constexpr std::size_t kMessageBytes = 8u << 10;
constexpr std::size_t kStackLines = 100;
constexpr std::size_t kStackLineBytes = 1000;
constexpr std::size_t kOtherMessageBytes = 200;   // as worker_group.cpp cuts them
constexpr std::size_t kControlCauseBytes = 1000;  // the line must fit a pipe in one write

// Output of ranks is not always UTF-8, and it must not stop a report.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string text_of(const Json& json) {
  return json.is_string() ? json.get<std::string>() : dump(json);
}

// Of another launcher, which is believed less than our own: a real would be undefined behaviour.
int int_of(const Json& json) {
  const double value = json.get<double>();
  if (!(value >= INT_MIN && value <= INT_MAX))
    throw UsageError("launch", "{} is not a number from {} to {}.", value, INT_MIN, INT_MAX);
  return static_cast<int>(value);
}

// Seconds since the epoch, or 0 for what cannot be a time: it is cast to an integer later, and
// JSON, in which it travels to other hosts, has no infinity.
double time_of(const Json& json) {
  constexpr double kYear5000_s = 1e11;
  double time = 0;
  if (json.is_number()) time = json.get<double>();
  if (json.is_string()) time = std::strtod(json.get<std::string>().c_str(), nullptr);
  return time > 0 && time < kYear5000_s ? time : 0;
}

void read_stack(const Json& extra, ErrorFile& file) {
  for (const char* key : {"cpp_stack", "py_callstack"}) {
    const auto found = extra.find(key);
    if (found == extra.end()) continue;
    if (found->is_array()) {
      for (const Json& frame : *found) file.stack.push_back(text_of(frame));
    } else {
      for (auto& line : lines_of(text_of(*found))) file.stack.push_back(std::move(line));
    }
  }
  if (file.stack.size() > kStackLines) file.stack.resize(kStackLines);
  for (std::string& line : file.stack)
    if (line.size() > kStackLineBytes) line.resize(kStackLineBytes);
}

// The two forms torchrun knows, and a bare string.
void read_forms(const Json& json, ErrorFile& file) {
  if (json.is_string()) {
    file.message = json.get<std::string>();
    return;
  }
  if (!json.is_object() || !json.contains("message")) {
    file.message = dump(json);
    file.problem = "has no field \"message\"";
    return;
  }
  const Json& message = json["message"];
  if (!message.is_object()) {
    file.message = text_of(message);
    if (json.contains("timestamp")) file.time = time_of(json["timestamp"]);
    return;
  }
  if (message.contains("message")) file.message = text_of(message["message"]);
  const auto extra = message.find("extraInfo");
  if (extra == message.end() || !extra->is_object()) return;
  if (extra->contains("timestamp")) file.time = time_of((*extra)["timestamp"]);
  file.consequence = extra->value("consequence", Json()) == Json(true);
  read_stack(*extra, file);
}

double modified_at(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return 0;
  return static_cast<double>(info.st_mtim.tv_sec) +
         1e-9 * static_cast<double>(info.st_mtim.tv_nsec);
}

std::string hint_for(const RankFailure& failure) {
  const auto died_of = [&failure](const char* name) {
    return failure.cause.find(name) != std::string::npos;
  };
  // Gloo's own messages, thrown on a thread of its own: the program never sees them.
  for (const char* text : {"collective mismatch", "op.preamble."}) {
    if (failure.message.find(text) != std::string::npos)
      return "the ranks have probably called different operations, or the same one with other "
             "shapes or dtypes. LOCKSTEP_DEBUG=1 compares every call and names the one that "
             "differs.";
  }
  if (failure.cause == kLeftCause)
    return "its process ended inside the body of lockstep::run(): look for std::exit(), _exit() or "
           "a return from main() that this rank reaches and the others do not.";
  if (died_of("SIGKILL"))
    return "SIGKILL comes from outside: often the kernel's out-of-memory killer (see dmesg), a "
           "scheduler's limit, or a person.";
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

// As the rank printed it ("lockstep: rank 1 on n1: ...", "    at f()"), and as Python did.
bool is_said_already(const RankFailure& failure, std::string_view line) {
  constexpr std::size_t kCut = 500;  // by last_error_lines
  std::string text = trim(line);
  if (text.empty()) return true;
  if (text.rfind("... ", 0) == 0 && text.ends_with(" more frames")) return true;
  const bool frame = text.rfind("at ", 0) == 0;
  if (frame) text.erase(0, 3);
  for (const std::string& known : failure.stack) {
    if (trim(known) == text || (line.size() == kCut && known.rfind(text, 0) == 0)) return true;
  }
  const auto message = lines_of(failure.message);
  if (message.empty() || frame) return false;
  if (text.rfind("lockstep: ", 0) == 0 && text.ends_with(": " + message.front())) return true;
  return std::any_of(message.begin(), message.end(),
                     [&](const std::string& known) { return trim(known) == text; });
}

void add_block(std::string& text, const char* title, const std::vector<std::string>& lines) {
  if (lines.empty()) return;
  text += fmt::format("\n  {}:", title);
  for (const std::string& line : lines) text += fmt::format("\n    {}", line);
}

// The others without the first cause's message, which all ranks have when all make one mistake.
std::vector<std::string> others_of(const RankFailure& failure) {
  std::vector<std::string> others = failure.others;
  const auto message = lines_of(failure.message);
  if (message.empty()) return others;
  const std::string same = ": " + message.front().substr(0, kOtherMessageBytes);
  for (std::string& other : others)
    if (other.ends_with(same)) other.replace(other.size() - same.size(), same.size(), ": the same");
  return others;
}

}  // namespace

ErrorFile read_error_file(const std::string& path) {
  ErrorFile file;
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 || info.st_size == 0) return file;
  file.present = true;
  const double modified = modified_at(path);
  std::string text;
  try {
    text = read_file(path, kErrorFileBytes);
    const Json json = Json::parse(text, nullptr, false);
    if (json.is_discarded()) {
      file.problem = "is not valid JSON";
      file.message = text;
    } else {
      read_forms(json, file);
    }
  } catch (const std::exception& error) {
    file.problem = fmt::format("cannot be read ({})", error.what());
  }
  if (file.message.size() > kMessageBytes) file.message.resize(kMessageBytes);
  // Whole seconds are too coarse to distinguish cause and consequence.
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

std::string shell_text(const std::vector<std::string>& command) {
  constexpr std::size_t kMaxBytes = 300;
  constexpr std::string_view kPlain = "_./-=:,+@%";
  std::string text;
  for (const std::string& word : command) {
    if (!text.empty()) text += ' ';
    const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [&](unsigned char c) {
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
  if (text.size() <= kMaxBytes) return text;
  std::size_t end = kMaxBytes;  // not inside a character of UTF-8
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + " ...";
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
  if (guard.size() > most) guard.erase(guard.begin(), guard.end() - static_cast<long>(most));
}

std::string control_line(const RankFailure& failure) {
  std::string cause = failure.cause;
  if (!failure.message.empty()) cause += ": " + lines_of(failure.message + "\n").front();
  if (cause.size() > kControlCauseBytes) cause.resize(kControlCauseBytes);
  return dump(
             Json{{"failed", {{"rank", failure.rank}, {"host", failure.host}, {"cause", cause}}}}) +
         "\n";
}

std::string failure_report(const RankFailure& failure) {
  std::string text = fmt::format("[launch] {}", failure.headline());
  if (failure.rank >= 0) {
    text += fmt::format(
        "\n  rank {} (local rank {}, pid {}, host {}), {:.2f} s after the start of "
        "attempt {}",
        failure.rank, failure.local_rank, failure.pid, failure.host, failure.after_s,
        failure.attempt);
  }
  if (!failure.program.empty()) text += fmt::format("\n  program: {}", failure.program);
  if (!failure.error_file.empty()) text += fmt::format("\n  error file: {}", failure.error_file);
  add_block(text, "message", lines_of(failure.message));
  add_block(text, "stack", failure.stack);
  add_block(text, "last lines of its stderr", failure.last_lines);
  add_block(text, "failed after it", others_of(failure));
  if (!failure.ended_before.empty()) {
    const bool one = failure.ended_before.size() == 1;
    text += fmt::format("\n  {} {} had ended with exit code 0 before", one ? "rank" : "ranks",
                        fmt::join(failure.ended_before, ", "));
  }
  if (!failure.note.empty()) text += fmt::format("\n  note: {}", failure.note);
  if (!failure.logs.empty()) text += fmt::format("\n  logs: {}", failure.logs);
  const std::string hint = hint_for(failure);
  if (!hint.empty()) text += fmt::format("\n  hint: {}", hint);
  return text;
}

std::string pass_on_error_file(const RankFailure& failure, const std::string& rank_file,
                               const std::string& own_file) {
  try {
    Json json;
    struct stat info {};
    if (!rank_file.empty() && ::stat(rank_file.c_str(), &info) == 0)
      json = Json::parse(read_file(rank_file, kErrorFileBytes), nullptr, false);
    if (!json.is_object() || !json.contains("message")) {
      json = Json{{"message",
                   {{"message", failure.message.empty() ? failure.headline() : failure.message},
                    {"extraInfo",
                     {{"timestamp", std::to_string(static_cast<long long>(failure.time))},
                      {"rank", failure.rank},
                      {"cpp_stack", failure.stack}}}}}};
    }
    if (json["message"].is_object()) json["message"]["errorCode"] = failure.code;
    write_file_atomically(own_file, dump(json));
    return {};
  } catch (const std::exception& error) {
    return fmt::format("[launch] {} (TORCHELASTIC_ERROR_FILE) was not written: {}", own_file,
                       error.what());
  }
}

std::string failure_to_json(const RankFailure& f) {
  return dump(Json{{"rank", f.rank},
                   {"local_rank", f.local_rank},
                   {"node", f.node},
                   {"pid", f.pid},
                   {"attempt", f.attempt},
                   {"host", f.host},
                   {"cause", f.cause},
                   {"code", f.code},
                   {"time", f.time},
                   {"after_s", f.after_s},
                   {"message", f.message},
                   {"restartable", f.restartable},
                   {"stopped", f.stopped},
                   {"program", f.program},
                   {"error_file", f.error_file},
                   {"stack", f.stack},
                   {"last_lines", f.last_lines},
                   {"note", f.note},
                   {"others", f.others},
                   {"ended_before", f.ended_before},
                   {"logs", f.logs}});
}

RankFailure failure_from_json(const std::string& text) {
  try {
    const Json json = Json::parse(text);
    RankFailure f;
    f.rank = int_of(json.at("rank"));
    f.local_rank = int_of(json.at("local_rank"));
    f.node = int_of(json.at("node"));
    f.pid = int_of(json.at("pid"));
    f.attempt = int_of(json.at("attempt"));
    json.at("host").get_to(f.host);
    json.at("cause").get_to(f.cause);
    f.code = int_of(json.at("code"));
    f.time = time_of(json.at("time"));
    json.at("after_s").get_to(f.after_s);
    json.at("message").get_to(f.message);
    json.at("restartable").get_to(f.restartable);
    f.stopped = json.value("stopped", false);
    f.program = json.value("program", "");
    f.error_file = json.value("error_file", "");
    json.at("stack").get_to(f.stack);
    json.at("last_lines").get_to(f.last_lines);
    json.at("note").get_to(f.note);
    json.at("others").get_to(f.others);
    for (const Json& rank : json.at("ended_before")) f.ended_before.push_back(int_of(rank));
    json.at("logs").get_to(f.logs);
    return f;
  } catch (const Json::exception& error) {
    throw UsageError("launch", "another launcher sent a failure that cannot be read ({}).",
                     error.what());
  }
}

}  // namespace lockstep::launch
