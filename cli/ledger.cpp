// `lockstep ledger`: what the ranks did last, from the files that a failed or stalled run left.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "cli/commands.h"
#include "launcher/stall_table.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/ledger_file.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLedgerHelp =
    "usage: lockstep ledger [--records N] FILE|DIR...\n\n"
    "Prints where each rank was: step, phase, its last operations with their call sites, and the\n"
    "first call that differs between ranks. `lockstep run` writes a ledger for each rank that\n"
    "failed or stalled, as DIR/<run id>_<random>/attempt_<k>/<local rank>/ledger with\n"
    "--log-dir DIR, otherwise in a temporary directory, which its report of the failure calls\n"
    "`logs`. A directory stands for all ledgers below it.\n\n"
    "  --records N   how many operations of each rank (5)\n";

// The files of one attempt on one host belong together.
using Attempts = std::map<std::string, std::vector<std::string>>;

void add(Attempts& attempts, const fs::path& file) {
  attempts[file.parent_path().parent_path().string()].push_back(file.string());
}

Attempts find_ledgers(const std::vector<std::string>& paths) {
  Attempts attempts;
  for (const std::string& path : paths) {
    if (!fs::is_directory(path)) {
      add(attempts, path);
      continue;
    }
    const std::size_t before = attempts.size();
    for (const auto& entry : fs::recursive_directory_iterator(path))
      if (entry.is_regular_file() && entry.path().filename() == ledger::kFileName)
        add(attempts, entry.path());
    if (attempts.size() == before)
      throw UsageError("ledger",
                       "there is no ledger below {}. Only ranks that failed or stalled leave one: "
                       "below --log-dir where that was given, otherwise in the directory that the "
                       "report of the failure calls `logs`.",
                       path);
  }
  return attempts;
}

std::string record_line(const ledger::Snapshot& seen, const ledger::Record& record) {
  std::string text = fmt::format("{} {}", launch::operation_text(record), name(record.state));
  if (!record.under_way() && record.ended_ns >= record.posted_ns)
    text += fmt::format(" after {:.3f} ms",
                        static_cast<double>(record.ended_ns - record.posted_ns) / 1e6);
  if (record.step >= 0) text += fmt::format(", step {}", record.step);
  if (*name(record.phase) != '\0') text += fmt::format(", {}", name(record.phase));
  const std::string place = seen.place(record.call_site);
  return text + (place.empty() ? "" : ", at " + place);
}

void print_attempt(const std::string& attempt, const std::vector<std::string>& files,
                   std::size_t records) {
  std::vector<launch::RankView> ranks;
  std::uint64_t saved_ns = 0;
  for (const std::string& file : files) {
    ranks.push_back({.ledger = ledger::read(read_file(file), file)});
    saved_ns = std::max(saved_ns, ranks.back().ledger.saved_ns);
  }
  std::sort(ranks.begin(), ranks.end(),
            [](const auto& a, const auto& b) { return a.ledger.rank < b.ledger.rank; });
  print_text("{}: {} of {} ranks, attempt {}{}\n", attempt, ranks.size(),
             ranks.front().ledger.world_size, ranks.front().ledger.attempt,
             launch::ledger_table(ranks, saved_ns));
  for (const launch::RankView& rank : ranks) {
    const auto& all = rank.ledger.records;
    const std::size_t shown = std::min(records, all.size());
    if (shown == 0) continue;
    print_text("  last operations of rank {}:\n", rank.ledger.rank);
    for (std::size_t i = all.size() - shown; i < all.size(); ++i)
      print_text("    {}\n", record_line(rank.ledger, all[i]));
  }
}

}  // namespace

int ledger_command(const Args& args) {
  if (print_help(args, kLedgerHelp)) return 0;
  std::size_t records = 5;
  Flags flags("ledger");
  flags.integer("--records", records, 0, 1024, "a number");
  const Args paths = flags.read(args);
  if (paths.empty())
    throw UsageError("ledger", "no file or directory was given. Name a log directory of a run.");
  for (const auto& [attempt, files] : find_ledgers(paths)) print_attempt(attempt, files, records);
  return 0;
}

}  // namespace lockstep::cli
