// The checks of `lockstep doctor` that concern the way to the master.
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>

#include <memory>

#include "cli/doctor_checks.h"
#include "launcher/ports.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/rendezvous/control.h"
#include "lockstep/rendezvous/this_host.h"

namespace lockstep::cli {
namespace {

constexpr std::chrono::seconds kResolveLimit{10};

struct Resolved {
  std::string address{};  // numeric; empty: it does not resolve
  std::string problem{};
};

Resolved ask_resolver(const std::string& host) {
  std::string name = host;
  if (name.size() > 2 && name.front() == '[' && name.back() == ']')
    name = name.substr(1, name.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int code = ::getaddrinfo(name.c_str(), nullptr, &hints, &found); code != 0)
    return {.problem = ::gai_strerror(code)};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  char text[NI_MAXHOST] = "";
  ::getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return {.address = text};
}

// A name server that does not answer blocks a resolver for longer than anybody waits.
Resolved resolve(const std::string& host) {
  try {
    return detail::run_with_deadline<Resolved>("resolving", Deadline::after(kResolveLimit),
                                               [host] { return ask_resolver(host); });
  } catch (const CommError&) {
    return {.problem = fmt::format("no answer within {} s", kResolveLimit.count())};
  }
}

struct Way {
  Resolved master;
  launch::Interface interface {};
  std::string problem{};   // why there is no interface
  bool this_host = false;  // the master is here
};

Way way_to(const std::string& master) {
  Way way{.master = resolve(master)};
  if (way.master.address.empty()) return way;
  try {
    way.interface = launch::interface_towards(way.master.address);
    way.this_host = way.interface.loopback || way.interface.address == way.master.address;
  } catch (const Error& error) {
    way.problem = error.what();
  }
  return way;
}

Check check_master(const Machine& machine, const Way& way) {
  Check check{.name = "master"};
  const std::string& host = machine.request.master_addr;
  if (way.master.address.empty()) {
    check.value = fmt::format("'{}' does not resolve ({})", host, way.master.problem);
    return check.fail(
        "Check the spelling, add the name to DNS or /etc/hosts on every host, or give "
        "an IP address with --master-addr.");
  }
  check.value =
      fmt::format("{} is {}{}", host, way.master.address, way.this_host ? ", this host" : "");
  check.data = {{"address", text_node(way.master.address)},
                {"this_host", bool_node(way.this_host)}};
  if (!is_loopback(way.master.address) || is_loopback(host)) return check;
  return check.warn(
      "The name leads to the loopback interface, which other hosts cannot reach. Give "
      "this host's address on the network with --master-addr, or mend /etc/hosts.");
}

Check check_interface(const Way& way) {
  Check check{.name = "interface"};
  if (way.master.address.empty()) return check.skip("the master does not resolve");
  if (!way.problem.empty()) {
    check.value = way.problem;
    return check.fail("Compare with ip route get " + way.master.address + ".");
  }
  check.value = fmt::format("{} ({}) leads to the master{}", way.interface.name,
                            way.interface.address, way.interface.loopback ? "; loopback" : "");
  check.data = {{"name", text_node(way.interface.name)},
                {"address", text_node(way.interface.address)},
                {"loopback", bool_node(way.interface.loopback)}};
  return check;
}

Check check_port(const Machine& machine, const std::optional<Way>& way) {
  Check check{.name = "port"};
  const int port = machine.request.master_port;
  check.data = {{"port", integer_node(port)}};
  const auto reach =
      !way || way->interface.loopback ? launch::Reach::kLoopback : launch::Reach::kNetwork;
  if (way && !way->this_host) {
    return check.skip("the master is another host: run lockstep doctor there");
  }
  try {
    if (port == 0) {
      const launch::HeldPort held = launch::HeldPort::any(reach);
      check.value = fmt::format("no --master-port: a free one is chosen, {} now", held.number());
      held.listen();
      return check;
    }
    launch::HeldPort::exactly(port, reach).listen();
  } catch (const Error& error) {
    check.value = error.what();
    return check.fail(port == 0 ? "Too many ports are in use (ss -s)."
                                : fmt::format("ss -ltnp 'sport = :{}' shows who listens. Choose "
                                              "another --master-port on every host.",
                                              port));
  }
  check.value = fmt::format("{} is free", port);
  return check;
}

}  // namespace

std::vector<Check> network_checks(const Machine& machine) {
  if (machine.request.master_addr.empty()) {
    constexpr const char* kOneHost = "no --master-addr: one host, over loopback";
    return {Check{.name = "master"}.skip(kOneHost), Check{.name = "interface"}.skip(kOneHost),
            check_port(machine, std::nullopt)};
  }
  const Way way = way_to(machine.request.master_addr);
  return {check_master(machine, way), check_interface(way), check_port(machine, way)};
}

}  // namespace lockstep::cli
