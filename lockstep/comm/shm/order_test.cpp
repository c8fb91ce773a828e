// A rank that has started an operation may turn to another engine before it waits for this one.
// Every operation must still end on the ranks that do wait: otherwise two programs that wait for
// two worlds in opposite orders wait for each other.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/worlds_for_test.h"

namespace lockstep::shm {
namespace {

using namespace for_test;

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
