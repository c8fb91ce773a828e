#include "observe/dashboard/http.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"

namespace lockstep::dashboard {

namespace {

constexpr int kMaxPort = 65535;

std::optional<int> port_of(std::string_view text) {
  int port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return {};
  if (port < 0 || port > kMaxPort) return {};
  return port;
}

bool is_v4(const std::string& text) {
  in_addr parsed;
  return ::inet_pton(AF_INET, text.c_str(), &parsed) == 1;
}

bool is_v6(const std::string& text) {
  in6_addr parsed;
  return ::inet_pton(AF_INET6, text.c_str(), &parsed) == 1;
}

// The name of "name", "name:port", "[v6]" or "[v6]:port"; nothing where it is not one of these.
std::optional<std::string> host_name(std::string_view header) {
  std::string_view name = header;
  std::string_view port;
  if (header.starts_with('[')) {
    const auto close = header.find(']');
    if (close == header.npos) return {};
    name = header.substr(1, close - 1);
    port = header.substr(close + 1);
    if (!is_v6(std::string(name))) return {};
  } else if (const auto colon = header.find(':'); colon != header.npos) {
    name = header.substr(0, colon);
    port = header.substr(colon);
  }
  if (name.empty() || (!port.empty() && (port[0] != ':' || !port_of(port.substr(1))))) return {};
  return lower(name);
}

std::string own_name() {
  char name[256] = "";
  if (::gethostname(name, sizeof(name) - 1) != 0) return "";
  return lower(name);
}

}  // namespace

ListenAddress parse_listen_address(std::string_view text, std::string_view flag) {
  ListenAddress where;
  if (text.empty()) return where;
  std::string_view port = text;
  bool right = true;
  if (const auto colon = text.rfind(':'); colon != text.npos) {
    port = text.substr(colon + 1);
    where.address = text.substr(0, colon);
    if (where.address.starts_with('[') && where.address.ends_with(']')) {
      where.address = where.address.substr(1, where.address.size() - 2);
      right = is_v6(where.address);
    } else {
      if (where.address == "localhost") where.address = "127.0.0.1";
      right = is_v4(where.address);
    }
  }
  const auto number = port_of(port);
  if (!right || !number)
    throw UsageError("dashboard",
                     "{}='{}' is not a port, or a numeric address and a port. Write {}=8080, "
                     "{}=127.0.0.1:8080, or {} alone for a free port.",
                     flag, text, flag, flag, flag);
  where.port = *number;
  return where;
}

std::string address_text(const ListenAddress& where) {
  return where.address.find(':') == std::string::npos
             ? fmt::format("{}:{}", where.address, where.port)
             : fmt::format("[{}]:{}", where.address, where.port);
}

std::string url_host(const ListenAddress& where) {
  if (where.address != "0.0.0.0" && where.address != "::") return address_text(where);
  return fmt::format("{}:{}", own_name(), where.port);
}

bool is_loopback(std::string_view address) {
  const std::string text(address);
  in_addr v4;
  if (::inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return ::inet_pton(AF_INET6, text.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

bool host_allowed(std::string_view header, std::string_view address) {
  const auto name = host_name(header);
  if (!name) return false;
  if (*name == "localhost" || is_loopback(*name)) return true;
  if (is_loopback(address)) return false;
  return is_v4(*name) || is_v6(*name) || *name == own_name();
}

std::string random_token() {
  unsigned char bytes[16];
  std::size_t filled = 0;
  while (filled < sizeof(bytes)) {
    const ssize_t got = ::getrandom(bytes + filled, sizeof(bytes) - filled, 0);
    if (got < 0 && errno != EINTR)
      throw SystemError("dashboard", "the kernel gives no random bytes", errno);
    if (got > 0) filled += static_cast<std::size_t>(got);
  }
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

std::string read_token_file(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0)
    throw UsageError("dashboard", "the token file {} cannot be read ({}).", path,
                     std::strerror(errno));
  const bool own = info.st_uid == ::geteuid() || info.st_uid == 0;
  if (!S_ISREG(info.st_mode) || (info.st_mode & 077) != 0 || !own)
    throw UsageError("dashboard",
                     "the token file {} is not a file that its owner alone can read (mode {:o}). "
                     "Run: chmod 600 {}",
                     path, info.st_mode & 07777, path);
  const std::string token = trim(read_file(path, 4096));
  const bool plain = std::ranges::all_of(token, [](unsigned char c) {
    return c < 128 && (std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.');
  });
  if (token.size() < 16 || token.size() > 256 || !plain)
    throw UsageError("dashboard",
                     "the token file {} has {} characters. Write 16 to 256 letters, digits, '-', "
                     "'_' or '.': openssl rand -hex 16 > {}",
                     path, token.size(), path);
  return token;
}

bool same_token(std::string_view given, std::string_view token) {
  // The length is no secret.
  if (given.size() != token.size() || token.empty()) return false;
  volatile unsigned char difference = 0;
  for (std::size_t i = 0; i < token.size(); ++i)
    difference = difference | static_cast<unsigned char>(given[i] ^ token[i]);
  return difference == 0;
}

std::string_view bearer_token(std::string_view header) {
  constexpr std::string_view kScheme = "bearer ";
  if (lower(header.substr(0, kScheme.size())) != kScheme) return {};
  header.remove_prefix(kScheme.size());
  while (header.starts_with(' ')) header.remove_prefix(1);
  return header;
}

namespace {

constexpr std::size_t kMaxHeaders = 64u << 10;
constexpr std::size_t kMaxBody = 64u << 20;  // of one answer, or of one event

[[noreturn]] void refuse_url(std::string_view text) {
  throw UsageError("monitor",
                   "'{}' is not an address of a dashboard. Give the one that `lockstep run "
                   "--dashboard` printed: http://127.0.0.1:PORT/?token=TOKEN.",
                   text);
}

[[noreturn]] void broken(const std::string& where, std::string_view what) {
  throw CommError("monitor", fmt::format("{} {}. Is that address a dashboard's, and does its run "
                                         "still last?",
                                         where, what));
}

void wait_for(int fd, short events, const Deadline& deadline, const std::string& where) {
  pollfd entry{fd, events, 0};
  while (true) {
    const int ready = ::poll(&entry, 1, deadline.remaining_ms());
    if (ready > 0) return;
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) throw SystemError("monitor", "poll failed", errno);
    throw TimeoutError("monitor",
                       fmt::format("{} has sent nothing for {:.0f} s. Its launcher may be stopped "
                                   "or its host overloaded.",
                                   where, static_cast<double>(deadline.total().count()) / 1e3));
  }
}

}  // namespace

DashboardUrl parse_dashboard_url(std::string_view text) {
  constexpr std::string_view kScheme = "http://";
  if (!text.starts_with(kScheme)) refuse_url(text);
  const std::string_view rest = text.substr(kScheme.size());
  const auto end = rest.find_first_of("/?#");
  const std::string_view place = rest.substr(0, end);
  DashboardUrl url;
  const auto close = place.starts_with('[') ? place.find(']') : 0;
  if (close == place.npos) refuse_url(text);
  const auto colon = place.find(':', close);
  url.host = place.starts_with('[') ? place.substr(1, close - 1) : place.substr(0, colon);
  if (colon != place.npos) url.port = port_of(place.substr(colon + 1)).value_or(0);
  if (url.host.empty() || url.port < 1) refuse_url(text);
  if (const auto at = rest.find("token="); at != rest.npos) {
    const std::string_view token = rest.substr(at + 6);
    url.token = token.substr(0, token.find_first_of("&#"));
  }
  // The value becomes part of a header.
  for (const char c : url.host + url.token)
    if (static_cast<unsigned char>(c) <= ' ' || c == 127) refuse_url(text);
  return url;
}

HttpStream::HttpStream(const DashboardUrl& url, const std::string& path, const Deadline& deadline)
    : where_(fmt::format("http://{}:{}", url.host, url.port)) {
  connect(url, deadline);
  const bool v6 = url.host.find(':') != std::string::npos;
  // With HTTP/1.1 the server could send its answer in chunks.
  std::string request = fmt::format("GET {} HTTP/1.0\r\nHost: {}:{}\r\n", path,
                                    v6 ? "[" + url.host + "]" : url.host, url.port);
  if (!url.token.empty()) request += fmt::format("Authorization: Bearer {}\r\n", url.token);
  send(request + "\r\n", deadline);
  read_headers(deadline);
}

void HttpStream::connect(const DashboardUrl& url, const Deadline& deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failed =
      ::getaddrinfo(url.host.c_str(), std::to_string(url.port).c_str(), &hints, &found);
  if (failed != 0)
    throw CommError("monitor", fmt::format("the name '{}' cannot be resolved ({}).", url.host,
                                           ::gai_strerror(failed)));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  int error = ECONNREFUSED;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    socket_.reset(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_) throw SystemError("monitor", "cannot make a socket", errno);
    if (::connect(socket_.get(), entry->ai_addr, entry->ai_addrlen) == 0) return;
    error = errno;
    if (error != EINPROGRESS) continue;
    wait_for(socket_.get(), POLLOUT, deadline, where_);
    socklen_t size = sizeof(error);
    ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error == 0) return;
  }
  throw CommError("monitor", fmt::format("cannot connect to {} ({}). The run has ended, or it was "
                                         "started without --dashboard.",
                                         where_, std::strerror(error)));
}

void HttpStream::send(std::string_view text, const Deadline& deadline) {
  while (!text.empty()) {
    const ssize_t sent = ::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      text.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      wait_for(socket_.get(), POLLOUT, deadline, where_);
    } else if (errno != EINTR) {
      broken(where_, "closed the connection");
    }
  }
}

bool HttpStream::fill(const Deadline& deadline) {
  char buffer[64u << 10];
  while (true) {
    const ssize_t got = ::recv(socket_.get(), buffer, sizeof(buffer), 0);
    if (got > 0) {
      received_.append(buffer, static_cast<std::size_t>(got));
      return true;
    }
    if (got == 0) return false;
    if (errno == EAGAIN)
      wait_for(socket_.get(), POLLIN, deadline, where_);
    else if (errno != EINTR)
      return false;
  }
}

std::optional<std::string> HttpStream::line(std::size_t most, const Deadline& deadline) {
  std::size_t end;
  while ((end = received_.find('\n')) == std::string::npos) {
    if (received_.size() > most) broken(where_, "sent more than a dashboard does");
    if (!fill(deadline)) return std::nullopt;
  }
  std::string line = received_.substr(0, end);
  received_.erase(0, end + 1);
  if (line.ends_with('\r')) line.pop_back();
  return line;
}

void HttpStream::read_headers(const Deadline& deadline) {
  const std::string status = line(kMaxHeaders, deadline).value_or("");
  if (!status.starts_with("HTTP/1.") || status.size() < 12) broken(where_, "does not speak HTTP");
  for (std::size_t bytes = 0;;) {
    const auto header = line(kMaxHeaders, deadline);
    if (!header) broken(where_, "closed the connection in the middle of an answer");
    if (header->empty()) break;
    bytes += header->size();
    if (bytes > kMaxHeaders) broken(where_, "sent too many headers");
  }
  const std::string code = status.substr(9, 3);
  if (code == "200") return;
  if (code == "403")
    throw UsageError("monitor",
                     "{} refuses the token. Give the whole address that `lockstep run "
                     "--dashboard` printed, with ?token=, in quotes.",
                     where_);
  broken(where_, fmt::format("answered with status {}", status.substr(9)));
}

std::optional<std::string> HttpStream::next_event(const Deadline& deadline) {
  std::string type;
  std::string data;
  while (const auto next = line(kMaxBody, deadline)) {
    if (next->starts_with("event: ")) type = next->substr(7);
    if (next->starts_with("data: ")) data += next->substr(6);
    if (data.size() > kMaxBody) broken(where_, "sent more than a dashboard does");
    if (!next->empty()) continue;
    if (type == "end") {
      ended_ = true;
      return std::nullopt;
    }
    if (type.empty() && !data.empty()) return data;
    type.clear();
    data.clear();
  }
  return std::nullopt;
}

}  // namespace lockstep::dashboard
