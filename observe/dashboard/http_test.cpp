// Where the dashboard listens, whom it answers, and what its client takes for an address.
#include "observe/dashboard/http.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "lockstep/core/error.h"

namespace lockstep::dashboard {
namespace {

TEST(HttpRules, ListensOnAFreeLoopbackPortUnlessSaid) {
  EXPECT_EQ(address_text(parse_listen_address("", "--dashboard")), "127.0.0.1:0");
  EXPECT_EQ(address_text(parse_listen_address("8080", "--dashboard")), "127.0.0.1:8080");
  EXPECT_EQ(address_text(parse_listen_address("localhost:8080", "--dashboard")), "127.0.0.1:8080");
  EXPECT_EQ(address_text(parse_listen_address("10.0.0.7:0", "--dashboard")), "10.0.0.7:0");
  EXPECT_EQ(address_text(parse_listen_address("[::1]:65535", "--dashboard")), "[::1]:65535");
  for (const char* wrong : {"65536", "-1", "80 ", " 80", "0x50", "::1", "::1:80", "[::1]", "[]:80",
                            "name:80", "1.2.3.4:", ":", "1.2.3.4.5:80"})
    EXPECT_THAT([&] { parse_listen_address(wrong, "--dashboard"); },
                testing::ThrowsMessage<UsageError>(testing::HasSubstr("is not a port")))
        << wrong;
}

TEST(HttpRules, OnlyNamesThatCannotBeReboundAreHosts) {
  for (const char* host :
       {"localhost", "LOCALHOST:80", "127.0.0.1", "127.255.0.1:65535", "[::1]", "[::1]:8080"})
    EXPECT_TRUE(host_allowed(host, "127.0.0.1")) << host;
  for (const char* host :
       {"", ":80", "evil.example", "localhost.", "localhost.evil.example", "127.0.0.1.evil.example",
        "128.0.0.1", "0.0.0.0", "[::2]", "[::1", "::1", "localhost:", "localhost:x",
        "localhost:80:80", "localhost 80", "127.1", "0x7f000001", "[127.0.0.1]"})
    EXPECT_FALSE(host_allowed(host, "127.0.0.1")) << host;
  EXPECT_TRUE(host_allowed("10.2.3.4:80", "0.0.0.0"));
  EXPECT_TRUE(host_allowed("[fe80::1]:80", "::"));
  EXPECT_FALSE(host_allowed("evil.example", "0.0.0.0"));
}

TEST(HttpRules, TokensAreRandomAndComparedWhole) {
  std::set<std::string> tokens;
  for (int i = 0; i < 100; ++i) tokens.insert(random_token());
  EXPECT_EQ(tokens.size(), 100u);
  const std::string token = *tokens.begin();
  EXPECT_EQ(token.size(), 32u);
  EXPECT_TRUE(same_token(token, token));
  for (std::size_t i = 0; i < token.size(); ++i) {
    std::string other = token;
    other[i] = other[i] == 'a' ? 'b' : 'a';
    EXPECT_FALSE(same_token(other, token));
  }
  EXPECT_FALSE(same_token(token + "0", token));
  EXPECT_FALSE(same_token(token.substr(1), token));
  EXPECT_FALSE(same_token("", ""));
  EXPECT_EQ(bearer_token("Bearer abc"), "abc");
  EXPECT_EQ(bearer_token("bearer  abc"), "abc");
  EXPECT_EQ(bearer_token("Basic abc"), "");
  EXPECT_EQ(bearer_token("Bear"), "");
}

TEST(HttpRules, ATokenOfTheUsersIsInAFileOfTheirOwn) {
  const std::string path = testing::TempDir() + "lockstep_token";
  const auto with = [&](const std::string& text, mode_t mode) {
    std::ofstream(path) << text;
    ::chmod(path.c_str(), mode);
    return read_token_file(path);
  };
  EXPECT_EQ(with(" 0123456789abcdef\n", 0600), "0123456789abcdef");
  for (const mode_t open : {0640, 0604, 0666})
    EXPECT_THAT([&] { with("0123456789abcdef", open); },
                testing::ThrowsMessage<UsageError>(testing::HasSubstr("chmod 600")));
  for (const char* wrong :
       {"", "short", "0123456789abcde&", "0123456789 abcdef", "0123456789abcd\xff\xff"})
    EXPECT_THAT([&] { with(wrong, 0600); },
                testing::ThrowsMessage<UsageError>(testing::HasSubstr("Write 16 to 256")))
        << wrong;
  ::unlink(path.c_str());
  EXPECT_THAT([&] { read_token_file(path); },
              testing::ThrowsMessage<UsageError>(testing::HasSubstr("cannot be read")));
}

TEST(HttpClient, ReadsTheAddressThatTheLauncherPrints) {
  const DashboardUrl url = parse_dashboard_url("http://127.0.0.1:8080/?token=0af3");
  EXPECT_EQ(url.host, "127.0.0.1");
  EXPECT_EQ(url.port, 8080);
  EXPECT_EQ(url.token, "0af3");
  EXPECT_EQ(parse_dashboard_url("http://[::1]:81").host, "::1");
  EXPECT_EQ(parse_dashboard_url("http://[::1]:81").port, 81);
  EXPECT_EQ(parse_dashboard_url("http://n0/?x=1&token=a&y#z").token, "a");
  EXPECT_EQ(parse_dashboard_url("http://n0").port, 80);
  for (const char* wrong :
       {"https://127.0.0.1:1/", "127.0.0.1:1", "http://", "http://:80", "file:/x", "http://h:0",
        "http://h:99999", "http://h:8x", "http://[::1", "http://h/?token=a\r\nX: y", "http://h h/"})
    EXPECT_THAT(
        [&] { parse_dashboard_url(wrong); },
        testing::ThrowsMessage<UsageError>(testing::HasSubstr("is not an address of a dashboard")))
        << wrong;
}

}  // namespace
}  // namespace lockstep::dashboard
