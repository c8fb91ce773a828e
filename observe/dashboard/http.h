// HTTP between a dashboard and who looks at it: what the server decides about a request before it
// looks at the run (where it listens, which Host it answers to, whose token is right), and the
// client of `lockstep monitor`. Any thread may call the functions, which have no state.
//
//   const ListenAddress where = parse_listen_address("8080", "--dashboard");
//   if (!host_allowed(header, where.address)) refuse();     // a page that rebinds its name by DNS
//   HttpStream events(parse_dashboard_url("http://localhost:80/?token=..."), "/events", deadline);
//   while (const auto state = events.next_event(deadline)) show(*state);
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"

namespace lockstep::dashboard {

struct ListenAddress {
  std::string address = "127.0.0.1";  // numeric, IPv6 without brackets
  int port = 0;                       // 0: a free one
};

// "", "PORT", "ADDRESS:PORT" or "[ADDRESS]:PORT"; UsageError that names `flag` for anything else.
ListenAddress parse_listen_address(std::string_view text, std::string_view flag);
// "127.0.0.1:8080", "[::1]:8080"
std::string address_text(const ListenAddress& where);
// Where a browser finds it: the same, but this host's name where it listens on every address.
std::string url_host(const ListenAddress& where);
bool is_loopback(std::string_view address);

// Whether a Host header names this server. A page of another site can have its name resolve to our
// address, but it cannot make the browser send a Host that is not its name: so localhost and
// numbers are right, and names are not, but for this host's own where it listens beyond loopback.
bool host_allowed(std::string_view header, std::string_view address);

std::string random_token();  // 128 bits of the kernel's, in hexadecimal
// A token that the user has chosen, so that a scraper can know it before the run. UsageError unless
// it is 16 to 256 characters that need no quoting in an address, in a file that only its owner
// (this user or root) can read. White space around it does not count.
std::string read_token_file(const std::string& path);
// Takes as long whatever the difference is.
bool same_token(std::string_view given, std::string_view token);
// "Bearer x" -> "x"; empty for anything else.
std::string_view bearer_token(std::string_view header);

struct DashboardUrl {
  std::string host;
  int port = 80;
  std::string token{};
};
DashboardUrl parse_dashboard_url(std::string_view text);

// Reads one answer, or a stream of events, by HTTP/1.0 over a socket, without TLS. Used by one
// thread. Throws CommError where the server cannot be reached or breaks the protocol, UsageError
// where it refuses (the token is wrong), and TimeoutError at a deadline. What it accepts is
// bounded, whoever the server is.
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
