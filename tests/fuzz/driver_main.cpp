// The driver for machines without clang's libFuzzer, and for the ordinary tests.
//
// Compiled with -fsanitize-coverage=trace-pc (GCC has it too), inputs that reach new code are added
// to the pool and mutated further; without it all changes start from the files given.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/fuzz/driver.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMapBytes = 1u << 16;
constexpr const char* kUsage =
    "usage: %s [--seconds S] [--runs N] [--seed N] [--max-bytes N] [--input-seconds S]\n"
    "          [--memory-mb N] [--dictionary FILE] [--found DIR] [--grow DIR] PATH...\n"
    "Runs the files given, then changed ones for S seconds or N runs. An input that ends or stops\n"
    "the parser is written to DIR (--found); one that reached new code to DIR (--grow).\n";

// How often each place was passed in the current run; code without instruments never calls this.
std::array<unsigned char, kMapBytes> g_passed;
bool g_instrumented = false;

struct Options {
  double seconds = 0;
  std::uint64_t runs = 0;
  std::uint64_t seed = 1;
  std::size_t max_bytes = 1u << 16;
  double input_seconds = 10;
  std::size_t memory_mb = 2048;
  std::string dictionary;
  std::string found = ".";
  std::string grow;
  std::vector<std::string> paths;
};

// The part of memory that parent and child share; the bytes of the input follow it.
struct Shared {
  std::atomic<std::uint64_t> runs{0};
  std::atomic<std::uint64_t> added{0};
  std::atomic<std::uint64_t> covered{0};
  std::atomic<std::size_t> size{0};
  char* bytes() { return reinterpret_cast<char*>(this + 1); }
};

std::string read_whole(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The hash names a file: the same input is saved once.
std::string hash_name(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  char name[17];
  std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(hash));
  return name;
}

fs::path keep(const std::string& folder, std::string_view text) {
  fs::create_directories(folder);
  fs::path path = fs::path(folder) / hash_name(text);
  std::ofstream(path, std::ios::binary)
      .write(text.data(), static_cast<std::streamsize>(text.size()));
  return path;
}

// ---------------------------------------------------------------- the child

class Runner {
 public:
  Runner(const Options& options, Shared& shared)
      : options_(options), shared_(shared), mutator_(options.seed, options.max_bytes, tokens()) {}

  void run_all(std::vector<std::string> inputs) {
    for (const std::string& input : inputs) run(input);
    if (options_.seconds <= 0 && options_.runs == 0) return;
    pool_ = std::move(inputs);
    if (pool_.empty()) pool_.emplace_back();
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(options_.seconds));
    for (std::uint64_t i = 0; options_.runs == 0 ? Clock::now() < end : i < options_.runs; ++i) {
      std::string input = mutator_.next(pool_);
      if (!run(input)) continue;
      if (!options_.grow.empty()) keep(options_.grow, input);
      pool_.push_back(std::move(input));
      shared_.added.fetch_add(1, std::memory_order_relaxed);
    }
  }

 private:
  std::vector<std::string> tokens() const {
    if (options_.dictionary.empty()) return {};
    return lockstep::fuzz::parse_dictionary(read_whole(options_.dictionary));
  }

  // Returns whether it reached something new.
  bool run(const std::string& input) {
    const std::size_t size = std::min(input.size(), options_.max_bytes);
    std::memcpy(shared_.bytes(), input.data(), size);
    shared_.size.store(size, std::memory_order_release);
    if (g_instrumented) g_passed.fill(0);
    // A copy of its exact size, so that the address sanitizer sees a read past its end.
    const std::vector<std::uint8_t> data(shared_.bytes(), shared_.bytes() + size);
    fuzz_one(data.data(), data.size());
    shared_.runs.fetch_add(1, std::memory_order_relaxed);
    return note_coverage();
  }

  bool note_coverage() {
    bool is_new = false;
    if (!g_instrumented) return is_new;
    for (std::size_t i = 0; i < kMapBytes; ++i) {
      if (g_passed[i] == 0) continue;
      // Counts in powers of two: a loop that runs once more is not news, twice as often is.
      const auto band = static_cast<unsigned char>(
          1u << (31 - __builtin_clz(static_cast<unsigned>(g_passed[i]))));
      if ((seen_[i] & band) != 0) continue;
      if (seen_[i] == 0) shared_.covered.fetch_add(1, std::memory_order_relaxed);
      seen_[i] |= band;
      is_new = true;
    }
    return is_new;
  }

  const Options& options_;
  Shared& shared_;
  lockstep::fuzz::Mutator mutator_;
  std::vector<std::string> pool_;
  std::array<unsigned char, kMapBytes> seen_{};
};

[[noreturn]] void be_the_child(const Options& options, Shared& shared,
                               std::vector<std::string> inputs) {
  try {
    Runner(options, shared).run_all(std::move(inputs));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz: an exception that is not a refusal: %s\n", error.what());
    std::abort();
  }
  std::exit(0);  // not _exit: the leak checker looks here
}

// ---------------------------------------------------------------- the parent

std::size_t resident_mb(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/statm");
  std::size_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) >> 20;
}

// "" when the child ended well; otherwise how it ended. Never waits longer than one input may take.
std::string watch(pid_t pid, int alive, const Options& options, Shared& shared) {
  std::uint64_t runs = 0;
  auto moved = Clock::now();
  std::string why;
  pollfd end{alive, POLLIN, 0};
  while (::poll(&end, 1, 100) == 0) {
    if (const auto now = shared.runs.load(); now != runs) {
      runs = now;
      moved = Clock::now();
    }
    if (std::chrono::duration<double>(Clock::now() - moved).count() > options.input_seconds)
      why = "took longer than " + std::to_string(options.input_seconds) + " s";
    if (resident_mb(pid) > options.memory_mb)
      why = "needed more than " + std::to_string(options.memory_mb) + " MB";
    if (!why.empty()) {
      ::kill(pid, SIGKILL);
      break;
    }
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (!why.empty() || status == 0) return why;
  if (WIFSIGNALED(status)) return "was ended by signal " + std::to_string(WTERMSIG(status));
  return "exited with code " + std::to_string(WEXITSTATUS(status));
}

std::vector<std::string> read_inputs(const std::vector<std::string>& paths) {
  std::vector<fs::path> files;
  for (const std::string& path : paths) {
    if (!fs::is_directory(path)) {
      if (!fs::is_regular_file(path)) {
        std::fprintf(stderr, "fuzz: there is no %s\n", path.c_str());
        std::exit(2);
      }
      files.emplace_back(path);
      continue;
    }
    for (const auto& entry : fs::directory_iterator(path))
      if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());  // the same order on every file system
  std::vector<std::string> inputs;
  inputs.reserve(files.size());
  for (const fs::path& file : files) inputs.push_back(read_whole(file));
  return inputs;
}

int fuzz(const char* program, const Options& options) {
  std::vector<std::string> inputs = read_inputs(options.paths);
  std::size_t room = options.max_bytes;
  for (const std::string& input : inputs) room = std::max(room, input.size());
  Options limits = options;
  limits.max_bytes = room;
  void* memory = ::mmap(nullptr, sizeof(Shared) + room, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int ends[2];
  if (memory == MAP_FAILED || ::pipe2(ends, O_CLOEXEC) != 0) {
    std::perror("fuzz: cannot prepare");
    return 2;
  }
  auto& shared = *new (memory) Shared;
  const std::size_t given = inputs.size();
  const auto began = Clock::now();
  const pid_t child = ::fork();
  if (child < 0) {
    std::perror("fuzz: cannot fork");
    return 2;
  }
  if (child == 0) be_the_child(limits, shared, std::move(inputs));
  ::close(ends[1]);  // the child's copy closes when it is gone
  const std::string why = watch(child, ends[0], options, shared);
  const double elapsed_s = std::chrono::duration<double>(Clock::now() - began).count();
  const auto count = [](const auto& value) {
    return static_cast<unsigned long long>(value.load());
  };
  std::printf("runs %llu, inputs %zu + %llu, places %llu, %.0f runs/s\n", count(shared.runs), given,
              count(shared.added), count(shared.covered),
              static_cast<double>(shared.runs.load()) / std::max(elapsed_s, 1e-3));
  if (why.empty()) return 0;
  const auto path = keep(options.found, {shared.bytes(), shared.size.load()});
  std::printf("FOUND: the parser %s\n  input: %s (%zu bytes)\n  again: %s %s\n", why.c_str(),
              path.c_str(), shared.size.load(), program, path.c_str());
  return 1;
}

bool read_option(const std::string& name, const char* value, Options& options) {
  if (name == "--seconds")
    options.seconds = std::atof(value);
  else if (name == "--runs")
    options.runs = std::strtoull(value, nullptr, 10);
  else if (name == "--seed")
    options.seed = std::strtoull(value, nullptr, 10);
  else if (name == "--max-bytes")
    options.max_bytes = std::strtoull(value, nullptr, 10);
  else if (name == "--input-seconds")
    options.input_seconds = std::atof(value);
  else if (name == "--memory-mb")
    options.memory_mb = std::strtoull(value, nullptr, 10);
  else if (name == "--dictionary")
    options.dictionary = value;
  else if (name == "--found")
    options.found = value;
  else if (name == "--grow")
    options.grow = value;
  else
    return false;
  return true;
}

}  // namespace

// Called at every place of instrumented code; this file is not instrumented.
extern "C" void __sanitizer_cov_trace_pc();
extern "C" void __sanitizer_cov_trace_pc() {
  g_instrumented = true;
  auto place = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  place = (place ^ (place >> 16)) * 0x9e3779b97f4a7c15u >> 40;
  unsigned char& count = g_passed[place % kMapBytes];
  if (count != 255) ++count;
}

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (!arg.starts_with("--")) {
      options.paths.push_back(arg);
    } else if (i + 1 == argc || !read_option(arg, argv[++i], options)) {
      std::fprintf(stderr, kUsage, argv[0]);
      return 2;
    }
  }
  if (options.paths.empty()) {
    std::fprintf(stderr, kUsage, argv[0]);
    return 2;
  }
  return fuzz(argv[0], options);
}
