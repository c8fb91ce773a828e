// An epoch of a training program, compiled with debug information as a user's program often is.
#pragma once

#include <functional>

void for_each_batch(int batches, const std::function<void()>& step);
