#include "lockstep/data/tokenize.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"
#include "lockstep/io/manifest.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

struct Document {
  std::string path;
  std::uint64_t bytes;
  std::uint64_t begin = 0;   // position of its end-of-text token in the stream of all documents
  std::uint64_t tokens = 0;  // after that one
  // The file with its tokens: the text file itself (bytes), or a temporary one (4 bytes each).
  std::string source{};
  std::uint64_t offset = 0;
};

struct Shard {
  std::string name;
  std::uint64_t begin;
  std::uint64_t count;
};

bool wanted(const fs::path& path, const std::vector<std::string>& suffixes) {
  const std::string file = path.filename().string();
  return suffixes.empty() || std::any_of(suffixes.begin(), suffixes.end(),
                                         [&](const auto& end) { return file.ends_with(end); });
}

// Absolute and without links, as far as the path exists.
fs::path resolved(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  if (error) throw SystemError("tokenize", "cannot resolve " + path, error.value());
  fs::path found = fs::weakly_canonical(absolute, error);
  if (error) throw SystemError("tokenize", "cannot resolve " + path, error.value());
  return found.has_filename() ? found : found.parent_path();
}

// The next run over the same inputs would read the shards as text.
void refuse_output_inside(const std::string& folder, const fs::path& output) {
  const fs::path input = resolved(folder);
  if (input == output) return;  // refused for its files
  if (std::mismatch(input.begin(), input.end(), output.begin(), output.end()).first != input.end())
    return;
  throw UsageError("tokenize",
                   "the output {} is inside the input {}, and would be tokenized with it the next "
                   "time. Choose an output beside the inputs.",
                   output.string(), folder);
}

// The output's name goes to a new folder, and its old contents are then deleted.
void refuse_inside(const std::string& input, const fs::path& output) {
  const fs::path path = resolved(input);
  const auto ends = std::mismatch(output.begin(), output.end(), path.begin(), path.end());
  if (ends.first != output.end()) return;
  throw UsageError(
      "tokenize",
      "the input {} is inside the output {}, which would be replaced. Choose an output "
      "beside the inputs, or a --suffix that does not match it.",
      input, output.string());
}

// Replaces only a folder that tokenize() has made: not a link, with a manifest of token files and
// no other files.
void check_replaceable(const std::string& output) {
  std::string path = output;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();  // a link, not what it leads to
  std::error_code error;
  const fs::file_type type = fs::symlink_status(path, error).type();
  if (type == fs::file_type::not_found) return;
  const auto refuse = [&](const std::string& why) {
    throw UsageError("tokenize",
                     "{} is not replaced: {}. Name another folder, or remove this one yourself.",
                     path, why);
  };
  if (error) refuse(error.message());
  if (type == fs::file_type::symlink) refuse("it is a symbolic link");
  if (type != fs::file_type::directory) refuse("it is not a folder");
  io::Manifest manifest;
  try {
    manifest = io::parse_manifest(read_file(path + "/" + std::string(io::kManifestName)));
  } catch (const Error&) {
    refuse(fmt::format("it has no valid {}, so `lockstep data tokenize` did not make it",
                       io::kManifestName));
  }
  if (manifest.empty()) refuse(fmt::format("its {} lists no file", io::kManifestName));
  for (const auto& [name, digest] : manifest)
    if (!name.ends_with(".bin"))
      refuse(fmt::format("its {} lists {}, which is not a token file", io::kManifestName, name));
  fs::directory_iterator entry(path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name != io::kManifestName && !manifest.contains(name))
      refuse(fmt::format("it holds {}, which is not in its {}", name, io::kManifestName));
  }
  if (error) refuse(error.message());
}

std::vector<Document> list_documents(const TokenizeOptions& options) {
  const fs::path output = resolved(options.output);
  const bool reads_shards =
      wanted("0.bin", options.suffixes) || wanted(io::kManifestName, options.suffixes);
  std::vector<std::string> paths;
  for (const std::string& input : options.inputs) {
    std::error_code ignored;
    if (fs::status(input, ignored).type() == fs::file_type::not_found)
      throw UsageError("tokenize", "{} does not exist. Name text files or folders.", input);
    const bool folder = fs::is_directory(input, ignored);
    if (folder && reads_shards) refuse_output_inside(input, output);
    std::vector<std::string> found{input};
    if (folder)
      found = files_below(input,
                          [&](const std::string& path) { return wanted(path, options.suffixes); });
    std::sort(found.begin(), found.end());
    paths.insert(paths.end(), found.begin(), found.end());
  }
  std::vector<Document> documents;
  for (const std::string& path : paths) {
    check_text_file(path);
    refuse_inside(path, output);
    std::error_code error;
    const std::uint64_t bytes = fs::file_size(path, error);
    if (error) refuse_text_file(path, error.value());
    if (bytes == 0) continue;
    documents.push_back({.path = path, .bytes = bytes, .tokens = bytes, .source = path});
  }
  if (documents.empty())
    throw UsageError("tokenize", "no text: {} files were found, and all are empty.{}", paths.size(),
                     options.suffixes.empty() ? "" : " Look at the suffixes that were asked for.");
  return documents;
}

std::vector<Shard> plan_shards(const TokenizeOptions& options, std::uint64_t total) {
  if (options.val_tokens >= total)
    throw UsageError("tokenize",
                     "{} tokens for validation leave nothing of {} to train on. Ask for fewer.",
                     options.val_tokens, total);
  std::vector<Shard> shards;
  if (options.format == TokenFormat::kNanogpt) {
    if (options.val_tokens > 0) shards.push_back({"val.bin", 0, options.val_tokens});
    shards.push_back({"train.bin", options.val_tokens, total - options.val_tokens});
    return shards;
  }
  token_header(options.format, std::max(options.shard_tokens, options.val_tokens));  // may refuse
  // As in llm.c's scripts: number 0 is for validation, training begins with 1.
  if (options.val_tokens > 0)
    shards.push_back({fmt::format("{}_val_{:06}.bin", options.name, 0), 0, options.val_tokens});
  int number = options.val_tokens > 0 ? 1 : 0;
  for (std::uint64_t at = options.val_tokens; at < total; at += options.shard_tokens, ++number)
    shards.push_back({fmt::format("{}_train_{:06}.bin", options.name, number), at,
                      std::min(options.shard_tokens, total - at)});
  return shards;
}

// Gives each document its place in the stream; returns the number of tokens.
std::uint64_t place(std::vector<Document>& documents) {
  std::uint64_t at = 0;
  for (Document& document : documents) {
    document.begin = at;
    at += document.tokens + 1;
  }
  return at;
}

// Jobs for several threads, each with a worker of its own, while this one reports.
class ThreadPool {
 public:
  using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;

  ThreadPool(int workers, Progress progress, std::uint64_t total)
      : workers_(workers > 0 ? workers : allowed_cores()),
        progress_(std::move(progress)),
        total_(total) {}

  std::atomic<std::uint64_t> done{0};
  std::atomic<bool> stop{false};  // an error somewhere

  // `new_worker` takes the thread's number; run() of what it points to takes a job's. Returns the
  // number of threads.
  template <typename NewWorker>
  std::size_t run(std::size_t jobs, const NewWorker& new_worker) {
    const auto count = std::min(static_cast<std::size_t>(workers_), jobs);
    std::vector<std::jthread> threads;
    running_ = count;
    for (std::size_t i = 0; i < count; ++i)
      threads.emplace_back([&, i] { work(i, jobs, new_worker); });
    std::unique_lock lock(mutex_);
    while (!ended_.wait_for(lock, std::chrono::milliseconds(200), [this] { return running_ == 0; }))
      report();
    report();
    if (error_) std::rethrow_exception(error_);
    return count;
  }

 private:
  void report() {
    if (progress_) progress_(done, total_);
  }

  template <typename NewWorker>
  void work(std::size_t thread, std::size_t jobs, const NewWorker& new_worker) {
    std::exception_ptr error;
    try {
      const auto worker = new_worker(thread);
      for (std::size_t i = next_++; i < jobs && !stop; i = next_++) worker->run(i);
      if (!stop) worker->finish();
    } catch (...) {
      error = std::current_exception();
      stop = true;
    }
    const std::lock_guard lock(mutex_);
    if (error && !error_) error_ = error;
    if (--running_ == 0) ended_.notify_all();
  }

  int workers_;
  Progress progress_;
  std::uint64_t total_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::size_t running_ = 0;
  std::exception_ptr error_;
  std::atomic<std::size_t> next_{0};
};

// The text of a document, as long as it was when it was listed.
io::MappedFile map_text(const Document& document) {
  io::MappedFile map(document.path);
  if (map.bytes().size() != document.bytes)
    throw UsageError("tokenize",
                     "{} had {} bytes at the start and has {} now. Somebody writes to it; try "
                     "again when it is finished.",
                     document.path, document.bytes, map.bytes().size());
  return map;
}

void append_token(std::string& out, std::uint32_t token, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i)
    out.push_back(static_cast<char>((token >> (8 * i)) & 0xffu));
}

// Encodes documents into one temporary file.
class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, std::vector<Document>& documents, const std::string& path,
          ThreadPool& pool)
      : tokenizer_(tokenizer), documents_(documents), file_(path), pool_(pool) {}

  void run(std::size_t job) {
    Document& document = documents_[job];  // this thread's alone
    const io::MappedFile map = map_text(document);
    const std::string_view text(reinterpret_cast<const char*>(map.bytes().data()),
                                map.bytes().size());
    document.source = file_.path();
    document.offset = file_.bytes();
    buffer_.clear();
    const auto ids = tokenizer_.encode(text, {.add_special_tokens = false});
    for (const std::int64_t id : ids) append_token(buffer_, static_cast<std::uint32_t>(id), 4);
    document.tokens = ids.size();
    file_.append(buffer_);
    pool_.done += document.bytes;
  }
  void finish() { file_.finish(); }

 private:
  const Tokenizer& tokenizer_;
  std::vector<Document>& documents_;
  io::FileWriter file_;
  ThreadPool& pool_;
  std::string buffer_;
};

struct ShardPlan {
  std::string folder{};
  std::vector<Shard> shards{};
  TokenFormat format;
  std::uint32_t end_of_text;
  std::size_t source_bytes;  // per token: 1 in a text, 4 in what an Encoder wrote
};

// Writes shards; can be stopped between blocks.
class ShardMaker {
 public:
  ShardMaker(const ShardPlan& plan, const std::vector<Document>& documents, ThreadPool& pool)
      : plan_(plan), documents_(documents), pool_(pool) {}

  void run(std::size_t job) {
    const Shard& shard = plan_.shards[job];
    io::FileWriter file(plan_.folder + "/" + shard.name);
    file.append(token_header(plan_.format, shard.count));
    auto document =
        std::upper_bound(documents_.begin(), documents_.end(), shard.begin,
                         [](std::uint64_t at, const Document& other) { return at < other.begin; });
    --document;
    const std::uint64_t end = shard.begin + shard.count;
    for (std::uint64_t at = shard.begin; at < end && !pool_.stop; ++document) {
      const std::uint64_t until = std::min(end, document->begin + 1 + document->tokens);
      append(file, *document, at - document->begin, until - document->begin);
      at = until;
    }
    flush(file);
    if (!pool_.stop) file.finish();
  }
  void finish() {}

 private:
  // Tokens [from, to) of a document; its first is the end-of-text token.
  void append(io::FileWriter& file, const Document& document, std::uint64_t from,
              std::uint64_t to) {
    if (from == 0) {
      put(plan_.end_of_text);
      ++from;
    }
    if (from >= to) return;
    const io::MappedFile map =
        plan_.source_bytes == 1 ? map_text(document) : io::MappedFile(document.source);
    for (std::uint64_t at = from; at < to; ++at) {
      put(token_at(map, document.offset + (at - 1) * plan_.source_bytes));
      if (buffer_.size() >= kBlock) flush(file);
      if (pool_.stop) return;
    }
  }

  std::uint32_t token_at(const io::MappedFile& map, std::uint64_t offset) const {
    std::uint32_t token = 0;
    for (std::size_t i = 0; i < plan_.source_bytes; ++i)
      token |= static_cast<std::uint32_t>(map.bytes()[offset + i]) << (8 * i);
    return token;
  }

  void put(std::uint32_t token) {
    append_token(buffer_, token, plan_.format == TokenFormat::kLlmc32 ? 4 : 2);
    ++pending_;
  }

  void flush(io::FileWriter& file) {
    file.append(buffer_);
    buffer_.clear();
    pool_.done += std::exchange(pending_, 0);
  }

  static constexpr std::size_t kBlock = 1u << 18;
  const ShardPlan& plan_;
  const std::vector<Document>& documents_;
  ThreadPool& pool_;
  std::string buffer_;
  std::uint64_t pending_ = 0;
};

// The token before each document, checked with the vocabulary against the format.
std::uint32_t end_of_text(const TokenizeOptions& options) {
  if (!options.tokenizer) return static_cast<std::uint32_t>(ByteTokenizer::kEndOfText);
  const Tokenizer& tokenizer = *options.tokenizer;
  if (options.format != TokenFormat::kLlmc32 && tokenizer.max_id() > 0xFFFF)
    throw UsageError("tokenize",
                     "{} has ids up to {}, and this format has 2 bytes for each. Write the format "
                     "llmc32.",
                     tokenizer.path(), tokenizer.max_id());
  const std::optional<std::int64_t> token =
      options.end_of_text ? options.end_of_text : tokenizer.eos_token_id();
  if (!token)
    throw UsageError("tokenize",
                     "{} does not say which token ends a text: there is no eos_token in a "
                     "tokenizer_config.json beside it. Name one with --end-of-text.",
                     tokenizer.path());
  return static_cast<std::uint32_t>(*token);
}

// Encodes every document's tokens into temporary files in the folder; returns their names.
std::vector<std::string> encode_documents(const TokenizeOptions& options,
                                          std::vector<Document>& documents,
                                          const std::string& folder) {
  std::uint64_t bytes = 0;
  for (const Document& document : documents) bytes += document.bytes;
  ThreadPool pool(options.workers, options.progress, bytes);
  const auto path = [&](std::size_t thread) {
    return fmt::format("{}/encoded-{}", folder, thread);
  };
  const std::size_t threads = pool.run(documents.size(), [&](std::size_t thread) {
    return std::make_unique<Encoder>(*options.tokenizer, documents, path(thread), pool);
  });
  std::vector<std::string> files;
  for (std::size_t thread = 0; thread < threads; ++thread) files.push_back(path(thread));
  return files;
}

}  // namespace

TokenizeResult tokenize(const TokenizeOptions& options) {
  if (options.inputs.empty())
    throw UsageError("tokenize", "no text was named. Name files or folders.");
  if (options.output.empty()) throw UsageError("tokenize", "no output folder was named.");
  if (options.shard_tokens == 0) throw UsageError("tokenize", "a shard cannot have 0 tokens.");
  if (options.workers < 0 || options.workers > 1024)
    throw UsageError("tokenize", "{} workers: the number must be 0 to 1024.", options.workers);
  if (options.name.empty() || options.name.find('/') != std::string::npos)
    throw UsageError("tokenize", "'{}' is not a name for shards: it becomes part of a file's name.",
                     options.name);
  if (options.format == TokenFormat::kAuto)
    throw UsageError("tokenize", "choose a format to write: llmc16, llmc32 or nanogpt.");
  const std::uint32_t end = end_of_text(options);
  std::vector<Document> documents = list_documents(options);
  if (options.replace) check_replaceable(options.output);
  const std::uint64_t width = options.format == TokenFormat::kLlmc32 ? 4 : 2;
  // With a tokenizer this is a guess: a token takes at least three bytes of text.
  std::uint64_t total = place(documents);
  ShardPlan plan{.shards = options.tokenizer ? std::vector<Shard>() : plan_shards(options, total),
                 .format = options.format,
                 .end_of_text = end,
                 .source_bytes = options.tokenizer ? 4u : 1u};
  io::AtomicDir folder(
      options.output,
      {.expected_bytes =
           options.tokenizer ? total / 3 * (width + 4) : total * width + plan.shards.size() * 1024,
       .replace = options.replace});
  plan.folder = folder.path();
  std::vector<std::string> encoded;
  if (options.tokenizer) {
    encoded = encode_documents(options, documents, folder.path());
    total = place(documents);
    plan.shards = plan_shards(options, total);
  }
  ThreadPool pool(options.workers, options.tokenizer ? nullptr : options.progress, total);
  pool.run(plan.shards.size(),
           [&](std::size_t) { return std::make_unique<ShardMaker>(plan, documents, pool); });
  for (const std::string& file : encoded) fs::remove(file);
  TokenizeResult result{.documents = documents.size(), .tokens = total};
  for (const Shard& shard : plan.shards) {
    folder.adopt(shard.name);
    result.shards.emplace_back(shard.name, shard.count);
  }
  folder.commit();
  return result;
}

namespace {

std::string cause(int error_number) {
  return std::generic_category().message(error_number);
}

const char* remedy(int error_number) {
  if (error_number == EACCES || error_number == EPERM)
    return "Give this user permission to read it, or move it out of the data.";
  if (error_number == ENOENT) return "Check the path, or remove a link whose file is gone.";
  return "Check the file system, or move it out of the data.";
}

const char* kind_name(fs::file_type type) {
  switch (type) {
    case fs::file_type::directory:
      return "folder";
    case fs::file_type::fifo:
      return "named pipe";
    case fs::file_type::socket:
      return "socket";
    default:
      return "device";
  }
}

[[noreturn]] void refuse_folder(const std::string& folder, const std::error_code& error) {
  throw UsageError("data", "the folder {} cannot be listed ({}). {}", folder, error.message(),
                   remedy(error.value()));
}

}  // namespace

void refuse_text_file(const std::string& path, int error_number) {
  throw UsageError("data", "{} cannot be read ({}). {}{}", path, cause(error_number),
                   remedy(error_number), link_advice(path));
}

void check_text_file(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) refuse_text_file(path, ENOENT);
  if (error) refuse_text_file(path, error.value());
  if (status.type() != fs::file_type::regular) {
    throw UsageError("data", "{} is a {}, not a file. Move it out of the data.", path,
                     kind_name(status.type()));
  }
  // The kind may have changed since: opening a named pipe must not block.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!fd) refuse_text_file(path, errno);
}

std::vector<std::string> files_below(const std::string& folder,
                                     const std::function<bool(const std::string& path)>& wanted) {
  std::vector<std::string> found;
  // Not a recursive iterator, which does not say which of the folders could not be listed.
  std::vector<std::string> folders{folder};
  while (!folders.empty()) {
    const std::string current = std::move(folders.back());
    folders.pop_back();
    std::error_code error;
    for (fs::directory_iterator entry(current, error); !error && entry != fs::directory_iterator();
         entry.increment(error)) {
      const std::string path = entry->path().string();
      std::error_code unknown;
      const fs::file_type type = entry->symlink_status(unknown).type();
      if (unknown) refuse_text_file(path, unknown.value());
      if (type == fs::file_type::directory) {
        folders.push_back(path);
      } else if (wanted(path) && !fs::is_directory(path, unknown)) {
        check_text_file(path);
        found.push_back(path);
      }
    }
    if (error) refuse_folder(current, error);
  }
  return found;
}

}  // namespace lockstep::data
