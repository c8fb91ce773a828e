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
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
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
    "--top_p P            among the likeliest tokens with this probability together (default 1)\n"
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
  models::GenerateOptions options{.max_new_tokens = 100};
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
  models::GenerateOptions& o = flags.options;
  if (name == "--model") {
    flags.model = value;
  } else if (name == "--prompt") {
    flags.prompt = value;
  } else if (name == "--ids") {
    flags.ids = ids_of(value);
  } else if (name == "--max_new_tokens") {
    o.max_new_tokens = number_of<std::int64_t>(name, value);
  } else if (name == "--temperature") {
    o.temperature = number_of<double>(name, value);
  } else if (name == "--top_p") {
    o.top_p = number_of<double>(name, value);
  } else if (name == "--seed") {
    o.seed = number_of<std::uint64_t>(name, value);
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
  Flags flags = parse_flags(argc, argv);
  if (flags.help) {
    fmt::print("{}", kHelp);
    return 0;
  }
  const Loaded loaded = load(flags);
  flags.options.eos = loaded.model->config().eos_token_ids;
  if (flags.ids) {
    fmt::print("{}\n", fmt::join(models::generate(*loaded.model, *flags.ids, flags.options), " "));
    return 0;
  }
  const Text text(flags, loaded);
  const Ids prompt = text.encode(flags);
  Ids all = prompt;
  const Ids added = models::generate(*loaded.model, prompt, flags.options);
  all.insert(all.end(), added.begin(), added.end());
  // Of a chat the answer alone; otherwise the whole text, because tokens may join at the seam.
  fmt::print("{}\n", text.decode(flags.chat ? added : all));
  return 0;
}

}  // namespace lockstep::cli
