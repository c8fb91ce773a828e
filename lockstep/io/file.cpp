#include "lockstep/io/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <utility>

namespace lockstep::io {
namespace {

// Small appends are gathered up to this; larger ones go out as they are.
constexpr std::size_t kBufferBytes = 256u << 10;
// Summed and then written in pieces of this size: the write finds them in the cache.
constexpr std::size_t kPieceBytes = 1u << 20;

std::string remedy(int error_number) {
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
      return "Check the path.";
    case EACCES:
    case EPERM:
    case EROFS:
      return "Choose a place this user may write to, or change its permissions.";
    case EEXIST:
    case ENOTEMPTY:
      return "Choose another name, or remove what is there.";
    case ENOSPC:
    case EDQUOT:
      return "Free some space, keep fewer checkpoints, or write to another disk.";
    case EIO:
      return "The disk or the network file system is failing; look at the kernel's log.";
    case ELOOP:
      return "A symbolic link is there. Delete it.";
    case EMFILE:
    case ENFILE:
      return "Too many files are open; raise `ulimit -n`.";
    default:
      return "Check the file system.";
  }
}

void count_write(WriteProgress* progress) {
  if (progress != nullptr) progress->fetch_add(1, std::memory_order_relaxed);
}

void sync_and_close(Fd& fd, const std::string& path, WriteProgress* progress) {
  while (::fsync(fd.get()) != 0)
    if (errno != EINTR) throw file_error("fsync", path, errno);
  count_write(progress);
  // A network file system may report a failed write only here.
  if (::close(fd.release()) != 0 && errno != EINTR) throw file_error("close", path, errno);
}

}  // namespace

std::uint64_t free_space(const std::string& path) {
  namespace fs = std::filesystem;
  fs::path place = path.empty() ? fs::path(".") : fs::path(path);
  struct statvfs info {};
  while (::statvfs(place.c_str(), &info) != 0) {
    if (errno == EINTR) continue;
    const fs::path parent = place.has_parent_path() ? place.parent_path() : fs::path(".");
    if (errno != ENOENT || parent == place) throw file_error("ask for the space at", path, errno);
    place = parent;
  }
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

std::string size_text(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} bytes", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

SystemError file_error(std::string_view doing, const std::string& path, int error_number,
                       std::uint64_t needed_bytes) {
  std::string values;
  if (error_number == ENOSPC || error_number == EDQUOT) {
    std::uint64_t free_bytes = 0;
    try {
      free_bytes = free_space(path);
    } catch (const SystemError&) {
      // The first error is the one to report.
    }
    values = needed_bytes > 0 ? fmt::format(" ({} needed, {} free)", size_text(needed_bytes),
                                            size_text(free_bytes))
                              : fmt::format(" ({} free)", size_text(free_bytes));
  }
  return SystemError("io",
                     fmt::format("cannot {} {}{}. {}", doing, path, values, remedy(error_number)),
                     error_number);
}

void sync_directory(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw file_error("open the directory", path, errno);
  // Some network file systems have nothing to do for a directory and say so by EINVAL.
  while (::fsync(fd.get()) != 0) {
    if (errno == EINVAL) return;
    if (errno != EINTR) throw file_error("fsync the directory", path, errno);
  }
}

void make_directories(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) == 0) return;
  const std::string above = std::filesystem::path(path).parent_path().string();
  const std::string parent = above.empty() ? "." : above;
  make_directories(parent);
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST)
    throw file_error("make the directory", path, errno);
  sync_directory(parent);
}

FileWriter::FileWriter(std::string path, WriteProgress* progress)
    : path_(std::move(path)), progress_(progress) {
  fd_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd_) throw file_error("create", path_, errno);
  buffer_.reserve(kBufferBytes);
}

void FileWriter::append(std::span<const std::byte> bytes) {
  LOCKSTEP_ASSERT(static_cast<bool>(fd_));
  bytes_ += bytes.size();
  if (buffer_.size() + bytes.size() > kBufferBytes) flush();
  if (bytes.size() <= kBufferBytes) {
    checksum_.update(bytes);
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    return;
  }
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(bytes.size(), kPieceBytes))) {
    const auto piece = bytes.first(std::min(bytes.size(), kPieceBytes));
    checksum_.update(piece);
    write(piece);
  }
}

void FileWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw file_error("write to", path_, errno, bytes.size());
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    count_write(progress_);
  }
}

void FileWriter::flush() {
  write(buffer_);
  buffer_.clear();
}

FileDigest FileWriter::finish() {
  LOCKSTEP_ASSERT(static_cast<bool>(fd_));
  flush();
  sync_and_close(fd_, path_, progress_);
  return {bytes_, checksum_.finish()};
}

void SharedFileWriter::make(const std::string& path, std::uint64_t bytes) {
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd) throw file_error("create", path, errno);
  const auto size = static_cast<off_t>(bytes);
  // A full disk is an error here, not halfway through the writes.
  while (size > 0 && ::fallocate(fd.get(), 0, 0, size) != 0) {
    if (errno == EOPNOTSUPP || errno == ENOSYS) break;
    if (errno != EINTR) throw file_error("write to", path, errno, bytes);
  }
  while (::ftruncate(fd.get(), size) != 0)
    if (errno != EINTR) throw file_error("write to", path, errno, bytes);
}

SharedFileWriter::SharedFileWriter(std::string path, WriteProgress* progress)
    : path_(std::move(path)), progress_(progress) {
  fd_.reset(::open(path_.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd_) throw file_error("open", path_, errno);
}

void SharedFileWriter::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_.get(), bytes.data(), std::min(bytes.size(), kPieceBytes),
                               static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw file_error("write to", path_, errno, bytes.size());
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
    count_write(progress_);
  }
}

void SharedFileWriter::finish() {
  sync_and_close(fd_, path_, progress_);
}

FileDigest digest_file(const std::string& path, WriteProgress* progress) {
  // Not mapped: a file that is being shortened must be an error here, not a SIGBUS.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw file_error("open", path, errno);
  // Not cleared first: most files of a checkpoint are smaller than it.
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(kBufferBytes);
  Sha256 sum;
  FileDigest digest;
  for (;;) {
    const ssize_t n = ::read(fd.get(), buffer.get(), kBufferBytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw file_error("read", path, errno);
    if (n == 0) break;
    sum.update(std::span(buffer.get(), static_cast<std::size_t>(n)));
    digest.bytes += static_cast<std::uint64_t>(n);
    count_write(progress);
  }
  digest.sha256 = sum.finish();
  return digest;
}

MappedFile::MappedFile(const std::string& path) {
  // Without O_NONBLOCK opening a named pipe waits for a writer.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!fd) throw file_error("open", path, errno);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) throw file_error("look at", path, errno);
  if (S_ISDIR(info.st_mode)) throw file_error("map", path, EISDIR);
  if (!S_ISREG(info.st_mode)) throw file_error("map a pipe or a device,", path, ENODEV);
  const auto size = static_cast<std::size_t>(info.st_size);
  if (size == 0) return;  // an empty mapping is an error; an empty span is not
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) throw file_error("map", path, errno);
  data_ = {static_cast<const std::byte*>(data), Unmap{size}};
}

void MappedFile::Unmap::operator()(const std::byte* data) const {
  ::munmap(const_cast<std::byte*>(data), size);
}

// ---------------------------------------------------------------- checksums

namespace {

void must(bool done) {
  if (!done)
    throw UsageError("io",
                     "OpenSSL cannot compute SHA-256. Check its configuration "
                     "(OPENSSL_CONF).");
}

}  // namespace

void Sha256::Free::operator()(evp_md_ctx_st* context) const {
  ::EVP_MD_CTX_free(context);
}

Sha256::Sha256() : context_(::EVP_MD_CTX_new()) {
  must(context_ && ::EVP_DigestInit_ex(context_.get(), ::EVP_sha256(), nullptr) == 1);
}

void Sha256::update(std::span<const std::byte> bytes) {
  must(::EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
}

std::string Sha256::finish() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  must(::EVP_DigestFinal_ex(context_.get(), digest.data(), &size) == 1);
  std::string text;
  for (unsigned i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

std::string sha256(std::span<const std::byte> bytes) {
  Sha256 sum;
  sum.update(bytes);
  return sum.finish();
}

std::uint32_t crc32c(std::span<const std::byte> bytes) {
  // 0x82f63b78 is the Castagnoli polynomial with its bits reversed.
  static constexpr auto kTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < table.size(); ++i) {
      std::uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
      table[i] = crc;
    }
    return table;
  }();
  std::uint32_t crc = ~0u;
  for (const std::byte b : bytes)
    crc = (crc >> 8) ^ kTable[(crc ^ std::to_integer<std::uint32_t>(b)) & 0xffu];
  return ~crc;
}

}  // namespace lockstep::io
