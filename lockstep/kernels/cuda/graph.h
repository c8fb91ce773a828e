// CUDA graphs: work that is recorded once and launched again as a whole.
//
//   const auto graph = cuda::make_graph();            // null: no plug-in is loaded
//   cuda::Capture capture{*graph};                    // on the current stream, not the default one
//   ... launches, on this thread and on those of autograd ...
//   capture.end();                                    // nothing has run yet
//   graph->replay();                                  // on the current stream, as often as wanted
//
// Memory that is allocated during the capture belongs to the graph and has the same addresses in
// every replay. An exception between the two ends the capture without a graph; the destructor of
// Capture does that.
//
// One capture at a time in a process. This header needs no CUDA.
#pragma once

#include <functional>
#include <memory>

namespace lockstep::kernels::cuda {

class Graph {
 public:
  virtual ~Graph() = default;
  virtual void begin() = 0;
  virtual void end() = 0;
  virtual void replay() = 0;
};

// `other`: a graph to share memory with. Results that one leaves for the other, or for the caller,
// must be held by tensors from its capture on; either graph may overwrite the rest.
std::unique_ptr<Graph> make_graph(const Graph* other = nullptr);

class Capture {
 public:
  explicit Capture(Graph& graph);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Calls the actions given to after_capture().
  void end();

 private:
  Graph& graph_;
  bool ended_ = false;
};

// Whether the process is between a Capture's construction and its end.
bool capturing();
// During a capture nothing may wait for the device, as a copy from pageable memory does. So data
// that replays need from the host is copied by an action after the capture's end.
void after_capture(std::function<void()> action);

}  // namespace lockstep::kernels::cuda
