#include "lockstep/core/device_rule.h"

#include <algorithm>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

struct Asked {
  bool cuda = false;
  int index = -1;  // negative: the local rank decides
};

Asked parse_device(const std::string& text, const char* source) {
  constexpr int kMaxGpus = 1024;
  constexpr std::string_view kNumbered = "cuda:";
  if (text == "cpu" || text == "cpu:0") return {};
  if (text == "cuda") return {true, -1};
  const std::string number = text.substr(std::min(kNumbered.size(), text.size()));
  const bool digits = !number.empty() && number.size() < 5 &&
                      number.find_first_not_of("0123456789") == std::string::npos;
  if (text.starts_with(kNumbered) && digits && std::stoi(number) <= kMaxGpus)
    return {true, std::stoi(number)};
  throw UsageError("world", "{}='{}' is not a device. Use cpu, cuda or cuda:N.", source, text);
}

std::string wanted_backend(const DeviceRequest& request) {
  std::string backend = request.backend;
  if (backend == "auto") backend = env::get("LOCKSTEP_BACKEND").value_or("auto");
  if (backend != "auto" && backend != "shm" && backend != "gloo" && backend != "nccl")
    throw UsageError("world", "there is no backend '{}'. Use auto, shm, gloo or nccl.", backend);
  return backend;
}

void place_on_gpu(DeviceRule& rule, const DeviceRequest& request, int index, int visible) {
  const bool share =
      request.share ? *request.share : env::get_bool("LOCKSTEP_SHARE_DEVICE").value_or(false);
  const int local_rank = std::max(request.local_rank, 0);
  rule.gpu = index;
  if (index < 0) rule.gpu = share && visible > 0 ? local_rank % visible : local_rank;
  if (rule.gpu < visible) return;
  rule.problem = fmt::format(
      "local rank {} wants cuda:{}, but {} CUDA device{} visible. Start fewer ranks per host, set "
      "LOCKSTEP_SHARE_DEVICE=1 to share devices, or LOCKSTEP_DEVICE=cpu (with backend shm or "
      "gloo).",
      local_rank, rule.gpu, visible, visible == 1 ? " is" : "s are");
}

}  // namespace

DeviceRule apply_device_rule(const DeviceRequest& request) {
  const std::string backend = wanted_backend(request);
  DeviceRule rule;
  std::optional<Asked> asked;
  if (!request.device.empty()) {
    asked = parse_device(request.device, "device");
    rule.reason = "asked for by the program";
  } else if (const auto text = env::get("LOCKSTEP_DEVICE")) {
    asked = parse_device(*text, "LOCKSTEP_DEVICE");
    rule.reason = "LOCKSTEP_DEVICE=" + *text;
  }
  const bool cpu = asked && !asked->cuda;
  const int visible = cpu || !request.visible_gpus ? 0 : request.visible_gpus();
  const std::string devices =
      fmt::format("{} CUDA device{} visible", visible, visible == 1 ? " is" : "s are");
  if (asked && asked->cuda) {
    place_on_gpu(rule, request, asked->index, visible);
  } else if (cpu) {
    // cpu it is
  } else if (backend == "gloo" || backend == "shm") {
    rule.reason = fmt::format("backend {} was asked for", backend);
  } else if (visible == 0) {
    rule.reason = request.no_gpu;
  } else if (!request.cuda_built) {
    rule.reason = devices + ", but this build has no CUDA plug-in";
  } else {
    place_on_gpu(rule, request, -1, visible);
    rule.reason = devices;
  }
  if (backend == "nccl" && rule.gpu < 0) {
    rule.problem = fmt::format(
        "backend nccl needs a CUDA device, but this rank's device is cpu ({}). Use shm (ranks of "
        "one host) or gloo, as in LOCKSTEP_BACKEND=gloo, or make a GPU visible.",
        rule.reason);
  }
  rule.automatic = backend == "auto" && rule.gpu < 0;
  rule.backend = backend != "auto" ? backend : rule.gpu >= 0 ? "nccl" : "shm";
  return rule;
}

std::string idle_gpus_warning(int world_size, bool device_given, int visible_gpus) {
  if (world_size > 1 || device_given || visible_gpus < 2) return {};
  return fmt::format(
      "{} GPUs are visible but this is a world of one: {} will be idle. Start it with lockstep run "
      "--nproc-per-node={} <program>, or set CUDA_VISIBLE_DEVICES.",
      visible_gpus, visible_gpus - 1, visible_gpus);
}

}  // namespace lockstep
