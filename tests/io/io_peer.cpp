// What the Python tests of lockstep/io run: it saves, checks and converts, and says what it did.
//
//   io_peer save PARENT STEP LIMIT   sweep, write PARENT/checkpoint-STEP, retain LIMIT
//   io_peer check PARENT             look at all; compare the contents of the newest
//   io_peer sweep PARENT
//   io_peer rewrite IN OUT           a safetensors file, read and written again
//   io_peer judge                    paths on stdin: "ok" or the refusal, a line each
//   io_peer events DIR
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/event_file.h"
#include "lockstep/io/safetensors.h"

namespace {

using namespace lockstep;
using namespace lockstep::io;

constexpr const char* kPrefix = "checkpoint-";

// The contents are a function of the step, so that a mixture of two would be seen.
std::vector<float> values_of(std::int64_t step, int tensor) {
  std::vector<float> values(static_cast<std::size_t>(1000 + 10 * tensor));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(step * 1000 + tensor * 100) + static_cast<float>(i) * 0.25f;
  return values;
}

std::string state_of(std::int64_t step) {
  return fmt::format("{{\"global_step\": {}}}\n", step);
}

void save(const std::string& parent, std::int64_t step, int limit) {
  for (const std::string& path : sweep(parent).removed) fmt::print("swept {}\n", path);
  std::vector<std::vector<float>> memory;
  for (int t = 0; t < 4; ++t) memory.push_back(values_of(step, t));
  std::vector<TensorBytes> tensors;
  for (int t = 0; t < 4; ++t) {
    const auto& values = memory[static_cast<std::size_t>(t)];
    tensors.push_back({fmt::format("layer.{}", t),
                       DType::kF32,
                       {static_cast<std::int64_t>(values.size())},
                       std::as_bytes(std::span(values))});
  }
  AtomicDir dir(fmt::format("{}/{}{}", parent, kPrefix, step), {.expected_bytes = 20'000});
  write_safetensors_set(dir, tensors, {{"format", "pt"}}, {.max_shard_bytes = 9'000});
  dir.write("trainer_state.json", state_of(step));
  dir.commit();
  for (const std::string& path :
       retain(parent, kPrefix, {.limit = limit, .durable = dir.final_path()}))
    fmt::print("deleted {}\n", path);
}

int check(const std::string& parent) {
  // Not only the newest: a half-deleted one must no longer have its name.
  for (const NumberedDir& dir : list_numbered(parent, kPrefix))
    if (const auto faults = verify(dir.path); !faults.empty())
      fmt::print("broken {}: {}\n", dir.path, describe(faults));
  const Newest newest = newest_valid(parent, kPrefix);
  for (const PassedOver& p : newest.passed_over) fmt::print("passed {}: {}\n", p.path, p.reason);
  if (newest.step < 0) return 1;
  const SafetensorsSet set(newest.path);
  for (int t = 0; t < 4; ++t) {
    const auto values = values_of(newest.step, t);
    const auto found = set.at(fmt::format("layer.{}", t)).bytes();
    if (!std::ranges::equal(found, std::as_bytes(std::span(values)))) return 2;
  }
  if (read_file(newest.path + "/trainer_state.json") != state_of(newest.step)) return 3;
  fmt::print("newest {}\n", newest.step);
  return 0;
}

void rewrite(const std::string& from, const std::string& to) {
  const SafetensorsFile file(from);
  std::vector<TensorBytes> tensors;
  for (const TensorEntry& entry : file.tensors())
    tensors.push_back({entry.name, entry.dtype, entry.shape, file.bytes(entry)});
  FileWriter out(to);
  write_safetensors(out, tensors, file.metadata());
  out.finish();
}

void judge() {
  for (std::string path; std::getline(std::cin, path);) {
    try {
      const SafetensorsFile file(path);
      fmt::print("ok {}\n", file.tensors().size());
    } catch (const UsageError& e) {
      fmt::print("refused {}\n", e.what());
    }
  }
}

void write_events(const std::string& directory) {
  EventFile events(directory);
  events.scalars(-1, {}, 13.0);
  for (int step = 0; step < 100; ++step)
    events.scalars(step, {{"train/loss", 1.0f / static_cast<float>(step + 1)}, {"train/lr", 0.5f}},
                   1000.0 + step);
  events.scalars(1'000'000'000'000, {{"train/\u03b7", INFINITY}});
  events.flush();
  fmt::print("{}\n", events.path());
}

int run(const std::vector<std::string>& args) {
  const auto is = [&](const char* name, std::size_t count) {
    return args.size() == count + 1 && args[0] == name;
  };
  if (is("save", 3))
    save(args[1], std::stoll(args[2]), std::stoi(args[3]));
  else if (is("check", 1))
    return check(args[1]);
  else if (is("sweep", 1))
    for (const std::string& path : sweep(args[1]).removed) fmt::print("swept {}\n", path);
  else if (is("rewrite", 2))
    rewrite(args[1], args[2]);
  else if (is("judge", 0))
    judge();
  else if (is("events", 1))
    write_events(args[1]);
  else
    return 64;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
