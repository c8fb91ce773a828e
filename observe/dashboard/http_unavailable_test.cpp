// The dashboard in a build without libmicrohttpd: this program has the stub in it, whatever the
// build found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "observe/dashboard/http.h"

namespace lockstep::dashboard {
namespace {

TEST(HttpUnavailable, SaysWhatToInstall) {
  const auto says = testing::ThrowsMessage<UsageError>(
      testing::HasSubstr("--dashboard needs libmicrohttpd, and Lockstep was built without it. "
                         "Install libmicrohttpd-dev, then configure and build again."));
  EXPECT_THAT([] { http_listen("8080", "--dashboard"); }, says);
}

}  // namespace
}  // namespace lockstep::dashboard
