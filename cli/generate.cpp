// Commands on the folders of models. `lockstep generate` continues a text with the model in a
// folder, to see what it has learned. `lockstep checkpoint import`: an archive that a C++ program
// wrote with torch::save becomes a folder of safetensors; LibTorch's own reader opens it, nothing
// of ours reads pickle. `lockstep checkpoint merge`: an adapter and its base model become one
// model, as with PEFT's merge_and_unload().
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/train_commands.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"
#include "lockstep/io/tensors.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/lora.h"
#include "lockstep/train/checkpoint.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using data::RecordKind;
using Ids = std::vector<std::int64_t>;

constexpr const char* kGenerateHelp =
    "usage: lockstep generate --model DIR --prompt TEXT | --ids 1,2,3 [flags]\n\n"
    "--model DIR          a Hugging Face folder, a checkpoint, or an output_dir (its newest\n"
    "                     checkpoint). A folder with an adapter names its base model in\n"
    "                     adapter_config.json; --base says where it is otherwise\n"
    "--prompt TEXT        the text to continue, by the folder's tokenizer.json; models of bytes\n"
    "                     need none. A checkpoint that was trained on instructions or chats has a\n"
    "                     prompt_format.json: TEXT is the instruction, or what the user says, in\n"
    "                     the form of the training, and the answer alone is printed\n"
    "--input TEXT         the {input} of such an instruction\n"
    "--raw                TEXT as it is, whatever the model was trained on\n"
    "--chat               TEXT is what a user says in a chat, by the model's chat template\n"
    "--ids 1,2,3          token ids to continue; the new ids are printed, separated by spaces\n"
    "--max_new_tokens N   (default 100, or as many as a GPT has positions left)\n"
    "--temperature T      0 (the default) takes the likeliest token; above, tokens are drawn\n"
    "--top_k K            among this many of the likeliest tokens (default 0: all)\n"
    "--top_p P            among the likeliest tokens with this probability together (default 1)\n"
    "--repetition_penalty R   above 1: tokens that are there already are less likely (default 1)\n"
    "                     The model's generation_config.json has other defaults for these five\n"
    "--stop TEXT          ends after the token in which TEXT is complete (transformers'\n"
    "                     stop_strings); may be given several times\n"
    "--seed N             of what is drawn (default 0)\n"
    "--base DIR           the model that an adapter belongs to\n"
    "--tokenizer DIR      a tokenizer.json elsewhere\n"
    "--dtype TYPE         float32 (default), bfloat16 or float16\n"
    "--device NAME        cpu (default) or cuda\n";

struct GenerateRequest {
  std::string model, base, tokenizer, device = "cpu", dtype = "float32";
  std::optional<std::string> prompt;
  std::optional<Ids> ids;
  std::string input;
  std::vector<std::string> stop;
  bool chat = false;
  bool raw = false;
  std::optional<std::int64_t> max_new_tokens, top_k;
  std::optional<double> temperature, top_p, repetition_penalty;
  std::uint64_t seed = 0;
};

template <typename Number>
Number number_from(const std::string& flag, std::string_view text) {
  Number number{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size())
    throw UsageError("generate", "{}={} is not a number.", flag, text);
  return number;
}

Ids ids_of(const std::string& text) {
  Ids ids;
  for (const std::string& part : split(text, ','))
    for (const std::string& word : split(part, ' '))
      if (!word.empty()) ids.push_back(number_from<std::int64_t>("--ids", word));
  return ids;
}

GenerateRequest parse_generate(int argc, char** argv) {
  GenerateRequest request;
  Flags flags("generate");
  // Keys of generation_config.json have underscores, other flags dashes: both are taken.
  const auto number = [&]<typename T>(const std::string& names, std::optional<T>& to) {
    flags.value(names, [&to, name = names.substr(0, names.find(','))](const std::string& value) {
      to = number_from<T>(name, value);
    });
  };
  std::optional<std::uint64_t> seed;
  flags.text("--model", request.model);
  flags.text("--base", request.base);
  flags.text("--tokenizer", request.tokenizer);
  flags.text("--device", request.device);
  flags.text("--dtype", request.dtype);
  flags.value("--prompt", [&](const std::string& value) { request.prompt = value; });
  flags.text("--input", request.input);
  number("--max_new_tokens,--max-new-tokens", request.max_new_tokens);
  number("--temperature", request.temperature);
  number("--top_k,--top-k", request.top_k);
  number("--top_p,--top-p", request.top_p);
  number("--repetition_penalty,--repetition-penalty", request.repetition_penalty);
  number("--seed", seed);
  flags.toggle("--chat", request.chat);
  flags.toggle("--raw", request.raw);
  flags.value("--ids", [&](const std::string& value) { request.ids = ids_of(value); });
  flags.value("--stop,--stop_strings,--stop-strings", [&](const std::string& value) {
    if (value.empty()) throw UsageError("generate", "--stop needs a text that is not empty.");
    request.stop.push_back(value);
  });
  for (const std::string& other : flags.read(Args(argv + 1, argv + argc)))
    throw UsageError("generate", "'{}' is no flag. lockstep generate --help lists them.", other);
  request.seed = seed.value_or(0);
  if (request.model.empty()) throw UsageError("generate", "--model DIR is missing.");
  if (request.prompt.has_value() == request.ids.has_value())
    throw UsageError("generate", "give --prompt TEXT or --ids 1,2,3, one of the two.");
  if (request.chat && !request.prompt)
    throw UsageError("generate", "--chat needs --prompt, which is what the user says.");
  if (request.chat && request.raw)
    throw UsageError("generate", "--chat and --raw contradict each other. Give one of the two.");
  if (request.ids && !request.stop.empty())
    throw UsageError("generate", "--stop is a text, and --ids has none. Give --prompt.");
  return request;
}

c10::ScalarType type_of(const std::string& name) {
  if (name == "float32") return c10::kFloat;
  if (name == "bfloat16") return c10::kBFloat16;
  if (name == "float16") return c10::kHalf;
  throw UsageError("generate", "--dtype={} is not float32, bfloat16 or float16.", name);
}

// ---------------------------------------------------------------- generation_config.json

// Whether the texts match those of transformers without looking further at this key: it is used, it
// names a token, a version or the cache, or its value changes nothing.
bool is_honoured(const Entry& entry) {
  for (const char* key :
       {"do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens",
        "max_length", "eos_token_id", "bos_token_id", "pad_token_id", "use_cache",
        "_from_model_config", "transformers_version"})
    if (entry.key == key) return true;
  const Node& value = entry.value;
  if (value.is(NodeKind::kNull) || (value.is(NodeKind::kBool) && !value.boolean)) return true;
  const bool number = value.is(NodeKind::kInteger) || value.is(NodeKind::kReal);
  for (const char* key : {"num_beams", "num_beam_groups", "num_return_sequences", "length_penalty",
                          "typical_p", "encoder_repetition_penalty", "guidance_scale"})
    if (entry.key == key) return number && value.real == 1;
  return number && value.real == 0;
}

constexpr std::int64_t kNewTokens = 100;

// The options: flags, then the settings in the model's folder for continuing `prompt`.
models::GenerateOptions options_for(const GenerateRequest& flags, const std::string& folder,
                                    std::size_t prompt, std::int64_t room) {
  const std::string path = folder + "/generation_config.json";
  const Node root = fs::exists(path) ? parse_json(read_file(path), path) : map_node({});
  MapReader keys(root, "generation_config");
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  constexpr double kLarge = 1e6;
  const bool draws = keys.boolean("do_sample", false);
  const std::int64_t length = keys.integer("max_length", 0, 0, kMost);
  models::GenerateOptions o{.seed = flags.seed};
  o.max_new_tokens = keys.integer("max_new_tokens", 0, 0, kMost);
  // Without do_sample transformers does not read a temperature; with it, these are its defaults.
  const double temperature = keys.real("temperature", 1, 0, kLarge);
  o.temperature = flags.temperature.value_or(draws ? temperature : 0);
  o.top_k = flags.top_k.value_or(keys.integer("top_k", draws ? 50 : 0, 0, kMost));
  o.top_p = flags.top_p.value_or(keys.real("top_p", 1, 1e-12, 1));
  o.repetition_penalty =
      flags.repetition_penalty.value_or(keys.real("repetition_penalty", 1, 1e-12, kLarge));
  const bool narrows = flags.top_k || flags.top_p;
  if (o.temperature == 0 && narrows)
    print_text(
        stderr,
        "note: --top_k and --top_p have no effect at temperature 0, which takes the likeliest "
        "token. Give --temperature 1.\n");
  std::vector<std::string> unused;
  for (const Entry& entry : root.entries)
    if (!is_honoured(entry)) unused.push_back(entry.key);
  if (!unused.empty())
    print_text(stderr, "note: {}: {} {} not used\n", path, fmt::join(unused, ", "),
               unused.size() == 1 ? "is" : "are");
  if (flags.max_new_tokens) {
    o.max_new_tokens = *flags.max_new_tokens;
  } else if (o.max_new_tokens == 0) {
    o.max_new_tokens = length > 0 ? length - static_cast<std::int64_t>(prompt)
                       : room > 0 ? std::min(kNewTokens, room)
                                  : kNewTokens;
    if (o.max_new_tokens <= 0)
      throw UsageError("generate",
                       "{}: max_length is {}, and the text to continue has {} tokens already. Give "
                       "--max_new_tokens.",
                       path, length, prompt);
  }
  return o;
}

// The text that goes into the model and comes out of it: the folder's tokenizer, or bytes for a
// model with their vocabulary, and the prompt format that the model was trained with.
class Text {
 public:
  Text(const GenerateRequest& flags, const std::string& own, const LoadedModel& loaded)
      : flags_(flags) {
    const std::string format = own + "/" + kPromptFormat;
    if (fs::exists(format)) format_ = read_prompt_format(format);
    find_tokenizer(own, loaded);
    if (!flags.input.empty() && !(is_formatted() && format_->kind == RecordKind::kInstruction))
      throw UsageError("generate",
                       "--input is for a model that was trained on instructions, with a {} beside "
                       "its weights.",
                       kPromptFormat);
    chat_ = flags.chat || (is_formatted() && format_->kind == RecordKind::kChat);
    if (chat_ && !tokenizer_)
      throw UsageError("generate", "--chat needs a tokenizer with a chat template.");
  }

  Ids encode() const {
    const std::string& given = *flags_.prompt;
    if (chat_) {
      const std::string chat =
          tokenizer_->apply_chat_template({{"user", given}}, {.add_generation_prompt = true});
      return tokenizer_->encode(chat, {.add_special_tokens = false});
    }
    const bool instruction = is_formatted() && format_->kind == RecordKind::kInstruction;
    const std::string text =
        instruction
            ? data::apply(format_->texts, {.instruction = given, .input = flags_.input}).prompt
            : given;
    if (!tokenizer_) {
      const data::Tokens bytes = data::ByteTokenizer{}.encode(text);
      return Ids(bytes.begin(), bytes.end());
    }
    Ids ids = tokenizer_->encode(text);
    // In training the end token follows the answer.
    if (is_formatted() && !ids.empty() && ids.back() == tokenizer_->eos_token_id()) ids.pop_back();
    return ids;
  }

  // The tokens that ended an answer in training, which a config.json may not name as an end.
  std::vector<std::int64_t> ends() const {
    if (!is_formatted() || !tokenizer_) return {};
    std::vector<std::int64_t> ids;
    if (const auto end = tokenizer_->eos_token_id()) ids.push_back(*end);
    if (chat_) {
      const std::vector<data::ChatMessage> chat{{"user", "a"}, {"assistant", "b"}};
      const data::ChatText text = tokenizer_->chat_text(chat);
      ids.push_back(tokenizer_
                        ->encode(std::string_view(text.text).substr(0, text.answers.front().end),
                                 {.add_special_tokens = false})
                        .back());
    }
    return ids;
  }

  bool answers_alone() const {
    return chat_ || (is_formatted() && format_->kind == RecordKind::kInstruction);
  }

  std::string decode(const Ids& ids) const {
    if (tokenizer_) return tokenizer_->decode(ids);
    return data::ByteTokenizer{}.decode(data::Tokens(ids.begin(), ids.end()));
  }

 private:
  bool is_formatted() const { return format_ && !flags_.chat && !flags_.raw; }

  void find_tokenizer(const std::string& own, const LoadedModel& loaded) {
    const std::string trained = format_ ? format_->tokenizer : "";
    for (const std::string& folder : {flags_.tokenizer, own, trained, loaded.folder}) {
      if (folder.empty()) continue;
      const bool file = fs::path(folder).extension() == ".json";
      if (!fs::exists(file ? fs::path(folder) : fs::path(folder) / "tokenizer.json") &&
          !(file && folder == flags_.tokenizer))
        continue;
      tokenizer_ = data::Tokenizer::from_file(folder);
      return;
    }
    if (!flags_.tokenizer.empty())
      throw UsageError("generate", "--tokenizer={} holds no tokenizer.json.", flags_.tokenizer);
    if (loaded.model->config().vocab_size() == data::ByteTokenizer::kVocabSize) return;
    throw UsageError(
        "generate", "{} has no tokenizer.json{}. Name one with --tokenizer, or give --ids.",
        loaded.folder,
        trained.empty() ? "" : ", and the one of the training, " + trained + ", is not there");
  }

  const GenerateRequest& flags_;
  std::optional<PromptFormat> format_;
  std::optional<data::Tokenizer> tokenizer_;
  bool chat_ = false;
};

}  // namespace

int generate_main(int argc, char** argv) {
  if (print_help(Args(argv + 1, argv + argc), kGenerateHelp)) return 0;
  const GenerateRequest flags = parse_generate(argc, argv);
  const std::string folder = model_folder(flags.model);
  const LoadedModel loaded = load_model(
      folder, flags.base, {.dtype = type_of(flags.dtype), .device = c10::Device(flags.device)});
  // Weights of experts that are not trained lie together, and need no copy for each token.
  for (const at::Tensor& parameter : loaded.model->parameters()) parameter.set_requires_grad(false);
  const auto options = [&](const Ids& prompt) {
    const auto& config = loaded.model->config();
    // A table of positions is finite; the last generated token needs no position.
    const std::int64_t room = config.spec().positions_end()
                                  ? config.max_positions() + 1 - std::ssize(prompt)
                                  : kNewTokens;
    models::GenerateOptions all = options_for(flags, loaded.folder, prompt.size(), room);
    all.eos = loaded.model->config().eos_token_ids;
    return all;
  };
  if (flags.ids) {
    print_text("{}\n",
               fmt::join(models::generate(*loaded.model, *flags.ids, options(*flags.ids)), " "));
    return 0;
  }
  const Text text(flags, folder, loaded);
  const Ids prompt = text.encode();
  models::GenerateOptions how = options(prompt);
  for (const std::int64_t id : text.ends()) how.eos.push_back(id);
  if (!flags.stop.empty())
    how.stop = [&](const Ids& made) {
      const std::string said = text.decode(made);
      return std::ranges::any_of(flags.stop, [&](const std::string& stop) {
        return said.find(stop) != std::string::npos;
      });
    };
  const Ids added = models::generate(*loaded.model, prompt, how);
  Ids all = prompt;
  all.insert(all.end(), added.begin(), added.end());
  // Only the answer where one was asked for; otherwise the whole text, because tokens may join at
  // the seam.
  const std::string answer = text.decode(text.answers_alone() ? added : all);
  fmt::print("{}\n", ::isatty(STDOUT_FILENO) != 0 ? printable_lines(answer) : answer);
  return 0;
}

// ---------------------------------------------------------------- the model's folder

std::string model_folder(const std::string& folder) {
  if (!fs::is_directory(folder))
    throw UsageError("model", "{} is not a folder. Give a Hugging Face folder or a checkpoint.{}",
                     folder, hub_advice(folder));
  const auto holds = [&](const char* name) { return fs::exists(fs::path(folder) / name); };
  if (holds("config.json") || holds(models::kAdapterConfig)) return folder;
  const auto checkpoints = io::list_numbered(folder, "checkpoint-");
  if (checkpoints.empty())
    throw UsageError("model",
                     "{} has neither a config.json nor an adapter_config.json, and no "
                     "checkpoint-<step> in it.",
                     folder);
  return checkpoints.front().path;  // highest first
}

std::string base_folder(const std::string& adapter_folder, const std::string& base) {
  const std::string config = fs::path(adapter_folder) / models::kAdapterConfig;
  std::string named = base;
  if (named.empty())
    named = models::parse_adapter_config(read_file(config), config).base_model_name_or_path;
  if (named.empty() || !fs::is_directory(named))
    throw UsageError("model",
                     "{} holds an adapter of the model '{}', which is not a folder here. Name the "
                     "base model's folder with --base.",
                     adapter_folder, named);
  return named;
}

LoadedModel load_model(const std::string& folder, const std::string& base,
                       const models::PretrainedOptions& options) {
  if (!fs::exists(fs::path(folder) / models::kAdapterConfig))
    return {models::load_pretrained(folder, options), folder};
  const std::string named = base_folder(folder, base);
  LoadedModel loaded{models::load_pretrained(named, options), named};
  models::load_adapter(*loaded.model, folder);
  loaded.model->to(options.device);
  loaded.model->eval();
  return loaded;
}

// ---------------------------------------------------------------- prompt_format.json

using data::RecordKind;

std::string prompt_format_text(const PromptFormat& format) {
  const bool texts = format.kind == RecordKind::kInstruction;
  const char* kind = texts                              ? "instruction"
                     : format.kind == RecordKind::kChat ? "chat"
                                                        : "completion";
  Node map = map_node({{"kind", text_node(kind)}});
  const auto set = [&](const char* key, const std::string& value) {
    map.entries.push_back({key, {}, text_node(value)});
  };
  if (texts) {
    set("prompt", format.texts.prompt);
    set("prompt_without_input", format.texts.prompt_without_input);
    set("response", format.texts.response);
  }
  if (!format.tokenizer.empty()) set("tokenizer", format.tokenizer);
  return to_json(map) + "\n";
}

PromptFormat read_prompt_format(const std::string& path) {
  const Node root = parse_json(read_file(path), path);
  MapReader keys(root, "prompt_format");
  PromptFormat format;
  const std::string kind =
      keys.choice("kind", "instruction", {"instruction", "completion", "chat"});
  format.kind = kind == "chat"         ? RecordKind::kChat
                : kind == "completion" ? RecordKind::kCompletion
                                       : RecordKind::kInstruction;
  format.texts.prompt = keys.text("prompt", format.texts.prompt);
  format.texts.prompt_without_input =
      keys.text("prompt_without_input", format.texts.prompt_without_input);
  format.texts.response = keys.text("response", format.texts.response);
  format.tokenizer = keys.text("tokenizer", "");
  return format;
}

// ---------------------------------------------------------------- lockstep checkpoint import

namespace {

using Archive = torch::serialize::InputArchive;

struct Imported {
  train::NamedTensors tensors;
  std::vector<std::string> skipped;  // what safetensors cannot hold
};

// Numbers become tensors, pairs such as Adam's betas a vector of two.
void collect_value(const c10::IValue& value, const std::string& name, Imported& found) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) found.tensors.emplace_back(name, value.toTensor());
  } else if (value.isBool()) {
    found.tensors.emplace_back(name, at::scalar_tensor(value.toBool(), at::kBool));
  } else if (value.isInt()) {
    found.tensors.emplace_back(name, at::scalar_tensor(value.toInt(), at::kLong));
  } else if (value.isDouble()) {
    found.tensors.emplace_back(name, at::scalar_tensor(value.toDouble(), at::kDouble));
  } else if (value.isTuple() || value.isList()) {
    const std::vector<c10::IValue> parts =
        value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
    const auto real = [](const c10::IValue& part) { return part.isDouble(); };
    if (!parts.empty() && std::ranges::all_of(parts, real)) {
      std::vector<double> numbers;
      for (const c10::IValue& part : parts) numbers.push_back(part.toDouble());
      found.tensors.emplace_back(name, at::tensor(numbers, at::kDouble));
      return;
    }
    for (std::size_t i = 0; i < parts.size(); ++i)
      collect_value(parts[i], fmt::format("{}.{}", name, i), found);
  } else if (!value.isNone()) {
    found.skipped.push_back(name);
  }
}

void collect(Archive& archive, const std::string& prefix, Imported& found);

std::int64_t number_in(Archive& archive, const std::string& key) {
  at::Tensor number;
  archive.read(key, number);
  return number.item<std::int64_t>();
}

// torch::optim names a parameter by its address in the process that saved. Here it gets its number
// among the parameters of all groups, as in Python's state_dict().
void collect_optimizer(Archive& states, Archive& groups, const std::string& prefix,
                       Imported& found) {
  std::int64_t number = 0;
  const std::int64_t count = number_in(groups, "param_groups/size");
  for (std::int64_t g = 0; g < count; ++g) {
    Archive group, options;
    groups.read(fmt::format("param_groups/{}", g), group);
    const std::int64_t parameters = number_in(group, "params/size");
    for (std::int64_t i = 0; i < parameters; ++i, ++number) {
      c10::IValue address;
      group.read(fmt::format("params/{}", i), address);
      Archive state;
      if (states.try_read(address.toStringRef(), state))
        collect(state, fmt::format("{}state.{}.", prefix, number), found);
    }
    group.read("options", options);
    collect(options, fmt::format("{}param_groups.{}.", prefix, g), found);
  }
}

void collect(Archive& archive, const std::string& prefix, Imported& found) {
  Archive states, groups;
  if (archive.try_read("state", states) && archive.try_read("param_groups", groups))
    return collect_optimizer(states, groups, prefix, found);
  for (const std::string& key : archive.keys()) {
    Archive inner;
    c10::IValue value;
    if (archive.try_read(key, inner))
      collect(inner, prefix + key + ".", found);
    else if (archive.try_read(key, value))
      collect_value(value, prefix + key, found);
  }
}

// The probable kind of a file that LibTorch's reader refuses.
std::string advice_for(const std::string& path) {
  constexpr const char* kPython =
      "Python's torch.save wrote it. Export the weights there: "
      "safetensors.torch.save_file(model.state_dict(), ...).";
  std::string start(4, '\0');
  std::ifstream(path, std::ios::binary).read(start.data(), 4);
  if (start[0] == '\x80') return kPython;  // a bare pickle, as before PyTorch 1.6
  if (start != "PK\x03\x04") return "Give the archive that torch::save wrote.";
  try {
    caffe2::serialize::PyTorchStreamReader reader(path);
    if (reader.hasRecord("data.pkl") && !reader.hasRecord("constants.pkl")) return kPython;
  } catch (const std::exception&) {
    // Not even its table of contents can be read.
  }
  return "It is probably cut short or damaged. Copy it again.";
}

Imported read_archive(const std::string& path) {
  std::string what;
  try {
    Archive archive;
    archive.load_from(path, c10::Device(c10::kCPU));
    Imported found;
    collect(archive, "", found);
    return found;
  } catch (const c10::Error& e) {
    what = e.what_without_backtrace();
  } catch (const std::exception& e) {
    what = e.what();
  }
  throw UsageError("checkpoint", "{} is not an archive of C++'s torch::save ({}). {}", path,
                   what.substr(0, what.find('\n')), advice_for(path));
}

}  // namespace

int checkpoint_import_main(int argc, char** argv) {
  if (argc != 3) throw UsageError("checkpoint", "usage: lockstep checkpoint import ARCHIVE FOLDER");
  const std::string from = argv[1], to = argv[2];
  if (!std::filesystem::is_regular_file(from))
    throw UsageError("checkpoint", "{} is not a file. Give the archive that torch::save wrote.",
                     from);
  if (std::filesystem::exists(to))
    throw UsageError("checkpoint", "{} is there already. Give the name of a new folder.", to);
  Imported found = read_archive(from);
  if (found.tensors.empty()) throw UsageError("checkpoint", "{} holds no tensor.", from);
  train::CheckpointContents contents;
  contents.model = std::move(found.tensors);
  contents.only_model = true;
  train::write_checkpoint(to, contents);
  print_text("{}: {} tensors, {}\n", to, contents.model.size(),
             io::size_text(train::checkpoint_bytes(contents)));
  if (!found.skipped.empty())
    print_text("skipped, being neither tensors nor numbers: {}\n", fmt::join(found.skipped, ", "));
  return 0;
}

// ---------------------------------------------------------------- merge

namespace {

constexpr const char* kMergeUsage = "usage: lockstep checkpoint merge ADAPTER FOLDER [--base DIR]";

// A model folder's files besides weights and config.json; the adapter's own take precedence.
std::vector<std::pair<std::string, std::string>> other_files(const std::string& adapter,
                                                             const std::string& base) {
  constexpr std::size_t kLargest = std::size_t{256} << 20;
  std::vector<std::pair<std::string, std::string>> texts;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                           "chat_template.jinja", "generation_config.json", kPromptFormat})
    for (const std::string& folder : {adapter, base}) {
      const fs::path file = fs::path(folder) / name;
      std::error_code ignored;
      if (!fs::is_regular_file(file, ignored)) continue;
      texts.emplace_back(name, read_file(file, kLargest));
      break;
    }
  return texts;
}

}  // namespace

int checkpoint_merge_main(int argc, char** argv) {
  std::string given_base;
  Flags flags("checkpoint");
  flags.text("--base", given_base);
  const Args names = flags.read(Args(argv + 1, argv + argc), /*keys=*/true);
  if (names.size() != 2 || names[0].starts_with("--") || names[1].starts_with("--"))
    throw UsageError("checkpoint", "{}", kMergeUsage);
  const std::string adapter = model_folder(names[0]), &out = names[1];
  if (!fs::exists(fs::path(adapter) / models::kAdapterConfig))
    throw UsageError("checkpoint",
                     "{} holds no adapter: there is no {} in it. Give a checkpoint of a training "
                     "with lora, or a folder of PEFT's.",
                     adapter, models::kAdapterConfig);
  if (fs::exists(out))
    throw UsageError("checkpoint", "{} is there already. Give the name of a new folder.", out);
  const std::string base = base_folder(adapter, given_base);
  const io::SafetensorsSet weights(base);
  const auto type = io::scalar_type_of(weights.at(weights.names().front()).entry->dtype);
  const LoadedModel loaded = load_model(adapter, base, {.dtype = type});
  models::unload_lora(*loaded.model);
  models::save_pretrained(*loaded.model, out, {.texts = other_files(adapter, base)});
  print_text("{}: {} with the adapter of {}\n", out, base, adapter);
  return 0;
}

}  // namespace lockstep::cli
