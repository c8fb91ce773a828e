// Read by ProcessGroupGloo.hpp; see gloo/algorithm.h here for why.
#pragma once

namespace gloo::transport {
class Device;
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};
}  // namespace gloo::transport
