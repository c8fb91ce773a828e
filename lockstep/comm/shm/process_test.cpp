// Ranks that are processes: what works, and what happens when one of them dies, stops or has no
// room.
//
// Every rank is a fresh process of this program (CHILD). LOCKSTEP_SOAK=1 repeats the faults 200
// times and holds them to the promised 100 ms; without it the machine may be busy with other tests.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <vector>

#include "lockstep/comm/shm/engine.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::shm {
namespace {

using child_for_test::Child;
using testing::HasSubstr;

Deadline seconds(int n) {
  return Deadline::after(std::chrono::seconds(n));
}

double now_ms() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

// Keys are files of a directory.
class FileStore final : public KeyValueStore {
 public:
  explicit FileStore(std::string directory) : directory_(std::move(directory)) {}
  void set(const std::string& key, const std::string& value) override {
    if (key.rfind(dies_at_, 0) == 0) ::raise(SIGKILL);
    write_file_atomically(path(key), value);
  }
  // The process ends instead of writing a key that begins with this.
  void die_at(const std::string& key) { dies_at_ = key; }
  std::string get(const std::string& key, const Deadline& deadline) override {
    while (!std::filesystem::exists(path(key))) {
      if (deadline.expired()) throw TimeoutError("kv", "nobody set " + key);
      ::usleep(500);
    }
    return read_file(path(key));
  }

 private:
  std::string path(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '.');
    return directory_ + "/" + key;
  }
  const std::string directory_;
  std::string dies_at_ = "-";
};

// ---------------------------------------------------------------- the ranks' side

int number(const char* name) {
  return static_cast<int>(*env::get_int(name));
}

EngineResult join_world() {
  FileStore kv(*env::get("TEST_STORE"));
  if (const auto key = env::get("TEST_DIES_AT")) kv.die_at(*key);
  return Engine::make(kv, {number("TEST_RANK"), number("TEST_SIZE")}, {}, seconds(60));
}

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

// What the ranks exchange besides the arrays that are reduced.
void exchange_parts(Engine& engine, std::vector<float>& array, int root,
                    const StartOptions& options) {
  const auto size = static_cast<std::size_t>(engine.size());
  const std::size_t part = array.size() / (2 * size);
  std::vector<Part> into;
  std::vector<ConstPart> from;
  for (std::size_t i = 0; i < size; ++i) {
    into.push_back({array.data() + i * part, part * 4});
    from.push_back({array.data() + (size + i) * part, part * 4});
  }
  const bool at_root = engine.rank() == root;
  engine.gather(at_root ? into : std::vector<Part>(), from[0], root, options)->wait();
  engine.scatter(into[0], at_root ? from : std::vector<ConstPart>(), root, options)->wait();
  engine.all_to_all(into, from, options)->wait();
  engine.reduce(array.data(), array.size(), DType::kF32, Op::kAvg, root, options)->wait();
  engine.reduce_scatter(array.data(), array.data() + part, part, DType::kF32, Op::kAvg, options)
      ->wait();
}

// Every kind of operation in a loop, until something happens or for so many rounds.
void stay_busy(Engine& engine, int deadline_ms, int rounds) {
  const auto block = engine.symmetric(4 << 20, seconds(60));
  std::vector<float> small(500), large(700'000);
  std::vector<char> one(64), all(64 * static_cast<std::size_t>(engine.size()));
  const int next = (engine.rank() + 1) % engine.size();
  const int before = (engine.rank() + engine.size() - 1) % engine.size();
  say("busy");
  for (int round = 0; rounds == 0 || round < rounds; ++round) {
    const StartOptions options{.deadline = Deadline::after(std::chrono::milliseconds(deadline_ms))};
    const auto sum = [&](void* data, std::size_t count) {
      engine.all_reduce(data, count, DType::kF32, Op::kAvg, options)->wait();
    };
    for (int i = 0; i < 50; ++i) sum(small.data(), small.size());
    sum(large.data(), large.size());
    sum(block->data(), 1 << 20);
    engine.all_gather(all.data(), one.data(), one.size(), options)->wait();
    engine.broadcast(large.data(), large.size() * 4, 0, options)->wait();
    auto send = engine.send(large.data(), 300'000, next, options);
    engine.recv(large.data() + 100'000, 300'000, before, options)->wait();
    send->wait();
    exchange_parts(engine, large, round % engine.size(), options);
    exchange_parts(engine, small, round % engine.size(), options);
    const auto another = engine.symmetric(64 << 10, options.deadline);
    sum(another->data(), 16 << 10);
    engine.barrier(options)->wait();
  }
}

// Runs `body`, which is expected to fail, and says how.
void report_failure(const std::function<void()>& body) {
  try {
    body();
  } catch (const TimeoutError& error) {
    say(fmt::format("timeout {:.3f} peer {} {}", now_ms(), error.context().peer, error.what()));
  } catch (const CommError& error) {
    say(fmt::format("comm {:.3f} peer {} {}", now_ms(), error.context().peer, error.what()));
  }
}

CHILD(busy) {
  EngineResult made = join_world();
  if (!made.engine) return 2;
  const auto rounds = static_cast<int>(env::get_int("TEST_ROUNDS").value_or(0));
  report_failure([&] { stay_busy(*made.engine, number("TEST_DEADLINE_MS"), rounds); });
  return 0;
}

// Waits for a message of rank TEST_FROM, or for its own end without one.
CHILD(receives) {
  EngineResult made = join_world();
  if (!made.engine) return 2;
  made.engine->barrier()->wait(seconds(60));
  say("ready");
  char data[8];
  const int from = number("TEST_FROM");
  if (from < 0) ::sleep(60);
  report_failure([&] { made.engine->recv(data, sizeof data, from)->wait(seconds(60)); });
  return 0;
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

// Element i of what rank `from` sends to rank `to`.
float value_of(int from, int to, std::size_t i) {
  return static_cast<float>(from * 100 + to) + static_cast<float>(i % 7) / 8;
}

// Operations that move without summing, with different part sizes for every pair. 0, or what is
// wrong.
int check_parts(Engine& engine) {
  const int own = engine.rank(), size = engine.size(), root = size / 2;
  const auto count = [](int from, int to) {
    return static_cast<std::size_t>(1 + (from * 31 + to * 17) % 600);
  };
  using Lists = std::vector<std::vector<float>>;
  Lists sent(static_cast<std::size_t>(size)), got(static_cast<std::size_t>(size));
  std::vector<ConstPart> from;
  std::vector<Part> into;
  for (int other = 0; other < size; ++other) {
    auto& list = sent[static_cast<std::size_t>(other)];
    for (std::size_t i = 0; i < count(own, other); ++i) list.push_back(value_of(own, other, i));
    auto& room = got[static_cast<std::size_t>(other)];
    room.resize(count(other, own));
    from.push_back({list.data(), list.size() * 4});
    into.push_back({room.data(), room.size() * 4});
  }
  const auto right = [](const std::vector<float>& list, int sender, int receiver) {
    for (std::size_t i = 0; i < list.size(); ++i)
      if (list[i] != value_of(sender, receiver, i)) return false;
    return true;
  };
  const auto clear = [&] {
    for (auto& list : got) std::fill(list.begin(), list.end(), -1.0f);
  };
  engine.all_to_all(into, from)->wait(seconds(60));
  for (int other = 0; other < size; ++other)
    if (!right(got[static_cast<std::size_t>(other)], other, own)) return 6;
  clear();
  const bool at_root = own == root;
  engine.gather(at_root ? into : std::vector<Part>(), from[static_cast<std::size_t>(root)], root)
      ->wait(seconds(60));
  for (int other = 0; other < size && at_root; ++other)
    if (!right(got[static_cast<std::size_t>(other)], other, own)) return 7;
  clear();
  engine
      .scatter(into[static_cast<std::size_t>(root)], at_root ? from : std::vector<ConstPart>(),
               root)
      ->wait(seconds(60));
  if (!right(got[static_cast<std::size_t>(root)], root, own)) return 8;
  std::vector<float> all(static_cast<std::size_t>(size));
  const auto mine = static_cast<float>(own);
  engine.all_gather(all.data(), &mine, sizeof mine)->wait(seconds(60));
  for (int other = 0; other < size; ++other)
    if (all[static_cast<std::size_t>(other)] != static_cast<float>(other)) return 9;
  return 0;
}

// Sums that are easy to check, through every way an array can go.
CHILD(sums) {
  const std::size_t descriptors = open_descriptors();
  {
    EngineResult made = join_world();
    if (!made.engine) return 2;
    Engine& engine = *made.engine;
    const auto want = static_cast<float>(engine.size() * (engine.size() + 1) / 2);
    const auto block = engine.symmetric(4 << 20, seconds(60));
    std::vector<float> memory(1 << 20);
    for (float* data : {memory.data(), reinterpret_cast<float*>(block->data())}) {
      for (const std::size_t count : {1, 1000, 100'000, 1 << 20}) {
        for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<float>(engine.rank() + 1);
        engine.all_reduce(data, count, DType::kF32, Op::kSum)->wait(seconds(60));
        for (std::size_t i = 0; i < count; ++i)
          if (data[i] != want) return 3;
      }
    }
    if (const int wrong = check_parts(engine)) return wrong;
    std::vector<float> one(5000, static_cast<float>(engine.rank()));
    if (engine.rank() == 0) engine.send(one.data(), 20'000, 1)->wait(seconds(60));
    if (engine.rank() == 1) engine.recv(one.data(), 20'000, 0)->wait(seconds(60));
    if (engine.rank() == 1 && one[4999] != 0) return 4;
    engine.barrier()->wait(seconds(60));
  }
  return open_descriptors() == descriptors ? 0 : 5;
}

CHILD(answers) {
  if (const auto mib = env::get_int("TEST_ADDRESS_MIB")) {
    const auto bytes = static_cast<rlim_t>(*mib) << 20;
    const rlimit limit{bytes, bytes};
    ::setrlimit(RLIMIT_AS, &limit);
  }
  const EngineResult made = join_world();
  say(made.engine ? "an engine" : made.unavailable_reason);
  return 0;
}

CHILD(connects) {
  say("connects");
  report_failure([] { (void)join_world(); });
  return 0;
}

std::size_t kib_of(const std::string& field) {
  std::istringstream lines(read_file("/proc/self/status"));
  for (std::string line; std::getline(lines, line);)
    if (line.rfind(field + ":", 0) == 0)
      return static_cast<std::size_t>(std::atoll(line.c_str() + field.size() + 1));
  return 0;
}

// Asks for a block of TEST_BLOCK_MIB. The rank TEST_FULL has half the address space for it. Says
// the most memory it had since it asked.
CHILD(wants_a_block) {
  EngineResult made = join_world();
  if (!made.engine) return 2;
  const auto bytes = static_cast<std::size_t>(number("TEST_BLOCK_MIB")) << 20;
  if (made.engine->rank() == number("TEST_FULL")) {
    const rlim_t limit = (kib_of("VmSize") << 10) + bytes / 2;
    const rlimit both{limit, limit};
    ::setrlimit(RLIMIT_AS, &both);
  }
  made.engine->barrier()->wait(seconds(60));
  const std::size_t before = kib_of("VmHWM");
  try {
    (void)made.engine->symmetric(bytes, seconds(60));
  } catch (const UsageError& error) {
    say(fmt::format("grew {} MiB: {}", (kib_of("VmHWM") - before) >> 10, error.what()));
  }
  made.engine->barrier()->wait(seconds(60));
  return 0;
}

// ---------------------------------------------------------------- the tests' side

class Ranks {
 public:
  Ranks(const std::string& name, int size, const std::map<std::string, std::string>& more = {}) {
    for (int rank = 0; rank < size; ++rank) start(name, rank, size, more);
  }
  Ranks() = default;
  void start(const std::string& name, int rank, int size,
             std::map<std::string, std::string> variables) {
    variables["TEST_STORE"] = directory_.path();
    variables["TEST_RANK"] = std::to_string(rank);
    variables["TEST_SIZE"] = std::to_string(size);
    children_.push_back(std::make_unique<Child>(name, variables));
  }
  Child& operator[](int rank) { return *children_[static_cast<std::size_t>(rank)]; }
  // The abstract socket on which that rank accepts the others.
  std::string socket_of(int rank) const {
    std::istringstream info(read_file(fmt::format("{}/shm.info.{}", directory_.path(), rank)));
    for (std::string line; std::getline(info, line);)
      if (line.rfind("lockstep-", 0) == 0) return line;
    return "";
  }
  int size() const { return static_cast<int>(children_.size()); }

 private:
  TemporaryDirectory directory_;
  std::vector<std::unique_ptr<Child>> children_;
};

bool soak() {
  return env::get_bool("LOCKSTEP_SOAK").value_or(false);
}
// How late a survivor may report.
double allowance_ms() {
  return soak() ? 100 : 2000;
}

TEST(Processes, SumAndLeaveNothingBehind) {
  for (const int size : {2, 4, soak() ? kMaxRanks : 7}) {
    Ranks ranks("sums", size);
    for (int rank = 0; rank < size; ++rank)
      EXPECT_EQ(ranks[rank].wait(std::chrono::seconds(60)), 0) << ranks[rank].output();
  }
}

struct Report {
  std::string kind;
  double at_ms = 0;
  int peer = -1;
  std::string text;
};

Report report_of(Child& child, std::chrono::seconds limit = std::chrono::seconds(60)) {
  EXPECT_EQ(child.wait(limit), 0) << child.output();
  Report report;
  std::istringstream lines(child.output());
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string kind, word;
    if (!(fields >> kind) || (kind != "comm" && kind != "timeout")) continue;
    report.kind = kind;
    fields >> report.at_ms >> word >> report.peer;
    report.text = line;
  }
  return report;
}

// Nothing has a name in a file system, so what a rank had must be gone with its process.
void expect_nothing_left(const Ranks& ranks) {
  const std::string sockets = read_file("/proc/net/unix", 64 << 20);
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const std::string name = ranks.socket_of(rank);
    ASSERT_FALSE(name.empty());
    EXPECT_EQ(sockets.find(name), std::string::npos) << "a socket of rank " << rank;
  }
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    EXPECT_EQ(entry.path().filename().string().find("lockstep"), std::string::npos) << entry.path();
}

// Memory of the whole machine that several processes map.
double shared_mib() {
  std::istringstream lines(read_file("/proc/meminfo"));
  for (std::string line; std::getline(lines, line);)
    if (line.rfind("Shmem:", 0) == 0) return std::atof(line.c_str() + 6) / 1024;
  return 0;
}

// A world that is struck has 20 MiB and more, so a leak of some hundred worlds cannot be
// overlooked, whatever else runs on the machine.
class NoMemoryIsLeft {
 public:
  ~NoMemoryIsLeft() {
    const Deadline limit = seconds(30);
    while (shared_mib() > before_ + kOthers && !limit.expired()) ::usleep(100'000);
    EXPECT_LT(shared_mib(), before_ + kOthers);
  }

 private:
  static constexpr double kOthers = 400;
  const double before_ = shared_mib();
};

// One rank of a busy world gets a signal at some moment; the others must report it in time.
void strike(int size, int victim, int signal, int after_us) {
  constexpr int kDeadlineMs = 2000;
  Ranks ranks("busy", size, {{"TEST_DEADLINE_MS", std::to_string(kDeadlineMs)}});
  for (int rank = 0; rank < size; ++rank) ASSERT_TRUE(ranks[rank].says("busy"));
  ::usleep(static_cast<useconds_t>(after_us));
  const double struck_ms = now_ms();
  ASSERT_EQ(::kill(ranks[victim].pid(), signal), 0);
  const bool stopped = signal == SIGSTOP;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == victim) continue;
    const Report report = report_of(ranks[rank]);
    SCOPED_TRACE(fmt::format("signal {} to rank {} of {} after {} us: rank {} said {}", signal,
                             victim, size, after_us, rank, report.text));
    EXPECT_EQ(report.kind, stopped ? "timeout" : "comm");
    if (stopped) {
      // Others may be late because of it, in the round before, and are named as well.
      EXPECT_THAT(report.text,
                  ::testing::ContainsRegex(fmt::format("ranks? ([0-9]+, )*{}[ ,]", victim)));
    } else {
      EXPECT_THAT(report.text, HasSubstr(fmt::format("rank {}", victim)));
      EXPECT_EQ(report.peer, victim);
    }
    const double due_ms = stopped ? kDeadlineMs : 0;
    EXPECT_LT(report.at_ms - struck_ms, due_ms + allowance_ms());
  }
  if (stopped) {
    // It comes back to a broken world and hears of it.
    ::kill(ranks[victim].pid(), SIGCONT);
    EXPECT_EQ(ranks[victim].wait(std::chrono::seconds(60)), 0);
  } else {
    EXPECT_EQ(ranks[victim].wait(std::chrono::seconds(60)), -signal);
  }
  expect_nothing_left(ranks);
}

TEST(Processes, EveryOperationByTurns) {
  for (const int size : {2, 3}) {
    Ranks ranks("busy", size, {{"TEST_DEADLINE_MS", "60000"}, {"TEST_ROUNDS", "5"}});
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(ranks[rank].wait(std::chrono::seconds(60)), 0) << ranks[rank].output();
      EXPECT_EQ(ranks[rank].output(), "busy\n");
    }
    expect_nothing_left(ranks);
  }
}

// A dead rank that nobody needs must not hide what has happened to another: here rank 0 waits only
// for rank 2, which gives up because of rank 1, or dies after it.
TEST(Processes, ADeadRankHidesNoOtherTrouble) {
  for (const bool both_die : {false, true}) {
    Ranks ranks;
    const int senders[] = {2, -1, both_die ? -1 : 1};
    for (int rank = 0; rank < 3; ++rank)
      ranks.start("receives", rank, 3, {{"TEST_FROM", std::to_string(senders[rank])}});
    for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(ranks[rank].says("ready"));
    ASSERT_EQ(::kill(ranks[1].pid(), SIGKILL), 0);
    ::usleep(100'000);
    const double struck_ms = now_ms();
    if (both_die) {
      ASSERT_EQ(::kill(ranks[2].pid(), SIGKILL), 0);
    }
    const Report report = report_of(ranks[0], std::chrono::seconds(90));
    EXPECT_EQ(report.kind, "comm") << report.text;
    EXPECT_EQ(report.peer, both_die ? 2 : 1) << report.text;
    // Its own deadline is 60 s; less would be a matter of how busy the machine is.
    EXPECT_LT(report.at_ms - struck_ms, 15'000) << report.text;
  }
}

// No launcher reports it here, and there is no engine yet that could: the start-up limit is 60 s.
TEST(Processes, ARankThatEndsDuringRendezvousIsNamedSoon) {
  for (const int victim : {0, 1, 2}) {
    for (const char* moment : {"shm/connected", "shm/made", "shm/done"}) {
      Ranks ranks;
      for (int rank = 0; rank < 3; ++rank) {
        std::map<std::string, std::string> variables;
        if (rank == victim) variables["TEST_DIES_AT"] = moment;
        ranks.start("connects", rank, 3, variables);
      }
      const pid_t pid = ranks[victim].pid();
      EXPECT_EQ(ranks[victim].wait(std::chrono::seconds(60)), -SIGKILL);
      const double ended_ms = now_ms();
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == victim) continue;
        const Report report = report_of(ranks[rank], std::chrono::seconds(90));
        SCOPED_TRACE(fmt::format("rank {} ended at {}, rank {} reports", victim, moment, rank));
        EXPECT_EQ(report.kind, "comm") << ranks[rank].output();
        EXPECT_EQ(report.peer, victim);
        EXPECT_THAT(report.text,
                    HasSubstr(fmt::format("rank {} (process {}) ended during the rendezvous",
                                          victim, pid)));
        EXPECT_LT(report.at_ms - ended_ms, 10'000);
      }
    }
  }
}

TEST(Processes, NobodyMakesABlockThatOneHasNoRoomFor) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers need all the address space";
#endif
  Ranks ranks("wants_a_block", 2, {{"TEST_BLOCK_MIB", "96"}, {"TEST_FULL", "1"}});
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks[rank].wait(std::chrono::seconds(60)), 0) << ranks[rank].output();
    EXPECT_THAT(ranks[rank].output(), HasSubstr("rank 1 cannot make a symmetric block"));
    int grew_mib = -1;
    ASSERT_EQ(std::sscanf(ranks[rank].output().c_str(), "grew %d MiB", &grew_mib), 1);
    EXPECT_LT(grew_mib, 48) << "a part was made all the same";
  }
}

// Random moments find rare faults, which belong to the soak and not into every run.
void strike_often(int turns, const std::function<int(int turn)>& signal_of) {
  if (!soak()) GTEST_SKIP() << "random moments: run with ./dev test --soak";
  const NoMemoryIsLeft memory;
  std::mt19937 random(std::random_device{}());
  for (int turn = 0; turn < turns && !testing::Test::HasFailure(); ++turn) {
    const unsigned size = 2 + random() % 3;
    strike(static_cast<int>(size), static_cast<int>(random() % size), signal_of(turn),
           static_cast<int>(random() % 50'000));
  }
}

TEST(Processes, ADeadRankIsNamedSoon) {
  strike_often(150, [](int turn) { return turn % 2 == 0 ? SIGKILL : SIGSEGV; });
}

TEST(Processes, AStoppedRankIsNamedAtTheDeadline) {
  strike_often(50, [](int) { return SIGSTOP; });
}

TEST(Processes, ARankWithoutAddressSpaceSaysSo) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers need all the address space";
#endif
  Ranks ranks;
  ranks.start("answers", 0, 2, {});
  ranks.start("answers", 1, 2, {{"TEST_ADDRESS_MIB", "1"}});
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks[rank].wait(std::chrono::seconds(60)), 0) << ranks[rank].output();
    EXPECT_THAT(ranks[rank].output(), HasSubstr("rank 1: [shm]"));
    EXPECT_THAT(ranks[rank].output(), HasSubstr("of address space are needed"));
  }
}

}  // namespace
}  // namespace lockstep::shm
