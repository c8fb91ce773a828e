#include "bench/other_programs.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>

#include "lockstep/core/cores.h"

namespace lockstep::bench {
namespace {

constexpr double kShortest_s = 1;  // an error or a help text is no measurement
constexpr double kMuch = 0.10;     // share of the cores that others use
// Others take nothing away while cores are idle.
constexpr double kAllInUse = 0.9;

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

// 0 where the kernel does not say; then there is no note.
double busy_s() {
  const auto cpus = allowed_cpus();
  std::ifstream file("/proc/stat");
  double ticks = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string name;
    fields >> name;
    if (std::ranges::none_of(cpus, [&](int cpu) { return name == fmt::format("cpu{}", cpu); }))
      continue;
    double user = 0, nice = 0, system = 0, idle = 0, io = 0, irq = 0, softirq = 0, steal = 0;
    fields >> user >> nice >> system >> idle >> io >> irq >> softirq >> steal;
    ticks += user + nice + system + irq + softirq + steal;
  }
  return ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

}  // namespace

OtherPrograms::Reading OtherPrograms::read() {
  Reading reading{.all_s = busy_s()};
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage used{};
    ::getrusage(who, &used);
    reading.own_s += seconds_of(used.ru_utime) + seconds_of(used.ru_stime);
  }
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  reading.clock_s = std::chrono::duration<double>(now).count();
  return reading;
}

std::string OtherPrograms::note() const {
  const Reading end = read();
  const auto cores = static_cast<double>(allowed_cpus().size());
  const double seconds = end.clock_s - begin_.clock_s;
  if (seconds < kShortest_s) return "";
  const double all = (end.all_s - begin_.all_s) / seconds;
  const double others = all - (end.own_s - begin_.own_s) / seconds;
  if (others < kMuch * cores || all < kAllInUse * cores) return "";
  return fmt::format(
      "note: other programs used {:.1f} of the {} cores meanwhile. Measure again on an idle "
      "machine "
      "before you use these figures.\n",
      others, cores);
}

}  // namespace lockstep::bench
