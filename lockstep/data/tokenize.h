// Text files into token shards, byte by byte, in parallel and all or nothing.
//
// One byte is one token, so where each file's tokens go is known from the files' sizes alone. Every
// shard is then made by itself, and the result does not depend on how many threads there were.
//
//   TokenizeResult result = tokenize({.inputs = {"docs"}, .suffixes = {".md"}, .output = "data"});
//
// A document is an end-of-text token and the file's bytes. Without torch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/shard_format.h"

namespace lockstep::data {

struct TokenizeOptions {
  std::vector<std::string> inputs{};    // files, and folders with all below them, sorted by path
  std::vector<std::string> suffixes{};  // of files in folders; empty: all
  std::string output{};                 // the folder to make
  std::string name = "text";            // shards are <name>_train_000001.bin; nanogpt: train.bin
  TokenFormat format = TokenFormat::kLlmc16;
  std::uint64_t shard_tokens = 100'000'000;  // nanogpt has one shard, of any size
  std::uint64_t val_tokens = 0;              // the first so many are for validation
  int workers = 0;                           // 0: one per processor
  bool replace = false;                      // a folder that tokenize() made before
  // Called from the caller's thread some times a second, and at the end.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress{};
};

struct TokenizeResult {
  std::uint64_t documents = 0;
  std::uint64_t tokens = 0;
  std::vector<std::pair<std::string, std::uint64_t>> shards{};  // file name, tokens
};

// Throws UsageError for inputs that are not there, unreadable, empty or inside the output, and for
// an output that exists (with `replace`: and is anything else than a folder of an earlier call);
// SystemError when the disk says no. `output` is then what it was before.
TokenizeResult tokenize(const TokenizeOptions& options);

}  // namespace lockstep::data
