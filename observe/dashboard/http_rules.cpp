#include "observe/dashboard/http_rules.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
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
  const std::string text = read_file(path, 4096);
  const auto first = text.find_first_not_of(" \t\r\n");
  const auto last = text.find_last_not_of(" \t\r\n");
  const std::string token = first == text.npos ? "" : text.substr(first, last - first + 1);
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

}  // namespace lockstep::dashboard
