#include "lockstep/rendezvous/this_host.h"

#include <arpa/inet.h>
#include <elf.h>
#include <fmt/format.h>
#include <link.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "lockstep/core/fd.h"

namespace lockstep {

std::string host_name() {
  char name[256] = "unknown";
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string machine_of(const std::string& host) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  return fmt::format("{}/{}", host, boot);
}

std::string build_id() {
  std::string id;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_NOTE) continue;
          const char* at = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
          const char* end = at + header.p_memsz;
          while (at + sizeof(ElfW(Nhdr)) <= end) {
            const auto* note = reinterpret_cast<const ElfW(Nhdr)*>(at);
            const char* name = at + sizeof *note;
            const char* body = name + ((note->n_namesz + 3u) & ~3u);
            if (note->n_type == NT_GNU_BUILD_ID && note->n_namesz == 4) {
              for (unsigned k = 0; k < std::min(note->n_descsz, 8u); ++k)
                static_cast<std::string*>(out)->append(
                    fmt::format("{:02x}", static_cast<unsigned char>(body[k])));
            }
            at = body + ((note->n_descsz + 3u) & ~3u);
          }
        }
        return 1;  // the program itself comes first; the libraries do not matter
      },
      &id);
  if (!id.empty()) return id;
  struct stat status {};
  return ::stat("/proc/self/exe", &status) == 0 ? fmt::format("size-{}", status.st_size)
                                                : "unknown";
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

std::string address_text(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
    ::inet_ntop(AF_INET, &four, text, sizeof text);
  } else if (address->sa_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    const bool wrapped = IN6_IS_ADDR_V4MAPPED(&six);
    ::inet_ntop(wrapped ? AF_INET : AF_INET6, six.s6_addr + (wrapped ? 12 : 0), text, sizeof text);
  }
  return text;
}

std::string address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  std::string address = "127.0.0.1";
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    return address;
  const Fd fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  if (fd && ::connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0 &&
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&local), &length) == 0)
    address = address_text(reinterpret_cast<sockaddr*>(&local));
  ::freeaddrinfo(found);
  return address;
}

}  // namespace lockstep
