// In place of http_server.cpp where the build found no libmicrohttpd.
#include "lockstep/core/error.h"
#include "observe/dashboard/http.h"

namespace lockstep::dashboard {

struct HttpServer::Impl {};

HttpEndpoint http_listen(const std::string&, const std::string& flag) {
  throw UsageError("dashboard",
                   "{} needs libmicrohttpd, and Lockstep was built without it. Install "
                   "libmicrohttpd-dev, then configure and build again.",
                   flag);
}

HttpServer::HttpServer(HttpEndpoint endpoint, DashboardSource, const HttpOptions&) {
  http_listen(address_text(endpoint.where), "the dashboard");
}

HttpServer::~HttpServer() = default;

std::string HttpServer::url() const {
  return "";
}

}  // namespace lockstep::dashboard
