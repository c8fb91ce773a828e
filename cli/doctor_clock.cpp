// The clock check of `lockstep doctor`. The master's clock is read without a program of ours there:
// its kernel answers ICMP timestamp requests (they need CAP_NET_RAW here), a time server answers
// NTP.
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/timex.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>

#include "cli/doctor_checks.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"

namespace lockstep::cli {
namespace {

constexpr double kSkew_s = 1;
constexpr std::chrono::milliseconds kAnswerLimit{700};
constexpr int kAttempts = 2;
constexpr std::int64_t kDayMs = 24ll * 3600 * 1000;
constexpr double kNtpEpoch_s = 2208988800.0;  // 1900 to 1970

struct Skew {
  std::optional<double> seconds{};  // the other clock minus ours
  double round_trip_s = 0;
  std::string problem{};
};

using Address = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Address numeric(const std::string& address, const char* port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), port, &hints, &found) != 0) found = nullptr;
  return {found, &::freeaddrinfo};
}

// The bytes that came, or -1 with errno. A connected socket gives only those of the other host.
ssize_t receive(int fd, void* buffer, std::size_t size, const Deadline& deadline) {
  for (;;) {
    pollfd waiting{fd, POLLIN, 0};
    const int ready = ::poll(&waiting, 1, deadline.remaining_ms());
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) errno = ETIMEDOUT;
    if (ready <= 0) return -1;
    const ssize_t n = ::recv(fd, buffer, size, 0);
    if (n >= 0 || errno != EINTR) return n;
  }
}

std::uint16_t random16() {
  std::uint16_t value = 0;
  if (::getrandom(&value, sizeof value, 0) != sizeof value)
    value = static_cast<std::uint16_t>(::getpid());
  return value;
}

// ------------------------------------------------------------------ ICMP

struct TimestampMessage {  // RFC 792; times in milliseconds since midnight UTC
  std::uint8_t type = ICMP_TIMESTAMP;
  std::uint8_t code = 0;
  std::uint16_t checksum = 0;
  std::uint16_t id = 0;
  std::uint16_t sequence = 0;
  std::uint32_t originate = 0;
  std::uint32_t received = 0;
  std::uint32_t sent = 0;
};
static_assert(sizeof(TimestampMessage) == 20);

std::uint16_t internet_checksum(const TimestampMessage& message) {
  std::array<std::uint16_t, sizeof message / 2> words{};
  std::memcpy(words.data(), &message, sizeof message);
  std::uint32_t sum = 0;
  for (const std::uint16_t word : words) sum += word;
  sum = (sum >> 16) + (sum & 0xffff);
  return static_cast<std::uint16_t>(~(sum + (sum >> 16)));
}

std::int64_t day_ms() {
  return static_cast<std::int64_t>(unix_time_s() * 1e3) % kDayMs;
}

// The difference between two times of day, the shorter way around midnight.
std::int64_t difference_ms(std::int64_t later, std::int64_t earlier) {
  std::int64_t ms = (later - earlier) % kDayMs;
  if (ms > kDayMs / 2) ms -= kDayMs;
  if (ms < -kDayMs / 2) ms += kDayMs;
  return ms;
}

std::optional<TimestampMessage> answer_to(int fd, const TimestampMessage& question,
                                          const Deadline& deadline) {
  std::array<unsigned char, 256> packet{};
  while (!deadline.expired()) {
    const ssize_t n = receive(fd, packet.data(), packet.size(), deadline);
    if (n < 0) return std::nullopt;
    const std::size_t header = (packet[0] & 0x0fu) * 4u;  // IP's, which a raw socket also receives
    TimestampMessage message;
    if (static_cast<std::size_t>(n) < header + sizeof message) continue;
    std::memcpy(&message, packet.data() + header, sizeof message);
    if (message.type == ICMP_TIMESTAMPREPLY && message.id == question.id &&
        message.sequence == question.sequence)
      return message;
  }
  errno = ETIMEDOUT;
  return std::nullopt;
}

Skew ask_icmp(const std::string& address) {
  const Address to = numeric(address, nullptr);
  if (!to || to->ai_family != AF_INET) return {.problem = "ICMP timestamps are of IPv4"};
  const Fd fd(::socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_ICMP));
  if (!fd) return {.problem = fmt::format("ICMP: {}", std::strerror(errno))};
  if (::connect(fd.get(), to->ai_addr, to->ai_addrlen) != 0)
    return {.problem = fmt::format("ICMP: {}", std::strerror(errno))};
  TimestampMessage question{.id = random16()};
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    question.sequence = htons(static_cast<std::uint16_t>(attempt));
    const std::int64_t asked = day_ms();
    question.originate = htonl(static_cast<std::uint32_t>(asked));
    question.checksum = 0;
    question.checksum = internet_checksum(question);
    if (::send(fd.get(), &question, sizeof question, 0) < 0) continue;
    const auto answer = answer_to(fd.get(), question, Deadline::after(kAnswerLimit));
    if (!answer) continue;
    const std::int64_t now = day_ms();
    const std::int64_t received = ntohl(answer->received);
    const std::int64_t sent = ntohl(answer->sent);
    if (received >= kDayMs || sent >= kDayMs) return {.problem = "ICMP: not in UTC"};
    const double ms =
        static_cast<double>(difference_ms(received, asked) + difference_ms(sent, now)) / 2;
    return {.seconds = ms / 1e3, .round_trip_s = static_cast<double>(now - asked) / 1e3};
  }
  return {.problem = fmt::format("ICMP: {}", std::strerror(errno))};
}

// ------------------------------------------------------------------ NTP

using NtpPacket = std::array<unsigned char, 48>;  // RFC 5905

double ntp_time_s(const NtpPacket& packet, std::size_t at) {
  double seconds = 0;
  double fraction = 0;
  for (std::size_t i = 0; i < 4; ++i) seconds = seconds * 256 + packet[at + i];
  for (std::size_t i = 0; i < 4; ++i) fraction = fraction * 256 + packet[at + 4 + i];
  return seconds + fraction / 4294967296.0 - kNtpEpoch_s;
}

Skew ask_ntp(const std::string& address) {
  const Address to = numeric(address, "123");
  if (!to) return {.problem = "NTP: not an address"};
  const Fd fd(::socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), to->ai_addr, to->ai_addrlen) != 0)
    return {.problem = fmt::format("NTP: {}", std::strerror(errno))};
  NtpPacket question{};
  question[0] = 0x23;  // version 4, client
  // A server returns these bytes; random, so that nobody else can answer.
  if (::getrandom(&question[40], 8, 0) != 8) return {.problem = "NTP: no random number"};
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const double asked = unix_time_s();
    if (::send(fd.get(), question.data(), question.size(), 0) < 0) continue;
    NtpPacket answer{};
    const ssize_t n =
        receive(fd.get(), answer.data(), answer.size(), Deadline::after(kAnswerLimit));
    const double now = unix_time_s();
    if (n != static_cast<ssize_t>(answer.size())) continue;
    const bool ours = std::memcmp(&answer[24], &question[40], 8) == 0;
    if (!ours || (answer[0] & 7) != 4 || answer[1] == 0 || answer[1] > 15)
      return {.problem = "NTP: its server is not synchronised"};
    return {.seconds = (ntp_time_s(answer, 32) - asked + ntp_time_s(answer, 40) - now) / 2,
            .round_trip_s = now - asked};
  }
  return {.problem = fmt::format("NTP: {}", std::strerror(errno))};
}

std::string own_clock() {
  timex state{};
  const int result = ::adjtimex(&state);
  if (result < 0) return "its synchronisation cannot be read";
  if (result == TIME_ERROR || (state.status & STA_UNSYNC) != 0)
    return "not synchronised as far as the kernel knows";
  return fmt::format("synchronised, within {:.1f} ms", static_cast<double>(state.maxerror) / 1e3);
}

}  // namespace

Check check_clock(const std::string& address) {
  Check check{.name = "clock"};
  const std::string own = "this host's clock is " + own_clock();
  if (address.empty()) return check.skip(own + "; there is no other host to compare with");
  Skew skew = ask_icmp(address);
  const std::string first = skew.problem;
  if (!skew.seconds) skew = ask_ntp(address);
  if (!skew.seconds) {
    check.remedy = "Compare date +%s.%N on both hosts, or look at chronyc tracking on each.";
    return check.skip(
        fmt::format("{}; {} does not say its time ({}; {})", own, address, first, skew.problem));
  }
  check.value = fmt::format(
      "the master's clock is {:.3f} s {} (round trip {:.1f} ms); this host's "
      "is {}",
      std::abs(*skew.seconds), *skew.seconds < 0 ? "behind" : "ahead", skew.round_trip_s * 1e3,
      own_clock());
  check.data = {{"skew_s", real_node(*skew.seconds)},
                {"round_trip_s", real_node(skew.round_trip_s)}};
  if (std::abs(*skew.seconds) - skew.round_trip_s < kSkew_s) return check;
  return check.warn(
      "Lines and events of the hosts cannot be put in order. Start chrony or "
      "systemd-timesyncd on both.");
}

}  // namespace lockstep::cli
