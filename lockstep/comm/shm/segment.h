// A piece of memory that several processes map: an anonymous file without a name, sealed so that
// nobody can shrink it under a reader's feet, and allocated in full so that touching it never
// fails.
//
//   auto mine = Segment::make(bytes, ranks);       // throws UsageError when there is no room
//   send_packet(socket, "here", mine->fd(), deadline);
//   auto theirs = Segment::open(packet.fd.get(), bytes);
//
// Opening a segment that this process already maps gives the same mapping: ranks that are threads
// of one process see the same addresses. Reference counted; safe from any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "lockstep/core/fd.h"

namespace lockstep::shm {

class Segment {
 public:
  // `ranks` of this host make one of this size at the same time, and each maps all of them.
  static std::shared_ptr<Segment> make(std::size_t bytes, int ranks = 1);
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
  static std::shared_ptr<Segment> enter(const std::shared_ptr<Segment>& segment);

  Fd fd_;  // the maker's
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Identity identity_{};
};

}  // namespace lockstep::shm
