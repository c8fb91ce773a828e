// A piece of memory that several processes map: an anonymous file without a name, sealed so that
// nobody can shrink it under a reader's feet, and allocated in full so that touching it never
// fails. From 2 MiB on it lies in huge pages, where the kernel provides them.
//
//   check_room(bytes, groups);                     // all ranks; throws UsageError
//   auto mine = Segment::make(bytes);
//   send_packet(socket, "here", mine->fd(), deadline);
//   auto theirs = Segment::open(packet.fd.get(), bytes);
//
// Opening a segment that this process already maps gives the same mapping: ranks that are threads
// of one process see the same addresses. Reference counted; safe from any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep::shm {

// Throws UsageError where the ranks of this host, whose control groups these are (memory_groups()),
// cannot make a segment of this size each and map all of them. All ranks must ask before any of
// them makes its own, which the others would otherwise count as missing or not count at all.
void check_room(std::size_t bytes, const std::vector<std::string>& groups);

class Segment {
 public:
  // Throws UsageError when there is no room for it.
  static std::shared_ptr<Segment> make(std::size_t bytes);
  // A descriptor received from a peer; it stays the caller's. Throws SystemError, or CommError
  // when it is not a sealed segment of at least that size.
  static std::shared_ptr<Segment> open(int fd, std::size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  // Only the mapping is needed once every peer has the descriptor.
  void close_fd() { fd_.reset(); }

 private:
  using Identity = std::pair<unsigned long long, unsigned long long>;  // device and inode

  Segment() = default;
  void map(int fd);
  void use_huge_pages(void* place) const;
  static std::shared_ptr<Segment> enter(const std::shared_ptr<Segment>& segment);

  Fd fd_;  // the maker's
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Identity identity_{};
};

}  // namespace lockstep::shm
