// The dashboard's web server: the page, the run's state as JSON and as a stream of events,
// Prometheus's page, and probes for orchestrators. It reads the run through three functions only.
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
// libmicrohttpd; without it (http_unavailable.cpp) http_listen() says what to install.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "lockstep/core/fd.h"
#include "observe/dashboard/http.h"

namespace lockstep::dashboard {

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
