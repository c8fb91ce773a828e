// MASTER_PORT: a port that nobody else can use from the moment it is chosen.
//
// Its sockets are bound without SO_REUSEADDR, so no process of any user can bind one beside them,
// even while they do not listen. A port that was asked for may have connections of an earlier run
// that the kernel has not forgotten. Then it can be bound only with SO_REUSEADDR; it listens for a
// moment, in which nobody else can, and loses the flag. A socket that is bound with the flag and
// does not listen holds nothing: anybody could bind the port, listen there and answer the ranks.
//
// It stays bound while it does not listen, and can listen again beside its connections.
//
//   HeldPort port = HeldPort::any(Reach::kLoopback);   // or HeldPort::exactly(29500, reach)
//   port.listen();
//
// Owned by the supervisor; one per attempt when the port was not asked for.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep::launch {

// Where the port can be reached from once it listens. "localhost" may mean either of the two
// loopback addresses, so both are held where ranks are given that name.
enum class Reach { kLoopback, kIpv4Loopback, kNetwork };

class HeldPort {
 public:
  // A free port.
  static HeldPort any(Reach reach = Reach::kNetwork);
  // Throws UsageError naming --master-port and, where it is found, the process that has it.
  static HeldPort exactly(int port, Reach reach = Reach::kNetwork);
  // Nothing while somebody else has it; otherwise as exactly().
  static std::optional<HeldPort> unless_in_use(int port, Reach reach);

  int number() const { return number_; }
  // One for each address; non-blocking. They belong to this object.
  const std::vector<Fd>& sockets() const { return sockets_; }
  // Throws UsageError as exactly() does. Does nothing the second time.
  void listen() const;
  void stop_listening() const;  // the port stays held

 private:
  HeldPort(std::vector<Fd> sockets, int number) : sockets_(std::move(sockets)), number_(number) {}

  std::vector<Fd> sockets_;
  int number_;
};

}  // namespace lockstep::launch
