// Read by ProcessGroupGloo.hpp; see gloo/algorithm.h here for why. Only the two functions that are
// called are declared; their definitions are in LibTorch.
#pragma once

#include <chrono>

namespace gloo {
class Context {
 public:
  virtual ~Context();
  void setTimeout(std::chrono::milliseconds timeout);
  void closeConnections();
};
}  // namespace gloo
