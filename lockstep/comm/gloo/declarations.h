// LibTorch exports ProcessGroupGloo but ships none of gloo's headers, of which its header includes
// five. These declarations are enough to compile it; the build puts this file in the place of each
// of the five (lockstep/comm/CMakeLists.txt). Definitions are in LibTorch; nothing declared here is
// constructed or laid out by Lockstep.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace gloo {

// Declares only what Lockstep calls.
class Context {
 public:
  virtual ~Context();
  void setTimeout(std::chrono::milliseconds timeout);
  void closeConnections();
};

}  // namespace gloo

namespace gloo::rendezvous {

// Never construct a GlooStore through this declaration: the real class has more virtual functions.
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};

}  // namespace gloo::rendezvous

namespace gloo::transport {

class Device;
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

}  // namespace gloo::transport
