// `lockstep generate`: continues a text with a model of a folder, to see what it has learned.
#include "lockstep/models/generate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/train_commands.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/map_reader.h"
#include "lockstep/data/byte_tokenizer.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/io/numbered_dirs.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<std::int64_t>;

constexpr const char* kHelp =
    "usage: lockstep generate --model DIR --prompt TEXT | --ids 1,2,3 [flags]\n\n"
    "--model DIR          a Hugging Face folder, a checkpoint, or an output_dir (its newest\n"
    "                     checkpoint). A folder with an adapter names its base model in\n"
    "                     adapter_config.json; --base says where it is otherwise\n"
    "--prompt TEXT        the text to continue, by the folder's tokenizer.json; models of bytes\n"
    "                     need none\n"
    "--chat               TEXT is what a user says in a chat, by the model's chat template\n"
    "--ids 1,2,3          token ids to continue; the new ids are printed, separated by spaces\n"
    "--max_new_tokens N   (default 100)\n"
    "--temperature T      0 (the default) takes the likeliest token; above, tokens are drawn\n"
    "--top_k K            among so many of the likeliest tokens (default 0: all)\n"
    "--top_p P            among the likeliest tokens with this probability together (default 1)\n"
    "--repetition_penalty R   above 1: tokens that are there already are less likely (default 1)\n"
    "                     The model's generation_config.json has other defaults for these five\n"
    "--seed N             of what is drawn (default 0)\n"
    "--base DIR           the model that an adapter belongs to\n"
    "--tokenizer DIR      a tokenizer.json elsewhere\n"
    "--dtype TYPE         float32 (default), bfloat16 or float16\n"
    "--device NAME        cpu (default) or cuda\n";

struct Flags {
  std::string model, base, tokenizer, device = "cpu", dtype = "float32";
  std::optional<std::string> prompt;
  std::optional<Ids> ids;
  bool chat = false;
  bool help = false;
  std::optional<std::int64_t> max_new_tokens, top_k;
  std::optional<double> temperature, top_p, repetition_penalty;
  std::uint64_t seed = 0;
};

template <typename Number>
Number number_of(const std::string& flag, std::string_view text) {
  Number number{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size())
    throw UsageError("generate", "{}={} is not a number.", flag, text);
  return number;
}

Ids ids_of(const std::string& text) {
  Ids ids;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(", ", at), text.size());
    if (end > at) ids.push_back(number_of<std::int64_t>("--ids", text.substr(at, end - at)));
    at = end + 1;
  }
  return ids;
}

void set_flag(Flags& flags, const std::string& name, const std::string& value) {
  if (name == "--model") {
    flags.model = value;
  } else if (name == "--prompt") {
    flags.prompt = value;
  } else if (name == "--ids") {
    flags.ids = ids_of(value);
  } else if (name == "--max_new_tokens") {
    flags.max_new_tokens = number_of<std::int64_t>(name, value);
  } else if (name == "--temperature") {
    flags.temperature = number_of<double>(name, value);
  } else if (name == "--top_k") {
    flags.top_k = number_of<std::int64_t>(name, value);
  } else if (name == "--top_p") {
    flags.top_p = number_of<double>(name, value);
  } else if (name == "--repetition_penalty") {
    flags.repetition_penalty = number_of<double>(name, value);
  } else if (name == "--seed") {
    flags.seed = number_of<std::uint64_t>(name, value);
  } else if (name == "--base") {
    flags.base = value;
  } else if (name == "--tokenizer") {
    flags.tokenizer = value;
  } else if (name == "--dtype") {
    flags.dtype = value;
  } else if (name == "--device") {
    flags.device = value;
  } else {
    throw UsageError("generate", "there is no flag {}. lockstep generate --help lists them.", name);
  }
}

Flags parse_flags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    if (name == "--help" || name == "-h") {
      flags.help = true;
      return flags;
    }
    if (name == "--chat") {
      flags.chat = true;
      continue;
    }
    const std::size_t equals = name.find('=');
    std::string value;
    if (equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    } else if (++i < argc) {
      value = argv[i];
    } else {
      throw UsageError("generate", "{} needs a value.", name);
    }
    for (std::size_t c = 2; c < name.size(); ++c)
      if (name[c] == '-') name[c] = '_';  // both spellings, as elsewhere
    set_flag(flags, name, value);
  }
  if (flags.model.empty()) throw UsageError("generate", "--model DIR is missing.");
  if (flags.prompt.has_value() == flags.ids.has_value())
    throw UsageError("generate", "give --prompt TEXT or --ids 1,2,3, one of the two.");
  if (flags.chat && !flags.prompt)
    throw UsageError("generate", "--chat needs --prompt, which is what the user says.");
  return flags;
}

// An output_dir stands for its newest checkpoint.
std::string checkpoint_of(const std::string& folder) {
  if (!fs::is_directory(folder))
    throw UsageError("generate", "{} is not a folder. Give a Hugging Face folder or a checkpoint.",
                     folder);
  const auto holds = [&](const char* name) { return fs::exists(fs::path(folder) / name); };
  if (holds("config.json") || holds(models::kAdapterConfig)) return folder;
  const auto checkpoints = io::list_numbered(folder, "checkpoint-");
  if (checkpoints.empty())
    throw UsageError("generate",
                     "{} has neither a config.json nor an adapter_config.json, and no "
                     "checkpoint-<step> in it.",
                     folder);
  return checkpoints.front().path;  // highest first
}

c10::ScalarType type_of(const std::string& name) {
  if (name == "float32") return c10::kFloat;
  if (name == "bfloat16") return c10::kBFloat16;
  if (name == "float16") return c10::kHalf;
  throw UsageError("generate", "--dtype={} is not float32, bfloat16 or float16.", name);
}

struct Loaded {
  models::CausalLmPtr model;
  std::string folder;  // of the model itself
};

Loaded load(const Flags& flags) {
  const std::string folder = checkpoint_of(flags.model);
  const fs::path adapter = fs::path(folder) / models::kAdapterConfig;
  const models::PretrainedOptions options{.dtype = type_of(flags.dtype),
                                          .device = c10::Device(flags.device)};
  if (!fs::exists(adapter)) return {models::load_pretrained(folder, options), folder};
  std::string base = flags.base;
  if (base.empty())
    base = models::parse_adapter_config(read_file(adapter), adapter).base_model_name_or_path;
  if (base.empty() || !fs::is_directory(base))
    throw UsageError("generate",
                     "{} holds an adapter of the model '{}', which is not a folder here. Name the "
                     "base model's folder with --base.",
                     folder, base);
  Loaded loaded{models::load_pretrained(base, options), base};
  models::load_adapter(*loaded.model, folder);
  loaded.model->to(c10::Device(flags.device));
  loaded.model->eval();
  return loaded;
}

// ---------------------------------------------------------------- generation_config.json

// Whether the texts are those of transformers without a further look at this key: it is used, it
// names a token, a version or the cache, or its value is the one that changes nothing.
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

// What the model's folder says about the continuation of `prompt`, below what the flags say.
models::GenerateOptions options_for(const Flags& flags, const std::string& folder,
                                    std::size_t prompt) {
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
  std::vector<std::string> unused;
  for (const Entry& entry : root.entries)
    if (!is_honoured(entry)) unused.push_back(entry.key);
  if (!unused.empty())
    fmt::print(stderr, "note: {}: {} {} not used\n", path, fmt::join(unused, ", "),
               unused.size() == 1 ? "is" : "are");
  if (flags.max_new_tokens) {
    o.max_new_tokens = *flags.max_new_tokens;
  } else if (o.max_new_tokens == 0) {
    o.max_new_tokens = length > 0 ? length - static_cast<std::int64_t>(prompt) : 100;
    if (o.max_new_tokens <= 0)
      throw UsageError("generate",
                       "{}: max_length is {}, and the text to continue has {} tokens already. Give "
                       "--max_new_tokens.",
                       path, length, prompt);
  }
  return o;
}

// The folder's tokenizer, or bytes for a model with their vocabulary.
class Text {
 public:
  Text(const Flags& flags, const Loaded& loaded) {
    const std::string own = checkpoint_of(flags.model);
    for (const std::string& folder : {flags.tokenizer, own, loaded.folder}) {
      if (folder.empty()) continue;
      const bool file = fs::path(folder).extension() == ".json";
      if (!file && !fs::exists(fs::path(folder) / "tokenizer.json")) continue;
      tokenizer_ = data::Tokenizer::from_file(folder);
      return;
    }
    if (!flags.tokenizer.empty())
      throw UsageError("generate", "--tokenizer={} holds no tokenizer.json.", flags.tokenizer);
    if (loaded.model->config().vocab_size() != data::ByteTokenizer::kVocabSize)
      throw UsageError("generate",
                       "{} has no tokenizer.json. Name one with --tokenizer, or give --ids.",
                       loaded.folder);
  }

  Ids encode(const Flags& flags) const {
    if (!tokenizer_) {
      if (flags.chat)
        throw UsageError("generate", "--chat needs a tokenizer with a chat template.");
      const data::Tokens bytes = data::ByteTokenizer{}.encode(*flags.prompt);
      return Ids(bytes.begin(), bytes.end());
    }
    if (!flags.chat) return tokenizer_->encode(*flags.prompt);
    const std::string chat =
        tokenizer_->apply_chat_template({{"user", *flags.prompt}}, {.add_generation_prompt = true});
    return tokenizer_->encode(chat, {.add_special_tokens = false});
  }

  std::string decode(const Ids& ids) const {
    if (tokenizer_) return tokenizer_->decode(ids);
    return data::ByteTokenizer{}.decode(data::Tokens(ids.begin(), ids.end()));
  }

 private:
  std::optional<data::Tokenizer> tokenizer_;
};

}  // namespace

int generate_main(int argc, char** argv) {
  const Flags flags = parse_flags(argc, argv);
  if (flags.help) {
    fmt::print("{}", kHelp);
    return 0;
  }
  const Loaded loaded = load(flags);
  const auto continued = [&](const Ids& prompt) {
    models::GenerateOptions options = options_for(flags, loaded.folder, prompt.size());
    options.eos = loaded.model->config().eos_token_ids;
    return models::generate(*loaded.model, prompt, options);
  };
  if (flags.ids) {
    fmt::print("{}\n", fmt::join(continued(*flags.ids), " "));
    return 0;
  }
  const Text text(flags, loaded);
  const Ids prompt = text.encode(flags);
  Ids all = prompt;
  const Ids added = continued(prompt);
  all.insert(all.end(), added.begin(), added.end());
  // Of a chat the answer alone; otherwise the whole text, because tokens may join at the seam.
  fmt::print("{}\n", text.decode(flags.chat ? added : all));
  return 0;
}

}  // namespace lockstep::cli
