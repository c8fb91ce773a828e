#include "lockstep/train/async_saver.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <cerrno>
#include <chrono>
#include <exception>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::train {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

bool is_full(const SystemError& error) {
  return error.error_number() == ENOSPC || error.error_number() == EDQUOT;
}

// The first device that is not the CPU; tensors of one model are on one.
std::optional<c10::Device> device_of(const CheckpointContents& contents) {
  for (const auto& [name, tensor] : contents.model)
    if (!tensor.device().is_cpu()) return tensor.device();
  return std::nullopt;
}

}  // namespace

struct AsyncSaver::Job {
  CheckpointContents contents;
  // Memory that is given back while its copy is queued would be written by the main stream's next.
  std::vector<at::Tensor> sources;
  std::string keep;
  SaveOutcome outcome;
  std::unique_ptr<c10::Event> boundary;  // the device had come this far when the save began
  std::optional<c10::Device> device;
  std::promise<void> copied;
  std::future<void> copied_future = copied.get_future();
  std::future<void> done;
};

AsyncSaver::AsyncSaver(SaverOptions options) : options_(std::move(options)) {}

AsyncSaver::~AsyncSaver() {
  if (job_ && job_->done.valid()) job_->done.wait();
}

bool AsyncSaver::busy() const {
  return job_ != nullptr;
}

// Into memory that is kept from save to save: fresh memory costs more than copying into it.
void AsyncSaver::copy(Job& job) {
  const auto place = [&](const std::string& name, at::Tensor& tensor) {
    at::Tensor& stage = staging_[name];
    const bool fits = stage.defined() && stage.scalar_type() == tensor.scalar_type() &&
                      stage.sizes() == tensor.sizes();
    if (!fits) {
      stage = at::empty(
          tensor.sizes(),
          at::TensorOptions().dtype(tensor.scalar_type()).pinned_memory(job.device.has_value()));
    }
    stage.copy_(tensor, /*non_blocking=*/true);
    job.sources.push_back(std::exchange(tensor, stage));
  };
  for (auto& [name, tensor] : job.contents.model) place("model." + name, tensor);
  for (auto& [name, tensor] : job.contents.optimizer) place("optimizer." + name, tensor);
}

// On a stream of its own, so that the device computes meanwhile. Also after an error nothing is
// left queued: its memory is used again by the next save, and its sources are given back.
void AsyncSaver::copy_beside(Job& job) {
  const c10::impl::VirtualGuardImpl device(job.device->type());
  const c10::StreamGuard guard(device.getStreamFromGlobalPool(*job.device));
  const c10::Stream side = guard.current_stream();
  job.boundary->block(side);
  std::exception_ptr trouble;
  try {
    copy(job);
  } catch (...) {
    trouble = std::current_exception();
  }
  side.synchronize();
  if (trouble) std::rethrow_exception(trouble);
}

void AsyncSaver::run(Job& job) {
  const at::NoGradGuard no_grad;
  const auto start = Clock::now();
  try {
    if (job.device) {
      copy_beside(job);
    } else {
      copy(job);
    }
  } catch (...) {
    job.copied.set_value();
    throw;
  }
  job.sources.clear();
  job.outcome.copy_ms = ms_since(start);
  job.copied.set_value();
  const auto writing = Clock::now();
  write_checkpoint(job.outcome.path, job.contents, options_.write);
  job.outcome.committed = true;
  job.outcome.write_ms = ms_since(writing);
  if (options_.limit > 0) {
    io::RetainOptions retain{.limit = options_.limit, .durable = job.outcome.path};
    if (!job.keep.empty()) retain.keep.push_back(job.keep);
    try {
      io::retain(options_.output_dir, kCheckpointPrefix, retain);
    } catch (const Error& error) {
      job.outcome.alert = fmt::format("{} is durable, but older ones were not deleted: {}",
                                      job.outcome.path, error.what());
    }
  }
}

void AsyncSaver::begin(CheckpointContents contents, std::string keep) {
  if (job_) {
    ended_.reset();  // a caller that polls between saves has seen it
    ended_ = wait();
  }
  job_ = std::make_unique<Job>();
  job_->contents = std::move(contents);
  job_->keep = std::move(keep);
  job_->outcome.step = job_->contents.state.global_step;
  job_->outcome.path = checkpoint_path(options_.output_dir, job_->outcome.step);
  job_->device = device_of(job_->contents);
  if (job_->device) {
    const c10::impl::VirtualGuardImpl guard(job_->device->type());
    job_->boundary = std::make_unique<c10::Event>(job_->device->type());
    job_->boundary->record(guard.getStream(*job_->device));
  }
  job_->done = std::async(std::launch::async, [this, job = job_.get()] { run(*job); });
}

void AsyncSaver::wait_copied() {
  if (job_) job_->copied_future.wait();
}

void AsyncSaver::wait_a_while(std::chrono::milliseconds time) {
  if (job_) job_->done.wait_for(time);
}

std::optional<SaveOutcome> AsyncSaver::poll() {
  if (!ended_ && !job_) return std::nullopt;
  if (!ended_ && job_->done.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
    return std::nullopt;
  return wait();
}

std::optional<SaveOutcome> AsyncSaver::wait() {
  if (ended_) return std::exchange(ended_, std::nullopt);
  if (!job_) return std::nullopt;
  const std::unique_ptr<Job> job = std::move(job_);
  try {
    job->done.get();
  } catch (const SystemError& error) {
    if (!is_full(error)) throw;
    job->outcome.alert = fmt::format(
        "{} {} was not saved; training goes on. Free some space: the next save is tried as "
        "planned.",
        error.what(), job->outcome.path);
  }
  return job->outcome;
}

}  // namespace lockstep::train
