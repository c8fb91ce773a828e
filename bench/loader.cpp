// lockstep bench loader: where the time of a batch goes, and whether the step waits for it.
//
// Two sources: samples that take a set time to load (the goal is stated for these), and the windows
// of token shards. The step is a sleep, like a GPU's step for the process that feeds it.
#include "lockstep/data/loader.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>
#include <set>
#include <thread>

#include "bench/harness.h"
#include "bench/processes.h"
#include "lockstep/core/error.h"
#include "lockstep/data/profile.h"
#include "lockstep/data/token_shards.h"

namespace lockstep::bench {
namespace {

using data::Batch;
using data::BatchTiming;
using data::DatasetPtr;
using data::Example;
using data::SampleRandom;
using Milliseconds = std::chrono::duration<double, std::milli>;

struct LoaderSettings {
  std::string tokens;
  std::int64_t batches = 100;
  std::int64_t batch_size = 8;
  int workers = 2;
  double load_ms = 3;
  double step_ms = 5;
  std::string device = "cpu";
};

DatasetPtr sleeping(const LoaderSettings& settings) {
  // This is the time of a whole batch: its first sample takes all of it.
  const auto load = Milliseconds(settings.load_ms);
  const std::int64_t batch = settings.batch_size;
  return data::make_dataset(settings.batches * batch, [load, batch](std::int64_t i, SampleRandom&) {
    if (i % batch == 0) std::this_thread::sleep_for(load);
    return Example{torch::full({16}, static_cast<float>(i)), torch::tensor(i)};
  });
}

DatasetPtr make_source(const LoaderSettings& settings) {
  if (!settings.tokens.empty())
    return std::make_shared<data::TokenShards>(data::token_files(settings.tokens, "train"), 1024);
  return sleeping(settings);
}

// Every sample once, and in its place: a fast but wrong loader is useless.
void verify(data::Loader& loader) {
  std::set<std::int64_t> seen;
  std::int64_t batches = 0;
  for (const auto& batch : loader.epoch(0)) {
    for (const std::int64_t index : batch.indices)
      if (!seen.insert(index).second)
        throw InternalError("bench", fmt::format("sample {} came twice in an epoch", index));
    if (++batches == 20) break;
  }
}

Report report_of(const data::LoaderProfile& profile) {
  Report report("loader", "ms per batch",
                {{"wait_percent", profile.wait_percent}, {"wait_p99_ms", profile.wait_p99_ms}});
  const auto row = [&](const char* name, double BatchTiming::*member) {
    std::vector<double> ms;
    for (const BatchTiming& timing : profile.batches) ms.push_back(1000 * (timing.*member));
    report.row(name).spread("", ms, 3);
  };
  row("load", &BatchTiming::load);
  row("collate", &BatchTiming::collate);
  row("copy, the worker's part", &BatchTiming::copy);
  row("copy, the device's part", &BatchTiming::transfer);
  row("wait of the step", &BatchTiming::wait);
  return report;
}

// PyTorch's loader with the same sleeps prints a line.
void run_python(const LoaderSettings& settings) {
  const std::string command =
      fmt::format("'{}' '{}' {} {} {} {} {}", python(), peer("loader.py"), settings.batches,
                  settings.batch_size, settings.workers, settings.load_ms, settings.step_ms);
  std::fflush(stdout);
  if (std::system(command.c_str()) != 0)
    fmt::print("PyTorch's loader: could not be run ({})\n", command);
}

}  // namespace

int loader_main(int argc, char** argv) {
  LoaderSettings s;
  bool python = true;
  Options options("Load, collate, copy and wait times of a batch, beside PyTorch's DataLoader");
  options.text("--tokens", s.tokens, "a folder of token shards, instead of samples that sleep");
  options.number("--batches", s.batches, 2, 1e6, "batches to load");
  options.number("--batch-size", s.batch_size, 1, 1e6, "samples per batch");
  options.number("--workers", s.workers, 0, 1024, "threads that load; 0 loads in the step's own");
  options.number("--load-ms", s.load_ms, 0, 1e6, "of a batch, without --tokens");
  options.number("--step-ms", s.step_ms, 0, 1e6, "what the step sleeps");
  options.device(s.device);
  options.flag("--python,!--no-python", python, "also PyTorch's, without --tokens");
  if (const auto code = options.parse(argc, argv)) return *code;
  torch::set_num_threads(1);
  prepare_device(s.device);

  data::Loader loader = data::loader(make_source(s), World{},
                                     {.batch_size = s.batch_size,
                                      .shuffle = !s.tokens.empty(),
                                      .drop_last = true,
                                      .num_workers = s.workers,
                                      .pin_memory = true,
                                      .persistent_workers = true,
                                      .device = torch::Device(s.device)});
  verify(loader);
  const auto step = Milliseconds(s.step_ms);
  const data::LoaderProfile profile = data::profile_loader(
      loader, {.batches = s.batches, .step = [&](Batch&) { std::this_thread::sleep_for(step); }});
  report_of(profile).publish(options);
  fmt::print("lockstep: the step waits {:.2f} % of the time, p99 {:.3f} ms\n", profile.wait_percent,
             profile.wait_p99_ms);
  if (python && s.tokens.empty()) run_python(s);
  for (const std::string& advice : profile.advice) fmt::print("{}\n", advice);
  return 0;
}

}  // namespace lockstep::bench
