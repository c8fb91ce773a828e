#include "cli/plan_machine.h"

#include <unistd.h>

#include <vector>

#include "cli/plan_record.h"
#include "launcher/host.h"
#include "lockstep/core/env.h"
#include "lockstep/core/host.h"

namespace lockstep::cli {
namespace {

plan::Devices find_devices(const launch::Gpus& gpus) {
  std::vector<plan::FoundGpu> found;
  for (const launch::GpuModel& gpu : gpus.models)
    found.push_back({gpu.name, gpu.memory_bytes, gpu.multiprocessors, gpu.clock_khz,
                     gpu.capability_major, gpu.capability_minor});
  return plan::detected_devices(
      found, gpus.count > 0 ? "the driver does not say what they are" : gpus.reason);
}

std::uint64_t host_memory() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long size = ::sysconf(_SC_PAGESIZE);
  return pages > 0 && size > 0
             ? static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(size)
             : 0;
}

}  // namespace

Here devices_here(const std::string& gpus_text) {
  std::string text = gpus_text;
  if (text.empty() || text == "detected") {
    const bool cpu = text.empty() && env::get("LOCKSTEP_DEVICE") == "cpu";
    const launch::Gpus gpus = cpu ? launch::Gpus{} : launch::find_gpus();
    if (gpus.count > 0 || text == "detected")
      return {find_devices(gpus), gpus.models.empty() ? "" : gpus.models.front().name};
    text = "cpu";
  }
  plan::Devices devices = plan::parse_devices(text);
  if (!devices.card.cpu) return {devices, ""};
  devices.card.memory_bytes = host_memory() / static_cast<std::uint64_t>(devices.count);
  return {devices, "cpu"};
}

plan::Cluster cluster_of(const std::string& link, int per_node, const Here& here) {
  const plan::Card& card = here.devices.card;
  const char* usual = card.cpu          ? "loopback"
                      : card.nvlink > 0 ? "nvlink+ib400"
                      : card.peers      ? "pcie+eth100/node"
                                        : "pcie-host+eth100/node";
  plan::Cluster cluster = plan::parse_link(link.empty() ? usual : link, card, per_node);
  if (card.cpu) cluster.cores = allowed_cores();
  if (link.empty() && !here.name.empty())
    if (const auto measured = saved_link(here.name, here.devices.count))
      plan::use_measured(cluster, *measured);
  return cluster;
}

}  // namespace lockstep::cli
