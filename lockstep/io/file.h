// Durable writing of files, memory-mapped reading, and checksums.
//
//   FileWriter file("dir/model.bin");
//   file.append(bytes);
//   FileDigest digest = file.finish();   // flushed, fsynced, closed; size and SHA-256
//
//   MappedFile map("dir/model.bin");
//   use(map.bytes());
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

struct evp_md_ctx_st;  // OpenSSL's

namespace lockstep::io {

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// SHA-256 of what is fed to it, by one thread at a time.
//
//   Sha256 sum;
//   sum.update(first); sum.update(second);      // the same as one update with both
//   const std::string digest = sum.finish();    // as `sha256sum` prints it
class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  std::string finish();  // 64 lower-case hexadecimal digits; nothing may follow

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

std::string sha256(std::span<const std::byte> bytes);

// The properties of a file that a manifest records.
struct FileDigest {
  std::uint64_t bytes = 0;
  std::string sha256{};  // empty: not known (folders of earlier versions)
  bool operator==(const FileDigest&) const = default;
};

// CRC-32C (Castagnoli), which event records carry; for small buffers.
std::uint32_t crc32c(std::span<const std::byte> bytes);

// Bytes an unprivileged process may still write to the file system that `path` is on; throws
// SystemError. `path` need not exist: its nearest existing parent is asked.
std::uint64_t free_space(const std::string& path);

// "1.5 GiB": for people, in messages.
std::string size_text(std::uint64_t bytes);

// A SystemError `cannot <doing> <path> (values): <errno's message>` with what to do about it. For a
// full disk it says how much was needed (0: not known) and how much is free.
SystemError file_error(std::string_view doing, const std::string& path, int error_number,
                       std::uint64_t needed_bytes = 0);

// Makes a directory's entries durable; throws SystemError.
void sync_directory(const std::string& path);

// Makes a directory and its missing parents, each durable in its own parent; throws SystemError.
void make_directories(const std::string& path);

// Incremented by every write and every fsync, so that a thread that waits for the writer can
// distinguish a slow one from a stuck one.
using WriteProgress = std::atomic<std::uint64_t>;

// Used by one thread. Dropping it without finish() closes the file and leaves it as it is: its
// creator removes it (AtomicDir does).
class FileWriter {
 public:
  // Creates the file; an existing one is an error (SystemError, as for all functions below).
  explicit FileWriter(std::string path, WriteProgress* progress = nullptr);

  void append(std::span<const std::byte> bytes);
  void append(std::string_view text) { append(bytes_of(text)); }
  // Everything appended is on the disk when this returns. Once; nothing may be appended after it.
  FileDigest finish();

  const std::string& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  void write(std::span<const std::byte> bytes);
  void flush();

  std::string path_;
  WriteProgress* progress_ = nullptr;
  Fd fd_;
  Sha256 checksum_;
  std::vector<std::byte> buffer_;
  std::uint64_t bytes_ = 0;
};

// A file that several processes write, each its own byte range. The first one creates it in full
// size, with space reserved where the file system can do so; AtomicDir::adopt() adds it to a
// directory when all have finished.
//
//   SharedFileWriter::make(path, bytes);                  // one process
//   SharedFileWriter file(path);                          // then each of them
//   file.write(offset, mine);
//   file.finish();
class SharedFileWriter {
 public:
  static void make(const std::string& path, std::uint64_t bytes);
  explicit SharedFileWriter(std::string path, WriteProgress* progress = nullptr);
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  void finish();  // what was written is on the disk

 private:
  std::string path_;
  WriteProgress* progress_ = nullptr;
  Fd fd_;
};

// Size and SHA-256 of the whole file; throws SystemError when it cannot. `progress` counts reads.
FileDigest digest_file(const std::string& path, WriteProgress* progress = nullptr);

// Read-only; spans into it live as long as it does. Any number of threads may read. A file that
// somebody shortens while it is mapped raises SIGBUS on access: files here are replaced by rename,
// never rewritten.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // throws SystemError

  std::span<const std::byte> bytes() const {
    return {data_.get(), data_ ? data_.get_deleter().size : 0};
  }

 private:
  struct Unmap {
    std::size_t size;
    void operator()(const std::byte* data) const;
  };
  std::unique_ptr<const std::byte, Unmap> data_;
};

}  // namespace lockstep::io
