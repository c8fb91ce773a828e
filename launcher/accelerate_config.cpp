#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "launcher/flags.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/text.h"
#include "lockstep/rendezvous/rank_env.h"

namespace lockstep::launch {
namespace {

constexpr const char* kFsdp = "FSDP";

constexpr const char* kKeys[] = {"compute_environment",
                                 "distributed_type",
                                 "mixed_precision",
                                 "num_processes",
                                 "num_machines",
                                 "machine_rank",
                                 "main_process_ip",
                                 "main_process_port",
                                 "gpu_ids",
                                 "rdzv_backend",
                                 "same_network",
                                 "use_cpu",
                                 "debug",
                                 "enable_cpu_affinity",
                                 "downcast_bf16",
                                 "main_training_function",
                                 "tpu_env",
                                 "tpu_use_cluster",
                                 "tpu_use_sudo"};

// The keys of fsdp_config and the variables that `accelerate launch` sets for them. Keys without a
// variable describe what FullyShard always does, or PyTorch's first FSDP.
constexpr std::pair<std::string_view, std::string_view> kFsdpKeys[] = {
    {"fsdp_version", "FSDP_VERSION"},
    {"fsdp_reshard_after_forward", "FSDP_RESHARD_AFTER_FORWARD"},
    {"fsdp_activation_checkpointing", "FSDP_ACTIVATION_CHECKPOINTING"},
    {"fsdp_transformer_layer_cls_to_wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP"},
    {"fsdp_offload_params", "FSDP_OFFLOAD_PARAMS"},
    {"fsdp_auto_wrap_policy", ""},
    {"fsdp_cpu_ram_efficient_loading", ""},
    {"fsdp_backward_prefetch", ""},
    {"fsdp_forward_prefetch", ""},
    {"fsdp_state_dict_type", ""},
    {"fsdp_sync_module_states", ""},
    {"fsdp_use_orig_params", ""}};

// Advice for PyTorch's first FSDP, which has named or numbered strategies instead of
// fsdp_reshard_after_forward.
std::string_view instead_of_strategy(std::string_view value) {
  if (value == "FULL_SHARD" || value == "1") return "Write fsdp_reshard_after_forward: true.";
  if (value == "SHARD_GRAD_OP" || value == "2") return "Write fsdp_reshard_after_forward: false.";
  if (value == "NO_SHARD" || value == "3")
    return "Write distributed_type: MULTI_GPU, which divides nothing.";
  if (value == "HYBRID_SHARD" || value == "4")
    return "Delete it, and write fsdp: hybrid_shard into the training file.";
  if (value == "HYBRID_SHARD_ZERO2" || value == "5")
    return "Delete it, and write fsdp: hybrid_shard_zero2 into the training file.";
  return "Write fsdp_reshard_after_forward: true or false.";
}

class Translator {
 public:
  Translator(const Node& document, const std::vector<std::string>& training_keys, Problems problems)
      : document_(document), training_keys_(training_keys), problems_(std::move(problems)) {}

  AccelerateLaunch run() {
    if (document_.is(NodeKind::kMap)) {
      keys_.emplace(document_, "", &problems_);
      check_keys();
      type_and_precision();
      processes();
      rendezvous();
      devices();
      switches();
      if (type_ == kFsdp) fully_sharded();
    } else if (!document_.is(NodeKind::kNull)) {
      problems_.attempt([&] {
        refuse_value(document_, "the launcher's file", "a map",
                     "Write `key: value` lines, with a space after the colon.");
      });
    }
    problems_.raise();
    return std::move(out_);
  }

 private:
  // ---------------------------------------------------------------- reading

  const Entry* given(std::string_view key) const {
    const Entry* entry = document_.find(key);
    return entry != nullptr && !entry->value.is(NodeKind::kNull) ? entry : nullptr;
  }

  template <typename... Args>
  void refuse(const Entry& entry, fmt::format_string<Args...> format, Args&&... args) {
    problems_.add(fmt::format("{}: {}", entry.value.location.text(),
                              fmt::format(format, std::forward<Args>(args)...)));
  }

  bool boolean(std::string_view key) { return keys_->boolean(key, false); }

  // -1 if it is absent or refused.
  std::int64_t integer(std::string_view key, std::int64_t min, std::int64_t max) {
    return keys_->integer(key, -1, min, max);
  }

  void check_keys() {
    const std::vector<std::string> names = launcher_keys();
    const auto has = [](const std::vector<std::string>& keys, const std::string& key) {
      return std::ranges::find(keys, key) != keys.end();
    };
    for (const Entry& entry : document_.entries) {
      const std::string& key = entry.key;
      const Entry* const type = given("distributed_type");
      if (has(names, key) || (key == "fsdp_config" && type != nullptr && type->value.text == kFsdp))
        continue;
      if (problems_.full()) return;
      std::string why;
      const bool section = key == "deepspeed_config" || key == "fsdp_config" ||
                           key == "megatron_lm_config" || key == "parallelism_config" ||
                           key == "fp8_config";
      if (section && (entry.value.is(NodeKind::kNull) ||
                      (entry.value.is(NodeKind::kMap) && entry.value.entries.empty())))
        continue;  // Accelerate writes empty sections
      if (has(training_keys_, key)) {
        why = fmt::format(
            "{} belongs in the training file (`lockstep train FILE`), not in the "
            "launcher's. Move it there{}.",
            key, key == "fsdp_config" ? ", or write distributed_type: FSDP" : "");
      } else if (section) {
        why = fmt::format(
            "{} is not supported. What divides a model or computes in fp8 is chosen in the "
            "training "
            "file: fsdp, pipeline_parallel_degree, tensor_parallel_degree, mixed_precision. Delete "
            "the section here.",
            key);
      } else {
        why = fmt::format("there is no key '{}' in the launcher's file.{}", key,
                          did_you_mean(key, names));
      }
      problems_.add(fmt::format("{}: {}", entry.location.text(), why));
    }
  }

  // ---------------------------------------------------------------- meaning

  void type_and_precision() {
    const std::string location = keys_->text("compute_environment", "LOCAL_MACHINE");
    if (location != "LOCAL_MACHINE") {
      refuse(*given("compute_environment"),
             "compute_environment {} is not supported. Write LOCAL_MACHINE.", location);
    }
    type_ = keys_->text("distributed_type", "");
    const std::vector<std::string> known = {"", "NO", "MULTI_CPU", "MULTI_GPU", kFsdp};
    if (std::ranges::find(known, type_) == known.end()) {
      refuse(*given("distributed_type"),
             "distributed_type {} is not supported. Write NO, MULTI_CPU, MULTI_GPU or FSDP.{}",
             type_, did_you_mean(type_, known));
    }
    const std::string precision =
        keys_->choice("mixed_precision", "no", {"no", "fp16", "bf16", "fp8"});
    if (precision != "no") out_.environment["ACCELERATE_MIXED_PRECISION"] = precision;
  }

  void processes() {
    const std::int64_t machines = integer("num_machines", 1, kMaxWorldSize);
    const std::int64_t processes = integer("num_processes", 1, kMaxWorldSize);
    const std::int64_t hosts = std::max<std::int64_t>(machines, 1);
    if (machines > 0) flag("nnodes", hosts);
    if (processes > 0 && processes % hosts != 0) {
      refuse(*given("num_processes"),
             "num_processes {} cannot be shared equally by {} machines: it counts the processes of "
             "all of them. Make it {} or {}.",
             processes, hosts, std::max<std::int64_t>(1, processes / hosts) * hosts,
             (processes / hosts + 1) * hosts);
    } else if (processes > 0) {
      if (type_ == "NO" && processes > 1) {
        refuse(*given("num_processes"),
               "num_processes is {}, but distributed_type is NO. Write MULTI_GPU or MULTI_CPU, or "
               "num_processes: 1.",
               processes);
      }
      flag("nproc-per-node", processes / hosts);
    } else if (type_ == "NO") {
      flag("nproc-per-node", std::int64_t{1});
    }
    if (const std::int64_t rank = integer("machine_rank", 0, kMaxWorldSize); rank >= 0) {
      if (rank >= hosts) {
        refuse(*given("machine_rank"),
               "machine_rank {} does not exist with num_machines {}. It counts from 0.", rank,
               hosts);
      }
      flag("node-rank", rank);
    }
    if (hosts > 1 && given("main_process_ip") == nullptr) {
      refuse(*given("num_machines"),
             "num_machines is {}, but there is no rendezvous address. Set main_process_ip to "
             "the address of machine 0.",
             hosts);
    }
  }

  void rendezvous() {
    const std::string address = keys_->text("main_process_ip", "");
    if (!address.empty()) flag("master-addr", address);
    const std::int64_t port = integer("main_process_port", 0, 65535);
    if (port > 0) flag("master-port", port);  // 0: a free one, as without the key
    const std::string backend = keys_->choice("rdzv_backend", "", {"static", "c10d"});
    if (!backend.empty()) flag("rdzv-backend", backend);
  }

  void devices() {
    const bool cpu = boolean("use_cpu");
    if (cpu && type_ == "MULTI_GPU") {
      refuse(*given("use_cpu"),
             "use_cpu is true, but distributed_type is MULTI_GPU. Write "
             "MULTI_CPU, or use_cpu: false.");
    }
    if (cpu || type_ == "MULTI_CPU") {
      out_.environment["ACCELERATE_USE_CPU"] = "true";
      out_.environment["LOCKSTEP_DEVICE"] = "cpu";
    }
    if (type_ == "MULTI_GPU" || (type_ == kFsdp && !cpu)) {
      // A rank without a GPU must not fall back to the CPU.
      out_.environment["LOCKSTEP_DEVICE"] = "cuda";
      out_.gpu_key = fmt::format("{}: distributed_type is {}",
                                 given("distributed_type")->value.location.text(), type_);
    }
    std::string ids = keys_->text("gpu_ids", "all");
    ids.erase(std::remove(ids.begin(), ids.end(), ' '), ids.end());
    if (ids == "all") return;
    const bool digits = ids.find_first_not_of("0123456789,") == ids.npos && !ids.empty() &&
                        ids.front() != ',' && ids.back() != ',';
    if (!digits) {
      refuse(*given("gpu_ids"), "gpu_ids must be all or numbers such as 0,1, and '{}' is not.",
             ids);
      return;
    }
    out_.environment["CUDA_VISIBLE_DEVICES"] = ids;
  }

  // Refuses keys and values of PyTorch's first FSDP.
  bool refuses_fsdp1(const Entry& entry) {
    const Node& value = entry.value;
    if (entry.key == "fsdp_version" && value.text != "2") {
      refuse(entry, "fsdp_config.fsdp_version {} is not supported. Write fsdp_version: 2.",
             value.text);
      return true;
    }
    const bool named = entry.key == "fsdp_reshard_after_forward" && !value.is(NodeKind::kBool);
    if ((!named && entry.key != "fsdp_sharding_strategy") || value.is(NodeKind::kNull))
      return false;
    refuse(entry, "fsdp_config.{} {} is of PyTorch's first FSDP. {}", entry.key, value.text,
           instead_of_strategy(value.text));
    return true;
  }

  // The ranks read these variables unless the training file has fsdp keys.
  void fully_sharded() {
    out_.environment["ACCELERATE_USE_FSDP"] = "true";
    const Entry* const section = given("fsdp_config");
    if (section == nullptr) return;
    if (!section->value.is(NodeKind::kMap)) {
      refuse(*section, "fsdp_config must be a map, such as {{fsdp_version: 2}}.");
      return;
    }
    for (const Entry& entry : section->value.entries) {
      if (refuses_fsdp1(entry)) continue;
      const auto* const known = std::ranges::find(
          kFsdpKeys, entry.key, [](const auto& pair) { return std::string(pair.first); });
      const bool off = entry.value.is(NodeKind::kBool) && !entry.value.boolean;
      if (known == std::end(kFsdpKeys) && !off && !entry.value.is(NodeKind::kNull))
        refuse(entry, "fsdp_config.{} is not supported. Delete it.", entry.key);
      if (known == std::end(kFsdpKeys) || known->second.empty() || entry.value.is(NodeKind::kNull))
        continue;
      std::string text = to_json(entry.value);
      std::erase_if(
          text, [](char c) { return std::string_view("\"[] ").find(c) != std::string_view::npos; });
      out_.environment[std::string(known->second)] = text;
    }
  }

  void switches() {
    if (boolean("debug")) out_.environment["LOCKSTEP_DEBUG"] = "1";
    if (boolean("enable_cpu_affinity")) flag("numa-binding", std::string("node"));
    boolean("same_network");
    const std::string function = keys_->text("main_training_function", "main");
    if (function != "main") {
      note("main_training_function", "it names a function of a notebook; programs are started");
    }
    if (const Entry* entry = given("downcast_bf16")) {
      const bool off = entry->value.text == "no" || entry->value.text == "false";
      if (!off) note("downcast_bf16", "it is for TPUs");
    }
    for (const char* key : {"tpu_use_cluster", "tpu_use_sudo"})
      if (boolean(key)) refuse(*given(key), "{} is for TPUs, which are not supported.", key);
    if (const Entry* env = given("tpu_env"); env != nullptr && !env->value.items.empty())
      refuse(*env, "tpu_env is for TPUs, which are not supported. Delete it.");
  }

  template <typename Value>
  void flag(std::string_view name, const Value& value) {
    out_.flags.push_back(fmt::format("--{}={}", name, value));
  }

  void note(std::string_view key, std::string_view why) {
    out_.notes.push_back(
        fmt::format("{}: {} has no effect: {}.", given(key)->location.text(), key, why));
  }

  const Node& document_;
  const std::vector<std::string>& training_keys_;
  std::string type_;
  Problems problems_;
  std::optional<MapReader> keys_;
  AccelerateLaunch out_;
};

}  // namespace

AccelerateLaunch read_accelerate_config(const Node& document,
                                        const std::vector<std::string>& training_keys,
                                        Problems problems) {
  return Translator(document, training_keys, std::move(problems)).run();
}

AccelerateLaunch load_accelerate_config(const std::string& path,
                                        const std::vector<std::string>& training_keys) {
  Problems problems;
  const Node document = load_document(path, {}, &problems);
  return read_accelerate_config(document, training_keys, std::move(problems));
}

std::vector<std::string> launcher_keys() {
  return {std::begin(kKeys), std::end(kKeys)};
}

}  // namespace lockstep::launch
