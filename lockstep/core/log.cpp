#include "lockstep/core/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/text.h"

namespace lockstep::log {
namespace {

Level level_from_environment() {
  const std::string text = env::get("LOCKSTEP_LOG").value_or("info");
  if (text == "debug") return Level::kDebug;
  if (text == "info") return Level::kInfo;
  if (text == "warning" || text == "warn") return Level::kWarning;
  if (text == "error") return Level::kError;
  if (text == "off" || text == "none") return Level::kOff;
  throw UsageError("log", "LOCKSTEP_LOG='{}' is not debug, info, warning, error or off.", text);
}

struct State {
  std::shared_ptr<spdlog::logger> logger = std::make_shared<spdlog::logger>(
      "lockstep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  std::atomic<Level> level{level_from_environment()};
  std::atomic<bool> chosen{false};  // for this process, not for all ranks identically
  std::atomic<int> rank{0};
  std::atomic<int> world_size{1};
  std::mutex mutex;  // of the two below
  std::string last_error;
  std::int64_t step_of_error = -1;
  State() {
    logger->set_level(spdlog::level::trace);
    logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %l %v");
    logger->flush_on(spdlog::level::trace);
  }
};

State& state() {
  static State* state = new State;  // never destroyed: static destructors may still log
  return *state;
}

}  // namespace

void set_rank(int rank, int world_size) {
  state().rank = rank;
  state().world_size = world_size;
}

void set_level(Level level) {
  state().level = level;
  state().chosen = true;
}

bool enabled(Level level) {
  const State& s = state();
  if (level < s.level) return false;
  return level != Level::kInfo || s.rank == 0 || s.level == Level::kDebug || s.chosen;
}

void write(Level level, std::string_view component, std::string_view said) {
  const std::string text = printable_lines(said);  // it may quote a file
  State& s = state();
  if (level == Level::kError) {
    const std::lock_guard lock(s.mutex);
    s.last_error = fmt::format("[{}] {}", component, text);
    s.step_of_error = ledger::step();
  }
  constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                   spdlog::level::warn, spdlog::level::err};
  const auto spd = kLevels[static_cast<int>(level)];
  if (s.world_size > 1) {
    s.logger->log(spd, "rank {} [{}] {}", s.rank.load(), component, text);
  } else {
    s.logger->log(spd, "[{}] {}", component, text);
  }
}

std::string last_error() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.step_of_error == ledger::step() ? s.last_error : "";
}

}  // namespace lockstep::log
