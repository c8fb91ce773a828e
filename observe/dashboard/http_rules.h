// What the dashboard's server decides about a request before it looks at the run: where it listens,
// which Host it answers to and whose token is right. Functions without state; any thread may call.
//
//   const ListenAddress where = parse_listen_address("8080", "--dashboard");
//   if (!host_allowed(header, where.address)) refuse();     // a page that rebinds its name by DNS
//   if (!same_token(given, token)) refuse();
#pragma once

#include <string>
#include <string_view>

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

}  // namespace lockstep::dashboard
