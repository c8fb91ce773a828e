// The training file: defaults, order of sources, every kind of mistake with its place and remedy.
#include "lockstep/train/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::train {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

Config resolve(const std::string& yaml, std::vector<std::string> flags = {},
               Environment environment = {}) {
  return resolve_config({.file = parse_yaml(yaml, "t.yaml"),
                         .environment = std::move(environment),
                         .flags = std::move(flags),
                         .launcher_keys = {"mixed_precision", "num_processes", "num_machines"}});
}

std::string refused(const std::string& yaml, std::vector<std::string> flags = {},
                    Environment environment = {}) {
  return message_of([&] { resolve(yaml, std::move(flags), std::move(environment)); });
}

std::string shown(const Config& config, std::string_view key) {
  const Setting& setting = config.setting(key);
  return to_json(setting.value) + " from " + setting.where;
}

// ------------------------------------------------------------------ the table

TEST(ConfigKeys, HuggingFacesDefaults) {
  const Config config = resolve("");
  const std::pair<const char*, const char*> expected[] = {
      {"output_dir", "\"trainer_output\""},
      {"per_device_train_batch_size", "8"},
      {"num_train_epochs", "3.0"},
      {"max_steps", "-1"},
      {"learning_rate", "5e-05"},
      {"adam_beta2", "0.999"},
      {"adam_epsilon", "1e-08"},
      {"lr_scheduler_type", "\"linear\""},
      {"max_grad_norm", "1.0"},
      {"seed", "42"},
      {"data_seed", "null"},
      {"logging_steps", "500.0"},
      {"eval_strategy", "\"no\""},
      {"save_strategy", "\"steps\""},
      {"report_to", "[\"none\"]"},
      {"dataloader_pin_memory", "true"},
      {"ddp_timeout", "1800"},
      {"enable_jit_checkpoint", "true"},
      {"ddp_find_unused_parameters", "null"},
      {"average_tokens_across_devices", "true"},
  };
  for (const auto& [key, value] : expected)
    EXPECT_EQ(shown(config, key), std::string(value) + " from default") << key;
  EXPECT_THAT(config.notes, IsEmpty());
  EXPECT_EQ(config_text(config, false), "");
}

TEST(ConfigKeys, EveryBackendOfAWorldCanBeNamed) {
  for (const char* backend : {"shm", "gloo", "nccl"})
    EXPECT_EQ(resolve(std::string("ddp_backend: ") + backend).arguments.ddp_backend, backend);
  EXPECT_THAT(refused("ddp_backend: mpi\n"), HasSubstr("ddp_backend must be shm, gloo or nccl"));
  EXPECT_EQ(resolve("use_cpu: true\nddp_backend: shm\n").arguments.ddp_backend, "shm");
}

// One of three words, two of which are booleans in YAML.
TEST(ConfigKeys, CompileModelIsAWordABooleanOrAFlagAlone) {
  EXPECT_EQ(resolve("").arguments.compile_model, "auto");
  for (const char* word : {"auto", "true", "false"})
    EXPECT_EQ(resolve(std::string("compile_model: ") + word).arguments.compile_model, word);
  EXPECT_EQ(resolve("", {"--compile_model"}).arguments.compile_model, "true");
  EXPECT_EQ(resolve("", {"--no_compile_model"}).arguments.compile_model, "false");
}

TEST(ConfigKeys, GradientCheckpointingIsABooleanAFlagAloneOrParts) {
  EXPECT_TRUE(resolve("", {"--gradient_checkpointing"}).arguments.gradient_checkpointing);
  EXPECT_FALSE(resolve("gradient_checkpointing: true\n", {"--no_gradient_checkpointing"})
                   .arguments.gradient_checkpointing);
  const auto parts = resolve("", {"--gradient_checkpointing", "{parts: [norm]}"});
  EXPECT_EQ(parts.arguments.gradient_checkpointing.parts, std::vector<std::string>{"norm"});
}

TEST(ConfigKeys, ShardOptimizerIsAWordOrABoolean) {
  EXPECT_EQ(resolve("").arguments.shard_optimizer, "auto");
  for (const char* word : {"auto", "true", "false"}) {
    EXPECT_EQ(resolve(std::string("shard_optimizer: ") + word).arguments.shard_optimizer, word);
    EXPECT_EQ(resolve("", {"--shard_optimizer", word}).arguments.shard_optimizer, word);
  }
  EXPECT_THAT(
      refused("shard_optimizer: always\n"),
      HasSubstr("t.yaml:1:18: shard_optimizer must be auto, true or false, and 'always' is"));
}

TEST(ConfigKeys, EveryKeyReadsBackWhatItWrites) {
  const TrainingArguments defaults;
  for (const KeySpec& key : key_table()) {
    TrainingArguments arguments;
    const Node value = value_of(defaults, key);
    EXPECT_NO_THROW(assign(arguments, key, value)) << key.name;
    EXPECT_TRUE(same_value(value_of(arguments, key), value)) << key.name;
    EXPECT_FALSE(key.help.empty());
    EXPECT_EQ(key.optional(), !key.unset.empty()) << key.name;
  }
}

// No value that a double or an integer can hold gets past the table to be cast.
TEST(ConfigKeys, EveryNumberHasARange) {
  int numbers = 0;
  for (const KeySpec& key : key_table()) {
    const auto is = [&](auto sample) {
      using Type = decltype(sample);
      return std::holds_alternative<Of<Type>>(key.member) ||
             std::holds_alternative<Of<std::optional<Type>>>(key.member);
    };
    if (!is(std::int64_t{}) && !is(double{}) && !is(Number{})) continue;
    ++numbers;
    ASSERT_NE(key.check, nullptr) << key.name;
    const std::string range(key.check->range);
    EXPECT_TRUE(range.find(" to ") != range.npos || range.find("up to ") != range.npos) << range;
    for (const char* text : {"9223372036854775807", "9223372036854775808", "1e300", ".inf", ".nan",
                             "-1e300", "-9223372036854775808", "-.inf"}) {
      const Node node = plain_scalar(text, location_named("t.yaml"));
      if (std::string(text).starts_with("92") && key.check->holds(node.real)) {
        // A seed is any integer, and a norm is never converted to one.
        EXPECT_THAT((std::set<std::string_view>{"seed", "data_seed", "max_grad_norm",
                                                "early_stopping_threshold"}),
                    Contains(key.name));
        continue;
      }
      TrainingArguments arguments;
      const std::string message = message_of([&] { assign(arguments, key, node); });
      EXPECT_THAT(message, StartsWith("[config] t.yaml: " + std::string(key.name) + " must be " +
                                      range + ", and "))
          << text;
      EXPECT_TRUE(same_value(value_of(arguments, key), value_of({}, key))) << key.name;
    }
  }
  EXPECT_GT(numbers, 25);
}

TEST(ConfigKeys, ThePageHasTheTable) {
  const char* source = std::getenv("LOCKSTEP_SOURCE");
  ASSERT_NE(source, nullptr);
  const std::string page = read_file(std::string(source) + "/docs/configuration.md");
  EXPECT_NE(page.find(keys_markdown()), std::string::npos)
      << "docs/configuration.md must hold this (lockstep config keys --markdown):\n"
      << keys_markdown();
}

TEST(ConfigKeys, HelpNamesEveryKey) {
  const std::string help = keys_help();
  for (const std::string& name : key_names()) EXPECT_THAT(help, HasSubstr("--" + name + " "));
  EXPECT_THAT(keys_help("warmup"), StartsWith("  --warmup_steps "));
  EXPECT_THAT(keys_help("warmup"), Not(HasSubstr("--learning_rate")));
  EXPECT_EQ(keys_help("warmop"), "");
}

// ------------------------------------------------------------------ order

TEST(Config, FlagsBeatTheEnvironmentBeatsTheFileBeatsThePreset) {
  const std::string file = "preset: fast\nseed: 1\nlearning_rate: 1e-4\nlogging_steps: 7\n";
  const Config config =
      resolve(file, {"--seed", "3"}, {{"LOCKSTEP_SEED", "2"}, {"LOCKSTEP_LEARNING_RATE", "2e-4"}});
  EXPECT_EQ(shown(config, "seed"), "3 from --seed");
  EXPECT_THAT(config.setting("seed").beaten, ElementsAre("LOCKSTEP_SEED (2)", "t.yaml:2:1 (1)"));
  EXPECT_EQ(shown(config, "learning_rate"), "0.0002 from LOCKSTEP_LEARNING_RATE");
  EXPECT_EQ(shown(config, "logging_steps"), "7.0 from t.yaml:4:1");
  EXPECT_THAT(config.setting("logging_steps").beaten, ElementsAre("preset fast (10.0)"));
  EXPECT_EQ(shown(config, "per_device_train_batch_size"), "8 from preset fast");
  EXPECT_EQ(shown(config, "save_total_limit"), "1 from preset fast");
  EXPECT_EQ(shown(config, "weight_decay"), "0.0 from default");
  EXPECT_EQ(config.arguments.seed, 3);
  EXPECT_EQ(config.arguments.learning_rate, 2e-4);
  EXPECT_THAT(config_text(config, false),
              HasSubstr("seed                           3                     --seed, beats "
                        "LOCKSTEP_SEED (2), t.yaml:2:1 (1)\n"));
}

// Every new text key is a path or is named here.
TEST(Config, EveryPathMayBeginAtHome) {
  const std::set<std::string_view> plain = {"run_name", "metric_for_best_model", "optim_args"};
  const char* before = std::getenv("HOME");
  const std::string home = before != nullptr ? before : "";
  ::setenv("HOME", "/srv/ada", 1);
  int paths = 0;
  for (const KeySpec& key : key_table()) {
    const bool text = std::holds_alternative<Of<std::string>>(key.member) ||
                      std::holds_alternative<Of<std::optional<std::string>>>(key.member);
    if (!text || !key.choices.empty() || key.name == "fsdp") continue;  // words of its own
    const std::string name(key.name);
    EXPECT_NE(key.path, plain.contains(key.name)) << name;
    const std::string expected = key.path ? "\"/srv/ada/x/y\"" : "\"~/x/y\"";
    if (!key.path && name == "run_name") continue;  // has no '/'
    EXPECT_THAT(shown(resolve(name + ": ~/x/y\n"), name), StartsWith(expected));
    EXPECT_THAT(shown(resolve("", {"--" + name + "=~/x/y"}), name), StartsWith(expected));
    EXPECT_THAT(shown(resolve("", {}, {{key.variable(), "~/x/y"}}), name), StartsWith(expected));
    if (!key.path) continue;
    ++paths;
    EXPECT_THAT(shown(resolve(name + ": \"~\"\n"), name), StartsWith("\"/srv/ada\""));
    EXPECT_THAT(shown(resolve(name + ": a/~/b\n"), name), StartsWith("\"a/~/b\""));
  }
  EXPECT_EQ(paths, 3);
  const Config maps =
      resolve("data: {path: ~/a, eval_path: ~/b, response: ~/c}\nmodel:\n  weights: ~/d\n",
              {"--output_dir=~root"});
  EXPECT_EQ(shown(maps, "data"),
            "{\"path\":\"/srv/ada/a\",\"eval_path\":\"/srv/ada/b\",\"response\":\"~/c\"} from "
            "t.yaml:1:1");
  EXPECT_EQ(shown(maps, "model"), "{\"weights\":\"/srv/ada/d\"} from t.yaml:2:1");
  EXPECT_EQ(maps.arguments.output_dir, "/root");
  EXPECT_EQ(refused("output_dir: ~nobody-has-this-name/x\n"),
            "[config] t.yaml:1:13: output_dir: '~nobody-has-this-name/x' names the home directory "
            "of user nobody-has-this-name, which is not known on this machine. Write the whole "
            "path, or ./~nobody-has-this-name/x for a folder of that name.");
  TrainingArguments program{.dataset_dir = "~", .output_dir = "~/x"};  // as the Trainer does
  program.data = std::make_shared<const Node>(parse_yaml("{path: ~/a}", ""));
  expand_paths(program);
  EXPECT_EQ(program.dataset_dir, "/srv/ada");
  EXPECT_EQ(program.output_dir, "/srv/ada/x");
  EXPECT_EQ(to_json(*program.data), "{\"path\":\"/srv/ada/a\"}");
  EXPECT_EQ(program.resume_from_checkpoint, std::nullopt);
  home.empty() ? ::unsetenv("HOME") : ::setenv("HOME", home.c_str(), 1);
}

TEST(Config, LongValuesKeepTheirDistance) {
  const std::string folder(40, 'x');
  EXPECT_EQ(config_text(resolve("output_dir: " + folder + "\n"), false),
            "output_dir                     " + folder + " t.yaml:1:1\n");
}

TEST(Config, ThePresetMayComeFromAnySource) {
  EXPECT_EQ(shown(resolve("preset: fast\n", {"--preset=standard"}), "gradient_accumulation_steps"),
            "2 from preset standard");
  EXPECT_EQ(shown(resolve("", {}, {{"LOCKSTEP_CONFIG_PRESET", "fast"}}), "logging_steps"),
            "10.0 from preset fast");
  // The build has a variable of that name.
  EXPECT_EQ(shown(resolve("", {}, {{"LOCKSTEP_PRESET", "asan"}}), "preset"), "null from default");
}

TEST(Config, FlagsInEverySpelling) {
  const Config config =
      resolve("", {"--learning-rate=1e-4", "--bf16", "--no_dataloader_pin_memory", "--max_steps",
                   "-1", "--tf32", "false", "--report_to", "tensorboard", "--eval_strategy=no",
                   "--lr_scheduler_type=cosine", "--lr_scheduler_kwargs={num_cycles: 2}",
                   "--save_total_limit=none", "--model=gpt", "--run_name", "42"});
  EXPECT_EQ(config.arguments.learning_rate, 1e-4);
  EXPECT_TRUE(config.arguments.bf16);
  EXPECT_FALSE(config.arguments.dataloader_pin_memory);
  EXPECT_EQ(config.arguments.max_steps, -1);
  EXPECT_EQ(config.arguments.tf32, false);
  EXPECT_THAT(config.arguments.report_to, ElementsAre("tensorboard"));
  EXPECT_EQ(shown(config, "lr_scheduler_kwargs"), "{\"num_cycles\":2} from --lr_scheduler_kwargs");
  EXPECT_EQ(config.arguments.save_total_limit, std::nullopt);
  EXPECT_EQ(config.arguments.model->text, "gpt");
  EXPECT_EQ(config.arguments.run_name, "42");
}

TEST(Config, ValuesOfTheFile) {
  const Config config = resolve(
      "max_steps: 1e4\nlogging_steps: 0.05\nwarmup_steps: 0.1\noptim: adamw_torch_fused\n"
      "eval_strategy: no\nreport_to: [tensorboard]\nsave_total_limit: null\n"
      "resume_from_checkpoint: true\noutput_dir: 2024\nmodel:\n  name: gpt\n  n_layer: 4\n"
      "save_strategy: best\nddp_bucket_cap_mb: 25\n",
      {"--eval_strategy=epoch"});
  EXPECT_EQ(config.arguments.max_steps, 10000);
  EXPECT_EQ(config.arguments.logging_steps, 0.05);
  EXPECT_EQ(config.arguments.optim, "adamw");
  EXPECT_EQ(config.arguments.eval_strategy, Interval::kEpoch);
  EXPECT_EQ(config.arguments.save_strategy, Interval::kBest);
  EXPECT_EQ(config.arguments.resume_from_checkpoint, "auto");
  EXPECT_EQ(config.arguments.output_dir, "2024");
  EXPECT_EQ(config.arguments.model->find("n_layer")->value.integer, 4);
  EXPECT_EQ(config.arguments.ddp_bucket_cap_mb, 25.0);
}

TEST(Config, TheLauncherSaysPrecisionWhereNobodyElseDoes) {
  const Environment bf16 = {{"ACCELERATE_MIXED_PRECISION", "bf16"}, {"ACCELERATE_USE_CPU", "true"}};
  EXPECT_EQ(shown(resolve("", {}, bf16), "bf16"), "true from ACCELERATE_MIXED_PRECISION");
  EXPECT_EQ(shown(resolve("", {}, bf16), "use_cpu"), "true from ACCELERATE_USE_CPU");
  EXPECT_EQ(shown(resolve("use_cpu: false\n", {}, bf16), "use_cpu"), "false from t.yaml:1:1");
  EXPECT_EQ(shown(resolve("bf16: false\n", {}, bf16), "bf16"), "false from t.yaml:1:1");
  const Environment fp8 = {{"ACCELERATE_MIXED_PRECISION", "fp8"}};
  EXPECT_EQ(shown(resolve("", {}, fp8), "mixed_precision"),
            "\"fp8\" from ACCELERATE_MIXED_PRECISION");
  EXPECT_EQ(fp8_recipe_name(resolve("fp16: false\n", {}, fp8).arguments), "");
}

TEST(Config, OlderSpellingsAreAcceptedWithALine) {
  const Config config = resolve(
      "warmup_ratio: 0.1\nevaluation_strategy: epoch\nno_cuda: true\nlogging_dir: x\n"
      "save_safetensors: true\nlocal_rank: -1\ntorch_compile: true\n");
  EXPECT_EQ(config.arguments.warmup_steps, 0.1);
  EXPECT_EQ(config.arguments.eval_strategy, Interval::kEpoch);
  EXPECT_TRUE(config.arguments.use_cpu);
  EXPECT_EQ(config.arguments.compile_model, "true");
  EXPECT_EQ(config.notes.size(), 7u);
  EXPECT_EQ(config.notes[1],
            "t.yaml:2:1: evaluation_strategy is an older spelling: its name is eval_strategy now.");
  EXPECT_THAT(config.notes[6], HasSubstr("which captures the step as one CUDA graph"));
  EXPECT_TRUE(resolve("", {"--no_cuda"}).arguments.use_cpu);
}

TEST(Config, Notes) {
  EXPECT_THAT(resolve("max_steps: 10\nnum_train_epochs: 2\n").notes,
              ElementsAre("t.yaml:1:1: max_steps 10 wins over num_train_epochs (t.yaml:2:1)."));
  EXPECT_THAT(resolve("max_steps: 10\nwarmup_steps: 10\n").notes,
              ElementsAre(HasSubstr("warmup_steps 10 is not below the 10 steps of the training")));
  // A recipe that is shortened for a trial trains as Hugging Face's does.
  EXPECT_THAT(
      resolve("warmup_steps: 2000\n", {"--max_steps=101"}).notes,
      ElementsAre("t.yaml:1:1: warmup_steps 2000 is not below the 101 steps of the training: "
                  "the learning rate rises to 2.5e-06 and never reaches 5e-05."));
  EXPECT_THAT(resolve("logging_steps: 1\n").notes,
              ElementsAre(HasSubstr("waits for the device in every step. 5 or 10")));
  EXPECT_THAT(resolve("", {}, {{"LOCKSTEP_LEARNINGRATE", "1"}}).notes,
              ElementsAre(HasSubstr("Did you mean LOCKSTEP_LEARNING_RATE?")));
  EXPECT_THAT(resolve("", {}, {{"LOCKSTEP_LEARNING_RAT", "1"}}).notes,
              ElementsAre("LOCKSTEP_LEARNING_RAT is not read. Did you mean "
                          "LOCKSTEP_LEARNING_RATE?"));
  for (const char* other :
       {"LOCKSTEP_DEVICE", "LOCKSTEP_BACKEND", "LOCKSTEP_TIMEOUT_S", "LOCKSTEP_SHARE_DEVICE",
        "LOCKSTEP_CONTROL_FD", "LOCKSTEP_STORE_CHANNEL"})
    EXPECT_THAT(resolve("", {}, {{other, "1"}}).notes, IsEmpty()) << other;
}

// What is set and never read beside the other keys is named; with its default it is not.
TEST(Config, KeysWithoutEffectAreNoted) {
  const std::pair<const char*, const char*> cases[] = {
      {"per_device_eval_batch_size: 4\n", "nothing is evaluated"},
      {"eval_steps: 10\n", "eval_strategy is not steps"},
      {"eval_steps: 10\neval_strategy: epoch\n", "eval_strategy is not steps"},
      {"eval_delay: 2\n", "nothing is evaluated"},
      {"metric_for_best_model: accuracy\n", "nothing is evaluated"},
      {"greater_is_better: true\n", "nothing is evaluated"},
      {"early_stopping_threshold: 0.1\n", "early_stopping_patience is unset"},
      {"logging_steps: 10\nlogging_strategy: epoch\n", "logging_strategy is not steps"},
      {"save_steps: 10\nsave_strategy: epoch\n", "save_strategy is not steps"},
      {"save_total_limit: 2\nsave_strategy: no\nenable_jit_checkpoint: false\n",
       "nothing is saved"},
      {"save_only_model: true\nsave_strategy: no\nenable_jit_checkpoint: false\n",
       "nothing is saved"},
      {"save_on_each_node: true\nsave_strategy: no\nenable_jit_checkpoint: false\n",
       "nothing is saved"},
      {"adam_beta1: 0.8\noptim: sgd\n", "optim is sgd"},
      {"adam_beta2: 0.8\noptim: sgd\n", "optim is sgd"},
      {"adam_epsilon: 1e-6\noptim: rmsprop\n", "optim is rmsprop"},
      {"momentum: 0.9\n", "optim is not sgd"},
      {"warmup_steps: 5\nlr_scheduler_type: constant\n", "lr_scheduler_type is constant"},
      {"ignore_data_skip: true\n", "resume_from_checkpoint is unset"},
  };
  for (const auto& [yaml, why] : cases) {
    const std::string text = yaml;
    const std::string key = text.substr(0, text.find(':'));
    EXPECT_THAT(resolve(text).notes,
                ElementsAre(StartsWith("t.yaml:1:1: " + key + " has no effect: " + why)))
        << text;
  }
  for (const char* yaml :
       {"eval_steps: 10\neval_strategy: steps\n", "preset: fast\nlogging_strategy: epoch\n",
        "per_device_eval_batch_size: 4\neval_on_start: true\n", "eval_delay: 0\n",
        "logging_steps: 10\nlogging_strategy: epoch\neval_strategy: steps\n",
        "ignore_data_skip: true\nresume_from_checkpoint: auto\n"})
    EXPECT_THAT(resolve(yaml).notes, IsEmpty()) << yaml;
}

TEST(Config, TheRecordIsJson) {
  const Config config = resolve("seed: 7\n", {"--seed=8"});
  const Node record = parse_json(config_json(config), "record");
  const Node& seed = record.find("settings")->value.find("seed")->value;
  EXPECT_EQ(to_json(seed), "{\"value\":8,\"from\":\"--seed\",\"beats\":[\"t.yaml:1:1 (7)\"]}");
  EXPECT_EQ(record.find("settings")->value.entries.size(), key_table().size());
}

// ------------------------------------------------------------------ mistakes

struct Mistake {
  const char* name;
  std::string yaml;
  std::string message;  // after "[config] "
};
class ConfigMistake : public ::testing::TestWithParam<Mistake> {};
TEST_P(ConfigMistake, IsNamedWithPlaceKeyAndRemedy) {
  EXPECT_THAT(refused(GetParam().yaml), StartsWith("[config] " + GetParam().message));
}

const Mistake kMistakes[] = {
    {"Unknown", "seed: 1\nlearning_rat: 1e-4\n",
     "t.yaml:2:1: there is no key 'learning_rat'. Did you mean learning_rate?"},
    {"Dashes", "learning-rate: 1\n",
     "t.yaml:1:1: there is no key 'learning-rate'. Did you mean learning_rate?"},
    {"Nothing", "qqqqqqqqqqqq: 1\n",
     "t.yaml:1:1: there is no key 'qqqqqqqqqqqq'. Delete it; `lockstep config keys` lists"},
    {"LauncherKey", "num_processes: 2\n",
     "t.yaml:1:1: num_processes belongs in the launcher's file (Accelerate's, `lockstep run "
     "--config-file`), not in the training file. Move it there."},
    {"LauncherTypo", "num_machine: 2\n",
     "t.yaml:1:1: there is no key 'num_machine'. Did you mean num_machines? That belongs in the "
     "launcher's file (Accelerate's)."},
    {"Foreign", "push_to_hub: true\n",
     "t.yaml:1:1: push_to_hub is a key of Hugging Face's that is not read here: nothing is "
     "uploaded. Delete it."},
    {"Section", "training_arguments:\n  learning_rate: 1\n",
     "t.yaml:1:1: there is no section 'training_arguments'. Write its keys (learning_rate, ...) at "
     "the top level"},
    {"Bool", "bf16: yes\n",
     "t.yaml:1:7: bf16 must be true or false, and 'yes' is a string here. Write true."},
    {"BoolNumber", "bf16: 1\n", "t.yaml:1:7: bf16 must be true or false, and 1 is a number."},
    {"Integer", "seed: abc\n", "t.yaml:1:7: seed must be a whole number, and 'abc' is a string."},
    {"Whole", "max_steps: 1.5\n", "t.yaml:1:12: max_steps must be a whole number, and 1.5 is not"},
    {"Quoted", "learning_rate: '1e-4'\n",
     "t.yaml:1:16: learning_rate must be a number, and '1e-4' is a string. Write 1e-4, without "
     "quotes."},
    {"Text", "output_dir: [a]\n", "t.yaml:1:13: output_dir must be a string, but this is a list"},
    {"TextBool", "run_name: true\n",
     "t.yaml:1:11: run_name must be a string, and true is a boolean. "
     "Quote it: \"true\"."},
    {"TextEmpty", "output_dir: ''\n", "t.yaml:1:13: output_dir must not be empty."},
    {"Null", "seed: null\n",
     "t.yaml:1:7: seed cannot be unset. Delete the line for its default (42)."},
    {"Empty", "seed:\n", "t.yaml:1:1: seed cannot be unset."},
    {"Range", "learning_rate: -1\n",
     "t.yaml:1:16: learning_rate must be above 0, up to 1000, and -1 is not."},
    {"Zero", "per_device_train_batch_size: 0\n",
     "t.yaml:1:30: per_device_train_batch_size must be from 1 to 1000000, and 0 is not."},
    {"Infinity", "weight_decay: .inf\n",
     "t.yaml:1:15: weight_decay must be from 0 to 1000, and .inf"},
    {"Beta", "adam_beta1: 1.0\n", "t.yaml:1:13: adam_beta1 must be from 0 to below 1, and 1.0 is"},
    {"Steps", "logging_steps: 2.5\n",
     "t.yaml:1:16: logging_steps must be a whole number of steps up to 1000000000000, or below 1 "
     "as a "
     "share of all steps, and 2.5 is not."},
    {"MaxSteps", "max_steps: 0\n",
     "t.yaml:1:12: max_steps must be -1 (off) or from 1 to 1000000000000, and 0 is"},
    {"Forever", "max_steps: 9223372036854775807\n",
     "t.yaml:1:12: max_steps must be -1 (off) or from 1 to 1000000000000, and 9223372036854775807"},
    {"Epochs", "num_train_epochs: 1e300\n",
     "t.yaml:1:19: num_train_epochs must be above 0, up to 1000000, and 1e300 is not."},
    {"KwargsHuge",
     "max_steps: 10\nlr_scheduler_type: warmup_stable_decay\n"
     "lr_scheduler_kwargs: {num_decay_steps: 9223372036854775807}\n",
     "t.yaml:3:40: lr_scheduler_kwargs (warmup_stable_decay).num_decay_steps must be from 0 to "
     "1000000000000"},
    {"EvalTwin", "per_device_batch_size: 4\n",
     "t.yaml:1:1: there is no key 'per_device_batch_size'. Did you mean "
     "per_device_train_batch_size?"},
    {"EvalTwinTypo", "per_device_evl_batch_size: 4\n",
     "t.yaml:1:1: there is no key 'per_device_evl_batch_size'. Did you mean per_device_"},
    {"Choice", "lr_scheduler_type: cosin\n",
     "t.yaml:1:20: lr_scheduler_type must be linear, cosine, cosine_with_restarts, "
     "cosine_with_min_lr, polynomial, constant, constant_with_warmup, inverse_sqrt, "
     "warmup_stable_decay, step, multi_step or exponential, and 'cosin' is none of them. Did you "
     "mean cosine?"},
    {"ChoiceWithWarmup", "lr_scheduler_type: cosine_with_warmup\n",
     "t.yaml:1:20: there is no lr_scheduler_type 'cosine_with_warmup'. Write cosine, and "
     "warmup_steps beside it."},
    {"Strategy", "eval_strategy: step\n",
     "t.yaml:1:16: eval_strategy must be no, steps or epoch, and 'step' is none of them. Did you "
     "mean steps?"},
    {"StrategyBool", "save_strategy: false\n",
     "t.yaml:1:16: save_strategy must be no, steps, epoch or best, and false is a boolean. Write "
     "no."},
    {"Report", "report_to: [tensorboard, wandb]\n",
     "t.yaml:1:26: report_to must be none, tensorboard or all, and 'wandb' is none of them. "
     "Event files of TensorBoard are what is supported, beside metrics.jsonl, which every run "
     "writes."},
    {"Model", "model: [gpt]\n", "t.yaml:1:8: model must be a name or a map, but this is a list"},
    {"Kwargs", "lr_scheduler_kwargs: 3\n",
     "t.yaml:1:22: lr_scheduler_kwargs must be a map, and 3 is a number."},
    {"KwargsKey", "lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {powr: 2}\n",
     "t.yaml:2:23: lr_scheduler_kwargs (polynomial) has no key 'powr'. Did you mean power?"},
    {"PartsUnknown", "gradient_checkpointing: {parts: [swigul]}\n",
     "t.yaml:1:34: gradient_checkpointing must be swiglu, norm, mlp or attention, and 'swigul' is "
     "none of them. Did you mean swiglu?"},
    {"PartsEmpty", "gradient_checkpointing: {parts: []}\n",
     "t.yaml:1:25: gradient_checkpointing names no parts. Write {parts: [swiglu, norm, mlp, "
     "attention]}, or true for whole blocks."},
    {"PartsOtherKey", "gradient_checkpointing: {part: [norm]}\n",
     "t.yaml:1:26: gradient_checkpointing has no key 'part'. Did you mean parts?"},
    {"StateDtype", "optim_state_dtype: bf16\n",
     "t.yaml:1:20: optim_state_dtype must be float32 or bfloat16, and 'bf16' is neither."},
    {"StateDtypeOfAnother", "optim_state_dtype: bfloat16\noptim: lion\n",
     "t.yaml:1:1: optim_state_dtype bfloat16 is adamw's, and lion has its state in the type of the "
     "parameters. Use adamw, or delete it."},
    {"StateDtypeOfMegatron", "exp_avg_dtype: bfloat16\n",
     "t.yaml:1:1: there is no key 'exp_avg_dtype'. Did you mean optim_state_dtype?"},
    {"KwargsOfLinear", "lr_scheduler_kwargs: {power: 2}\n",
     "t.yaml:1:23: lr_scheduler_kwargs (linear) has no key 'power'."},
    {"KwargsMinLr", "lr_scheduler_type: cosine_with_min_lr\n",
     "t.yaml:1:1: cosine_with_min_lr takes min_lr or min_lr_rate in lr_scheduler_kwargs."},
    {"KwargsDecay", "lr_scheduler_type: warmup_stable_decay\n",
     "t.yaml:1:1: warmup_stable_decay needs num_decay_steps in lr_scheduler_kwargs."},
    {"KwargsStep", "lr_scheduler_type: step\n",
     "t.yaml:1:1: step needs step_size in lr_scheduler_kwargs."},
    {"KwargsStepSize", "lr_scheduler_type: step\nlr_scheduler_kwargs: {step_size: 0}\n",
     "t.yaml:2:34: lr_scheduler_kwargs (step).step_size must be from 1 to 1000000000000, and 0 is"},
    {"KwargsMilestones", "lr_scheduler_type: multi_step\nlr_scheduler_kwargs: {gamma: 0.5}\n",
     "t.yaml:1:1: multi_step needs milestones in lr_scheduler_kwargs."},
    {"KwargsMilestone",
     "lr_scheduler_type: multi_step\nlr_scheduler_kwargs: {milestones: [3, 4.5]}\n",
     "t.yaml:2:1: milestones [3,4.5] of multi_step must be a list of whole numbers of steps"},
    {"KwargsGamma", "lr_scheduler_type: exponential\n",
     "t.yaml:1:1: exponential needs gamma in lr_scheduler_kwargs."},
    {"KwargsGammaRange", "lr_scheduler_type: exponential\nlr_scheduler_kwargs: {gamma: -1}\n",
     "t.yaml:2:30: lr_scheduler_kwargs (exponential).gamma must be from 0 to 1000, and -1.0 is"},
    {"DecayTooLong",
     "max_steps: 10\nwarmup_steps: 6\nlr_scheduler_type: warmup_stable_decay\n"
     "lr_scheduler_kwargs: {num_decay_steps: 5}\n",
     "t.yaml:2:1: 6 warm-up and 5 decay steps are more than max_steps 10."},
    {"PolynomialEnd",
     "learning_rate: 1e-4\nlr_scheduler_type: polynomial\nlr_scheduler_kwargs: {lr_end: 1e-3}\n",
     "t.yaml:1:1: polynomial falls to lr_end 0.001, which is not below learning_rate 0.0001."},
    {"OfTheModel", "n_layer: 4\n",
     "t.yaml:1:1: n_layer is a key of the model, not of the top level. Write model: {name: gpt, "
     "n_layer: 4}."},
    {"OfTheData", "path: x\n",
     "t.yaml:1:1: path is a key of the data, not of the top level. Write data: {name: bytes, path: "
     "FOLDER}. A folder of token shards is dataset_dir."},
    {"OtherWordOfTheModel", "model_name: Phi-3-mini\n",
     "t.yaml:1:1: there is no key 'model_name'. Did you mean model.path? Write model: {path: "
     "FOLDER}."},
    {"OtherWordOfTheData", "dataset_path: x\n",
     "t.yaml:1:1: there is no key 'dataset_path'. Did you mean data.path? Write data: {name: "
     "bytes, "
     "path: FOLDER}. A folder of token shards is dataset_dir."},
    {"OtherWordOfPadding", "packing: true\n",
     "t.yaml:1:1: there is no key 'packing'. Did you mean data.padding? Write data: {name: "
     "instructions, path: FILE, padding: packed}."},
    {"OtherWordOfTheSize", "hidden_size: 64\n",
     "t.yaml:1:1: there is no key 'hidden_size'. Did you mean model.n_embd? Write model: {name: "
     "gpt, n_embd: 128}."},
    {"OtherWord", "seq_len: 4\n",
     "t.yaml:1:1: there is no key 'seq_len'. Did you mean max_seq_len?"},
    {"NotAMap", "- seed\n", "t.yaml:1:1: the file must be a map, but this is a list."},
    {"NoSpace", "seed:1\n",
     "t.yaml:1:1: the file must be a map, and 'seed:1' is a string. Write "
     "`key: value` lines, with a space after the colon."},
    {"OldAndNew", "warmup_ratio: 0.1\nwarmup_steps: 5\n",
     "t.yaml:1:1: warmup_ratio is an older spelling of warmup_steps, which is here too. Delete "
     "warmup_ratio."},
    {"OldRange", "warmup_ratio: 5\n", "t.yaml:1:15: warmup_ratio must be from 0 to below 1, and 5"},
    {"Pickle", "save_safetensors: false\n",
     "t.yaml:1:1: save_safetensors cannot be false: pickle is never written. Delete it."},
    // Keys against each other.
    {"BothHalves", "bf16: true\nfp16: true\n",
     "t.yaml:1:1: bf16 and fp16 cannot both be true. Keep one. (bf16: t.yaml:1:1; fp16: "
     "t.yaml:2:1)"},
    {"CpuHalf", "use_cpu: true\nfp16: true\n",
     "t.yaml:2:1: fp16 needs a GPU, and use_cpu is true."},
    {"CpuTf32", "use_cpu: true\ntf32: true\n", "t.yaml:2:1: tf32 is a GPU's, and use_cpu is true."},
    {"CpuNccl", "use_cpu: true\nddp_backend: nccl\n", "t.yaml:2:1: the backend nccl needs GPUs"},
    {"LogZero", "logging_steps: 0\n",
     "t.yaml:1:1: logging_steps is 0, and logging_strategy is steps. Write how many, or "
     "logging_strategy: no. (logging_steps: t.yaml:1:1; logging_strategy: default)"},
    {"SaveZero", "save_steps: 0\n", "t.yaml:1:1: save_steps is 0, and save_strategy is steps."},
    {"EvalZero", "eval_strategy: steps\neval_steps: 0\n", "t.yaml:2:1: eval_steps is 0, and"},
    {"BestSave", "save_strategy: best\n", "t.yaml:1:1: save_strategy is best, but nothing is"},
    {"BestWithoutEval", "load_best_model_at_end: true\n",
     "t.yaml:1:1: load_best_model_at_end needs evaluations. Set eval_strategy to steps or epoch."},
    {"BestMismatch", "load_best_model_at_end: true\neval_strategy: epoch\n",
     "t.yaml:1:1: load_best_model_at_end needs a checkpoint of every evaluated model. Make "
     "save_strategy equal to eval_strategy, or best."},
    {"BestMultiple", "load_best_model_at_end: true\neval_strategy: steps\neval_steps: 200\n",
     "t.yaml:3:1: load_best_model_at_end needs save_steps to be a multiple of eval_steps, and 500 "
     "is not a multiple of 200."},
    {"Persistent", "dataloader_persistent_workers: true\n",
     "t.yaml:1:1: dataloader_persistent_workers needs workers. Set dataloader_num_workers above "
     "0."},
    {"Prefetch", "dataloader_prefetch_factor: 4\n",
     "t.yaml:1:1: dataloader_prefetch_factor needs workers."},
    {"TokensAndAccumulation",
     "tokens_per_update: 8192\nmax_seq_len: 1024\ngradient_accumulation_steps: 2\n",
     "t.yaml:1:1: tokens_per_update decides the accumulation."},
    {"SamplesAndAccumulation", "global_batch_size: 64\ngradient_accumulation_steps: 2\n",
     "t.yaml:1:1: global_batch_size decides the accumulation. Delete gradient_accumulation_steps"},
    {"SamplesAndTokens", "global_batch_size: 64\ntokens_per_update: 8192\nmax_seq_len: 1024\n",
     "t.yaml:1:1: global_batch_size and tokens_per_update both decide the accumulation."},
    {"SamplesUneven", "global_batch_size: 20\n",
     "t.yaml:1:1: global_batch_size 20 is not a multiple of 8 (batch 8). The nearest that are: 16 "
     "and 24."},
    {"Momentum", "momentum: 1\noptim: sgd\n",
     "t.yaml:1:11: momentum must be from 0 to below 1, and 1 is not."},
    {"TokensWithoutLength", "tokens_per_update: 8192\n",
     "t.yaml:1:1: tokens_per_update needs to know how long a sample is. Set max_seq_len."},
    {"TokensUneven", "tokens_per_update: 10000\nmax_seq_len: 1024\n",
     "t.yaml:1:1: tokens_per_update 10000 is not a multiple of 8192 (batch 8 x 1024 tokens). The "
     "nearest that are: 8192 and 16384."},
    {"ReportNone", "report_to: [none, tensorboard]\n", "t.yaml:1:1: report_to cannot be none and"},
    {"RunNamePath", "run_name: out/first\n",
     "t.yaml:1:1: run_name 'out/first' cannot name a folder (runs/<run_name>). Use letters, "
     "digits"},
    {"RunNameUp", "run_name: ..\n", "t.yaml:1:1: run_name '..' cannot name a folder"},
    {"RunNameEmpty", "run_name: \"\"\n", "t.yaml:1:11: run_name must not be empty."},
};
INSTANTIATE_TEST_SUITE_P(Config, ConfigMistake, ::testing::ValuesIn(kMistakes),
                         [](const auto& one) { return one.param.name; });

TEST(Config, AllMistakesAreReportedAtOnce) {
  const std::string message =
      refused("bf16: yes\nsed: 1\n", {"--max_steps=x"}, {{"LOCKSTEP_FP16", "maybe"}});
  EXPECT_THAT(message, StartsWith("[config] 4 mistakes:\n  t.yaml:2:1: there is no key 'sed'"));
  EXPECT_THAT(message, HasSubstr("\n  --max_steps: max_steps must be a whole number"));
  EXPECT_THAT(message, HasSubstr("\n  LOCKSTEP_FP16: fp16 must be true or false"));
  EXPECT_THAT(message, HasSubstr("\n  t.yaml:1:7: bf16 must be"));
}

TEST(Config, VeryManyMistakesAreCutShort) {
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += "wrong_" + std::to_string(i) + ": 1\n";
  EXPECT_THAT(refused(text), StartsWith("[config] at least 50 mistakes:\n  t.yaml:1:1: "));
}

TEST(Config, AMistakeThatIsBeatenIsStillOne) {
  EXPECT_THAT(refused("seed: x\n", {"--seed=1"}), HasSubstr("t.yaml:1:7: seed must be"));
}

TEST(Config, TheFileMayStandAnywhereAmongTheFlags) {
  const auto names = [](std::vector<std::string> words) { return take_names(words); };
  EXPECT_THAT(names({"--elastic_gpu", "t.yaml"}), ElementsAre("t.yaml"));
  EXPECT_THAT(names({"--elastic-gpu", "true", "t.yaml"}), ElementsAre("t.yaml"));
  EXPECT_THAT(names({"--max_steps", "5", "t.yaml", "--bf16"}), ElementsAre("t.yaml"));
  EXPECT_THAT(names({"--no_bf16", "t.yaml"}), ElementsAre("t.yaml"));
  EXPECT_THAT(names({"--max_steps=5", "t.yaml"}), ElementsAre("t.yaml"));
  EXPECT_THAT(names({"--shard_optimizer", "auto", "t.yaml"}), ElementsAre("t.yaml"));
  EXPECT_THAT(names({"--output_dir", "t.yaml"}), IsEmpty());
  EXPECT_THAT(names({"a.yaml", "--bf16", "b.yaml"}), ElementsAre("a.yaml", "b.yaml"));
  std::vector<std::string> rest{"--tf32", "false", "t.yaml", "--seed", "7", "--save_steps=2"};
  take_names(rest);
  EXPECT_THAT(rest, ElementsAre("--tf32", "false", "--seed", "7", "--save_steps=2"));
}

TEST(Config, MistakesInFlags) {
  EXPECT_EQ(refused("", {"--sed=1"}), "[config] --sed: there is no key 'sed'. Did you mean seed?");
  EXPECT_EQ(refused("", {"--seed"}), "[config] --seed needs a value. Write --seed=VALUE.");
  EXPECT_EQ(refused("", {"seed"}),
            "[config] 'seed' is not a flag. Write --key value or --key=value.");
  EXPECT_THAT(refused("", {"--no_seed"}), HasSubstr("there is no key 'no_seed'"));
  EXPECT_THAT(refused("", {"--model_name", "gpt2"}), HasSubstr("Did you mean model.path?"));
  EXPECT_THAT(refused("", {"--num_processes=2"}), HasSubstr("belongs in the launcher's file"));
  // A program without a launcher knows nothing of its keys.
  EXPECT_THAT(message_of([] { resolve_config({.flags = {"--num_processes=2"}}); }),
              HasSubstr("there is no key 'num_processes'."));
  EXPECT_THAT(refused("", {"--model={a: [}"}), StartsWith("[config] --model:1:"));
}

TEST(Config, FilesAreLoadedWithTheEnvironment) {
  EXPECT_THAT(message_of([] { load_config("no_such_file.yaml"); }),
              HasSubstr("no_such_file.yaml cannot be read"));
  ::setenv("LOCKSTEP_WEIGHT_DECAY", "0.5", 1);
  EXPECT_EQ(load_config("").arguments.weight_decay, 0.5);
  ::unsetenv("LOCKSTEP_WEIGHT_DECAY");
}

// ------------------------------------------------------------------ the effective batch

TEST(EffectiveBatch, ThePresetsHaveOne) {
  for (const int world_size : {1, 2, 3, 4, 7}) {
    const Config standard = resolve("preset: standard\n");
    const Config fast = resolve("preset: fast\n");
    EXPECT_EQ(effective_batch(standard.arguments, world_size), 8 * world_size);
    EXPECT_EQ(effective_batch(fast.arguments, world_size), 8 * world_size);
  }
  EXPECT_EQ(effective_batch_text(resolve("preset: standard\n").arguments, 2),
            "effective batch 16 = 4 per device x 2 accumulation x 2 ranks");
  EXPECT_THAT(preset_comparison(resolve("preset: fast\n").arguments, 2),
              HasSubstr("The effective batch is the same: they differ in speed alone."));
  const std::string other =
      preset_comparison(resolve("per_device_train_batch_size: 6\n").arguments, 2);
  EXPECT_THAT(other, HasSubstr("The effective batch differs from standard and fast"));
  EXPECT_THAT(other, HasSubstr("  standard           4       2        5               16\n"));
}

TEST(EffectiveBatch, TokensDecideTheAccumulation) {
  const TrainingArguments arguments{
      .max_seq_len = 1024, .per_device_train_batch_size = 4, .tokens_per_update = 32768};
  EXPECT_EQ(accumulation_steps(arguments, 1), 8);
  EXPECT_EQ(accumulation_steps(arguments, 4), 2);
  EXPECT_EQ(
      message_of([&] { accumulation_steps(arguments, 3); }),
      "[config] tokens_per_update 32768 is not a multiple of 12288 (batch 4 x 1024 tokens x 3 "
      "ranks). The nearest that are: 24576 and 36864.");
  EXPECT_THAT(message_of([&] { accumulation_steps({.tokens_per_update = 5}, 1); }),
              HasSubstr("Set max_seq_len."));
  EXPECT_THAT(message_of([&] { accumulation_steps(arguments, 0); }), HasSubstr("a world of 0"));
}

// The same update at any number of ranks that divides it.
TEST(EffectiveBatch, SamplesDecideTheAccumulation) {
  const TrainingArguments arguments{.per_device_train_batch_size = 4, .global_batch_size = 32};
  check_arguments(arguments);
  for (const int world_size : {1, 2, 4, 8}) {
    EXPECT_EQ(accumulation_steps(arguments, world_size), 8 / world_size);
    EXPECT_EQ(effective_batch(arguments, world_size), 32);
  }
  EXPECT_EQ(
      message_of([&] { accumulation_steps(arguments, 3); }),
      "[config] global_batch_size 32 is not a multiple of 12 (batch 4 x 3 ranks). The nearest "
      "that are: 24 and 36.");
  // The proposed values suit the ranks that a launcher has started, and not just one.
  ::setenv("WORLD_SIZE", "2", 1);
  EXPECT_THAT(message_of([] { check_arguments({.global_batch_size = 100}); }),
              HasSubstr("global_batch_size 100 is not a multiple of 16 (batch 8 x 2 ranks). The "
                        "nearest that are: 96 and 112."));
  ::unsetenv("WORLD_SIZE");
  EXPECT_THAT(out_of_memory_advice(arguments, 2),
              HasSubstr("per_device_train_batch_size: 2: global_batch_size makes the accumulation "
                        "8 (effective batch stays 32)."));
}

TEST(EffectiveBatch, MemoryAdviceSaysWhatChanges) {
  EXPECT_EQ(out_of_memory_advice(resolve("preset: fast\n").arguments, 2),
            "effective batch 16 = 8 per device x 1 accumulation x 2 ranks. Try "
            "per_device_train_batch_size: 6 (effective batch 12 instead of 16), or "
            "per_device_train_batch_size: 4 with gradient_accumulation_steps: 2 (effective batch "
            "stays 16).");
  EXPECT_THAT(out_of_memory_advice({.per_device_train_batch_size = 3}, 1),
              HasSubstr("per_device_train_batch_size: 1 with gradient_accumulation_steps: 3 "
                        "(effective batch stays 3)."));
  EXPECT_THAT(out_of_memory_advice({.per_device_train_batch_size = 1}, 1),
              HasSubstr("Try gradient_checkpointing: true"));
}

// gradient_accumulation_steps is refused beside tokens_per_update, and 6 of 8 would not divide.
TEST(EffectiveBatch, MemoryAdviceWithTokensPerUpdateCanBeFollowed) {
  TrainingArguments a{
      .max_seq_len = 16, .per_device_train_batch_size = 8, .tokens_per_update = 256};
  EXPECT_EQ(out_of_memory_advice(a, 2),
            "effective batch 16 = 8 per device x 1 accumulation x 2 ranks. Try "
            "per_device_train_batch_size: 4: tokens_per_update makes the accumulation 2 (effective "
            "batch stays 16).");
  a.per_device_train_batch_size = 4;
  check_arguments(a);
  EXPECT_EQ(effective_batch(a, 2), 16);
}

TEST(EffectiveBatch, MemoryAdviceForAnEvaluationNamesItsBatch) {
  EXPECT_EQ(
      evaluation_memory_advice({.per_device_eval_batch_size = 8}),
      "per_device_eval_batch_size is 8. Try 4: evaluation takes longer and its metrics stay.");
  EXPECT_THAT(evaluation_memory_advice({.per_device_eval_batch_size = 1}),
              HasSubstr("is 1 already. Try bf16: true"));
}

TEST(EffectiveBatch, AnotherBatchGetsAdviceOnTheLearningRate) {
  TrainingArguments a{.per_device_train_batch_size = 8, .gradient_accumulation_steps = 4};
  a.learning_rate = 3e-4;
  EXPECT_EQ(learning_rate_advice(a, 1), "");
  EXPECT_EQ(learning_rate_advice(a, 2),
            "learning_rate 0.0003: a step has 64 samples on 2 ranks, 32 on one. If it was chosen "
            "for 32, the square-root rule for adamw suggests 0.000424; set "
            "learning_rate_batch_size to what it was chosen for, or global_batch_size to keep the "
            "batch.");
  // A run that continues with a different number of ranks, including fewer.
  EXPECT_EQ(learning_rate_advice(a, 2, 32),
            "learning_rate 0.0003 was set for 32 samples per step; 64 now: the square-root rule "
            "for adamw suggests 0.000424.");
  EXPECT_EQ(learning_rate_advice(a, 2, 64), "");
  EXPECT_THAT(learning_rate_advice(a, 2, 256), HasSubstr("suggests 0.00015."));
  a.optim = "sgd";
  EXPECT_EQ(learning_rate_advice(a, 4, 32),
            "learning_rate 0.0003 was set for 32 samples per step; 128 now: the linear rule for "
            "sgd suggests 0.0012.");
  a.learning_rate_batch_size = 128;  // stronger than the checkpoint
  EXPECT_EQ(learning_rate_advice(a, 4, 32), "");
  EXPECT_THAT(learning_rate_advice(a, 1), HasSubstr("was set for 128 samples per step; 32 now"));
  a.learning_rate_batch_size.reset();
  a.gradient_accumulation_steps = 1;
  a.global_batch_size = 64;
  EXPECT_EQ(learning_rate_advice(a, 4), "") << "the same at any number of ranks";
  EXPECT_THAT(learning_rate_advice(a, 4, 32), HasSubstr("64 now"));
}

TEST(EffectiveBatch, ASmallerBatchKeepsTheEffectiveOne) {
  const std::array<std::int64_t, 3> cases[] = {{8, 1, 4}, {7, 1, 1},  {5, 1, 1}, {7, 2, 2},
                                               {9, 1, 3}, {12, 1, 6}, {1, 6, 0}};
  for (const auto& [batch, steps, smaller] : cases) {
    const TrainingArguments a{.per_device_train_batch_size = batch,
                              .gradient_accumulation_steps = steps};
    EXPECT_EQ(smaller_batch(a, 3), smaller) << batch << " x " << steps;
  }
}

}  // namespace
}  // namespace lockstep::train
