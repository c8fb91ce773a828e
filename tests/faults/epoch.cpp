#include "epoch.h"

void for_each_batch(int batches, const std::function<void()>& step) {
  for (int batch = 0; batch < batches; ++batch) step();  // LINE
}
