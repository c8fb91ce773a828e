// `lockstep data`: text into token shards, and a look into files of tokens and instructions.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "cli/commands.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/data/instruction_file.h"
#include "lockstep/data/shard_format.h"
#include "lockstep/data/tokenize.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/io/file.h"

namespace lockstep::cli {
namespace {

constexpr const char* kDataHelp =
    "usage: lockstep data tokenize --output FOLDER [OPTIONS] FILE|FOLDER...\n"
    "       lockstep data inspect [--format FORMAT] [--show N] FILE|FOLDER...\n\n"
    "tokenize  text files into shards of tokens: byte by byte (256 ends a document), or with the\n"
    "          tokenizer of a model. The folder appears when all of it is on the disk.\n"
    "  --output FOLDER      the folder to write\n"
    "  --tokenizer PATH     a tokenizer.json of Hugging Face, or the folder of a model with one\n"
    "  --end-of-text TOKEN  written before each document (default: the eos_token)\n"
    "  --format FORMAT      llmc16 (default), llmc32 or nanogpt (train.bin and val.bin)\n"
    "  --suffix .TXT        which files of a folder; may be given several times (default: all)\n"
    "  --name NAME          shards are NAME_train_000001.bin (default: text)\n"
    "  --shard-tokens N     tokens of a shard (default: 100000000)\n"
    "  --val-tokens N       the first N tokens are for validation (default: 0)\n"
    "  --workers N          threads (default: one per processor)\n"
    "  --force              replace a folder that tokenize made before\n"
    "inspect   what a token file holds, or a .json or .jsonl file of instructions; 2 when it is\n"
    "          not what its header says\n"
    "  --format FORMAT      for files without a header: nanogpt\n"
    "  --show N             the first N tokens (default: 64)\n"
    "  --tokenizer PATH     shows them as text, by this tokenizer\n";

// The id of the token that --end-of-text names.
std::optional<std::int64_t> end_of_text(const std::string& token,
                                        const std::optional<data::Tokenizer>& tokenizer) {
  if (token.empty()) return std::nullopt;
  if (!tokenizer)
    throw UsageError("data", "--end-of-text is for --tokenizer; bytes have 256. Delete it.");
  if (const auto id = tokenizer->token_to_id(token)) return id;
  throw UsageError("data", "--end-of-text: {} has no token '{}'.", tokenizer->path(), token);
}

int tokenize(const Args& args) {
  data::TokenizeOptions options;
  std::string tokenizer, end;
  Flags flags("data");
  flags.value("--output", [&](const auto& v) { options.output = expand_home(v, "--output"); });
  flags.value("--tokenizer", [&](const auto& v) { tokenizer = expand_home(v, "--tokenizer"); });
  flags.text("--end-of-text", end);
  flags.value("--format", [&](const auto& v) { options.format = data::token_format(v); });
  flags.value("--suffix", [&](const auto& v) { options.suffixes.push_back(v); });
  flags.text("--name", options.name);
  flags.integer("--shard-tokens", options.shard_tokens, 0, INT64_MAX);
  flags.integer("--val-tokens", options.val_tokens, 0, INT64_MAX);
  flags.integer("--workers", options.workers, 0, 1024);
  flags.toggle("--force", options.replace);
  options.inputs = flags.read(Args(args.begin() + 1, args.end()));
  if (options.output.empty())
    throw UsageError("data", "tokenize needs --output FOLDER, the folder to make.");
  std::error_code unknown;  // an output that cannot be looked at is refused when it is made
  if (!options.replace && std::filesystem::exists(options.output, unknown))
    throw UsageError("data",
                     "{} is there already. Name another folder with --output, or replace it with "
                     "--force.",
                     options.output);
  if (!tokenizer.empty()) options.tokenizer = data::Tokenizer::from_file(tokenizer);
  options.end_of_text = end_of_text(end, options.tokenizer);
  options.progress = ReadingProgress("the texts");
  const auto start = Deadline::Clock::now();
  const data::TokenizeResult result = data::tokenize(options);
  const double seconds = seconds_since(start);
  print_text("{}: {} tokens of {} documents in {} shards, {:.1f} s\n", options.output,
             result.tokens, result.documents, result.shards.size(), seconds);
  for (const auto& [name, count] : result.shards) print_text("  {}  {} tokens\n", name, count);
  return 0;
}

// Printable bytes as they are, the rest escaped.
std::string readable(const std::vector<std::uint32_t>& tokens) {
  std::string text;
  for (const std::uint32_t token : tokens) {
    if (token == static_cast<std::uint32_t>(data::ByteTokenizer::kEndOfText))
      text += "<end of text>";
    else if (token == '\n')
      text += "\\n";
    else if (token == '\t')
      text += "\\t";
    else if (token >= 32 && token < 127)
      text += static_cast<char>(token);
    else
      text += fmt::format("\\x{:02x}", token);
  }
  return text;
}

// printable() with \n for a line break, which is a token of its own.
std::string on_one_line(const std::string& text) {
  return printable(fmt::format("{}", fmt::join(split(text, '\n'), "\\n")));
}

struct Inspection {
  data::TokenFormat format = data::TokenFormat::kAuto;
  std::uint64_t show = 64;
  std::optional<data::Tokenizer> tokenizer{};
};

void inspect_tokens(const std::string& path, const Inspection& how) {
  const data::TokenFile file(path, how.format);
  const std::uint64_t bytes = file.layout().data_offset + file.size() * file.layout().token_bytes;
  print_text("{}: {}, {} tokens of {} bytes ({})\n", path, data::name(file.layout().format),
             file.size(), file.layout().token_bytes, io::size_text(bytes));
  if (file.size() == 0) return;
  const std::uint32_t largest = file.largest_token();
  print_text("  largest token {}: a vocabulary of {} or more\n", largest,
             std::uint64_t{largest} + 1);
  std::vector<std::uint32_t> first;
  for (std::uint64_t i = 0; i < std::min(how.show, file.size()); ++i) first.push_back(file[i]);
  if (first.empty()) return;
  print_text("  begins with {}\n", fmt::join(first, " "));
  if (how.tokenizer)
    print_text("  as text: {}\n", on_one_line(how.tokenizer->decode(
                                      std::vector<std::int64_t>(first.begin(), first.end()),
                                      {.skip_special_tokens = false})));
  else if (largest <= static_cast<std::uint32_t>(data::ByteTokenizer::kEndOfText))
    print_text("  as bytes: {}\n", readable(first));
}

void inspect_chats(const std::string& path, const std::vector<data::Instruction>& items) {
  std::size_t messages = 0, most = 0;
  for (const data::Instruction& item : items) {
    messages += item.messages.size();
    most = std::max(most, item.messages.size());
  }
  print_text("{}: {} chats with {} messages, {} at most\n----\n", path, items.size(), messages,
             most);
  const data::Instruction& first = items.front();
  for (std::size_t i = 0; i < first.messages.size(); ++i) {
    const data::ChatMessage& message = first.messages[i];
    const bool learned = first.given > 0 ? i >= first.given : message.role == "assistant";
    print_text("{}: {}{}{}\n", message.role, learned ? "[" : "", message.content,
               learned ? "]" : "");
  }
  print_text("----\n");
}

// The learned tokens are printed in brackets.
void inspect_instructions(const std::string& path) {
  const auto items = data::load_instructions(path);
  if (!items.empty() && items.front().kind == data::RecordKind::kChat)
    return inspect_chats(path, items);
  std::size_t inputs = 0, answers = 0, longest = 0;
  for (const data::Instruction& item : items) {
    inputs += item.input.empty() ? 0 : 1;
    answers += item.output.empty() && item.answer.empty() ? 0 : 1;
    const data::PromptAndResponse texts = data::apply({}, item);
    longest = std::max(longest, texts.prompt.size() + texts.response.size());
  }
  if (!items.empty() && items.front().kind == data::RecordKind::kCompletion)
    print_text("{}: {} prompts with completions; the longest has {} bytes\n", path, items.size(),
               longest);
  else
    print_text(
        "{}: {} instructions, {} with an input, {} with an output or answer; the longest has {} "
        "bytes\n",
        path, items.size(), inputs, answers, longest);
  if (items.empty()) return;
  const data::PromptAndResponse first = data::apply({}, items.front());
  print_text("----\n{}[{}]\n----\n", first.prompt, first.response);
}

int inspect(const Args& args) {
  Inspection how;
  Flags flags("data");
  flags.value("--format", [&](const auto& v) { how.format = data::token_format(v); });
  flags.integer("--show", how.show, 0, INT64_MAX);
  flags.value("--tokenizer", [&](const auto& v) {
    how.tokenizer = data::Tokenizer::from_file(expand_home(v, "--tokenizer"));
  });
  const Args names = flags.read(Args(args.begin() + 1, args.end()));
  if (names.empty()) throw UsageError("data", "inspect needs a file or a folder of token files.");
  for (const std::string& name : names) {
    if (name.ends_with(".json") || name.ends_with(".jsonl")) {
      inspect_instructions(name);
    } else if (std::error_code unknown; std::filesystem::is_directory(name, unknown)) {
      for (const std::string& file : data::token_files(name, "")) inspect_tokens(file, how);
    } else {
      inspect_tokens(name, how);
    }
  }
  return 0;
}

}  // namespace

int data_command(const Args& args) {
  if (print_help(args, kDataHelp)) return 0;
  const bool help = std::ranges::find(args, "help") != args.end();
  if (help || args.empty()) {
    print_text(help ? stdout : stderr, "{}", kDataHelp);
    return help ? 0 : 2;
  }
  const std::string& what = args.front();
  if (what == "tokenize") return tokenize(args);
  if (what == "inspect") return inspect(args);
  throw UsageError("data", "there is no 'data {}'. Write lockstep data tokenize or inspect.", what);
}

}  // namespace lockstep::cli
