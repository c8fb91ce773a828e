// The side of a node that is not node 0 in the link between launchers (node_link.h): it looks for
// node 0 until that answers, joins, and passes on what is said.
//
//   Spoke spoke(loop, plan, host, {...});
//   spoke.connect();
//
// Owned by the supervisor, one thread. Callbacks come from the event loop, never from a call.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "launcher/event_loop.h"
#include "launcher/node_connection.h"
#include "launcher/node_message.h"
#include "launcher/plan.h"

namespace lockstep::launch {

struct Addresses;
class Lookup;

class Spoke {
 public:
  struct Handlers {
    std::function<void(const Message&)> message;  // kStart and what follows
    std::function<void(const StoreFrame&)> frame;
    // Refused (2), or node 0 or another node did not come in time (1).
    std::function<void(int code, const std::string& text)> failed;
    // After it had answered; one that is waited for a second time, after an attempt had begun.
    std::function<void(const std::string& why)> lost;
    std::function<void(const std::string& text)> say;
  };
  Spoke(EventLoop& loop, const LaunchPlan& plan, std::string host, Handlers handlers);
  ~Spoke();

  // Tries until node 0 answers. `first_attempt`: the lowest it may start, after node 0 was lost.
  void connect(int first_attempt = 0);
  void send(const Message& message);
  void send(const StoreFrame& frame);
  void close();
  std::string local_address() const { return local_address_; }

 private:
  void expect_node_zero();
  void try_now();
  void try_addresses(const Addresses& found);
  void on_connected(Fd socket);
  void on_closed(const Closing& closing);
  void try_later(const std::string& why);
  void on_message(const Message& message);
  std::string what_is_wrong(const Message& message) const;
  void report_progress();

  EventLoop& loop_;
  const LaunchPlan& plan_;
  std::string host_;
  Handlers handlers_;
  std::unique_ptr<SecureContext> secure_;
  std::unique_ptr<Lookup> lookup_;
  Fd pending_;
  std::unique_ptr<Connection> connection_;
  bool welcome_ = false;
  bool begun_ = false;  // an attempt, since connect()
  int first_attempt_ = 0;
  std::string run_;  // its token, once an attempt has begun
  std::size_t tries_ = 0;
  std::string last_problem_ = "no answer yet";
  std::string local_address_;
  EventLoop::Clock::time_point started_;
  Timer overdue_timer_{loop_}, retry_timer_{loop_}, answer_timer_{loop_}, progress_timer_{loop_};
};

}  // namespace lockstep::launch
