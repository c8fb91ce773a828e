// Reads from a dashboard: one answer, or its stream of events. HTTP/1.0 over a socket, no TLS.
//
//   const DashboardUrl url = parse_dashboard_url("http://127.0.0.1:8080/?token=...");
//   HttpStream events(url, "/events", Deadline::after(std::chrono::seconds(10)));
//   while (const auto state = events.next_event(deadline)) show(*state);
//
// Used by one thread. Throws CommError where the server cannot be reached or breaks the protocol,
// UsageError where it refuses (the token is wrong), and TimeoutError at a deadline. What it accepts
// is bounded, whoever the server is.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"

namespace lockstep::dashboard {

struct DashboardUrl {
  std::string host;
  int port = 80;
  std::string token{};
};
DashboardUrl parse_dashboard_url(std::string_view text);

class HttpStream {
 public:
  HttpStream(const DashboardUrl& url, const std::string& path, const Deadline& deadline);

  // The data of the next event of type "message". Nothing after the event "end" and after the last
  // one; ended() says which.
  std::optional<std::string> next_event(const Deadline& deadline);
  bool ended() const { return ended_; }

 private:
  void connect(const DashboardUrl& url, const Deadline& deadline);
  void send(std::string_view text, const Deadline& deadline);
  bool fill(const Deadline& deadline);  // false at the end of the connection
  // Without its end; nothing at the end of the connection.
  std::optional<std::string> line(std::size_t most, const Deadline& deadline);
  void read_headers(const Deadline& deadline);

  std::string where_;
  Fd socket_;
  std::string received_;  // and not taken
  bool ended_ = false;
};

}  // namespace lockstep::dashboard
