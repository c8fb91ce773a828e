// What happens when a world of threads goes wrong. Processes that die are in process_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "lockstep/comm/shm/worlds_for_test.h"

namespace lockstep::shm {
namespace {

using namespace for_test;
using testing::HasSubstr;

Deadline within_ms(int ms) {
  return Deadline::after(std::chrono::milliseconds(ms));
}

// The two sides of a disagreement, as a rank reports them.
void expect_both_sides(const std::vector<std::exception_ptr>& errors, const std::string& one,
                       const std::string& other) {
  for (const auto& error : errors) {
    EXPECT_TRUE(is<CommError>(error)) << text_of(error);
    EXPECT_FALSE(is<TimeoutError>(error)) << text_of(error);
    EXPECT_THAT(text_of(error), HasSubstr(one));
    EXPECT_THAT(text_of(error), HasSubstr(other));
  }
}

TEST(Disagreement, OnTheOperation) {
  const auto errors = outcomes(3, kTiny, [](Engine& engine) {
    float x[12] = {};
    if (engine.rank() == 2)
      engine.broadcast(x, 48, 0)->wait(soon());
    else
      engine.all_reduce(x, 12, DType::kF32, Op::kSum)->wait(soon());
  });
  expect_both_sides(errors, "called all_reduce(float32 x 12, sum)",
                    "rank 2 called broadcast(48 bytes, root 0)");
  for (const char* usual : {"fewer batches", "model.join()", "`if (rank == 0)`"})
    EXPECT_THAT(text_of(errors[0]), HasSubstr(usual));
}

TEST(Disagreement, OfASaveByOneRankAloneNamesIt) {
  for (const bool ended : {false, true}) {
    const auto errors = outcomes(3, kTiny, [&](Engine& engine) {
      float x[12] = {};
      if (engine.rank() == 0)
        engine.all_reduce(x, 6, DType::kF32, Op::kSum, {.saving = true})->wait(soon());
      else if (ended)
        engine.finish()->wait(soon());
      else
        engine.all_reduce(x, 12, DType::kF32, Op::kSum)->wait(soon());
    });
    expect_both_sides(errors, "rank 0 called all_reduce(float32 x 6, sum) to save a checkpoint",
                      ended ? "rank 1 has returned from its body"
                            : "rank 1 called all_reduce(float32 x 12, sum)");
    for (const auto& error : errors)
      EXPECT_THAT(text_of(error), HasSubstr("Every rank must call save_checkpoint()"));
  }
}

TEST(Disagreement, HasTheCallersNumbersAndNamesARankThatHasFinished) {
  const auto errors = outcomes(2, kTiny, [](Engine& engine) {
    float x[12] = {};
    const StartOptions options{.number = engine.rank() == 0 ? 41u : 40u};
    if (engine.rank() == 0)
      engine.finish(options)->wait(soon());
    else
      engine.all_reduce(x, 12, DType::kF32, Op::kSum, options)->wait(soon());
  });
  expect_both_sides(errors, "rank 0 has returned from its body",
                    "rank 1 called all_reduce(float32 x 12, sum)");
  EXPECT_THAT(text_of(errors[0]), HasSubstr("disagree on collective #4"));
  EXPECT_THAT(text_of(errors[0]), HasSubstr(" as its #4"));
  // Whichever rank notices first, all say the same, with what helps against it.
  EXPECT_EQ(text_of(errors[0]), text_of(errors[1]));
  EXPECT_THAT(text_of(errors[0]), HasSubstr("model.join()"));
}

TEST(Disagreement, OnSizeTypeOperationAndRoot) {
  const auto differ = [](const std::function<void(Engine&, bool)>& call, const std::string& one,
                         const std::string& other) {
    expect_both_sides(outcomes(2, kTiny, [&](Engine& e) { call(e, e.rank() == 1); }), one, other);
  };
  differ(
      [](Engine& e, bool odd) {
        std::vector<float> x(9000);
        e.all_reduce(x.data(), odd ? 1 : 9000, DType::kF32, Op::kSum)->wait(soon());
      },
      "x 9000, sum", "x 1, sum");
  differ(
      [](Engine& e, bool odd) {
        std::int32_t x = 0;
        e.all_reduce(&x, 1, odd ? DType::kI32 : DType::kF32, Op::kSum)->wait(soon());
      },
      "(float32 x 1, sum)", "(int32 x 1, sum)");
  differ(
      [](Engine& e, bool odd) {
        float x = 0;
        e.all_reduce(&x, 1, DType::kF32, odd ? Op::kMax : Op::kSum)->wait(soon());
      },
      "x 1, sum", "x 1, max");
  differ([](Engine& e, bool odd) { e.broadcast(&odd, 1, odd ? 1 : 0)->wait(soon()); }, "root 0",
         "root 1");
  differ(
      [](Engine& e, bool odd) {
        float x[4];
        odd ? e.barrier()->wait(soon()) : e.all_gather(x, x, 8)->wait(soon());
      },
      "all_gather(8 bytes)", "barrier()");
}

TEST(Disagreement, OfOneOperationBeginsWithItsSizeOrType) {
  struct Case {
    std::size_t count;
    DType dtype;
    Op op;
    const char* subject;
  };
  for (const Case& each :
       {Case{3, DType::kF32, Op::kSum, "size"}, Case{4, DType::kI32, Op::kSum, "dtype"},
        Case{4, DType::kF64, Op::kMax, "dtype"}, Case{3, DType::kF64, Op::kMax, "size and dtype"},
        Case{4, DType::kF32, Op::kMax, "reduction"}}) {
    const auto errors = outcomes(3, kTiny, [&](Engine& e) {
      double x[4] = {};
      const Case mine = e.rank() == 2 ? each : Case{4, DType::kF32, Op::kSum, ""};
      e.all_reduce(x, mine.count, mine.dtype, mine.op)->wait(soon());
    });
    expect_both_sides(errors, fmt::format(", on its {}: rank 0 called all_reduce", each.subject),
                      fmt::format("Give this one the same {} on every rank.", each.subject));
    EXPECT_EQ(text_of(errors[0]), text_of(errors[2]));
  }
}

// Ranks whose own sizes are right hear of it too.
TEST(Disagreement, OnTheSizeOfOnePart) {
  const auto errors = outcomes(3, kTiny, [](Engine& engine) {
    char in[32] = {}, out[96] = {};
    std::vector<ConstPart> inputs(3, ConstPart{in, 8});
    std::vector<Part> outputs;
    for (int from = 0; from < 3; ++from) outputs.push_back({out + 32 * from, 8});
    if (engine.rank() == 1) inputs[2].bytes = 12;
    engine.all_to_all(outputs, inputs)->wait(soon());
  });
  expect_both_sides(errors, "rank 1 sends 12 bytes to rank 2", "which expects 8");
}

TEST(Disagreement, OnTheSizeOfAMessage) {
  const auto errors = outcomes(2, kTiny, [](Engine& engine) {
    char data[16] = {};
    if (engine.rank() == 0) {
      engine.send(data, 16, 1)->wait(soon());
      engine.recv(data, 1, 1)->wait(soon());  // never comes
    } else {
      engine.recv(data, 12, 0)->wait(soon());
    }
  });
  expect_both_sides(errors, "rank 0 sent 16 bytes to rank 1", "which expects 12");
}

TEST(Disagreement, OnASymmetricBlock) {
  const auto errors = outcomes(2, kTiny, [](Engine& engine) {
    (void)engine.symmetric(engine.rank() == 0 ? 4096 : 8192, soon());
  });
  expect_both_sides(errors, "rank 0 asks for 4096", "rank 1 for 8192");
}

// ---------------------------------------------------------------- deadlines

TEST(Timeout, NamesWhoDidNotArrive) {
  std::atomic<bool> over{false};
  std::atomic<int> there{0};
  const auto errors = outcomes(3, kTiny, [&](Engine& engine) {
    const Deadline limit = soon();
    if (engine.rank() == 2) {  // alive, but elsewhere
      while (!over.load() && !limit.expired()) ::usleep(1000);
      return;
    }
    float x = 0;
    const auto ticket = engine.all_reduce(&x, 1, DType::kF32, Op::kSum);
    // Both must have arrived before either's time counts; otherwise one could be named with rank 2.
    const auto start = Deadline::Clock::now();
    ++there;
    while (there.load() < 2 && !limit.expired()) ::usleep(1000);
    try {
      ticket->wait(within_ms(300));
    } catch (...) {
      EXPECT_GE(Deadline::Clock::now() - start, std::chrono::milliseconds(250));
      over = true;
      throw;
    }
  });
  for (const int rank : {0, 1}) {
    const auto& error = errors[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(is<TimeoutError>(error)) << text_of(error);
    EXPECT_THAT(text_of(error), HasSubstr("all_reduce(float32 x 1, sum) timed out after"));
    EXPECT_THAT(text_of(error), HasSubstr("rank 2 did not arrive"));
  }
}

TEST(Timeout, OfAMessageNamesThePeer) {
  std::atomic<bool> over{false};
  const auto errors = outcomes(2, kTiny, [&](Engine& engine) {
    char data[8];
    if (engine.rank() == 0) {
      const Deadline limit = soon();
      while (!over.load() && !limit.expired()) ::usleep(1000);
      return;
    }
    try {
      engine.recv(data, 8, 0)->wait(within_ms(200));
    } catch (...) {
      over = true;
      throw;
    }
  });
  EXPECT_TRUE(is<TimeoutError>(errors[1]));
  EXPECT_THAT(text_of(errors[1]), HasSubstr("recv of 8 bytes from rank 0 timed out after"));
  EXPECT_THAT(text_of(errors[1]), HasSubstr("rank 0 did not arrive"));
}

// A rank that wants nothing from one that has gone still has its own deadline.
TEST(Timeout, OfAMessageThoughAThirdRankHasGone) {
  std::atomic<bool> over{false};
  run_ranks(3, kTiny, [&](Engine& engine) {
    engine.barrier()->wait(soon());
    const Deadline limit = soon(30);
    if (engine.rank() == 1) return;  // closes its engine
    if (engine.rank() == 0) {
      char data[8];
      const auto ticket = engine.recv(data, 8, 2, {.deadline = within_ms(200)});
      while (!ticket->poll() && !limit.expired()) ::usleep(1000);
      over = true;
      EXPECT_TRUE(is<TimeoutError>(ticket->error())) << text_of(ticket->error());
      EXPECT_THAT(text_of(ticket->error()), HasSubstr("rank 2 did not arrive"));
    }
    while (!over.load() && !limit.expired()) ::usleep(1000);
  });
}

// Nobody waits: the deadline that it was started with ends it.
TEST(Timeout, WithoutAWaiter) {
  std::atomic<bool> over{false};
  run_ranks(2, kTiny, [&](Engine& engine) {
    if (engine.rank() == 0) {
      std::vector<float> x(5000);
      const auto ticket = engine.all_reduce(x.data(), x.size(), DType::kF32, Op::kSum,
                                            {.deadline = within_ms(200)});
      const Deadline limit = soon();
      while (!ticket->done() && !limit.expired()) ::usleep(1000);
      EXPECT_TRUE(is<TimeoutError>(ticket->error()));
      EXPECT_THAT(engine.failure(), HasSubstr("rank 1 did not arrive"));
      over = true;
    }
    const Deadline limit = soon();
    while (!over.load() && !limit.expired()) ::usleep(1000);
  });
}

TEST(Timeout, OfASymmetricBlockNamesThePeer) {
  std::atomic<bool> over{false};
  const auto errors = outcomes(2, kTiny, [&](Engine& engine) {
    const Deadline limit = soon();
    while (engine.rank() == 0 && !over.load() && !limit.expired()) ::usleep(1000);
    if (engine.rank() == 0) return;
    try {
      (void)engine.symmetric(4096, within_ms(200));
    } catch (...) {
      EXPECT_FALSE(engine.failure().empty());
      over = true;
      throw;
    }
  });
  EXPECT_TRUE(is<TimeoutError>(errors[1]));
  EXPECT_THAT(text_of(errors[1]), HasSubstr("rank 0 did not make its part of a symmetric block"));
}

// ---------------------------------------------------------------- abort and the end

TEST(Abort, EndsEveryPendingOperationOnAllRanks) {
  std::atomic<bool> over{false};
  const auto errors = outcomes(3, kTiny, [&](Engine& engine) {
    std::vector<float> x(5000);
    std::atomic<int> callbacks{0};
    if (engine.rank() == 0) {
      float y = 0;
      auto reduce = engine.all_reduce(x.data(), x.size(), DType::kF32, Op::kSum);
      auto later = engine.all_reduce(&y, 1, DType::kF32, Op::kSum);
      auto receive = engine.recv(&y, 4, 1);
      later->on_done([&] { ++callbacks; });
      std::thread killer([&] {
        ::usleep(50'000);
        engine.abort("somebody pressed the button");
      });
      EXPECT_THROW(reduce->wait(soon()), CommError);
      EXPECT_THROW(receive->wait(soon()), CommError);
      EXPECT_THROW(later->wait(soon()), CommError);
      killer.join();
      // The thread that ends the tickets runs the callback after that, perhaps the engine's own.
      const Deadline limit = soon();
      while (callbacks.load() == 0 && !limit.expired()) ::usleep(1000);
      EXPECT_EQ(callbacks.load(), 1);
      engine.abort("a second cause");
      EXPECT_EQ(engine.failure(), "somebody pressed the button");
      EXPECT_THROW((void)engine.barrier(), CommError);
      EXPECT_THROW((void)engine.symmetric(4096, soon()), CommError);
      over = true;
      engine.barrier()->wait(soon());
    }
    const Deadline limit = soon();
    while (!over.load() && !limit.expired()) ::usleep(1000);
    engine.all_reduce(x.data(), x.size(), DType::kF32, Op::kSum)->wait(soon());
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(is<CommError>(error));
    EXPECT_THAT(text_of(error), HasSubstr("somebody pressed the button"));
  }
}

TEST(Close, WithOperationsUnderWayFailsThemAndThePeers) {
  MapStore kv;
  std::string reported;
  std::thread peer([&] {
    auto engine = make_engine(kv, 1, 2, kTiny);
    float x[2] = {};
    try {
      engine->all_reduce(x, 1, DType::kF32, Op::kSum)->wait(soon());
      engine->all_gather(x, x, 4)->wait(soon());
    } catch (const CommError& error) {
      reported = error.what();
    }
  });
  auto engine = make_engine(kv, 0, 2, kTiny);
  float x = 0;
  engine->all_reduce(&x, 1, DType::kF32, Op::kSum)->wait(soon());
  char message[8];
  auto receive = engine->recv(message, 8, 1);
  engine.reset();
  EXPECT_TRUE(receive->done());
  EXPECT_THAT(text_of(receive->error()), HasSubstr("closed its engine with operations under way"));
  peer.join();
  EXPECT_THAT(reported,
              HasSubstr("rank 0 failed: rank 0 closed its engine with operations under way"));
}

// Arrays are free once the engine is gone, even those that another thread waits for: here the
// thread that waits for the second operation is busy with the first, which nobody else remembers.
TEST(Close, ReturnsWhenNoThreadTouchesAnArray) {
  for (int turn = 0; turn < 30; ++turn) {
    MapStore kv;
    std::atomic<bool> over{false};
    std::thread peer([&] {
      std::vector<float> x(300'000);  // outlives the engine, which may still be at it
      auto engine = make_engine(kv, 1, 2, kTiny);
      const auto ticket = engine->all_reduce(x.data(), x.size(), DType::kF32, Op::kSum);
      const Deadline limit = soon();
      while (!over.load() && !limit.expired()) {
        (void)ticket->poll();
        ::usleep(100);
      }
    });
    auto engine = make_engine(kv, 0, 2, kTiny);
    auto first = std::make_unique<std::vector<float>>(300'000);
    const StartOptions options{.deadline = soon(), .caller_waits = true};
    auto forgotten =
        engine->all_reduce(first->data(), first->size(), DType::kF32, Op::kSum, options);
    auto awaited = engine->barrier(options);
    std::atomic<bool> waiting{false};
    std::thread waiter([&] {
      waiting = true;
      EXPECT_THROW(awaited->wait(soon()), CommError);
    });
    while (!waiting.load()) ::usleep(10);
    ::usleep(static_cast<useconds_t>(turn * 20));
    engine.reset();
    EXPECT_TRUE(forgotten->done());
    EXPECT_TRUE(awaited->done());
    first.reset();
    waiter.join();
    over = true;
    peer.join();
  }
}

// An engine that is closed when all is done leaves its peers in peace, and those that still want
// something of it are reported.
TEST(Close, AfterTheLastOperationIsNoFailure) {
  for (int turn = 0; turn < 20; ++turn) {
    run_ranks(4, kTiny, [](Engine& engine) {
      std::vector<float> x(2000);
      engine.all_reduce(x.data(), x.size(), DType::kF32, Op::kSum)->wait(soon());
      engine.barrier()->wait(soon());
    });
  }
  const auto errors = outcomes(2, kTiny, [](Engine& engine) {
    engine.barrier()->wait(soon());
    if (engine.rank() == 1) engine.barrier()->wait(soon());
  });
  EXPECT_EQ(text_of(errors[0]), "");
  EXPECT_THAT(text_of(errors[1]), HasSubstr("rank 0 has closed its engine before it took part in "
                                            "barrier()"));
}

// A forked child has a copy of the engine, whose rank and thread are the parent's.
TEST(Close, InAForkedChildIsNoneOfTheParentsBusiness) {
  MapStore kv;
  std::thread peer([&] {
    auto engine = make_engine(kv, 1, 2, kTiny);
    const std::int64_t value = 7;
    engine->barrier()->wait(soon());
    engine->send(&value, sizeof value, 0)->wait(soon());
    engine->barrier()->wait(soon());
  });
  auto engine = make_engine(kv, 0, 2, kTiny);
  std::int64_t value = 0;
  const auto receive = engine->recv(&value, sizeof value, 1);  // the engine's thread looks after it
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    ::alarm(20);
    const auto refused = [](const auto& call) {
      try {
        call();
      } catch (const UsageError& error) {
        return std::strstr(error.what(), "was forked off rank 0") != nullptr;
      }
      return false;
    };
    int code = 0;
    if (!refused([&] { (void)engine->barrier(); })) code |= 1;
    if (!refused([&] { receive->poll(); })) code |= 2;
    if (!refused([&] { receive->wait(soon()); })) code |= 4;
    engine->abort("the child's own affair");
    engine.reset();
    ::_exit(code);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(engine->failure(), "");
  engine->barrier()->wait(soon());
  receive->wait(soon());
  EXPECT_EQ(value, 7);
  engine->barrier()->wait(soon());
  peer.join();
}

// ---------------------------------------------------------------- the caller's mistakes

TEST(Usage, MistakesAreNamedAndHarmless) {
  run_ranks(2, kTiny, [](Engine& engine) {
    const auto expect = [](const std::function<void()>& call, const std::string& text) {
      try {
        call();
        FAIL() << "no error: " << text;
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr(text));
      }
    };
    float x[4] = {};
    const int own = engine.rank();
    expect([&] { (void)engine.all_reduce(x, 1, DType::kF32, Op::kAnd); },
           "there is no and of float32");
    expect([&] { (void)engine.reduce(x, 1, DType::kBool, Op::kAvg, 0); },
           "there is no avg of bool");
    expect([&] { (void)engine.broadcast(x, 4, 2); }, "rank 2 as root does not exist");
    expect([&] { (void)engine.send(x, 4, own); }, "cannot send a message to itself");
    expect([&] { (void)engine.recv(x, 4, 7); }, "rank 7 as the other end");
    expect([&] { (void)engine.all_to_all({}, {}); }, "a list of 0 parts for 2 ranks");
    expect(
        [&] {
          std::vector<Part> out(2, Part{x, 4});
          std::vector<ConstPart> in(2, ConstPart{x, 8});
          (void)engine.all_to_all(out, in);
        },
        "sends 8 bytes to itself but expects 4");
    engine.barrier()->wait(soon());
    EXPECT_EQ(engine.failure(), "");
  });
}

TEST(Usage, OptionsAndPlacesThatMakeNoSense) {
  MapStore kv;
  EXPECT_THROW(Engine::make(kv, {0, 65}, {}, soon()), UsageError);
  EXPECT_THROW(Engine::make(kv, {2, 2}, {}, soon()), UsageError);
  EXPECT_THROW(Engine::make(kv, {0, 1}, {.small_bytes = 1u << 20, .chunk_bytes = 4096}, soon()),
               UsageError);
}

// All sizes are compared, even where their sum is the same.
TEST(Usage, OptionsThatDifferOverRanks) {
  const auto answers = [](const EngineOptions& one, const EngineOptions& other) {
    MapStore kv;
    std::vector<std::string> texts(3);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        const EngineResult made = Engine::make(kv, {rank, 3}, rank == 1 ? other : one, soon());
        texts[static_cast<std::size_t>(rank)] = made.engine ? "an engine" : made.unavailable_reason;
      });
    }
    for (auto& rank : ranks) rank.join();
    return texts;
  };
  EngineOptions other = kTiny;
  other.small_bytes = 512;
  for (const std::string& text : answers(kTiny, other))
    EXPECT_THAT(text, testing::AllOf(HasSubstr("rank 1 divides its buffers in another way"),
                                     HasSubstr("small_bytes 512"), HasSubstr("small_bytes 1024")));
  // Two chunks and three rings.
  const EngineOptions long_chunks{.small_bytes = 1024, .chunk_bytes = 16384, .ring_bytes = 4096};
  const EngineOptions long_rings{.small_bytes = 1024, .chunk_bytes = 4096, .ring_bytes = 12288};
  for (const std::string& text : answers(long_chunks, long_rings))
    EXPECT_THAT(text, HasSubstr("chunk_bytes 4096, ring_bytes 12288"));
  // Not even segments of one size: found before any is made.
  for (const std::string& text : answers({.chunk_bytes = 1u << 20}, {.chunk_bytes = 1u << 21}))
    EXPECT_THAT(text, HasSubstr("rank 1 has another buffer size"));
}

}  // namespace
}  // namespace lockstep::shm
