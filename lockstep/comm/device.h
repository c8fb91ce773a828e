// Chooses a rank's device, loads CUDA at run time, and measures a step's phases on the device.
//
// The driver is asked directly (dlopen of libcuda), so a machine without a GPU never loads the
// gigabytes of LibTorch's CUDA part; load_cuda() opens them when a CUDA device is really wanted.
//
//   lockstep::load_cuda();                 // torch::cuda works from here on
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

#include "lockstep/comm/types.h"
#include "lockstep/core/ledger.h"

namespace lockstep {

// Devices the CUDA driver shows to this process (CUDA_VISIBLE_DEVICES counts); 0 without a driver.
int cuda_device_count();

// Makes torch's CUDA side part of this process: opens our plug-in, which brings libtorch_cuda.
// Cheap when it is there already. Throws UsageError when this build has no plug-in.
void load_cuda();

namespace detail {

struct DeviceChoice {
  c10::Device device;
  std::string backend;     // "shm", "gloo" or "nccl"
  std::string reason;      // for one line of log
  bool automatic = false;  // not requested by name, so gloo may replace shm
};

// WorldOptions come first, then LOCKSTEP_DEVICE and LOCKSTEP_BACKEND, then the hardware.
DeviceChoice choose_device(const Identity& identity, const WorldOptions& options);

// A name for the physical GPU (its UUID), equal in every process of the host; empty when unknown.
std::string cuda_device_id(int index);

}  // namespace detail

// Marks the beginning of a phase on the current stream: a host that only enqueues work returns
// early from every phase, so its clock cannot tell where a step's time goes.
//
//   mark_device_phase(ledger::Phase::kForward, device);
//   ... forward ...
//   mark_device_phase(ledger::Phase::kBackward, device);
//
// The device's time between two marks, known once it has passed both, is added to the phase of the
// first one (ledger::add_device_time), with the time in which the stream was idle. On a CPU nothing
// is marked: the ledger's phases have the wall time. Any thread may mark; the marks of a process
// are one sequence, of one device. Nobody waits for them, and they never throw.
void mark_device_phase(ledger::Phase phase, c10::Device device) noexcept;

// Suspends the marks during the capture of a CUDA graph: an event in a graph has no timestamp.
class DeviceMarksOff {
 public:
  DeviceMarksOff() noexcept;
  ~DeviceMarksOff();
  DeviceMarksOff(const DeviceMarksOff&) = delete;
  DeviceMarksOff& operator=(const DeviceMarksOff&) = delete;
};

// Counts the time in which the training thread waits for the device as the device's, not as part of
// the surrounding host phase:
//
//   const DeviceWait wait(loss.device());
//   const double value = loss.item<double>();
//
// The phase is kDeviceWait until the end of the scope; then the device's time up to that point is
// added. On a CPU nothing happens.
class DeviceWait {
 public:
  explicit DeviceWait(c10::Device device) noexcept;
  ~DeviceWait();
  DeviceWait(const DeviceWait&) = delete;
  DeviceWait& operator=(const DeviceWait&) = delete;

 private:
  std::optional<ledger::PhaseScope> phase_;
};

}  // namespace lockstep
