#include <dlfcn.h>
#include <fmt/format.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/monitor/prometheus.h"
#include "observe/dashboard/http.h"
#include "observe/dashboard/page.h"

namespace lockstep::dashboard {
namespace {

using Clock = Deadline::Clock;
using Text = std::shared_ptr<const std::string>;

constexpr std::size_t kRequestBytes = 32u << 10;  // of a request's line and headers
constexpr unsigned kPerAddress = 32;              // connections; on loopback all have the same one
constexpr std::size_t kSpare = 32;                // places, which a new connection always finds
constexpr auto kEndLimit = std::chrono::milliseconds(1000);
constexpr const char* kPlain = "text/plain; charset=utf-8";
// Nothing from elsewhere, nothing inline, and no way to make elements out of text.
constexpr const char* kContentPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'";

// Opened by name at the first use: `lockstep` starts without it, and where it is not installed.
struct Microhttpd {
  decltype(&::MHD_add_response_header) add_response_header;
  decltype(&::MHD_create_response_from_buffer) create_response_from_buffer;
  decltype(&::MHD_create_response_from_callback) create_response_from_callback;
  decltype(&::MHD_destroy_response) destroy_response;
  decltype(&::MHD_get_connection_info) get_connection_info;
  decltype(&::MHD_get_connection_values) get_connection_values;
  decltype(&::MHD_lookup_connection_value) lookup_connection_value;
  decltype(&::MHD_queue_response) queue_response;
  decltype(&::MHD_resume_connection) resume_connection;
  decltype(&::MHD_start_daemon) start_daemon;
  decltype(&::MHD_stop_daemon) stop_daemon;
  decltype(&::MHD_suspend_connection) suspend_connection;
};

constexpr const char* kLibrary = "libmicrohttpd.so.12";

Microhttpd load_microhttpd() {
  void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw UsageError("dashboard",
                     "the dashboard needs {}, which cannot be loaded ({}). Install Debian's "
                     "package libmicrohttpd12 or its like.",
                     kLibrary, ::dlerror());
  const auto load = [&]<typename Function>(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr)
      throw UsageError("dashboard", "{} has no {}. Install a newer one (0.9.71 or later).",
                       kLibrary, name);
  };
  Microhttpd found;
  load(found.add_response_header, "MHD_add_response_header");
  load(found.create_response_from_buffer, "MHD_create_response_from_buffer");
  load(found.create_response_from_callback, "MHD_create_response_from_callback");
  load(found.destroy_response, "MHD_destroy_response");
  load(found.get_connection_info, "MHD_get_connection_info");
  load(found.get_connection_values, "MHD_get_connection_values");
  load(found.lookup_connection_value, "MHD_lookup_connection_value");
  load(found.queue_response, "MHD_queue_response");
  load(found.resume_connection, "MHD_resume_connection");
  load(found.start_daemon, "MHD_start_daemon");
  load(found.stop_daemon, "MHD_stop_daemon");
  load(found.suspend_connection, "MHD_suspend_connection");
  return found;
}

const Microhttpd& mhd() {
  static const Microhttpd library = load_microhttpd();
  return library;
}

// The source's last answer, refreshed when it is older than `interval`.
class Cached {
 public:
  Text get(const std::function<std::string()>& source, std::chrono::milliseconds interval) {
    const std::lock_guard lock(mutex_);
    if (!text_ || Clock::now() - time_ >= interval) {
      text_ = std::make_shared<const std::string>(source());
      time_ = Clock::now();
    }
    return text_;
  }

 private:
  std::mutex mutex_;
  Text text_;
  Clock::time_point time_{};
};

struct Reply {
  unsigned status = MHD_HTTP_OK;
  std::string body{};
  std::string type = kPlain;
  std::vector<std::pair<const char*, std::string>> headers{};
};

using Address = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Address address_of(const ListenAddress& where) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(where.port);
  const int failed = ::getaddrinfo(where.address.c_str(), port.c_str(), &hints, &found);
  LOCKSTEP_ASSERT(failed == 0);  // parse_listen_address() takes numbers alone
  return {found, &::freeaddrinfo};
}

int port_of(int socket) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&bound), &size) != 0)
    throw SystemError("dashboard", "cannot read the address of a socket", errno);
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

// One event; a line break would end it, and JSON needs none.
std::string event_text(std::string json) {
  for (char& c : json)
    if (c == '\n' || c == '\r') c = ' ';
  return "data: " + json + "\n\n";
}

const char* value_of(MHD_Connection* connection, MHD_ValueKind kind, const char* name) {
  return mhd().lookup_connection_value(connection, kind, name);
}

std::string_view view(const char* text) {
  return text == nullptr ? std::string_view() : std::string_view(text);
}

struct HostHeaders {
  int count = 0;
  std::string value;
};

MHD_Result count_host(void* closure, MHD_ValueKind, const char* key, const char* value) {
  auto& found = *static_cast<HostHeaders*>(closure);
  if (key == nullptr || ::strcasecmp(key, MHD_HTTP_HEADER_HOST) != 0) return MHD_YES;
  ++found.count;
  found.value = view(value);
  return MHD_YES;
}

const char* listen_remedy(int error) {
  if (error == EADDRNOTAVAIL)
    return "This host has no such address. `ip address` lists those that it has; 0.0.0.0 is all of "
           "them, and a port alone is on 127.0.0.1.";
  if (error == EACCES)
    return "Ports below 1024 are for root. Choose another one, or give none for a free one.";
  if (error == EADDRINUSE)
    return "Another program may have that port. Choose another one, or give none for a free one.";
  return "Choose another address or port, or give none for a free port of 127.0.0.1.";
}

}  // namespace

struct HttpServer::Impl {
  // A client with an event stream.
  struct Viewer {
    Impl* server = nullptr;
    MHD_Connection* connection = nullptr;
    std::uint64_t seen = 0;  // the generation that it was sent
    Text sending{};
    std::size_t at = 0;
    bool suspended = false;
  };
  struct Connection {
    Clock::time_point since;
    bool streaming = false;
    bool closing = false;
  };
  using Connections = std::map<MHD_Connection*, Connection>;

  HttpEndpoint endpoint;
  DashboardSource source;
  HttpOptions options;
  std::string cookie;
  Cached snapshot;
  Cached metrics;

  std::mutex mutex;  // of everything below; never held while the source is called
  std::condition_variable changed;
  Connections connections;
  std::set<Viewer*> viewers;
  Text event = std::make_shared<const std::string>();
  std::uint64_t generation = 0;
  bool stopping = false;

  MHD_Daemon* daemon = nullptr;
  std::thread publisher;

  void start();
  void stop();
  void publish_loop();
  void publish(Text text);
  static void close(Connections::value_type& entry);
  void close_slow();
  void close_oldest();
  MHD_Result answer(MHD_Connection* connection, const char* path, const char* method);
  bool permitted(MHD_Connection* connection);
  Reply reply_to(MHD_Connection* connection, std::string_view path);
  MHD_Result stream(MHD_Connection* connection, bool head);
  MHD_Result send(MHD_Connection* connection, const Reply& reply);
  void add_headers(MHD_Response* response, const Reply& reply);
  static ssize_t read_events(void* closure, std::uint64_t, char* buffer, std::size_t room);
  static void end_viewer(void* closure);
  static void note_connection(void* closure, MHD_Connection* connection, void**,
                              MHD_ConnectionNotificationCode code);
};

// ---------------------------------------------------------------- requests

void HttpServer::Impl::add_headers(MHD_Response* response, const Reply& reply) {
  const std::pair<const char*, std::string> always[] = {
      {MHD_HTTP_HEADER_CONTENT_TYPE, reply.type},
      {MHD_HTTP_HEADER_CONNECTION, "close"},
      {MHD_HTTP_HEADER_CACHE_CONTROL, "no-store"},
      {"Content-Security-Policy", kContentPolicy},
      {"X-Content-Type-Options", "nosniff"},
      {"X-Frame-Options", "DENY"},
      {"Referrer-Policy", "no-referrer"},
      {"Cross-Origin-Resource-Policy", "same-origin"},
      {"Cross-Origin-Opener-Policy", "same-origin"},
  };
  for (const auto& [name, value] : always) mhd().add_response_header(response, name, value.c_str());
  for (const auto& [name, value] : reply.headers)
    mhd().add_response_header(response, name, value.c_str());
}

MHD_Result HttpServer::Impl::send(MHD_Connection* connection, const Reply& reply) {
  MHD_Response* response = mhd().create_response_from_buffer(
      reply.body.size(), const_cast<char*>(reply.body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  add_headers(response, reply);
  const MHD_Result queued = mhd().queue_response(connection, reply.status, response);
  mhd().destroy_response(response);
  return queued;
}

// The query decides where it has a token; a browser has the cookie, a program the header.
bool HttpServer::Impl::permitted(MHD_Connection* connection) {
  if (const char* given = value_of(connection, MHD_GET_ARGUMENT_KIND, "token"))
    return same_token(given, options.token);
  if (const char* given = value_of(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION))
    return same_token(bearer_token(given), options.token);
  return same_token(view(value_of(connection, MHD_COOKIE_KIND, cookie.c_str())), options.token);
}

Reply HttpServer::Impl::reply_to(MHD_Connection* connection, std::string_view path) {
  if (path == "/healthz") return {.body = "ok\n"};
  if (path == "/readyz") {
    if (!source.ready || source.ready()) return {.body = "ready\n"};
    return {.status = MHD_HTTP_SERVICE_UNAVAILABLE, .body = "not ready\n"};
  }
  if (!permitted(connection))
    return {.status = MHD_HTTP_FORBIDDEN,
            .body =
                "This page needs the token that `lockstep run` printed with its address: "
                "open that address, or send the token as Authorization: Bearer.\n"};
  if (path == "/snapshot")
    return {.body = *snapshot.get(source.snapshot_json, options.interval),
            .type = "application/json"};
  if (path == "/metrics" && source.metrics_text)
    return {.body = *metrics.get(source.metrics_text, options.interval),
            .type = monitor::Prometheus::kContentType};
  for (const PageFile& file : page_files()) {
    if (file.path != path) continue;
    Reply reply{.body = std::string(file.body), .type = std::string(file.type)};
    // The page removes the token from its URL; the cookie replaces it from then on.
    if (path == "/")
      reply.headers.emplace_back(
          MHD_HTTP_HEADER_SET_COOKIE,
          fmt::format("{}={}; Path=/; HttpOnly; SameSite=Strict", cookie, options.token));
    return reply;
  }
  return {.status = MHD_HTTP_NOT_FOUND, .body = "There is no such page.\n"};
}

MHD_Result HttpServer::Impl::answer(MHD_Connection* connection, const char* path,
                                    const char* method) {
  HostHeaders host;
  mhd().get_connection_values(connection, MHD_HEADER_KIND, count_host, &host);
  if (host.count != 1)
    return send(connection, {.status = MHD_HTTP_BAD_REQUEST, .body = "One Host is needed.\n"});
  if (!host_allowed(host.value, endpoint.where.address))
    return send(connection, {.status = MHD_HTTP_MISDIRECTED_REQUEST,
                             .body = "This server does not answer to that Host. Use "
                                     "http://localhost or a numeric address.\n"});
  const bool head = view(method) == MHD_HTTP_METHOD_HEAD;
  if (!head && view(method) != MHD_HTTP_METHOD_GET)
    return send(connection, {.status = MHD_HTTP_METHOD_NOT_ALLOWED,
                             .body = "Only GET and HEAD are served.\n",
                             .headers = {{MHD_HTTP_HEADER_ALLOW, "GET, HEAD"}}});
  try {
    if (view(path) == "/events" && permitted(connection)) return stream(connection, head);
    return send(connection, reply_to(connection, path));
  } catch (const std::exception& error) {
    return send(connection, {.status = MHD_HTTP_INTERNAL_SERVER_ERROR,
                             .body = fmt::format("{}\n", error.what())});
  }
}

// ---------------------------------------------------------------- event streams

MHD_Result HttpServer::Impl::stream(MHD_Connection* connection, bool head) {
  Reply reply{.type = "text/event-stream; charset=utf-8"};
  if (head) return send(connection, reply);
  const Text text = snapshot.get(source.snapshot_json, options.interval);
  auto viewer = std::make_unique<Viewer>();
  viewer->server = this;
  viewer->connection = connection;
  viewer->sending = std::make_shared<const std::string>("retry: 1000\n" + event_text(*text));
  {
    const std::lock_guard lock(mutex);
    if (stopping || viewers.size() >= options.viewers)
      return send(connection, {.status = MHD_HTTP_SERVICE_UNAVAILABLE,
                               .body = fmt::format("{} event streams are open, which is the "
                                                   "most. Close a page.\n",
                                                   viewers.size()),
                               .headers = {{MHD_HTTP_HEADER_RETRY_AFTER, "5"}}});
    viewer->seen = generation;
    viewers.insert(viewer.get());
    connections[connection].streaming = true;
  }
  MHD_Response* response = mhd().create_response_from_callback(
      MHD_SIZE_UNKNOWN, kRequestBytes / 2, read_events, viewer.get(), end_viewer);
  if (response == nullptr) {
    end_viewer(viewer.release());
    return MHD_NO;
  }
  static_cast<void>(viewer.release());  // the response's, until end_viewer()
  add_headers(response, reply);
  const MHD_Result queued = mhd().queue_response(connection, MHD_HTTP_OK, response);
  mhd().destroy_response(response);
  return queued;
}

// A viewer that reads slowly skips states: it gets the newest when it is done with one.
ssize_t HttpServer::Impl::read_events(void* closure, std::uint64_t, char* buffer,
                                      std::size_t room) {
  Viewer& viewer = *static_cast<Viewer*>(closure);
  Impl& server = *viewer.server;
  const std::lock_guard lock(server.mutex);
  if (viewer.at == viewer.sending->size()) {
    if (viewer.seen == server.generation) {
      if (server.stopping) return MHD_CONTENT_READER_END_OF_STREAM;
      viewer.suspended = true;
      mhd().suspend_connection(viewer.connection);
      return 0;
    }
    viewer.sending = server.event;
    viewer.seen = server.generation;
    viewer.at = 0;
  }
  const std::size_t count = std::min(room, viewer.sending->size() - viewer.at);
  std::memcpy(buffer, viewer.sending->data() + viewer.at, count);
  viewer.at += count;
  return static_cast<ssize_t>(count);
}

void HttpServer::Impl::end_viewer(void* closure) {
  const std::unique_ptr<Viewer> viewer(static_cast<Viewer*>(closure));
  Impl& server = *viewer->server;
  const std::lock_guard lock(server.mutex);
  server.viewers.erase(viewer.get());
  server.changed.notify_all();
}

// With the mutex held.
void HttpServer::Impl::publish(Text text) {
  event = std::move(text);
  ++generation;
  for (Viewer* viewer : viewers) {
    if (!std::exchange(viewer->suspended, false)) continue;
    mhd().resume_connection(viewer->connection);
  }
}

// The library notices, and forgets it.
void HttpServer::Impl::close(Connections::value_type& entry) {
  entry.second.closing = true;
  const auto* info = mhd().get_connection_info(entry.first, MHD_CONNECTION_INFO_CONNECTION_FD);
  if (info != nullptr) ::shutdown(info->connect_fd, SHUT_RDWR);
}

// The library's own limit is on silence alone: a client that sends a byte now and then, or reads
// one, would stay forever. With the mutex held.
void HttpServer::Impl::close_slow() {
  const auto now = Clock::now();
  for (auto& entry : connections)
    if (!entry.second.streaming && now - entry.second.since >= options.request_limit) close(entry);
}

// At its own limit the library accepts no connections, so a client that opens that many would lock
// out all others. Requests are answered at once, so the oldest connection without a request is the
// least likely to be a real client's. With the mutex held.
void HttpServer::Impl::close_oldest() {
  std::size_t open = 0;
  Connections::value_type* oldest = nullptr;
  for (auto& entry : connections) {
    if (entry.second.closing) continue;
    ++open;
    if (entry.second.streaming) continue;
    if (oldest == nullptr || entry.second.since < oldest->second.since) oldest = &entry;
  }
  if (open + kSpare > options.connections && oldest != nullptr) close(*oldest);
}

void HttpServer::Impl::publish_loop() {
  std::unique_lock lock(mutex);
  while (!stopping) {
    changed.wait_until(lock, Clock::now() + options.interval, [&] { return stopping; });
    if (stopping) return;
    close_slow();
    if (viewers.empty()) continue;
    lock.unlock();
    std::string text;
    try {
      text = event_text(*snapshot.get(source.snapshot_json, options.interval / 2));
    } catch (const std::exception&) {
      // The page says that nothing came; GET /snapshot says why.
    }
    lock.lock();
    if (!text.empty()) publish(std::make_shared<const std::string>(std::move(text)));
  }
}

void HttpServer::Impl::note_connection(void* closure, MHD_Connection* connection, void**,
                                       MHD_ConnectionNotificationCode code) {
  Impl& server = *static_cast<Impl*>(closure);
  const std::lock_guard lock(server.mutex);
  if (code != MHD_CONNECTION_NOTIFY_STARTED) {
    server.connections.erase(connection);
    return;
  }
  server.connections[connection] = {.since = Clock::now()};
  server.close_oldest();
}

// ---------------------------------------------------------------- begin and end

void HttpServer::Impl::start() {
  const SignalsBlocked blocked;  // for the threads
  const MHD_AccessHandlerCallback handler = [](void* closure, MHD_Connection* connection,
                                               const char* path, const char* method, const char*,
                                               const char*, std::size_t*, void** request) {
    // A body may follow; it is ignored.
    if (*request != nullptr) return MHD_NO;
    *request = closure;
    return static_cast<Impl*>(closure)->answer(connection, path, method);
  };
  const auto silence_s = static_cast<unsigned>(std::max<std::int64_t>(
      1, std::chrono::ceil<std::chrono::seconds>(options.request_limit).count()));
  daemon = mhd().start_daemon(
      MHD_USE_POLL | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_SUSPEND_RESUME, 0, nullptr, nullptr,
      handler, this, MHD_OPTION_LISTEN_SOCKET, endpoint.socket.get(), MHD_OPTION_CONNECTION_LIMIT,
      options.connections, MHD_OPTION_CONNECTION_TIMEOUT, silence_s,
      MHD_OPTION_PER_IP_CONNECTION_LIMIT,
      is_loopback(endpoint.where.address) ? options.connections : kPerAddress,
      MHD_OPTION_CONNECTION_MEMORY_LIMIT, kRequestBytes, MHD_OPTION_STRICT_FOR_CLIENT, 1,
      MHD_OPTION_NOTIFY_CONNECTION, note_connection, this, MHD_OPTION_END);
  if (daemon == nullptr)
    throw SystemError("dashboard", "libmicrohttpd did not start its server", errno);
  static_cast<void>(endpoint.socket.release());  // it closes it
  try {
    publisher = std::thread([this] { publish_loop(); });
  } catch (...) {  // its threads must not outlive this
    mhd().stop_daemon(daemon);
    throw;
  }
}

void HttpServer::Impl::stop() {
  std::string last;
  try {
    last = event_text(*snapshot.get(source.snapshot_json, std::chrono::milliseconds(0)));
  } catch (const std::exception&) {
    // The viewers keep the previous state.
  }
  {
    std::unique_lock lock(mutex);
    stopping = true;
    publish(std::make_shared<const std::string>(last + "event: end\ndata: {}\n\n"));
    changed.notify_all();
    changed.wait_until(lock, Clock::now() + kEndLimit, [&] { return viewers.empty(); });
  }
  publisher.join();
  mhd().stop_daemon(daemon);
}

HttpEndpoint http_listen(const std::string& where, const std::string& flag) {
  HttpEndpoint endpoint{.socket = {}, .where = parse_listen_address(where, flag)};
  mhd();  // a library that is missing is known now
  const Address address = address_of(endpoint.where);
  endpoint.socket.reset(
      ::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!endpoint.socket) throw SystemError("dashboard", "cannot make a socket", errno);
  const int on = 1;
  ::setsockopt(endpoint.socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(endpoint.socket.get(), address->ai_addr, address->ai_addrlen) != 0 ||
      ::listen(endpoint.socket.get(), 128) != 0) {
    const int error = errno;
    throw UsageError("dashboard", "{}: cannot listen on {} ({}). {}", flag,
                     address_text(endpoint.where), std::strerror(error), listen_remedy(error));
  }
  endpoint.where.port = port_of(endpoint.socket.get());
  return endpoint;
}

HttpServer::HttpServer(HttpEndpoint endpoint, DashboardSource source, const HttpOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->endpoint = std::move(endpoint);
  impl_->source = std::move(source);
  impl_->options = options;
  if (impl_->options.token.empty()) impl_->options.token = random_token();
  // Cookies are of a host, whatever the port: two dashboards must not overwrite each other's.
  impl_->cookie = fmt::format("lockstep_{}", impl_->endpoint.where.port);
  impl_->start();
}

HttpServer::~HttpServer() {
  impl_->stop();
}

std::string HttpServer::url() const {
  return fmt::format("http://{}/?token={}", url_host(impl_->endpoint.where), impl_->options.token);
}

}  // namespace lockstep::dashboard
