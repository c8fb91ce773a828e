#include "lockstep/train/divided_save.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/safetensors.h"
#include "lockstep/io/tensors.h"
#include "lockstep/nn/divided.h"
#include "lockstep/train/run_checks.h"

namespace lockstep::train {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kDividedListenEvery{50};
constexpr const char* kBusy = "busy";

struct File {
  std::string name;
  io::SafetensorsLayout layout;
};

// Also used by a thread that is stuck and outlives the save.
struct Job {
  CheckpointContents contents;
  SaverOptions options;
  std::string keep;
  bool leader = false;
  bool writes = false;  // of the copies along "data" one is written
  std::vector<File> files{};
  std::string index_name{}, index{};
  std::map<std::string, at::Tensor> tensors{};  // by file and name
  std::string folder{};                         // where the files are until the commit
  std::unique_ptr<io::AtomicDir> dir{};         // rank 0's
  SaveOutcome outcome{};
  io::WriteProgress progress{0};
  bool abandoned = false;  // a thread that is stuck still uses all of this
};
using JobPtr = std::shared_ptr<Job>;

std::string key_of(const std::string& file, const std::string& tensor) {
  return file + "/" + tensor;
}

std::vector<io::TensorShape> shapes_of(const NamedTensors& tensors) {
  std::vector<io::TensorShape> shapes;
  for (const auto& [name, tensor] : tensors)
    shapes.push_back({name, io::dtype_of(tensor.scalar_type()), nn::whole_sizes(tensor)});
  return shapes;
}

// The same on every rank.
void lay_out(Job& job) {
  const CheckpointContents& all = job.contents;
  io::SetLayout model = io::lay_out_safetensors_set(
      shapes_of(all.model), {{"format", kModelFormat}},
      {.stem = all.files.stem, .max_shard_bytes = job.options.write.max_shard_bytes});
  job.index_name = model.index_name;
  job.index = model.index;
  const std::map<std::string, at::Tensor> named(all.model.begin(), all.model.end());
  for (io::SetLayout::File& file : model.files) {
    for (const io::TensorEntry& entry : file.layout.tensors)
      job.tensors.emplace(key_of(file.name, entry.name), named.at(entry.name));
    job.files.push_back({file.name, std::move(file.layout)});
  }
  if (all.only_model) return;
  for (const auto& [name, tensor] : all.optimizer)
    job.tensors.emplace(key_of(kOptimizerFile, name), tensor);
  job.files.push_back({kOptimizerFile, io::lay_out_safetensors(shapes_of(
                                           {all.optimizer.begin(), all.optimizer.end()}))});
}

// ---------------------------------------------------------------- the three stages

void make_files(Job& job) {
  if (!job.leader) return;
  std::uint64_t bytes = 0;
  for (const File& file : job.files) bytes += file.layout.bytes();
  job.dir = std::make_unique<io::AtomicDir>(
      job.outcome.path,
      io::AtomicDirOptions{
          .expected_bytes = bytes + kSmallFiles, .replace = true, .progress = &job.progress});
  job.folder = job.dir->path();
  for (const File& file : job.files) {
    const std::string path = job.folder + "/" + file.name;
    io::SharedFileWriter::make(path, file.layout.bytes());
    io::SharedFileWriter out(path);
    out.write(0, io::bytes_of(file.layout.head));
    out.finish();
  }
}

void write_own(Job& job) {
  if (!job.writes) return;
  const at::NoGradGuard no_grad;
  for (const File& file : job.files) {
    std::optional<io::SharedFileWriter> out;
    try {
      out.emplace(job.folder + "/" + file.name, &job.progress);
    } catch (const SystemError& e) {
      if (e.error_number() != ENOENT) throw;
      throw Error("checkpoint",
                  fmt::format("{} is not there, where rank 0 has just made it. Ranks write their "
                              "parts of a divided model together: put output_dir on a file system "
                              "that all hosts mount.",
                              job.folder));
    }
    for (const io::TensorEntry& entry : file.layout.tensors) {
      const at::Tensor& tensor = job.tensors.at(key_of(file.name, entry.name));
      const nn::Rows* const rows = nn::rows_of(tensor);
      if (rows == nullptr && !job.leader) continue;
      const at::Tensor mine =
          (rows != nullptr ? rows->values : tensor).detach().to(at::kCPU).contiguous();
      const auto* const bytes = static_cast<const std::byte*>(mine.const_data_ptr());
      const auto runs =
          rows != nullptr ? nn::runs_of(*rows) : std::vector{nn::Run{0, 0, mine.numel()}};
      const std::uint64_t begin = file.layout.head.size() + entry.begin;
      for (const nn::Run& run : runs)
        out->write(begin + static_cast<std::uint64_t>(run.in_whole) * mine.itemsize(),
                   {bytes + static_cast<std::size_t>(run.in_values) * mine.itemsize(),
                    static_cast<std::size_t>(run.length) * mine.itemsize()});
    }
    out->finish();
  }
}

void commit(Job& job) {
  if (!job.leader) return;
  for (const File& file : job.files) job.dir->adopt(file.name);
  if (!job.index.empty()) job.dir->write(job.index_name, job.index);
  write_small_files(*job.dir, job.contents);
  job.dir->commit();
  job.dir.reset();
  job.outcome.committed = true;
  job.outcome.alert = delete_older(job.options, job.outcome.path, job.keep);
}

// ---------------------------------------------------------------- ranks together

struct Failure {
  std::size_t rank = 0;
  int error_number = 0;
  std::string text;
};

// What went wrong on this rank, on its way to the others: the number of a system's error, its text.
std::string report_of(std::future<void>& done) {
  try {
    done.get();
    return {};
  } catch (const SystemError& e) {
    return fmt::format("{} {}", e.error_number(), e.what());
  } catch (const std::exception& e) {
    return fmt::format("0 {}", e.what());
  }
}

// Runs it on a thread, while ranks exchange whether all have ended. The first failure, the same on
// every rank. Nobody joins the thread: a peer that dies makes the exchange throw meanwhile.
std::optional<Failure> run_together(World& world, const JobPtr& job,
                                    const std::function<void(Job&)>& stage) {
  std::promise<void> ended;
  std::future<void> done = ended.get_future();
  {
    const SignalsBlocked blocked;
    std::thread([job, stage, ended = std::move(ended)]() mutable {
      try {
        stage(*job);
        ended.set_value();
      } catch (...) {
        ended.set_exception(std::current_exception());
      }
    }).detach();
  }
  std::string mine = kBusy;
  std::uint64_t seen = 0;
  auto seen_at = Clock::now();
  for (;;) {
    if (mine == kBusy && done.wait_for(kDividedListenEvery) == std::future_status::ready) {
      mine = report_of(done);
    } else if (mine == kBusy) {
      const std::uint64_t now = job->progress.load(std::memory_order_relaxed);
      if (now != std::exchange(seen, now)) seen_at = Clock::now();
      if (Clock::now() - seen_at > job->options.stall_limit) {
        job->abandoned = true;
        mine =
            "0 the writer has made no progress for too long. The disk or the network file system "
            "is probably stuck.";
      }
    }
    const std::vector<std::string> all = all_gather_bytes(world, mine);
    if (std::ranges::find(all, kBusy) != all.end()) continue;
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      if (!all[rank].empty())
        return Failure{rank, std::stoi(all[rank]), all[rank].substr(all[rank].find(' ') + 1)};
    return std::nullopt;
  }
}

}  // namespace

bool any_divided(const NamedTensors& tensors) {
  return std::ranges::any_of(
      tensors, [](const auto& named) { return nn::rows_of(named.second) != nullptr; });
}

SaveOutcome write_divided(const Mesh& mesh, CheckpointContents contents,
                          const SaverOptions& options, const std::string& keep) {
  const auto start = Clock::now();
  World& world = mesh.world();
  const auto job = std::make_shared<Job>();
  job->contents = std::move(contents);
  job->options = options;
  job->keep = keep;
  job->leader = world.is_leader();
  job->writes = mesh.rank("data") == 0;
  job->outcome.step = job->contents.state.global_step;
  job->outcome.path = checkpoint_path(options.output_dir, job->outcome.step);
  lay_out(*job);
  std::optional<Failure> failed = run_together(world, job, make_files);
  if (!failed) {
    job->folder = broadcast_bytes(world, job->folder);
    failed = run_together(world, job, write_own);
  }
  if (!failed) failed = run_together(world, job, commit);
  if (!job->abandoned) job->dir.reset();  // what was not committed goes
  SaveOutcome outcome = job->outcome;
  outcome.committed = !failed;
  outcome.write_ms = outcome.waited_ms =
      std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  if (!failed) return outcome;
  if (failed->error_number != ENOSPC && failed->error_number != EDQUOT)
    throw Error("checkpoint", fmt::format("rank {} could not save {}: {}", failed->rank,
                                          outcome.path, failed->text));
  outcome.alert =
      fmt::format("rank {}: {} {} was not saved", failed->rank, failed->text, outcome.path);
  return outcome;
}

}  // namespace lockstep::train
