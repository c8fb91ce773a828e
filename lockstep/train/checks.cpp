#include "lockstep/train/checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <set>

#include "lockstep/core/document.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/text.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"
#include "lockstep/io/manifest.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::train {
namespace {

constexpr double kMaxRate = 1000;  // the same as for learning_rate
constexpr double kMaxCycles = 1e6;
constexpr auto kMaxCount = static_cast<std::int64_t>(kStepLimit);

class Checker {
 public:
  Checker(const TrainingArguments& arguments, const Where& where)
      : arguments_(arguments),
        kwargs_(arguments.lr_scheduler_kwargs ? *arguments.lr_scheduler_kwargs : Node{}),
        where_(where) {}

  std::vector<std::string> run() {
    precision();
    intervals();
    best_model();
    loading();
    accumulation();
    sharding();
    state();
    reports();
    scheduler();
    schedule_length();
    return std::move(found_);
  }

 private:
  // The message begins at the first of the keys that somebody has set, and says where each comes
  // from.
  void add(std::initializer_list<std::string_view> keys, const std::string& text) {
    std::string lead;
    std::string sources;
    for (const std::string_view key : keys) {
      const std::string place = where_(key);
      if (place.empty()) continue;
      if (lead.empty() && place != "default") lead = place + ": ";
      sources += fmt::format("{}{}: {}", sources.empty() ? "" : "; ", key, place);
    }
    if (keys.size() > 1 && !sources.empty()) sources = fmt::format(" ({})", sources);
    found_.push_back(lead + text + (keys.size() > 1 ? sources : ""));
  }

  // mixed_precision has set the flag that it stands for, unless that was set otherwise.
  void fp8() {
    const TrainingArguments& a = arguments_;
    const std::string word = a.mixed_precision.value_or("");
    if (word == "no" && (a.bf16 || a.fp16))
      add({"mixed_precision", a.bf16 ? "bf16" : "fp16"},
          "mixed_precision is no, and bf16 or fp16 is true. Keep one.");
    const bool in_file = !where_("bf16").empty();
    if (in_file && (word == "bf16" || word == "fp8") && !a.bf16)
      add({"mixed_precision", "bf16"},
          "mixed_precision is " + word + ", and bf16 is false. Keep one.");
    if (in_file && word == "fp16" && !a.fp16)
      add({"mixed_precision", "fp16"}, "mixed_precision is fp16, and fp16 is false. Keep one.");
    if (a.fp8 && word != "fp8")
      add({"fp8"},
          "fp8 says how to scale, and mixed_precision is not fp8. Write mixed_precision: "
          "fp8, or delete it.");
    try {
      fp8_recipe_name(a);
    } catch (const UsageError& error) {
      found_.push_back(error.what());
    }
  }

  // mixed_precision has set one of them, where the file has it.
  void both_halves() {
    const std::string word = arguments_.mixed_precision.value_or("no");
    if (word == "no") return add({"bf16", "fp16"}, "bf16 and fp16 cannot both be true. Keep one.");
    const char* const other = word == "fp16" ? "bf16" : "fp16";
    add({"mixed_precision", other},
        fmt::format("mixed_precision is {}, and {} is true. Keep one.", word, other));
  }

  void precision() {
    const TrainingArguments& a = arguments_;
    if (a.bf16 && a.fp16) both_halves();
    fp8();
    if (a.use_cpu && a.fp16) {
      add({"fp16", "use_cpu"},
          "fp16 needs a GPU, and use_cpu is true. Use bf16, or delete one of them.");
    }
    if (a.use_cpu && a.tf32.value_or(false)) {
      add({"tf32", "use_cpu"}, "tf32 is a GPU's, and use_cpu is true. Delete one of them.");
    }
    if (a.use_cpu && a.ddp_backend == "nccl") {
      add({"ddp_backend", "use_cpu"},
          "the backend nccl needs GPUs, and use_cpu is true. Use shm or gloo, or delete one of "
          "them.");
    }
  }

  void intervals() {
    const TrainingArguments& a = arguments_;
    const auto needs = [&](const std::string& strategy, double steps, std::string_view which,
                           std::string_view count) {
      if (strategy == Interval::kSteps && steps == 0) {
        add({count, which}, fmt::format("{} is 0, and {} is steps. Write how many, or {}: no.",
                                        count, which, which));
      }
    };
    needs(a.logging_strategy, a.logging_steps, "logging_strategy", "logging_steps");
    needs(a.save_strategy, a.save_steps, "save_strategy", "save_steps");
    needs(a.eval_strategy, a.eval_steps.value_or(a.logging_steps), "eval_strategy", "eval_steps");
  }

  void best_model() {
    const TrainingArguments& a = arguments_;
    if (a.save_strategy == Interval::kBest && a.eval_strategy == Interval::kNo) {
      add({"save_strategy", "eval_strategy"},
          "save_strategy is best, but nothing is evaluated. Set eval_strategy to steps or epoch.");
    }
    if (a.early_stopping_patience && a.eval_strategy == Interval::kNo) {
      add({"early_stopping_patience", "eval_strategy"},
          "early_stopping_patience counts evaluations. Set eval_strategy to steps or epoch.");
    }
    if (!a.load_best_model_at_end) return;
    if (a.eval_strategy == Interval::kNo) {
      add({"load_best_model_at_end", "eval_strategy"},
          "load_best_model_at_end needs evaluations. Set eval_strategy to steps or epoch.");
      return;
    }
    if (a.save_strategy == Interval::kBest) return;
    if (a.save_strategy != a.eval_strategy) {
      add({"load_best_model_at_end", "save_strategy", "eval_strategy"},
          "load_best_model_at_end needs a checkpoint of every evaluated model. Make save_strategy "
          "equal to eval_strategy, or best.");
      return;
    }
    const double eval_steps = a.eval_steps.value_or(a.logging_steps);
    if (a.save_strategy != Interval::kSteps || eval_steps == 0) return;
    const double ratio = a.save_steps / eval_steps;
    const bool same_kind = (a.save_steps < 1) == (eval_steps < 1);
    if (!same_kind || std::abs(ratio - std::round(ratio)) > 1e-9 || ratio < 1) {
      add({"save_steps", "eval_steps"},
          fmt::format("load_best_model_at_end needs save_steps to be a multiple of eval_steps, and "
                      "{} is not a multiple of {}. Change one of them.",
                      static_cast<double>(a.save_steps), eval_steps));
    }
  }

  void loading() {
    const TrainingArguments& a = arguments_;
    if (a.dataloader_num_workers > 0) return;
    if (a.dataloader_persistent_workers) {
      add({"dataloader_persistent_workers", "dataloader_num_workers"},
          "dataloader_persistent_workers needs workers. Set dataloader_num_workers above 0.");
    }
    if (a.dataloader_prefetch_factor) {
      add({"dataloader_prefetch_factor", "dataloader_num_workers"},
          "dataloader_prefetch_factor needs workers. Set dataloader_num_workers above 0.");
    }
  }

  void accumulation() {
    const TrainingArguments& a = arguments_;
    if (a.tokens_per_update && a.global_batch_size) {
      add({"global_batch_size", "tokens_per_update"},
          "global_batch_size and tokens_per_update both decide the accumulation. Delete one of "
          "them.");
      return;
    }
    if (a.tokens_per_update && !a.max_seq_len) {
      add({"tokens_per_update"},
          "tokens_per_update needs to know how long a sample is. Set max_seq_len.");
      return;
    }
    TrainingArguments smallest = a;
    if (a.elastic_gpu) smallest.per_device_train_batch_size = 1;  // lowers it as far as it must
    const std::optional<UpdateSize> size = update_size(smallest);
    if (!size) return;
    if (a.gradient_accumulation_steps != 1) {
      add({size->key, "gradient_accumulation_steps"},
          fmt::format("{} decides the accumulation. Delete gradient_accumulation_steps, or {}.",
                      size->key, size->key));
    }
    // If one copy of the model cannot compute it in whole passes, no number of copies can. The
    // nearest values are those for this run's ranks, if a launcher has given their number.
    const std::int64_t copies = std::max<std::int64_t>(1, ranks_of_launcher() / ranks_of_copy(a));
    if (!uneven_text(*size, 1).empty())
      add({size->key, "per_device_train_batch_size", "max_seq_len"},
          uneven_text(*size, static_cast<int>(copies)));
  }

  static int ranks_of_launcher() {
    const std::int64_t ranks = env::get_int("WORLD_SIZE").value_or(1);
    return static_cast<int>(std::clamp<std::int64_t>(ranks, 1, 1'000'000));
  }

  void reports() {
    const auto& to = arguments_.report_to;
    if (to.size() > 1 && std::find(to.begin(), to.end(), "none") != to.end())
      add({"report_to"}, "report_to cannot be none and something else. Delete one of them.");
    const std::string name = arguments_.run_name.value_or("run");
    const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
      return static_cast<unsigned char>(c) >= ' ' && c != '/' && c != 127;
    });
    if (!plain || name.starts_with('.') || name.size() > 200) {
      add({"run_name"},
          fmt::format("run_name '{}' cannot name a folder (runs/<run_name>). Use letters, digits, "
                      "'-' and '_', at most 200.",
                      name));
    }
  }

  void sharding() {
    const TrainingArguments& a = arguments_;
    Problems problems;
    const FsdpPlan plan = fsdp_plan(a, problems);
    for (const std::string& text : problems.texts()) {
      // Messages of keys that were parsed from a file have their location already.
      if (text.starts_with("fsdp: "))
        add({"fsdp"}, text);
      else if (text.starts_with("fsdp_config"))
        add({"fsdp_config"}, text);
      else
        found_.push_back(text);
    }
    if (!problems.empty()) return;
    if (a.pipeline_parallel_degree > 1) pipeline(plan);
    if (a.tensor_parallel_degree > 1) tensor();
    if (!plan.on) return;
    if (plan.hybrid && a.data_parallel_shard_degree)
      add({"fsdp", "data_parallel_shard_degree"},
          "hybrid_shard divides the model over the ranks of a host, and data_parallel_shard_degree "
          "says another number. Write full_shard, or delete data_parallel_shard_degree.");
    if (a.shard_optimizer == "true")
      add({"fsdp", "shard_optimizer"},
          "fsdp divides the optimizer's state with the parameters. Delete shard_optimizer.");
    if (a.gradient_checkpointing && plan.activation_checkpointing)
      add({"gradient_checkpointing", "fsdp_config"},
          "gradient_checkpointing and fsdp_config.activation_checkpointing are the same. Keep "
          "one.");
  }

  void state() {
    const TrainingArguments& a = arguments_;
    if (a.optim_state_dtype != "float32" && a.optim != "adamw")
      add({"optim_state_dtype", "optim"},
          fmt::format("optim_state_dtype {} is adamw's, and {} has its state in the type of the "
                      "parameters. Use adamw, or delete it.",
                      a.optim_state_dtype, a.optim));
  }

  void pipeline(const FsdpPlan& plan) {
    const TrainingArguments& a = arguments_;
    constexpr const char* kKey = "pipeline_parallel_degree";
    if (a.shard_optimizer == "true" && !plan.on)
      add({kKey, "shard_optimizer"},
          "each stage of a pipeline has its optimizer's state. Delete shard_optimizer.");
    if (a.auto_find_batch_size || a.elastic_gpu)
      add({kKey, a.elastic_gpu ? "elastic_gpu" : "auto_find_batch_size"},
          "batches are tried on the whole model, which a pipeline does not hold. Delete one.");
  }

  void tensor() {
    const TrainingArguments& a = arguments_;
    constexpr const char* kKey = "tensor_parallel_degree";
    const auto refuse = [&](bool on, const char* key, const char* text) {
      if (on) add({kKey, key}, text);
    };
    refuse(a.shard_optimizer == "true", "shard_optimizer",
           "each tensor parallel rank has the optimizer's state of its slices. Delete "
           "shard_optimizer.");
    refuse(a.auto_find_batch_size || a.elastic_gpu,
           a.elastic_gpu ? "elastic_gpu" : "auto_find_batch_size",
           "batches are tried on the whole model, of which tensor parallel ranks hold slices. "
           "Delete one.");
    refuse(a.mixed_precision == "fp8" && a.lora, "mixed_precision",
           "a frozen base is stored in fp8 with its transpose, and tensor parallel ranks have "
           "slices of it. Use bf16, or train without lora.");
    refuse(a.optim == "muon" || a.optim == "adafactor", "optim",
           "muon and adafactor step whole matrices, and tensor parallel ranks have slices of them. "
           "Use adamw, adam, lion, rmsprop or sgd.");
  }

  void scheduler() {
    const TrainingArguments& a = arguments_;
    const std::string& type = a.lr_scheduler_type;
    Problems problems;
    problems.attempt([&] {
      MapReader kwargs(kwargs_, fmt::format("lr_scheduler_kwargs ({})", type));
      if (type == "cosine_with_restarts") {
        kwargs.integer("num_cycles", 1, 1, static_cast<std::int64_t>(kMaxCycles));
      } else if (type.rfind("cosine", 0) == 0 || type == "warmup_stable_decay") {
        kwargs.real("num_cycles", 0.5, 0, kMaxCycles);
      }
      if (type == "cosine_with_min_lr") {
        const bool both = kwargs.has("min_lr") && kwargs.has("min_lr_rate");
        kwargs.real("min_lr", 0, 0, kMaxRate);
        kwargs.real("min_lr_rate", 0, 0, 1);
        if (both || (!kwargs.has("min_lr") && !kwargs.has("min_lr_rate"))) {
          add({"lr_scheduler_type", "lr_scheduler_kwargs"},
              "cosine_with_min_lr takes min_lr or min_lr_rate in lr_scheduler_kwargs. Give one of "
              "them.");
        }
      }
      if (type == "polynomial") {
        kwargs.real("power", 1, 0, 1000);
        kwargs.real("lr_end", 1e-7, 0, kMaxRate);
      }
      if (type == "inverse_sqrt") kwargs.integer("timescale", 1, 1, kMaxCount);
      if (type == "warmup_stable_decay") decay(kwargs);
      if (type == "step" || type == "multi_step" || type == "exponential") gamma(kwargs, type);
      kwargs.finish();
    });
    try {
      problems.raise();
    } catch (const UsageError& error) {
      found_.push_back(error.what());
    }
  }

  // Reports early what making a schedule would refuse (lockstep/optim/schedule.h), if the number of
  // steps is known before the data is. Mistakes in the options themselves come earlier.
  void schedule_length() {
    const TrainingArguments& a = arguments_;
    const std::string& type = a.lr_scheduler_type;
    if (type == "polynomial") {
      const double end = option("lr_end", 1e-7);
      if (!(a.learning_rate > end))
        add({"learning_rate", "lr_scheduler_kwargs"},
            fmt::format("polynomial falls to lr_end {}, which is not below learning_rate {}. Set a "
                        "smaller lr_end in lr_scheduler_kwargs.",
                        end, a.learning_rate));
    }
    const bool endless = type == "constant" || type == "constant_with_warmup" ||
                         type == "inverse_sqrt" || type == "step" || type == "multi_step" ||
                         type == "exponential";
    if (a.max_steps <= 0 || endless) return;
    const std::int64_t warmup = in_steps(a.warmup_steps, a.max_steps);
    if (warmup >= a.max_steps) return;  // advice() says what is reached
    const auto decay_steps = static_cast<std::int64_t>(option("num_decay_steps", 0));
    const bool stable_given = option("num_stable_steps", -1) >= 0;
    if (type != "warmup_stable_decay" || stable_given || warmup + decay_steps <= a.max_steps)
      return;
    add({"warmup_steps", "lr_scheduler_kwargs", "max_steps"},
        fmt::format("{} warm-up and {} decay steps are more than max_steps {}. Lower one of them.",
                    warmup, decay_steps, a.max_steps));
  }

  // Returns `fallback` also for what scheduler() has refused.
  double option(const char* name, double fallback) const {
    const Entry* entry = kwargs_.find(name);
    const bool number = entry != nullptr &&
                        (entry->value.is(NodeKind::kInteger) || entry->value.is(NodeKind::kReal)) &&
                        entry->value.real >= 0 && entry->value.real <= kStepLimit;
    return number ? entry->value.real : fallback;
  }

  void decay(MapReader& kwargs) {
    kwargs.integer("num_stable_steps", 0, 0, kMaxCount);
    kwargs.real("min_lr_ratio", 0, 0, 1);
    kwargs.choice("warmup_type", "linear", {"linear", "cosine", "1-sqrt"});
    kwargs.choice("decay_type", "cosine", {"linear", "cosine", "1-sqrt"});
    if (kwargs.integer("num_decay_steps", 0, 0, kMaxCount) == 0) {
      add({"lr_scheduler_type", "lr_scheduler_kwargs"},
          "warmup_stable_decay needs num_decay_steps in lr_scheduler_kwargs. Give it.");
    }
  }

  // Options of PyTorch's StepLR, MultiStepLR and ExponentialLR.
  void gamma(MapReader& kwargs, const std::string& type) {
    constexpr double kMaxGamma = 1000;
    kwargs.real("gamma", 0.1, 0, kMaxGamma);
    const char* needed = type == "step"         ? "step_size"
                         : type == "multi_step" ? "milestones"
                                                : "gamma";
    if (!kwargs.has(needed))
      add({"lr_scheduler_type", "lr_scheduler_kwargs"},
          fmt::format("{} needs {} in lr_scheduler_kwargs. Give it.", type, needed));
    if (type == "step") kwargs.integer("step_size", 1, 1, kMaxCount);
    if (type != "multi_step") return;
    const Node* milestones = kwargs.node("milestones");
    const bool list = milestones != nullptr && milestones->is(NodeKind::kList);
    const auto is_step = [](const Node& item) {
      return item.is(NodeKind::kInteger) && item.integer >= 0 && item.integer <= kMaxCount;
    };
    if (milestones != nullptr &&
        (!list || milestones->items.empty() || !std::ranges::all_of(milestones->items, is_step)))
      add({"lr_scheduler_kwargs"},
          fmt::format("milestones {} of multi_step must be a list of whole numbers of steps: "
                      "[30, 80].",
                      to_json(*milestones)));
  }

  const TrainingArguments& arguments_;
  const Node kwargs_;
  const Where& where_;
  std::vector<std::string> found_;
};

}  // namespace

namespace {

// A key whose value is not read because of the other keys, and why.
struct Idle {
  std::string_view key;
  bool idle;
  std::string why;
};

std::vector<Idle> idle_keys(const TrainingArguments& a) {
  const bool evaluates = a.eval_strategy != Interval::kNo || a.eval_on_start;
  const bool by_eval_steps = a.eval_strategy == Interval::kSteps;
  const bool saves = a.save_strategy != Interval::kNo || a.enable_jit_checkpoint;
  const bool resumes = a.resume_from_checkpoint.value_or("never") != "never";
  constexpr const char* kNoEvaluation = "nothing is evaluated (eval_strategy: no)";
  constexpr const char* kNoSaving =
      "nothing is saved (save_strategy: no, enable_jit_checkpoint: false)";
  const bool fully = a.fsdp && !a.fsdp->empty();
  const bool stages = a.pipeline_parallel_degree > 1;
  // Beside copies of the slices they have an effect, so it depends on the number of ranks.
  const bool slices = a.tensor_parallel_degree > 1 &&
                      env::get_int("WORLD_SIZE").value_or(0) == a.tensor_parallel_degree;
  const bool no_ddp = fully || stages || slices;
  const char* const why = fully    ? "fsdp is set, which averages the gradients of a block"
                          : stages ? "a pipeline averages the gradients of its stages"
                                   : "all ranks hold slices of one model (tensor_parallel_degree), "
                                     "and no other rank has gradients of them";
  const bool betas = a.optim == "adamw" || a.optim == "adam" || a.optim == "lion";
  const bool epsilon = a.optim == "adamw" || a.optim == "adam" || a.optim == "muon";
  const std::string other = "optim is " + a.optim;
  return {
      {"per_device_eval_batch_size", !evaluates, kNoEvaluation},
      {"eval_steps", !by_eval_steps, "eval_strategy is not steps"},
      {"eval_delay", a.eval_strategy == Interval::kNo, kNoEvaluation},
      {"metric_for_best_model", a.eval_strategy == Interval::kNo, kNoEvaluation},
      {"greater_is_better", a.eval_strategy == Interval::kNo, kNoEvaluation},
      {"early_stopping_threshold", !a.early_stopping_patience, "early_stopping_patience is unset"},
      {"logging_steps", a.logging_strategy != Interval::kSteps && (!by_eval_steps || a.eval_steps),
       "logging_strategy is not steps"},
      {"save_steps", a.save_strategy != Interval::kSteps, "save_strategy is not steps"},
      {"save_total_limit", !saves, kNoSaving},
      {"save_only_model", !saves, kNoSaving},
      {"save_on_each_node", !saves, kNoSaving},
      {"adam_beta1", !betas && a.optim != "muon", other},
      {"adam_beta2", !betas && a.optim != "muon", other},
      {"adam_epsilon", !epsilon, other},
      {"momentum", a.optim != "sgd", "optim is not sgd"},
      {"warmup_steps", a.lr_scheduler_type == "constant",
       "lr_scheduler_type is constant (constant_with_warmup has one)"},
      {"ignore_data_skip", !resumes, "resume_from_checkpoint is unset"},
      {"fsdp_config", !fully, "fsdp is unset"},
      {"data_parallel_shard_degree", !fully, "fsdp is unset"},
      {"pipeline_parallel_schedule", !stages, "pipeline_parallel_degree is 1"},
      {"ddp_find_unused_parameters", no_ddp, why},
      {"ddp_bucket_cap_mb", no_ddp, why},
      {"ddp_broadcast_buffers", no_ddp, why},
      {"ddp_static_graph", no_ddp, why},
  };
}

}  // namespace

std::optional<UpdateSize> update_size(const TrainingArguments& a) {
  const std::int64_t batch = a.per_device_train_batch_size;
  if (a.global_batch_size)
    return UpdateSize{"global_batch_size", *a.global_batch_size, batch,
                      fmt::format("batch {}", batch), ranks_of_copy(a)};
  if (!a.tokens_per_update || !a.max_seq_len) return std::nullopt;
  return UpdateSize{"tokens_per_update", *a.tokens_per_update, batch * *a.max_seq_len,
                    fmt::format("batch {} x {} tokens", batch, *a.max_seq_len), ranks_of_copy(a)};
}

std::int64_t ranks_of_copy(const TrainingArguments& a) {
  return a.pipeline_parallel_degree * a.tensor_parallel_degree;
}

std::string copies_text(std::int64_t copies, std::int64_t ranks_of_copy) {
  if (ranks_of_copy == 1) return fmt::format("{} rank{}", copies, copies == 1 ? "" : "s");
  return fmt::format("{} data parallel group{} of {} ranks", copies, copies == 1 ? "" : "s",
                     ranks_of_copy);
}

std::string uneven_text(const UpdateSize& size, int copies) {
  const std::int64_t pass = size.per_pass * copies;
  if (size.wanted % pass == 0) return {};
  const std::int64_t below = size.wanted / pass * pass;
  return fmt::format("{} {} is not a multiple of {} ({}{}). The nearest that are: {}{}.", size.key,
                     size.wanted, pass, size.pass_text,
                     copies * size.ranks_of_copy > 1
                         ? fmt::format(" x {}", copies_text(copies, size.ranks_of_copy))
                         : "",
                     below > 0 ? fmt::format("{} and ", below) : "", below + pass);
}

std::int64_t in_steps(double value, std::int64_t max_steps) {
  if (value >= 1) return static_cast<std::int64_t>(value);
  return static_cast<std::int64_t>(std::ceil(value * static_cast<double>(max_steps)));
}

std::string short_warmup_text(const TrainingArguments& a, std::int64_t max_steps) {
  const std::int64_t warmup = in_steps(a.warmup_steps, max_steps);
  if (max_steps <= 0 || warmup < max_steps || a.lr_scheduler_type == "constant") return {};
  // The last step uses the rate that max_steps - 1 steps have reached.
  const double share = static_cast<double>(max_steps - 1) / static_cast<double>(warmup);
  const bool linear = a.lr_scheduler_type != "warmup_stable_decay";
  return fmt::format(
      "warmup_steps {} is not below the {} steps of the training: the learning rate "
      "rises to {} and never reaches {}.",
      warmup, max_steps, linear ? fmt::format("{:.3g}", share * a.learning_rate) : "a part",
      a.learning_rate);
}

std::string fp8_recipe_name(const TrainingArguments& arguments) {
  if (arguments.mixed_precision != "fp8") return "";
  const Node none;
  MapReader keys(arguments.fp8 ? *arguments.fp8 : none, "fp8");
  const std::string recipe = keys.choice("recipe", "tensorwise", {"tensorwise", "rowwise"});
  keys.finish();
  return recipe;
}

std::vector<std::string> contradictions(const TrainingArguments& arguments, const Where& where) {
  return Checker(arguments, where).run();
}

std::vector<std::string> advice(const TrainingArguments& arguments, const Where& where) {
  std::vector<std::string> notes;
  const auto given = [&](std::string_view key) {
    const std::string place = where(key);
    return !place.empty() && place != "default";
  };
  for (const Idle& one : idle_keys(arguments)) {
    const KeySpec& key = *find_key(one.key);
    const bool chosen = given(one.key) && !where(one.key).starts_with("preset ") &&
                        !same_value(value_of(arguments, key), value_of({}, key));
    if (one.idle && chosen)
      notes.push_back(fmt::format("{}: {} has no effect: {}.", where(one.key), one.key, one.why));
  }
  Problems reported;  // by contradictions()
  for (const auto& [key, why] : fsdp_plan(arguments, reported).idle)
    notes.push_back(
        fmt::format("{}: fsdp_config.{} has no effect: {}.", where("fsdp_config"), key, why));
  if (arguments.max_steps > 0 && given("num_train_epochs") && given("max_steps")) {
    notes.push_back(fmt::format("{}: max_steps {} wins over num_train_epochs ({}).",
                                where("max_steps"), arguments.max_steps,
                                where("num_train_epochs")));
  }
  if (const std::string text = short_warmup_text(arguments, arguments.max_steps); !text.empty())
    notes.push_back(fmt::format("{}: {}", where("warmup_steps"), text));
  if (arguments.logging_strategy == Interval::kSteps && arguments.logging_steps == 1) {
    notes.push_back(
        fmt::format("{}: logging_steps 1 waits for the device in every step. 5 or 10 "
                    "cost a fifth or a tenth of that.",
                    where("logging_steps")));
  }
  return notes;
}

void expand_paths(TrainingArguments& arguments) {
  for (const KeySpec& key : key_table())
    if (key.path || std::holds_alternative<Of<NodePtr>>(key.member))
      assign(arguments, key, value_of(arguments, key));
}

}  // namespace lockstep::train

namespace lockstep {

void check_arguments(const TrainingArguments& arguments) {
  Problems problems;
  TrainingArguments scratch;  // what is right by itself; the rest keeps its default
  for (const train::KeySpec& key : train::key_table()) {
    const Node value = train::value_of(arguments, key);
    problems.attempt([&] { train::assign(scratch, key, value); });
  }
  for (std::string& text :
       train::contradictions(scratch, [](std::string_view) { return std::string(); }))
    problems.add(std::move(text));
  problems.raise();
}

}  // namespace lockstep

namespace lockstep::train {

void check_evaluation(const TrainingArguments& arguments, bool has_eval_data) {
  const bool by_strategy = arguments.eval_strategy != Interval::kNo;
  if (has_eval_data || (!by_strategy && !arguments.eval_on_start)) return;
  throw UsageError("trainer",
                   "{} asks for evaluations, and the task has no eval_data, or an empty one. Set "
                   "it (in a training file: data.eval_bytes, longer than max_seq_len, "
                   "data.eval_samples, data.eval_path, or token shards of the split val), or {}.",
                   by_strategy ? "eval_strategy" : "eval_on_start",
                   by_strategy ? "eval_strategy: no" : "eval_on_start: false");
}

std::string full_metric_name(const std::string& metric) {
  return metric.rfind("eval_", 0) == 0 ? metric : "eval_" + metric;
}

void check_metric(const TrainingArguments& arguments, const std::vector<std::string>& given) {
  const bool needed = arguments.load_best_model_at_end || arguments.early_stopping_patience ||
                      arguments.save_strategy == Interval::kBest;
  const std::string name = full_metric_name(arguments.metric_for_best_model);
  if (!needed || std::find(given.begin(), given.end(), name) != given.end()) return;
  throw UsageError(
      "trainer",
      "metric_for_best_model is '{}' and evaluation gives no {}.{} It gives {}. Choose "
      "one of them, or give the task totals of that name.",
      arguments.metric_for_best_model, name, did_you_mean(name, given), fmt::join(given, ", "));
}

void check_precision(const TrainingArguments& arguments, bool on_cpu) {
  if (!arguments.fp16 || !on_cpu) return;
  if (env::get_bool("LOCKSTEP_HALF_ON_CPU").value_or(false)) return;
  throw UsageError("trainer",
                   "fp16 needs a GPU, and this rank computes on the CPU. Use bf16, which a CPU "
                   "computes too, or neither.");
}

void check_resume(const std::string& flag) {
  std::error_code ignored;
  if (flag == "auto" || flag == "never") return;
  if (std::filesystem::is_directory(flag, ignored)) {
    if (io::has_manifest(flag)) return;
    const auto inside = io::list_numbered(flag, kCheckpointPrefix);
    if (inside.empty()) return;  // reading it reports what is missing
    throw UsageError("checkpoint",
                     "{} is an output_dir and not a checkpoint. Its newest checkpoint is {}. Give "
                     "that folder, or set output_dir to {} and resume_from_checkpoint (--resume) "
                     "to auto.",
                     flag, inside.front().path, flag);
  }
  throw UsageError(
      "checkpoint",
      "{} cannot be used: there is no such folder.{}{} resume_from_checkpoint (--resume) "
      "is auto (continue from the newest whole checkpoint in output_dir), never (start "
      "again) or the folder of a checkpoint.",
      flag, link_advice(flag), did_you_mean(flag, std::vector<std::string>{"auto", "never"}));
}

namespace {

// Whether only the rank of an adapter differs: A is [rank, in], B is [out, rank].
bool differs_in_rank(const std::string& name, const std::vector<std::int64_t>& saved,
                     const std::vector<std::int64_t>& own) {
  if (saved.size() != 2 || own.size() != 2) return false;
  return (name.ends_with("lora_A.weight") && saved[1] == own[1]) ||
         (name.ends_with("lora_B.weight") && saved[0] == own[0]);
}

}  // namespace

void check_weights(const std::string& folder, const io::SafetensorsSet& weights,
                   const std::vector<io::TensorShape>& model) {
  std::set<std::string> known;
  std::vector<std::string> missing;
  for (const io::TensorShape& tensor : model) {
    known.insert(tensor.name);
    const auto found = weights.find(tensor.name);
    if (found.entry == nullptr) {
      missing.push_back(tensor.name);
    } else if (found.entry->shape != tensor.shape) {
      const bool rank = differs_in_rank(tensor.name, found.entry->shape, tensor.shape);
      throw UsageError(
          "checkpoint", "{}: '{}' is [{}] and the model's is [{}]. The checkpoint {}{}.", folder,
          tensor.name, fmt::join(found.entry->shape, ", "), fmt::join(tensor.shape, ", "),
          rank ? "has adapters of another rank" : "belongs to another model",
          std::filesystem::exists(folder + "/training_args.json")
              ? fmt::format("; compare `{}` in its training_args.json", rank ? "lora" : "model")
              : "");
    }
  }
  std::vector<std::string> unknown;
  for (const std::string& name : weights.names())
    if (!known.contains(name)) unknown.push_back(name);
  if (missing.empty() && unknown.empty()) return;
  throw UsageError("checkpoint",
                   "{} does not fit the model: {} of its tensors are missing ({}), {} are not "
                   "the model's ({}). It belongs to another model.",
                   folder, missing.size(), fmt::join(missing, ", "), unknown.size(),
                   fmt::join(unknown, ", "));
}

void check_output_dir(const std::string& output_dir) {
  std::error_code error;
  for (std::filesystem::path place = std::filesystem::absolute(output_dir, error); !place.empty();
       place = place.parent_path()) {
    const auto type = std::filesystem::status(place, error).type();
    if (type == std::filesystem::file_type::directory) {
      if (::access(place.c_str(), W_OK | X_OK) == 0) return;
      throw UsageError("trainer",
                       "output_dir {}: nothing can be written in {} ({}). Choose another "
                       "output_dir, or change the permissions of that folder.",
                       output_dir, place.string(), std::strerror(errno));
    }
    if (place == place.parent_path()) return;
    if (type == std::filesystem::file_type::not_found || type == std::filesystem::file_type::none)
      continue;
    throw UsageError("trainer", "output_dir {}: {} is a file, not a folder. Choose another one.",
                     output_dir, place.string());
  }
}

void check_room(const TrainingArguments& arguments, const CheckpointSize& size, bool two) {
  check_output_dir(arguments.output_dir);
  const bool by_plan = arguments.save_strategy != Interval::kNo;
  if (!by_plan && !arguments.enable_jit_checkpoint) return;
  const std::uint64_t one =
      size.model + (arguments.save_only_model ? 0 : size.optimizer) + kSmallFiles;
  const std::uint64_t free = io::free_space(arguments.output_dir);
  if (free >= (two ? 2 * one : one)) return;
  const std::string found =
      fmt::format("{} has room for {} and one checkpoint takes about {}", arguments.output_dir,
                  io::size_text(free), io::size_text(one));
  if (!by_plan) {
    log::warning("trainer", "{}: a stop signal will not be able to save. Free some space.", found);
    return;
  }
  throw UsageError("trainer",
                   "{}{}. Free some space, choose another output_dir, or set save_strategy: no.",
                   found,
                   two ? "; two exist side by side until the older one is deleted "
                         "(save_total_limit)"
                       : "");
}

}  // namespace lockstep::train
