// MASTER_PORT: a port that stays ours from the moment it is chosen.
//
// Several sockets may share one port as long as at most one of them listens and all
// have SO_REUSEADDR. The first is bound and never listens, so nobody else is given the port; others
// are bound beside it to listen for a while: node 0's launcher for the other launchers, on every
// interface, and then, on loopback, for the store (store_server.h). Connections that were accepted
// on the port earlier do not disturb.
//
//   HeldPort port = HeldPort::any(Reach::kLoopback);   // or HeldPort::exactly(29500, reach)
//   Fd listener = port.listener();
//
// Owned by the supervisor; one per attempt when the port was not asked for.
#pragma once

#include "lockstep/core/fd.h"

namespace lockstep::launch {

// From where the port can be reached once somebody listens there.
enum class Reach { kLoopback, kNetwork };

class HeldPort {
 public:
  // A free port; no other bind to port 0 on this host can return it while it is held.
  static HeldPort any(Reach reach = Reach::kNetwork);
  // Throws UsageError naming --master-port when somebody listens there.
  static HeldPort exactly(int port, Reach reach = Reach::kNetwork);

  int number() const { return number_; }
  // Bound to the same port, not listening, close-on-exec.
  Fd store_socket() const;
  // Bound and listening, non-blocking. Throws UsageError when somebody else listens.
  Fd listener() const;

 private:
  HeldPort(Fd socket, int number, int family, Reach reach)
      : socket_(std::move(socket)), number_(number), family_(family), reach_(reach) {}

  Fd socket_;
  int number_;
  int family_;
  Reach reach_;
};

}  // namespace lockstep::launch
