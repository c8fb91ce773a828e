#include "lockstep/core/other_programs.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "lockstep/core/cores.h"
#include "lockstep/core/kernel_files.h"

namespace lockstep {
namespace {

constexpr double kMuch = 0.10;  // share of the cores that others use
// Others take nothing away while cores are idle.
constexpr double kAllInUse = 0.9;

// CPU seconds of all programs on the cores that this process may use.
double busy_s() {
  const std::string stat = text_or_empty("/proc/stat");
  std::uint64_t ticks = 0;
  for (const int cpu : allowed_cpus()) {
    std::string_view fields = text_after(stat, fmt::format("cpu{}", cpu));
    // user nice system idle iowait irq softirq steal
    for (int field = 0; field < 8 && !fields.empty(); ++field) {
      fields.remove_prefix(std::min(fields.find_first_not_of(' '), fields.size()));
      if (field != 3 && field != 4) ticks += leading_number(fields).value_or(0);
      fields.remove_prefix(std::min(fields.find(' '), fields.size()));
    }
  }
  return static_cast<double>(ticks) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

// Of this process, with those of the children that have ended.
double own_s() {
  double sum = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage used{};
    ::getrusage(who, &used);
    sum += seconds_of(used.ru_utime) + seconds_of(used.ru_stime);
  }
  return sum;
}

}  // namespace

OtherPrograms::OtherPrograms() : all_s_(busy_s()), own_s_(own_s()) {}

std::string OtherPrograms::text(double shortest_s) const {
  const auto cores = static_cast<double>(allowed_cpus().size());
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
  const double seconds = passed.count();
  if (seconds < shortest_s) return "";
  const double all = (busy_s() - all_s_) / seconds;
  const double others = all - (own_s() - own_s_) / seconds;
  if (others < kMuch * cores || all < kAllInUse * cores) return "";
  return fmt::format("other programs used {:.1f} of the {} cores", others, cores);
}

}  // namespace lockstep
