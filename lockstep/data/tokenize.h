// Converts text files to token shards, in parallel; on an error no shard is left.
//
//   TokenizeResult result = tokenize({.inputs = {"docs"}, .suffixes = {".md"}, .output = "data"});
//
// A document is an end-of-text token and the file's tokens. Without a tokenizer one byte is one
// token, so where each file's tokens go is known from the files' sizes alone. With one the files
// are encoded first, to temporary files in the folder. Every shard is then made by itself, and the
// result does not depend on how many threads there were.
//
// No text file is skipped silently: an unreadable one is an error with its name, because a run on
// the rest would look normal. Other readers of text files ensure the same with files_below() and
// check_text_file(). Without torch; call from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/shard_format.h"
#include "lockstep/data/tokenizer.h"

namespace lockstep::data {

struct TokenizeOptions {
  std::vector<std::string> inputs{};    // files, and folders with all below them, sorted by path
  std::vector<std::string> suffixes{};  // for files in folders; empty: all
  std::string output{};                 // the folder to make
  std::string name = "text";            // shards are <name>_train_000001.bin; nanogpt: train.bin
  TokenFormat format = TokenFormat::kLlmc16;
  std::optional<Tokenizer> tokenizer{};       // none: bytes, and 256 for the end of text
  std::optional<std::int64_t> end_of_text{};  // for a tokenizer; none: its eos_token
  std::uint64_t shard_tokens = 100'000'000;   // nanogpt has one shard, of any size
  std::uint64_t val_tokens = 0;               // this many from the start are for validation
  int workers = 0;                            // 0: one per processor
  bool replace = false;                       // replaces a folder that tokenize() made before
  // Called on the caller's thread a few times a second, and at the end. Counts tokens, or with a
  // tokenizer the bytes of the text.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress{};
};

struct TokenizeResult {
  std::uint64_t documents = 0;
  std::uint64_t tokens = 0;
  std::vector<std::pair<std::string, std::uint64_t>> shards{};  // file name, tokens
};

// Throws UsageError for inputs that are missing, unreadable, empty or inside the output; for a
// tokenizer without an end-of-text token or with ids too large for the format; and for an output
// that exists (with `replace`: unless it is a folder of an earlier call). SystemError when the disk
// fails. On an error `output` is unchanged.
TokenizeResult tokenize(const TokenizeOptions& options);

// Every file below `folder` whose path `wanted` accepts, unsorted. Links to files are followed,
// links to folders are not. UsageError when a folder cannot be listed, or when something that is
// wanted is not a readable regular file (see check_text_file).
std::vector<std::string> files_below(const std::string& folder,
                                     const std::function<bool(const std::string& path)>& wanted);

// UsageError with name, cause and remedy unless `path` is a regular file that this user may read.
void check_text_file(const std::string& path);

// The same error for a read that failed later.
[[noreturn]] void refuse_text_file(const std::string& path, int error_number);

}  // namespace lockstep::data
