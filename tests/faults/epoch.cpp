// An epoch of a training program, compiled with debug information as a user's program often is.
#include <functional>

void for_each_batch(int batches, const std::function<void()>& step) {
  for (int batch = 0; batch < batches; ++batch) step();  // LINE
}
