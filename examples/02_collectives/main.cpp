// Common collectives: barrier, broadcast, all_reduce, gather, and the mean of a number.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/comm/numbers.h>
#include <lockstep/run.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

// "1, 2, 3"
std::string numbers(const at::Tensor& tensor) {
  const at::Tensor values = tensor.cpu().to(at::kDouble).contiguous();
  const auto* data = values.const_data_ptr<double>();
  return fmt::format("{}", fmt::join(data, data + values.numel(), ", "));
}

// One write per line, so that lines of different ranks are never torn.
void say(const std::string& line) {
  std::fputs((line + "\n").c_str(), stdout);
}

void collectives(lockstep::World& world) {
  const int rank = world.rank();
  const auto floats = at::TensorOptions().device(world.device()).dtype(at::kFloat);
  const auto integers = floats.dtype(at::kLong);

  // Barrier: nobody continues before everybody has arrived.
  world.barrier();
  say(fmt::format("rank {} passed the barrier", rank));

  // Broadcast: one rank's tensor, everywhere. Shape and dtype must be the same on every rank.
  at::Tensor vector = rank == 0 ? at::tensor({1.0, 2.0, 3.0}, floats) : at::zeros({3}, floats);
  world.broadcast(vector, 0).wait();
  say(fmt::format("rank {} after broadcast: [{}]", rank, numbers(vector)));

  // All-reduce: combined, and the result is everywhere.
  at::Tensor sum = at::full({1}, rank, integers);
  world.all_reduce(sum, lockstep::ReduceOp::kSum).wait();
  say(fmt::format("rank {} after all_reduce: {}", rank, numbers(sum)));

  // Gather: every rank's tensor, on one rank. Only that rank provides tensors to receive them.
  std::vector<at::Tensor> gathered;
  if (rank == 0) {
    for (int i = 0; i < world.size(); ++i) gathered.push_back(at::zeros({1}, integers));
  }
  world.gather(gathered, at::full({1}, rank, integers), 0).wait();
  if (rank == 0) say(fmt::format("rank 0 gathered: [{}]", numbers(at::cat(gathered))));

  // A metric averaged over ranks, to be printed once.
  const double loss = 0.25 * (rank + 1);
  const double mean = lockstep::all_reduce(world, loss, lockstep::ReduceOp::kAvg);
  if (world.is_leader()) say(fmt::format("average loss across all ranks: {:.4f}", mean));
}

}  // namespace

int main() {
  return lockstep::run(collectives);
}
