// The dashboard's server with a scripted run: each line of stdin is the state that it serves from
// then on. Prints its address after the first one; ends when stdin does.
//
//   server_peer [where] [interval_ms] [request_limit_ms] [viewers]
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cli/commands.h"
#include "observe/dashboard/http.h"

namespace {

using namespace lockstep;
using namespace lockstep::dashboard;

int serve(int count, char** args) {
  const auto number = [&](int i, int fallback) {
    return count > i ? std::atoi(args[i]) : fallback;
  };
  std::mutex mutex;
  std::string state = "{}";
  const auto current = [&] {
    const std::lock_guard lock(mutex);
    if (state == "throw") throw std::runtime_error("there is no state");
    return state;
  };
  HttpEndpoint endpoint = http_listen(count > 1 ? args[1] : "", "--dashboard");
  std::getline(std::cin, state);
  const HttpServer server(
      std::move(endpoint),
      {.snapshot_json = current,
       .metrics_text = [] { return std::string("# TYPE lockstep_step gauge\nlockstep_step 7\n"); },
       .ready =
           [&] {
             const std::lock_guard lock(mutex);
             return state.find("\"running\"") != std::string::npos;
           }},
      {.interval = std::chrono::milliseconds(number(2, 200)),
       .viewers = static_cast<unsigned>(number(4, 64)),
       .request_limit = std::chrono::milliseconds(number(3, 2000))});
  fmt::print("{}\n", server.url());
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const std::lock_guard lock(mutex);
    state = line;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return cli::guarded([&] { return serve(argc, argv); });
}
