// lockstep bench loader: where the time of a batch goes, and whether the step waits for it.
//
// Three sources: samples that take a set time to load (the goal is stated for these), images made
// and normalised on the way, and the windows of token shards. The step is a sleep, like a GPU's
// step for the process that feeds it.
#include "lockstep/data/loader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <set>
#include <thread>

#include "bench/bench.h"
#include "bench/stats.h"
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

struct Settings {
  std::string source = "sleep";
  std::string tokens;
  std::int64_t batches = 100;
  std::int64_t batch_size = 8;
  std::int64_t seq_len = 1024;
  int workers = 2;
  int prefetch = 2;
  bool pin = true;
  double load_ms = 3;
  double step_ms = 5;
  std::string device = "cpu";
  bool python = true;
  double require_wait = 0;
  double require_p99_ms = 0;
  std::string csv;
};

DatasetPtr sleeping(const Settings& settings) {
  // This is the time of a whole batch: its first sample takes all of it.
  const auto load = Milliseconds(settings.load_ms);
  const std::int64_t batch = settings.batch_size;
  return data::make_dataset(settings.batches * batch, [load, batch](std::int64_t i, SampleRandom&) {
    if (i % batch == 0) std::this_thread::sleep_for(load);
    return Example{torch::full({16}, static_cast<float>(i)), torch::tensor(i)};
  });
}

DatasetPtr images(const Settings& settings) {
  const auto pixels = torch::randint(256, {64, 3, 224, 224}, torch::kUInt8);
  return data::make_dataset(
      settings.batches * settings.batch_size, [pixels](std::int64_t i, SampleRandom& random) {
        auto image = pixels[i % 64];
        if (random.uniform() < 0.5) image = image.flip({-1});
        return Example{image.to(torch::kFloat).div_(255).sub_(0.45).div_(0.225), torch::tensor(i)};
      });
}

DatasetPtr make_source(const Settings& settings) {
  if (!settings.tokens.empty())
    return std::make_shared<data::TokenShards>(data::token_files(settings.tokens, "train"),
                                               settings.seq_len);
  return settings.source == "images" ? images(settings) : sleeping(settings);
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

void print_table(const data::LoaderProfile& profile, const Settings& settings) {
  Table table({"ms per batch", "min", "p50", "p99", "max"});
  const auto row = [&](const char* name, double BatchTiming::*member) {
    std::vector<double> ms;
    for (const BatchTiming& timing : profile.batches) ms.push_back(1000 * (timing.*member));
    const Summary s = summarize(ms);
    table.add({name, fmt::format("{:.3f}", s.min), fmt::format("{:.3f}", s.p50),
               fmt::format("{:.3f}", s.p99), fmt::format("{:.3f}", s.max)});
  };
  row("load", &BatchTiming::load);
  row("collate", &BatchTiming::collate);
  row("copy, the worker's part", &BatchTiming::copy);
  row("copy, the device's part", &BatchTiming::transfer);
  row("wait of the step", &BatchTiming::wait);
  publish(table, settings.csv);
}

// PyTorch's loader with the same sleeps: returns the line that it prints.
void run_python(const Settings& settings) {
  const std::string command = fmt::format(
      "'{}' '{}' {} {} {} {} {} {}", default_python(), peer("loader.py"), settings.batches,
      settings.batch_size, settings.workers, settings.prefetch, settings.load_ms, settings.step_ms);
  std::fflush(stdout);
  if (std::system(command.c_str()) != 0)
    fmt::print("PyTorch's loader: could not be run ({})\n", command);
}

int judge(const data::LoaderProfile& profile, const Settings& settings) {
  int code = 0;
  if (settings.require_wait > 0 && profile.wait_percent > settings.require_wait) {
    fmt::print(stderr, "loader: the step waits {:.2f} % of the time, {} % are allowed\n",
               profile.wait_percent, settings.require_wait);
    code = 1;
  }
  if (settings.require_p99_ms > 0 && profile.wait_p99_ms > settings.require_p99_ms) {
    fmt::print(stderr, "loader: a wait of {:.3f} ms at p99, {} ms are allowed\n",
               profile.wait_p99_ms, settings.require_p99_ms);
    code = 1;
  }
  return code;
}

}  // namespace

int loader_main(int argc, char** argv) {
  Settings settings;
  CLI::App app{"Load, collate, copy and wait times of a batch, beside PyTorch's DataLoader"};
  app.add_option("--source", settings.source, "sleep or images")
      ->check(CLI::IsMember({"sleep", "images"}));
  app.add_option("--tokens", settings.tokens, "a folder of token shards, instead of --source");
  app.add_option("--batches", settings.batches, "batches to load")->check(CLI::Range(2, 1'000'000));
  app.add_option("--batch-size", settings.batch_size, "samples per batch")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--seq-len", settings.seq_len, "with --tokens")->check(CLI::Range(1, 1'000'000));
  app.add_option("--workers", settings.workers, "threads that load; 0 loads in the step's own")
      ->check(CLI::Range(0, 1024));
  app.add_option("--prefetch", settings.prefetch, "batches ahead per worker")
      ->check(CLI::Range(1, 1024));
  app.add_flag("--pin,!--no-pin", settings.pin, "pin memory, where there is a GPU");
  app.add_option("--load-ms", settings.load_ms, "of a batch, with --source sleep");
  app.add_option("--step-ms", settings.step_ms, "what the step sleeps");
  app.add_option("--device", settings.device, "cpu, cuda or cuda:N")->check(device_problem);
  app.add_flag("--python,!--no-python", settings.python, "also PyTorch's, with --source sleep");
  app.add_option("--require-wait", settings.require_wait, "fail above this percentage");
  app.add_option("--require-p99-ms", settings.require_p99_ms, "fail above this wait");
  app.add_option("--csv", settings.csv, "also write the table to this file");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  torch::set_num_threads(1);
  prepare_device(settings.device);
  const torch::Device device(settings.device);

  data::Loader loader = data::loader(make_source(settings), World{},
                                     {.batch_size = settings.batch_size,
                                      .shuffle = settings.source != "sleep",
                                      .drop_last = true,
                                      .num_workers = settings.workers,
                                      .prefetch_factor = settings.prefetch,
                                      .pin_memory = settings.pin,
                                      .persistent_workers = true,
                                      .device = device});
  verify(loader);
  const auto step = Milliseconds(settings.step_ms);
  const data::LoaderProfile profile = data::profile_loader(
      loader,
      {.batches = settings.batches, .step = [&](Batch&) { std::this_thread::sleep_for(step); }});
  print_table(profile, settings);
  fmt::print("lockstep: the step waits {:.2f} % of the time, p99 {:.3f} ms\n", profile.wait_percent,
             profile.wait_p99_ms);
  if (settings.python && settings.tokens.empty() && settings.source == "sleep")
    run_python(settings);
  for (const std::string& advice : profile.advice) fmt::print("{}\n", advice);
  return judge(profile, settings);
}

}  // namespace lockstep::bench
