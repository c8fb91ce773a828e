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
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

// ---------------------------------------------------------------- changing inputs

// Where sizes, offsets and counts go wrong.
constexpr std::array<std::uint64_t, 14> kNumbers{
    0,     1,           7,           127,        255,         256,         65535,
    65536, 100'000'000, 0x7fff'ffff, 0xffffffff, 0x100000000, ~0ull >> 1u, ~0ull};

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Tokens of a libFuzzer dictionary: one quoted text a line, with \\, \" and \xAB; # comments.
std::vector<std::string> parse_dictionary(std::string_view text) {
  std::vector<std::string> tokens;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::size_t open = line.find('"');
    const std::size_t close = line.rfind('"');
    if (line.starts_with('#') || open == close) continue;
    line = line.substr(open + 1, close - open - 1);
    std::string token;
    for (std::size_t i = 0; i < line.size(); ++i) {
      if (line[i] != '\\' || i + 1 == line.size()) {
        token += line[i];
      } else if (line[i + 1] == 'x' && i + 3 < line.size()) {
        token += static_cast<char>(hex_digit(line[i + 2]) * 16 + hex_digit(line[i + 3]));
        i += 3;
      } else {
        token += line[++i];
      }
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

// Makes inputs from inputs. One thread; the same seed and calls give the same inputs.
class Mutator {
 public:
  Mutator(std::uint64_t seed, std::size_t max_bytes, std::vector<std::string> dictionary);

  // Some changes to one of `pool`, which is not empty: bits, bytes, numbers, pieces cut, doubled,
  // moved in from another, tokens of the dictionary.
  std::string next(const std::vector<std::string>& pool);

 private:
  std::size_t below(std::size_t count);
  void change_byte(std::string& text);
  void change_number(std::string& text);
  void cut(std::string& text);
  void copy_piece(std::string& text, const std::string& from);
  void put_token(std::string& text);
  void change(std::string& text, const std::vector<std::string>& pool);

  std::mt19937_64 random_;
  std::size_t max_bytes_;
  std::vector<std::string> dictionary_;
};

Mutator::Mutator(std::uint64_t seed, std::size_t max_bytes, std::vector<std::string> dictionary)
    : random_(seed), max_bytes_(max_bytes), dictionary_(std::move(dictionary)) {}

std::size_t Mutator::below(std::size_t count) {
  return count == 0 ? 0 : random_() % count;
}

void Mutator::change_byte(std::string& text) {
  if (text.empty()) return;
  char& byte = text[below(text.size())];
  byte = below(2) == 0 ? static_cast<char>(byte ^ (1 << below(8))) : static_cast<char>(random_());
}

// A number in the text, or the bytes of a binary one.
void Mutator::change_number(std::string& text) {
  const std::uint64_t value = kNumbers[below(kNumbers.size())] + below(3) - 1;
  const auto digit = std::find_if(text.begin() + static_cast<std::ptrdiff_t>(below(text.size())),
                                  text.end(), is_digit);
  if (digit != text.end() && below(4) != 0) {
    const auto end = std::find_if_not(digit, text.end(), is_digit);
    text.replace(digit, end, std::to_string(value));
    return;
  }
  const std::size_t width = std::size_t{1} << below(4);
  if (text.size() < width) return;
  const std::size_t at = below(text.size() - width + 1);
  for (std::size_t i = 0; i < width; ++i) text[at + i] = static_cast<char>(value >> (8 * i));
}

void Mutator::cut(std::string& text) {
  const std::size_t at = below(text.size() + 1);
  text.erase(at, below(8) == 0 ? std::string::npos : 1 + below(below(8) == 0 ? 256 : 8));
}

void Mutator::copy_piece(std::string& text, const std::string& from) {
  if (from.empty()) return;
  const std::size_t begin = below(from.size());
  const std::string piece = from.substr(begin, 1 + below(below(4) == 0 ? from.size() : 40));
  const std::size_t at = below(text.size() + 1);
  if (below(3) == 0)
    text.replace(at, piece.size(), piece);
  else
    text.insert(at, piece);
}

void Mutator::put_token(std::string& text) {
  if (dictionary_.empty()) return change_byte(text);
  const std::string& token = dictionary_[below(dictionary_.size())];
  const std::size_t at = below(text.size() + 1);
  if (below(3) == 0)
    text.replace(at, token.size(), token);
  else
    text.insert(at, token);
}

void Mutator::change(std::string& text, const std::vector<std::string>& pool) {
  switch (below(8)) {
    case 0:
    case 1:
      return change_byte(text);
    case 2:
      return change_number(text);
    case 3:
      return cut(text);
    case 4:
      return copy_piece(text, text);
    case 5:
      return copy_piece(text, pool[below(pool.size())]);
    default:
      return put_token(text);
  }
}

std::string Mutator::next(const std::vector<std::string>& pool) {
  // Half of the time from the newest inputs: they reached something that the others did not.
  const std::size_t recent = std::min<std::size_t>(pool.size(), 64);
  const std::size_t chosen = below(2) == 0 ? pool.size() - 1 - below(recent) : below(pool.size());
  std::string text = pool[chosen];
  for (std::size_t count = std::size_t{1} << below(4); count > 0; --count) change(text, pool);
  if (text.size() > max_bytes_) text.resize(max_bytes_);
  return text;
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
    return parse_dictionary(read_whole(options_.dictionary));
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
  Mutator mutator_;
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
