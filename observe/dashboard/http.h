// HTTP between a dashboard and its viewers: the server's checks of a request that do not involve
// the run (listening address, allowed Host, token), the client of `lockstep monitor`, and the
// server. Stateless functions; any thread may call them.
//
//   const ListenAddress where = parse_listen_address("8080", "--dashboard");
//   if (!host_allowed(header, where.address)) refuse();     // a page that rebinds its name by DNS
//   HttpStream events(parse_dashboard_url("http://localhost:80/?token=..."), "/events", deadline);
//   while (const auto state = events.next_event(deadline)) show(*state);
#pragma once

#include <chrono>
#include <functional>
#include <memory>
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
// The host for a browser's URL: the same, or this host's name if it listens on all addresses.
std::string url_host(const ListenAddress& where);
bool is_loopback(std::string_view address);

// Whether a Host header names this server. Another site's page can make its name resolve to our
// address, but cannot change the Host that the browser sends: so localhost and numbers are allowed,
// and no names but this host's own, if it listens beyond loopback.
bool host_allowed(std::string_view header, std::string_view address);

std::string random_token();  // 128 bits of the kernel's, in hexadecimal
// Reads a token chosen by the user, so that a scraper can know it before the run. UsageError unless
// it has 16 to 256 characters that need no quoting in a URL, in a file that only its owner (this
// user or root) can read. Surrounding white space is ignored.
std::string read_token_file(const std::string& path);
// Compares in constant time, whatever the difference.
bool same_token(std::string_view given, std::string_view token);
// "Bearer x" -> "x"; empty for anything else.
std::string_view bearer_token(std::string_view header);

struct DashboardUrl {
  std::string host;
  int port = 80;
  std::string token{};
};
DashboardUrl parse_dashboard_url(std::string_view text);

// Reads one response, or a stream of events, by HTTP/1.0 over a socket, without TLS. Used by one
// thread. Throws CommError if the server cannot be reached or breaks the protocol, UsageError if it
// refuses (a wrong token), and TimeoutError at a deadline. The size of responses is bounded, even
// from an untrusted server.
class HttpStream {
 public:
  HttpStream(const DashboardUrl& url, const std::string& path, const Deadline& deadline);

  // The data of the next event of type "message"; nothing after the event "end" or the last event.
  // ended() tells the two apart.
  std::optional<std::string> next_event(const Deadline& deadline);
  bool ended() const { return ended_; }

 private:
  void connect(const DashboardUrl& url, const Deadline& deadline);
  void send(std::string_view text, const Deadline& deadline);
  bool fill(const Deadline& deadline);  // false at the end of the connection
  // A line without its terminator; nothing at the end of the connection.
  std::optional<std::string> line(std::size_t most, const Deadline& deadline);
  void read_headers(const Deadline& deadline);

  std::string where_;
  Fd socket_;
  std::string received_;  // received, but not yet returned
  bool ended_ = false;
};

// ---------------------------------------------------------------- the server
//
// The page, the run's state as JSON and as a stream of events, Prometheus's page, and probes for
// orchestrators. It reads the run through three functions only.
//
//   HttpEndpoint endpoint = http_listen("", "--dashboard");            // a free loopback port
//   HttpServer server(std::move(endpoint), {.snapshot_json = ..., .metrics_text = ...});
//   fmt::print(stderr, "[dashboard] {}\n", server.url());              // with the token
//
//   GET /            the page            GET /snapshot   the state, once
//   GET /events      the state, each second, as server-sent events
//   GET /metrics     Prometheus          GET /healthz, /readyz   without a token
//
// Everything else needs the token: in the query (`?token=`, which the page exchanges for a cookie)
// or as `Authorization: Bearer`. The server runs two threads of its own; requests are bounded in
// size, number and time, so that a client can neither hold it up nor make it grow. Built on
// libmicrohttpd (http_server.cpp); without it (http_unavailable.cpp) http_listen() says what to
// install.

// The run, as the server reads it. Called by the server's threads, one call at a time, at most once
// a second. An exception is answered with status 500.
struct DashboardSource {
  std::function<std::string()> snapshot_json;  // one JSON object (docs/dashboard.md)
  std::function<std::string()> metrics_text;   // empty: there is no /metrics
  std::function<bool()> ready;                 // empty: always
};

struct HttpEndpoint {
  Fd socket;
  ListenAddress where;  // with the port that the kernel gave
};

// Binds the port, so that a port in use is reported before anything is started. The UsageError
// names `flag`.
HttpEndpoint http_listen(const std::string& where, const std::string& flag);

struct HttpOptions {
  std::string token{};                             // empty: a random one
  std::chrono::milliseconds interval{1000};        // between events
  unsigned connections = 160;                      // near it the oldest without a request is closed
  unsigned viewers = 64;                           // event streams; more get status 503
  std::chrono::milliseconds request_limit{10000};  // from connection to response; not for streams
};

// Used by one thread; other threads call the source until the destructor returns. The
// destructor sends the last state and the event "end" to all viewers, for at most a
// second.
class HttpServer {
 public:
  HttpServer(HttpEndpoint endpoint, DashboardSource source, const HttpOptions& options = {});
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  std::string url() const;  // with the token

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::dashboard
