// One engine whose peers are played by the test, so that what they do is exact: a rank that always
// has room for more bytes, one that never comes, one whose process has ended. Then ranks with two
// engines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/collectives.h"
#include "lockstep/comm/shm/engine_core.h"
#include "lockstep/comm/shm/progress_policy.h"
#include "lockstep/comm/shm/segment.h"
#include "lockstep/comm/shm/worlds_for_test.h"
#include "lockstep/core/host.h"

namespace lockstep::shm {
namespace {

using namespace for_test;
using testing::HasSubstr;

constexpr std::uint64_t kNoEnd = std::uint64_t{1} << 40;

// Rank 0.
class Alone {
 public:
  explicit Alone(int size, Fd pidfd_of_last = {}, Fd socket_of_last = {}) : layout_(size, kTiny) {
    std::vector<Peer> peers(static_cast<std::size_t>(size));
    for (Peer& peer : peers) {
      peer.segment = Segment::make(layout_.segment_bytes());
      layout_.construct(peer.segment->data());
    }
    peers.back().pidfd = std::move(pidfd_of_last);
    peers.back().socket = std::move(socket_of_last);
    core_ = std::make_shared<EngineCore>(RankAndSize{0, size}, layout_, std::move(peers),
                                         policy_under_test());
  }
  ~Alone() { core_->close(); }

  const std::shared_ptr<EngineCore>& core() { return core_; }
  std::size_t ring_bytes() const { return layout_.ring_bytes(); }
  // As if that rank took every byte at once, or had sent without end.
  void takes_all(int rank) { layout_.ring(core_->group().view(0), rank).taken = kNoEnd; }
  void sends_on(int rank) {
    Ring& ring = layout_.ring(core_->group().view(rank), 0);
    std::memcpy(ring.data(), &length_, sizeof length_);
    ring.written = kNoEnd;
  }

  std::shared_ptr<Message> message(int peer, bool sending, bool caller_waits = true) {
    auto message = std::make_shared<Message>(
        core_->group(), soon(), Message::Ends{data_.data(), data_.size(), peer, sending});
    core_->start(message, caller_waits);
    return message;
  }
  // Gigabytes, from the same array: seconds of copying.
  std::vector<std::shared_ptr<Message>> stream_to(int peer) {
    std::vector<std::shared_ptr<Message>> all;
    for (int i = 0; i < 4000; ++i) all.push_back(message(peer, true));
    return all;
  }
  std::shared_ptr<Collective> barrier() {
    auto ticket = std::make_shared<Barrier>(core_->group(), soon(), Kind::kBarrier);
    core_->start(ticket, /*caller_waits=*/true);
    return ticket;
  }

 private:
  const Layout layout_;
  std::vector<std::byte> data_{std::size_t{4} << 20};
  const std::uint64_t length_ = data_.size();
  std::shared_ptr<EngineCore> core_;
};

// A process that has ended.
Fd ended_process() {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(0);
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return pidfd;
}

// Starting a message does not copy all of it, however fast the other side is.
TEST(Alone, AStartMovesAFewRingsOfALongMessage) {
  Alone ranks(3);
  ranks.takes_all(1);
  ranks.sends_on(2);
  for (const auto& message : {ranks.message(1, true), ranks.message(2, false)}) {
    EXPECT_FALSE(message->done());
    EXPECT_GT(message->moved, 0u);
    EXPECT_LE(message->moved, 20 * ranks.ring_bytes());
  }
}

// While messages move, a rank that does not come to a collective is waited for as long as asked.
TEST(Alone, ADeadlineHoldsWhileMessagesMove) {
  Alone ranks(3);
  ranks.takes_all(1);
  const auto stream = ranks.stream_to(1);
  const auto barrier = ranks.barrier();
  EXPECT_THROW(barrier->wait(Deadline::after(std::chrono::milliseconds(200))), TimeoutError);
  EXPECT_THAT(text_of(barrier->error()), HasSubstr("did not arrive"));
  // The stream was cut off, and not waited for.
  EXPECT_THAT(text_of(stream.back()->error()), HasSubstr("barrier() timed out after"));
}

// Whoever waits sees it, and whoever polls.
TEST(Alone, ADeadRankIsSeenWhileMessagesMove) {
  for (const bool polls : {false, true}) {
    Alone ranks(3, ended_process());
    ranks.takes_all(1);
    const auto stream = ranks.stream_to(1);
    const auto barrier = ranks.barrier();
    while (polls && !barrier->poll()) {
    }
    try {
      barrier->wait(soon());
      FAIL() << "a dead rank took part";
    } catch (const CommError& error) {
      EXPECT_EQ(error.context().peer, 2);
      EXPECT_THAT(error.what(), HasSubstr("has ended before it took part in barrier()"));
      EXPECT_THAT(error.what(), HasSubstr("model.join()"));
    }
    EXPECT_THAT(text_of(stream.back()->error()), HasSubstr("has ended"));
  }
}

// A rank that ends while a block is made leaves a closed socket first.
TEST(Alone, ABlockWithARankThatIsGone) {
  const auto closed_socket = [] {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    ::close(ends[1]);
    return Fd(ends[0]);
  };
  const auto error_of = [](Alone& ranks) {
    try {
      (void)ranks.core()->make_symmetric(4096, soon());
    } catch (const CommError& error) {
      EXPECT_EQ(error.context().peer, 2);
      return std::string(error.what());
    }
    return std::string("none");
  };
  Alone dead(3, ended_process(), closed_socket());
  EXPECT_THAT(error_of(dead), HasSubstr("rank 2 (process 0) has ended"));
  Alone silent(3, {}, closed_socket());
  EXPECT_THAT(error_of(silent), HasSubstr("rank 2 closed its socket before its part of a symmetric "
                                          "block was there"));
}

// The stream itself wants nothing of the dead rank and continues.
TEST(Alone, ADeadRankThatNobodyWantsDoesNotStopAStream) {
  Alone ranks(3, ended_process());
  ranks.takes_all(1);
  std::vector<std::shared_ptr<Message>> some;
  for (int i = 0; i < 100; ++i) some.push_back(ranks.message(1, true));
  some.back()->wait(soon());
  EXPECT_TRUE(ranks.core()->failure().text().empty());
}

// ---------------------------------------------------------------- cores

TEST(Wait, WhoLeavesACoreMayUseAllAsBefore) {
  const std::vector<int> cores = allowed_cpus();
  if (cores.size() < 2) GTEST_SKIP() << "one core";
  // The scheduler may send it back at any time, but hardly every time.
  int left = 0;
  for (int i = 0; i < 50; ++i) {
    const int here = ::sched_getcpu();
    migrate_off_cores({here});
    left += ::sched_getcpu() != here ? 1 : 0;
  }
  EXPECT_GT(left, 0);
  EXPECT_EQ(allowed_cpus(), cores);
  migrate_off_cores(cores);  // there is nowhere to go
  EXPECT_EQ(allowed_cpus(), cores);
}

// Refuses the next `left` calls that allow more than one core, from the start or once it has moved.
struct Refusing {
  static int set(pid_t thread, std::size_t bytes, const cpu_set_t* cores) {
    if (CPU_COUNT(cores) == 1) {
      moved = true;
    } else if ((moved || from_start) && left > 0) {
      --left;
      errno = EINVAL;
      return -1;
    }
    return ::sched_setaffinity(thread, bytes, cores);
  }
  static inline bool moved = false, from_start = false;
  static inline int left = 0;
};

TEST(Wait, WhoLeavesACoreIsNotLeftOnOne) {
  const std::vector<int> cores = allowed_cpus();
  if (cores.size() < 2) GTEST_SKIP() << "one core";
  for (const int refusals : {1, 3}) {  // once, and until every core is asked for
    Refusing::moved = Refusing::from_start = false;
    Refusing::left = refusals;
    migrate_off_cores({::sched_getcpu()}, Refusing::set);
    EXPECT_TRUE(Refusing::moved);
    EXPECT_EQ(Refusing::left, 0);
    const std::vector<int> after = allowed_cpus();
    EXPECT_TRUE(std::includes(after.begin(), after.end(), cores.begin(), cores.end()));
    if (refusals == 1) {
      EXPECT_EQ(after, cores);
    }
  }
  cpu_set_t again;
  CPU_ZERO(&again);
  for (const int core : cores) CPU_SET(core, &again);
  ASSERT_EQ(::sched_setaffinity(0, sizeof again, &again), 0);
  // Where nothing may be set, nothing is.
  Refusing::moved = false;
  Refusing::from_start = true;
  Refusing::left = 1;
  migrate_off_cores({::sched_getcpu()}, Refusing::set);
  EXPECT_FALSE(Refusing::moved);
  EXPECT_EQ(allowed_cpus(), cores);
}

// ---------------------------------------------------------------- two engines

// A rank that has started an operation may turn to another engine before it waits for this one.
// Every operation must still end on the ranks that do wait: otherwise two programs that wait for
// two worlds in opposite orders wait for each other.

constexpr int kRanks = 3;
constexpr int kLimitSeconds = 20;

// `odd`: the rank whose share is so small that the operation looks like a single round to it.
struct Shape {
  int odd = 0;
  std::size_t few = 0;
  std::size_t many = 0;

  std::size_t bytes(int from, int to) const { return from == odd || to == odd ? few : many; }
};

// One rank's arrays and tickets of one operation.
class Call {
 public:
  Call(Engine& engine, Shape shape, int root) : engine_(engine), shape_(shape), root_(root) {}

  void all_reduce(std::size_t count) {
    values(count);
    tickets_.push_back(engine_.all_reduce(data(0), count, DType::kF32, Op::kSum, options()));
  }
  void reduce(std::size_t count) {
    values(count);
    tickets_.push_back(engine_.reduce(data(0), count, DType::kF32, Op::kSum, root_, options()));
  }
  void reduce_symmetric(std::size_t count) {
    block_ = engine_.symmetric(count * sizeof(float), soon(kLimitSeconds));
    tickets_.push_back(engine_.all_reduce(block_->data(), count, DType::kF32, Op::kSum, options()));
  }
  void broadcast(std::size_t bytes) {
    values(bytes);
    tickets_.push_back(engine_.broadcast(data(0), bytes, root_, options()));
  }
  void all_gather(std::size_t bytes) {
    values(bytes);
    values(bytes * kRanks);
    tickets_.push_back(engine_.all_gather(data(1), data(0), bytes, options()));
  }
  void reduce_scatter(std::size_t count) {
    values(count);
    values(count * kRanks);
    tickets_.push_back(
        engine_.reduce_scatter(data(0), data(1), count, DType::kF32, Op::kSum, options()));
  }
  void barrier() { tickets_.push_back(engine_.barrier(options())); }
  void all_to_all() {
    std::vector<Part> outputs;
    std::vector<ConstPart> inputs;
    for (int rank = 0; rank < kRanks; ++rank) {
      outputs.push_back(part(shape_.bytes(rank, own())));
      inputs.push_back(const_part(shape_.bytes(own(), rank)));
    }
    tickets_.push_back(engine_.all_to_all(outputs, inputs, options()));
  }
  void gather() {
    std::vector<Part> outputs;
    for (int rank = 0; own() == root_ && rank < kRanks; ++rank)
      outputs.push_back(part(shape_.bytes(rank, rank)));
    tickets_.push_back(
        engine_.gather(outputs, const_part(shape_.bytes(own(), own())), root_, options()));
  }
  void scatter() {
    std::vector<ConstPart> inputs;
    for (int rank = 0; own() == root_ && rank < kRanks; ++rank)
      inputs.push_back(const_part(shape_.bytes(rank, rank)));
    tickets_.push_back(engine_.scatter(part(shape_.bytes(own(), own())), inputs, root_, options()));
  }
  void all_gather_v() {
    tickets_.push_back(
        engine_.all_gather_v(gathered_, const_part(shape_.bytes(own(), own())), options()));
  }
  // Everybody with everybody, sends first.
  void messages() {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == own()) continue;
      const ConstPart sent = const_part(shape_.bytes(own(), rank));
      tickets_.push_back(engine_.send(sent.data, sent.bytes, rank, options()));
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == own()) continue;
      const Part received = part(shape_.bytes(rank, own()));
      tickets_.push_back(engine_.recv(received.data, received.bytes, rank, options()));
    }
  }

  void wait() {
    for (const TicketPtr& ticket : tickets_) ticket->wait(soon(kLimitSeconds));
  }

 private:
  int own() const { return engine_.rank(); }
  static StartOptions options() { return {.deadline = soon(kLimitSeconds)}; }
  void values(std::size_t count) { arrays_.emplace_back(count * sizeof(float)); }
  void* data(std::size_t i) { return arrays_[i].data(); }
  Part part(std::size_t bytes) { return {arrays_.emplace_back(bytes).data(), bytes}; }
  ConstPart const_part(std::size_t bytes) { return {arrays_.emplace_back(bytes).data(), bytes}; }

  Engine& engine_;
  const Shape shape_;
  const int root_;
  std::deque<std::vector<std::byte>> arrays_;
  std::vector<std::vector<std::byte>> gathered_;
  std::shared_ptr<SymmetricBlock> block_;
  std::vector<TicketPtr> tickets_;
};

struct Operation {
  std::string name;
  std::function<void(Call&)> start;
};

std::vector<Operation> operations() {
  std::vector<Operation> all{{"barrier", [](Call& call) { call.barrier(); }},
                             {"all_to_all", [](Call& call) { call.all_to_all(); }},
                             {"gather", [](Call& call) { call.gather(); }},
                             {"scatter", [](Call& call) { call.scatter(); }},
                             {"all_gather_v", [](Call& call) { call.all_gather_v(); }},
                             {"messages", [](Call& call) { call.messages(); }}};
  // One round, around its border, and several.
  for (const std::size_t count : {1, 340, 341, 342, 1024, 1025, 9000}) {
    const std::string of = " of " + std::to_string(count);
    all.push_back({"all_reduce" + of, [=](Call& call) { call.all_reduce(count); }});
    all.push_back({"symmetric" + of, [=](Call& call) { call.reduce_symmetric(count); }});
    all.push_back({"reduce" + of, [=](Call& call) { call.reduce(count); }});
    all.push_back({"broadcast" + of, [=](Call& call) { call.broadcast(count); }});
    all.push_back({"all_gather" + of, [=](Call& call) { call.all_gather(count); }});
    all.push_back({"reduce_scatter" + of, [=](Call& call) { call.reduce_scatter(count); }});
  }
  return all;
}

// Runs every rank with two engines of its own. Returns what the first rank to fail says, and its
// case.
std::string in_two_engines(
    const EngineOptions& options,
    const std::function<void(Engine&, Engine&, std::string& case_name)>& body) {
  MapStore stores[2];
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      std::string case_name;
      try {
        const auto first = make_engine(stores[0], rank, kRanks, options);
        const auto second = make_engine(stores[1], rank, kRanks, options);
        body(*first, *second, case_name);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = case_name + ": " + error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (!error.empty()) return error;
  return "";
}

constexpr EngineOptions kForms[] = {
    {.small_bytes = 1024, .chunk_bytes = 4096, .ring_bytes = 4096},
    // What just fits into a chunk: divided among the ranks it may need a second one.
    {.small_bytes = 4096, .chunk_bytes = 4096, .ring_bytes = 4096},
    {}};
constexpr std::size_t kFewAndMany[][2] = {{0, 0},      {100, 100},       {0, 50'000},
                                          {100, 5000}, {100, 3'000'000}, {6000, 6000}};

void finish_before_the_odd_rank(Engine& first, Engine& second, const Operation& operation,
                                const Shape& shape) {
  for (int root = 0; root < kRanks; ++root) {
    Call call(first, shape, root);
    operation.start(call);
    if (first.rank() != shape.odd) call.wait();
    second.barrier({.deadline = soon(kLimitSeconds)})->wait();
    call.wait();
  }
}

TEST(Order, ARankThatIsElsewhereHoldsNobodyUp) {
  for (const EngineOptions& form : kForms) {
    const std::string error =
        in_two_engines(form, [&](Engine& first, Engine& second, std::string& case_name) {
          for (const Operation& operation : operations()) {
            const bool sized = operation.name.find(" of ") == std::string::npos;
            for (const auto& [few, many] : kFewAndMany) {
              if (!sized && many != 0) continue;
              // Rings of one chunk would pass it on in 700 turns of every rank.
              if (form.ring_bytes != 0 && many > 100 * form.ring_bytes) continue;
              for (int odd = 0; odd < kRanks; ++odd) {
                case_name = operation.name + ", " + std::to_string(few) + " and " +
                            std::to_string(many) + " bytes, rank " + std::to_string(odd) +
                            " is elsewhere, small_bytes " + std::to_string(form.small_bytes);
                finish_before_the_odd_rank(first, second, operation, {odd, few, many});
              }
            }
          }
        });
    EXPECT_EQ(error, "");
  }
}

// Every rank starts in both engines and waits in an order of its own.
TEST(Order, EveryOrderOfTwoEngines) {
  const std::string error =
      in_two_engines(kForms[0], [&](Engine& first, Engine& second, std::string& case_name) {
        for (const Operation& operation : operations()) {
          for (unsigned orders = 0; orders < (1u << kRanks); ++orders) {
            case_name = operation.name + ", orders " + std::to_string(orders);
            Call one(first, {0, 100, 50'000}, 0), two(second, {1, 100, 50'000}, 1);
            operation.start(one);
            operation.start(two);
            const bool opposite = ((orders >> first.rank()) & 1u) != 0;
            (opposite ? two : one).wait();
            (opposite ? one : two).wait();
          }
        }
      });
  EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace lockstep::shm
