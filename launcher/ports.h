// MASTER_PORT: a port that no other process can use from the moment it is chosen.
//
// Its sockets are bound without SO_REUSEADDR, so no process of any user can bind the port, even
// while they do not listen. If the kernel still has connections of an earlier run at a requested
// port, it can be bound only with SO_REUSEADDR. Then it listens for a moment, which no other
// process can do meanwhile, and clears the flag: with the flag and without listening, any process
// could bind the port too, listen there and answer the ranks.
//
// The port stays bound when it stops listening, and can listen again while it has connections.
//
//   HeldPort port = HeldPort::any(Reach::kLoopback);   // or HeldPort::exactly(29500, reach)
//   port.listen();
//
// Owned by the supervisor; a new one for each attempt unless the port was requested.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep::launch {

// The addresses of the port. "localhost" may mean either loopback address, so kLoopback is both.
enum class Reach { kLoopback, kIpv4Loopback, kNetwork };

class HeldPort {
 public:
  // A free port.
  static HeldPort any(Reach reach = Reach::kNetwork);
  // Throws UsageError naming --master-port and, if it is found, the process that has the port.
  static HeldPort exactly(int port, Reach reach = Reach::kNetwork);
  // None if another process has the port; otherwise like exactly().
  static std::optional<HeldPort> unless_in_use(int port, Reach reach);

  int number() const { return number_; }
  // One for each address; non-blocking. They belong to this object.
  const std::vector<Fd>& sockets() const { return sockets_; }
  // Throws UsageError like exactly(). Does nothing the second time.
  void listen() const;
  void stop_listening() const;  // the port stays held

 private:
  HeldPort(std::vector<Fd> sockets, int number) : sockets_(std::move(sockets)), number_(number) {}

  std::vector<Fd> sockets_;
  int number_;
};

}  // namespace lockstep::launch
