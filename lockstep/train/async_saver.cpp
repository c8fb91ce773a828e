#include "lockstep/train/async_saver.h"

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
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
#include "lockstep/core/log.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/safetensors.h"
#include "lockstep/io/tensors.h"
#include "lockstep/nn/divided.h"
#include "lockstep/train/checks.h"

namespace lockstep::train {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kLook{1};

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

bool is_full(const SystemError& error) {
  return error.error_number() == ENOSPC || error.error_number() == EDQUOT;
}

// All devices except the CPU: one, or several with a device map. The optimizer keeps a parameter's
// state on the parameter's device.
std::vector<c10::Device> devices_of(const CheckpointContents& contents) {
  std::vector<c10::Device> devices;
  for (const auto& [name, tensor] : contents.model)
    if (!tensor.device().is_cpu() && std::ranges::find(devices, tensor.device()) == devices.end())
      devices.push_back(tensor.device());
  return devices;
}

std::vector<at::Tensor*> tensors_of(CheckpointContents& contents) {
  std::vector<at::Tensor*> all;
  for (auto& [name, tensor] : contents.model) all.push_back(&tensor);
  for (auto& [name, tensor] : contents.optimizer) all.push_back(&tensor);
  return all;
}

}  // namespace

std::string delete_older(const SaverOptions& options, const std::string& durable,
                         const std::string& keep) {
  if (options.limit <= 0) return {};
  io::RetainOptions retain{.limit = options.limit, .durable = durable};
  if (!keep.empty()) retain.keep.push_back(keep);
  try {
    io::retain(options.output_dir, kCheckpointPrefix, retain);
  } catch (const Error& error) {
    return fmt::format("{} is durable, but older ones were not deleted: {}", durable, error.what());
  }
  return {};
}

struct AsyncSaver::Shared {
  SaverOptions options;
  TensorDict staging;
  std::optional<std::size_t> room{};  // bytes of device memory that copies may take
  at::Tensor bounce{};                // pinned
};

struct AsyncSaver::Job {
  CheckpointContents contents;
  // Memory freed while its copy is queued could be overwritten by the main stream's next tensors.
  std::vector<at::Tensor> sources;
  std::string keep;
  SaveOutcome outcome;
  std::vector<c10::Device> devices;
  std::vector<c10::Event> boundaries;  // how far each device was when the save began
  bool on_device = false;              // the contents are copies already
  std::promise<void> copied;
  std::future<void> copied_future = copied.get_future();
  std::promise<void> finished;
  std::future<void> done = finished.get_future();
  io::WriteProgress progress{0};
  std::uint64_t seen = 0;  // value of `progress` that the waiting thread last saw
  Clock::time_point seen_at = Clock::now();
  double waited_ms = 0;  // by the thread that saves
  std::thread thread;
};

AsyncSaver::AsyncSaver(SaverOptions options)
    : shared_(std::make_shared<Shared>(Shared{std::move(options), {}})) {}

AsyncSaver::~AsyncSaver() {
  try {
    while (job_ && !ended()) wait_a_while(kLook);
  } catch (const std::exception& e) {
    log::error("checkpoint", "{}", e.what());
  }
  if (job_) job_->thread.join();
}

bool AsyncSaver::busy() const {
  return job_ != nullptr;
}

bool AsyncSaver::ended() const {
  return job_->done.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

// A call that does not return cannot be stopped; only its caller can stop waiting.
void AsyncSaver::check_progress() {
  const std::uint64_t now = job_->progress.load(std::memory_order_relaxed);
  if (now != std::exchange(job_->seen, now)) job_->seen_at = Clock::now();
  const auto stalled = Clock::now() - job_->seen_at;
  if (stalled < shared_->options.stall_limit || ended()) return;
  job_->thread.detach();
  const std::string path = std::exchange(job_, nullptr)->outcome.path;
  shared_ = std::make_shared<Shared>(Shared{shared_->options, {}});
  throw Error(
      "checkpoint",
      fmt::format("{} was not saved: its writer has made no progress for {:.1f} s. The disk, "
                  "the device that it copies from or the network file system is probably stuck. "
                  "Resume from the newest checkpoint when it works again.",
                  path, std::chrono::duration<double>(stalled).count()));
}

// Replaces the contents' tensors by copies in one piece of the device's memory, on the current
// stream. False where that would need more than half of what was free at the first save; asking
// again would wait for the device.
bool AsyncSaver::copy_on_device(Shared& shared, CheckpointContents& contents, c10::Device device) {
  constexpr std::size_t kAlignment = 256;
  std::vector<at::Tensor*> there;
  std::vector<std::size_t> begins;
  std::size_t bytes = 0;
  for (at::Tensor* tensor : tensors_of(contents)) {
    if (tensor->device() != device) continue;
    if (!tensor->is_contiguous()) return false;
    there.push_back(tensor);
    begins.push_back(bytes);
    bytes += (tensor->nbytes() + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (!shared.room)
    shared.room = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first / 2;
  if (bytes > *shared.room) return false;
  const at::NoGradGuard no_grad;
  at::Tensor memory;
  try {
    memory =
        at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(device).dtype(at::kByte));
  } catch (const c10::OutOfMemoryError&) {
    shared.room = 0;
    return false;
  }
  std::map<at::ScalarType, std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> copies;
  for (std::size_t i = 0; i < there.size(); ++i) {
    at::Tensor& tensor = *there[i];
    const at::Tensor copy = memory
                                .narrow(0, static_cast<std::int64_t>(begins[i]),
                                        static_cast<std::int64_t>(tensor.nbytes()))
                                .view(tensor.scalar_type())
                                .view(tensor.sizes());
    auto& [to, from] = copies[tensor.scalar_type()];
    to.push_back(copy);
    from.push_back(std::exchange(tensor, copy));
  }
  for (auto& [type, lists] : copies) at::_foreach_copy_(lists.first, lists.second);
  return true;
}

void AsyncSaver::prepare(c10::Device device) {
  if (device.is_cpu()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor one = at::zeros({1}, at::TensorOptions(device).dtype(at::kFloat));
  at::_foreach_copy_({at::empty_like(one)}, {one});
}

// From the device to memory that is not pinned, in pieces: the driver would hold its lock while it
// copies a whole tensor there, and training could launch nothing.
void AsyncSaver::bring(Shared& shared, const at::Tensor& from, const at::Tensor& to) {
  constexpr std::int64_t kPiece = 4 << 20;
  if (!shared.bounce.defined())
    shared.bounce = at::empty({kPiece}, at::TensorOptions(at::kByte).pinned_memory(true));
  const at::Tensor bytes = from.reshape({-1}).view(at::kByte);
  const c10::Stream side =
      c10::impl::VirtualGuardImpl(from.device().type()).getStream(from.device());
  auto* const target = static_cast<char*>(to.mutable_data_ptr());
  for (std::int64_t begin = 0; begin < bytes.numel(); begin += kPiece) {
    const std::int64_t count = std::min(kPiece, bytes.numel() - begin);
    shared.bounce.narrow(0, 0, count).copy_(bytes.narrow(0, begin, count), /*non_blocking=*/true);
    side.synchronize();
    std::memcpy(target + begin, shared.bounce.const_data_ptr(), static_cast<std::size_t>(count));
  }
}

// Into memory that is reused from save to save: fresh memory costs more than copying into it.
void AsyncSaver::copy(Shared& shared, Job& job) {
  const auto place = [&](const std::string& name, at::Tensor& tensor) {
    at::Tensor& stage = shared.staging[name];
    const bool fits = stage.defined() && stage.scalar_type() == tensor.scalar_type() &&
                      stage.sizes() == tensor.sizes();
    if (!fits) {
      // Pinning takes a second per gigabyte, during which nothing can be launched: done only where
      // a step waits for the copy.
      const bool pinned = !job.devices.empty() && !job.on_device;
      stage = at::empty(tensor.sizes(),
                        at::TensorOptions().dtype(tensor.scalar_type()).pinned_memory(pinned));
    }
    if (job.on_device && !tensor.is_cpu()) {
      bring(shared, tensor, stage);
    } else {
      stage.copy_(tensor, /*non_blocking=*/true);
    }
    job.sources.push_back(std::exchange(tensor, stage));
    ++job.progress;
  };
  for (auto& [name, tensor] : job.contents.model) place("model." + name, tensor);
  for (auto& [name, tensor] : job.contents.optimizer) place("optimizer." + name, tensor);
}

// On streams of its own, so that the devices compute meanwhile. Nothing stays queued after an error
// either: the next save reuses its memory, and its sources are freed.
void AsyncSaver::copy_beside(Shared& shared, Job& job) {
  std::vector<c10::Stream> sides;
  for (const c10::Device device : job.devices)
    sides.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  const c10::StreamGuard guard(sides.front());  // also makes its device the thread's own
  const c10::MultiStreamGuard all(sides);
  for (std::size_t i = 0; i < sides.size(); ++i) job.boundaries[i].block(sides[i]);
  std::exception_ptr trouble;
  try {
    copy(shared, job);
  } catch (...) {
    trouble = std::current_exception();
  }
  for (const c10::Stream& side : sides) side.synchronize();
  if (trouble) std::rethrow_exception(trouble);
}

void AsyncSaver::copy_everything(Shared& shared, Job& job) {
  const auto start = Clock::now();
  try {
    if (!job.devices.empty()) {
      copy_beside(shared, job);
    } else {
      copy(shared, job);
    }
  } catch (...) {
    if (!job.on_device) job.copied.set_value();
    throw;
  }
  job.sources.clear();
  job.outcome.copy_ms = ms_since(start);
  if (!job.on_device) job.copied.set_value();
}

void AsyncSaver::run(Shared& shared, Job& job) {
  const at::NoGradGuard no_grad;
  const SaverOptions& options = shared.options;
  if (options.copy) {
    copy_everything(shared, job);
  } else {
    for (const c10::Event& boundary : job.boundaries) boundary.synchronize();
  }
  const auto writing = Clock::now();
  WriteOptions write = options.write;
  write.progress = &job.progress;
  write_checkpoint(job.outcome.path, job.contents, write);
  ++job.progress;
  job.outcome.committed = true;
  job.outcome.write_ms = ms_since(writing);
  job.outcome.alert = delete_older(options, job.outcome.path, job.keep);
}

void AsyncSaver::begin(CheckpointContents contents, std::string keep) {
  if (job_) {
    ended_.reset();  // a caller that polls between saves has seen it
    ended_ = wait();
  }
  const auto start = Clock::now();
  auto job = std::make_shared<Job>();
  job->contents = std::move(contents);
  job->keep = std::move(keep);
  job->outcome.step = job->contents.state.global_step;
  job->outcome.path = checkpoint_path(shared_->options.output_dir, job->outcome.step);
  job->devices = devices_of(job->contents);
  if (job->devices.size() == 1 && shared_->options.copy)
    job->on_device = copy_on_device(*shared_, job->contents, job->devices.front());
  if (job->on_device) job->copied.set_value();
  for (const c10::Device device : job->devices) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    job->boundaries.emplace_back(device.type()).record(guard.getStream(device));
  }
  job->thread = std::thread([shared = shared_, job] {
    try {
      run(*shared, *job);
      job->finished.set_value();
    } catch (...) {
      job->finished.set_exception(std::current_exception());
    }
  });
  job_ = std::move(job);
  job_->waited_ms = ms_since(start);
}

void AsyncSaver::wait_copied() {
  if (!job_) return;
  const auto start = Clock::now();
  wait_until_copied();
  if (job_) job_->waited_ms += ms_since(start);
}

void AsyncSaver::wait_until_copied() {
  const SaverOptions& options = shared_->options;
  const auto look = std::min<std::chrono::milliseconds>(kLook, options.stall_limit);
  while (job_) {
    const std::future<void>& until = options.copy ? job_->copied_future : job_->done;
    if (until.wait_for(look) == std::future_status::ready) return;
    check_progress();
  }
}

void AsyncSaver::wait_a_while(std::chrono::milliseconds time) {
  if (!job_ || job_->done.wait_for(time) == std::future_status::ready) return;
  check_progress();
}

std::optional<SaveOutcome> AsyncSaver::poll() {
  if (!ended_ && !job_) return std::nullopt;
  if (!ended_ && !ended()) return std::nullopt;
  return wait();
}

std::optional<SaveOutcome> AsyncSaver::wait() {
  if (ended_) return std::exchange(ended_, std::nullopt);
  if (!job_) return std::nullopt;
  while (!ended()) wait_a_while(kLook);
  const std::shared_ptr<Job> job = std::move(job_);
  job->thread.join();
  job->outcome.waited_ms = job->waited_ms;
  try {
    job->done.get();
  } catch (const SystemError& error) {
    if (!is_full(error)) throw;
    job->outcome.alert = fmt::format("{} {} was not saved", error.what(), job->outcome.path);
  }
  return job->outcome;
}

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

// An error of this rank, encoded for the others: errno and the text.
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
