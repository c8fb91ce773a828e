#include "lockstep/comm/shm/collectives.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/shm/reduce.h"

namespace lockstep::shm {
namespace {

// A symmetric array is summed in pieces of this size, between which the driver can look at other
// things.
constexpr std::size_t kPieceBytes = 4u << 20;

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

std::size_t lines_down(std::size_t bytes) {
  return bytes / kLine * kLine;
}

// A rank's buffer, divided equally among the ranks.
std::size_t slot_bytes(const Group& group) {
  return lines_down(group.layout().chunk_bytes() / static_cast<std::size_t>(group.size()));
}

// The part that one rank sums: whole cache lines, as equal as can be.
std::size_t slice_begin(std::size_t bytes, int rank, int size) {
  const std::size_t lines = (bytes + kLine - 1) / kLine;
  const std::size_t line = lines * static_cast<std::size_t>(rank) / static_cast<std::size_t>(size);
  return std::min(line * kLine, bytes);
}

}  // namespace

Barrier::Barrier(const Group&, const Deadline& deadline, Kind kind) : Collective(deadline) {
  what.kind = kind;
  quick = one_round = true;
}

// ---------------------------------------------------------------- all_reduce, reduce

AllReduce::AllReduce(const Group& group, const Deadline& deadline, const Call& call)
    : Collective(deadline),
      data_(static_cast<std::byte*>(call.data)),
      bytes_(call.count * size_of(call.dtype)) {
  what.kind = call.root < 0 ? Kind::kAllReduce : Kind::kReduce;
  what.bytes = bytes_;
  what.dtype = call.dtype;
  what.op = call.op;
  what.root = static_cast<std::int16_t>(call.root);
  quick = one_round = bytes_ <= group.layout().small_bytes();
  if (quick) return;
  stage_ = Stage::kAgree;
  location_ = group.blocks().find(data_, bytes_);
  if (!location_.block) return;
  what.block = location_.block->id();
  what.offset = location_.offset;
}

// In every chunk but the last, all ranks have the same number of bytes.
AllReduce::Slice AllReduce::slice(const Group& group, std::size_t chunk, int rank) const {
  const int size = group.size();
  const std::size_t slot = slot_bytes(group);
  const std::size_t begin = chunk * slot * static_cast<std::size_t>(size);
  const std::size_t bytes = std::min(slot * static_cast<std::size_t>(size), bytes_ - begin);
  const std::size_t from = slice_begin(bytes, rank, size);
  return {begin + from, slice_begin(bytes, rank + 1, size) - from,
          slot * static_cast<std::size_t>(rank)};
}

std::size_t AllReduce::chunks(const Group& group) const {
  const std::size_t bytes = slot_bytes(group) * static_cast<std::size_t>(group.size());
  return (bytes_ + bytes - 1) / bytes;
}

bool AllReduce::wanted(const Group& group) const {
  return what.root < 0 || what.root == group.rank();
}

void AllReduce::fill(const Group& group, int parity) {
  if (stage_ == Stage::kAll)
    copy_bytes(group.own().buffers[parity], data_, bytes_);
  else if (chunk_ == 0 &&
           (stage_ == Stage::kChunks || (stage_ == Stage::kAgree && !location_.block)))
    copy_in(group, parity);
}

Collective::Next AllReduce::take(const Group& group, int parity) {
  switch (stage_) {
    case Stage::kAll:
      sum_all(group, parity);
      return Next::kDone;
    case Stage::kAgree:
      return choose_path(group, parity);
    case Stage::kChunks:
      return take_chunk(group, parity);
    case Stage::kSymmetric:
      return sum_symmetric(group);
    case Stage::kEnd:
      break;
  }
  return Next::kDone;
}

// Arrays at the same place of the same block on all ranks need no copies. If only some are, those
// have not filled their buffers: all begin again, with copies.
Collective::Next AllReduce::choose_path(const Group& group, int parity) {
  bool same = what.block != 0;
  bool all_private = what.block == 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank()) continue;
    const Descriptor& theirs = group.view(rank).header->posts[parity].what;
    same = same && theirs.block == what.block && theirs.offset == what.offset;
    all_private = all_private && theirs.block == 0;
  }
  if (same) {
    stage_ = Stage::kSymmetric;
    return sum_symmetric(group);
  }
  stage_ = Stage::kChunks;
  return all_private ? take_chunk(group, parity) : Next::kRound;
}

void AllReduce::sum_all(const Group& group, int parity) {
  if (!wanted(group)) return;
  const std::byte* inputs[kMaxRanks];
  const int size = group.size();
  for (int rank = 0; rank < size; ++rank) inputs[rank] = group.view(rank).buffers[parity];
  std::byte* outputs[] = {data_};
  combine(what.dtype, what.op, {inputs, size, outputs, 1, bytes_ / size_of(what.dtype)});
}

void AllReduce::copy_in(const Group& group, int parity) {
  std::byte* const buffer = group.own().buffers[parity];
  for (int rank = 0; rank < group.size(); ++rank) {
    const Slice theirs = slice(group, 0, rank);
    if (rank != group.rank()) copy_bytes(buffer + theirs.slot, data_ + theirs.at, theirs.bytes);
  }
}

// Our own sum goes into the next round's buffer, which no rank reads any more.
Collective::Next AllReduce::take_chunk(const Group& group, int parity) {
  const int own = group.rank();
  const std::size_t end = chunks(group);
  std::vector<Copy>& copies = copies_;
  copies.clear();
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == own) continue;
    if (chunk_ > 0 && wanted(group)) {
      const Slice sum = slice(group, chunk_ - 1, rank);
      copies.push_back({data_ + sum.at, group.view(rank).buffers[parity] + sum.slot, sum.bytes});
    }
    if (chunk_ + 1 < end) {
      const Slice next = slice(group, chunk_ + 1, rank);
      copies.push_back({group.own().buffers[1 - parity] + next.slot, data_ + next.at, next.bytes});
    }
  }
  if (chunk_ < end) sum_slice(group, parity);
  for (const Copy& copy : copies) copy_bytes(copy.to, copy.from, copy.bytes);
  return chunk_++ < end ? Next::kRound : Next::kDone;
}

void AllReduce::sum_slice(const Group& group, int parity) {
  const int own = group.rank();
  const int size = group.size();
  const Slice mine = slice(group, chunk_, own);
  const std::byte* inputs[kMaxRanks];
  for (int rank = 0; rank < size; ++rank)
    inputs[rank] = group.view(rank).buffers[parity] + mine.slot;
  inputs[own] = data_ + mine.at;
  std::byte* outputs[2];
  int m = 0;
  if (wanted(group)) outputs[m++] = data_ + mine.at;
  if (what.root != own) outputs[m++] = group.own().buffers[1 - parity] + mine.slot;

  // Two ranks have two slices of about the same length: all three passes are one.
  std::size_t together = 0;
  Move moves[kMaxMoves];
  if (copies_.size() <= static_cast<std::size_t>(kMaxMoves)) {
    together = mine.bytes;
    for (const Copy& copy : copies_) together = lines_down(std::min(together, copy.bytes));
  }
  for (std::size_t i = 0; together > 0 && i < copies_.size(); ++i) {
    Copy& copy = copies_[i];
    moves[i] = {copy.to, copy.from};
    copy = {copy.to + together, copy.from + together, copy.bytes - together};
  }
  Arrays arrays{inputs, size, outputs, m, together / size_of(what.dtype)};
  arrays.last_leaves = what.root != own;
  arrays.moves = moves;
  arrays.moved = together > 0 ? static_cast<int>(copies_.size()) : 0;
  if (together > 0) combine(what.dtype, what.op, arrays);
  for (int rank = 0; rank < size; ++rank) inputs[rank] += together;
  for (int i = 0; i < m; ++i) outputs[i] += together;
  arrays.count = (mine.bytes - together) / size_of(what.dtype);
  arrays.moved = 0;
  combine(what.dtype, what.op, arrays);
}

Collective::Next AllReduce::sum_symmetric(const Group& group) {
  const int size = group.size();
  const std::size_t begin = slice_begin(bytes_, group.rank(), size);
  const std::size_t end = slice_begin(bytes_, group.rank() + 1, size);
  const std::size_t from = begin + at_;
  const std::size_t bytes = std::min(kPieceBytes, end - from);
  const std::byte* inputs[kMaxRanks];
  std::byte* outputs[kMaxRanks];
  for (int rank = 0; rank < size; ++rank) {
    outputs[rank] = location_.block->peer(rank) + location_.offset + from;
    inputs[rank] = outputs[rank];
  }
  std::byte* const* const targets = what.root < 0 ? outputs : outputs + what.root;
  combine(what.dtype, what.op,
          {inputs, size, targets, what.root < 0 ? size : 1, bytes / size_of(what.dtype)});
  at_ += bytes;
  if (begin + at_ < end) return Next::kAgain;
  stage_ = Stage::kEnd;
  return Next::kRound;
}

// ---------------------------------------------------------------- broadcast, all_gather

Broadcast::Broadcast(const Group& group, const Deadline& deadline, Part array, int root)
    : Collective(deadline), array_(array) {
  what.kind = Kind::kBroadcast;
  what.bytes = array.bytes;
  what.root = static_cast<std::int16_t>(root);
  quick = one_round = array.bytes <= group.layout().small_bytes();
}

void Broadcast::fill(const Group& group, int parity) {
  if (what.root != group.rank()) return;
  copy_bytes(group.view(what.root).buffers[parity],
             static_cast<const std::byte*>(array_.data) + at_,
             std::min(group.layout().chunk_bytes(), array_.bytes - at_));
}

Collective::Next Broadcast::take(const Group& group, int parity) {
  const std::size_t bytes = std::min(group.layout().chunk_bytes(), array_.bytes - at_);
  if (what.root != group.rank())
    copy_bytes(static_cast<std::byte*>(array_.data) + at_, group.view(what.root).buffers[parity],
               bytes);
  at_ += bytes;
  return at_ == array_.bytes ? Next::kDone : Next::kRound;
}

AllGather::AllGather(const Group& group, const Deadline& deadline, void* output, ConstPart input)
    : Collective(deadline),
      output_(static_cast<std::byte*>(output)),
      input_(static_cast<const std::byte*>(input.data)),
      bytes_(input.bytes) {
  what.kind = Kind::kAllGather;
  what.bytes = bytes_;
  quick = bytes_ * static_cast<std::size_t>(group.size()) <= group.layout().small_bytes();
  one_round = quick;
}

void AllGather::fill(const Group& group, int parity) {
  copy_bytes(group.own().buffers[parity], input_ + at_,
             std::min(group.layout().chunk_bytes(), bytes_ - at_));
}

Collective::Next AllGather::take(const Group& group, int parity) {
  const std::size_t bytes = std::min(group.layout().chunk_bytes(), bytes_ - at_);
  for (int rank = 0; rank < group.size(); ++rank) {
    const bool own = rank == group.rank();
    copy_bytes(output_ + static_cast<std::size_t>(rank) * bytes_ + at_,
               own ? input_ + at_ : group.view(rank).buffers[parity], bytes);
  }
  at_ += bytes;
  return at_ == bytes_ ? Next::kDone : Next::kRound;
}

AllGatherV::AllGatherV(const Group& group, const Deadline& deadline, Outputs& outputs,
                       ConstPart input)
    : Collective(deadline), outputs_(outputs), input_(input) {
  what.kind = Kind::kAllGatherV;
  quick = input.bytes <= group.layout().small_bytes();
}

void AllGatherV::fill(const Group& group, int parity) {
  const View& own = group.own();
  if (at_ == 0) own.header->sends[parity][0] = input_.bytes;
  const std::size_t at = std::min(at_, input_.bytes);
  copy_bytes(own.buffers[parity], static_cast<const std::byte*>(input_.data) + at,
             std::min(group.layout().chunk_bytes(), input_.bytes - at));
}

Collective::Next AllGatherV::take(const Group& group, int parity) {
  const auto size = static_cast<std::size_t>(group.size());
  if (at_ == 0) {
    outputs_.resize(size);
    for (std::size_t rank = 0; rank < size; ++rank) {
      outputs_[rank].resize(group.view(static_cast<int>(rank)).header->sends[parity][0]);
      largest_ = std::max(largest_, outputs_[rank].size());
    }
  }
  const std::size_t chunk = group.layout().chunk_bytes();
  for (std::size_t rank = 0; rank < size; ++rank) {
    std::vector<std::byte>& output = outputs_[rank];
    const std::size_t at = std::min(at_, output.size());
    copy_bytes(output.data() + at, group.view(static_cast<int>(rank)).buffers[parity],
               std::min(chunk, output.size() - at));
  }
  at_ += chunk;
  return at_ >= largest_ ? Next::kDone : Next::kRound;
}

// ---------------------------------------------------------------- reduce_scatter

ReduceScatter::ReduceScatter(const Group& group, const Deadline& deadline, const Call& call)
    : Collective(deadline),
      output_(static_cast<std::byte*>(call.output)),
      input_(static_cast<const std::byte*>(call.input)),
      bytes_(call.count * size_of(call.dtype)) {
  what.kind = Kind::kReduceScatter;
  what.bytes = bytes_;
  what.dtype = call.dtype;
  what.op = call.op;
  quick = bytes_ * static_cast<std::size_t>(group.size()) <= group.layout().small_bytes();
  one_round = quick && bytes_ <= slot_bytes(group);  // slots are whole cache lines
}

void ReduceScatter::fill(const Group& group, int parity) {
  const std::size_t bytes = std::min(slot_bytes(group), bytes_ - at_);
  std::byte* const buffer = group.own().buffers[parity];
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank()) continue;
    const auto place = static_cast<std::size_t>(rank);
    copy_bytes(buffer + place * slot_bytes(group), input_ + place * bytes_ + at_, bytes);
  }
}

Collective::Next ReduceScatter::take(const Group& group, int parity) {
  const std::size_t bytes = std::min(slot_bytes(group), bytes_ - at_);
  const int size = group.size();
  const auto own = static_cast<std::size_t>(group.rank());
  const std::byte* inputs[kMaxRanks];
  for (int rank = 0; rank < size; ++rank)
    inputs[rank] = group.view(rank).buffers[parity] + own * slot_bytes(group);
  inputs[own] = input_ + own * bytes_ + at_;
  std::byte* outputs[] = {output_ + at_};
  combine(what.dtype, what.op, {inputs, size, outputs, 1, bytes / size_of(what.dtype)});
  at_ += bytes;
  return at_ == bytes_ ? Next::kDone : Next::kRound;
}

// ---------------------------------------------------------------- gather, scatter, all_to_all

namespace {

// How a rank divides its buffer, from the row of sizes it has published.
struct Division {
  std::size_t slot_bytes = 0;
  std::size_t rounds = 1;

  Division(const Group& group, const std::uint64_t* sends, int rank) {
    std::size_t active = 0;
    std::uint64_t largest = 0;
    for (int to = 0; to < group.size(); ++to) {
      if (to == rank || sends[to] == 0) continue;
      ++active;
      largest = std::max(largest, sends[to]);
    }
    if (active == 0) return;
    slot_bytes = lines_down(group.layout().chunk_bytes() / active);
    rounds = (largest + slot_bytes - 1) / slot_bytes;
  }
};

}  // namespace

Exchange::Exchange(const Group& group, const Deadline& deadline, Call call)
    : Collective(deadline), sends_(std::move(call.sends)), receives_(std::move(call.receives)) {
  what.kind = call.kind;
  what.root = static_cast<std::int16_t>(call.root);
  std::size_t total = 0;
  for (const ConstPart& part : sends_) total += part.bytes;
  for (const Part& part : receives_) total += part.bytes;
  // Other ranks may have more to move: how many rounds it takes is known after the first.
  quick = total <= group.layout().small_bytes();
}

void Exchange::fill(const Group& group, int parity) {
  const int own = group.rank();
  Header& header = *group.own().header;
  std::uint64_t sizes[kMaxRanks];
  for (std::size_t to = 0; to < sends_.size(); ++to) {
    sizes[to] = sends_[to].bytes;
    if (round_ == 0) header.sends[parity][to] = sends_[to].bytes;
    if (round_ == 0) header.receives[parity][to] = receives_[to].bytes;
  }
  const Division division(group, sizes, own);
  std::byte* slot = group.own().buffers[parity];
  for (int to = 0; to < group.size(); ++to) {
    const ConstPart& part = sends_[static_cast<std::size_t>(to)];
    if (to == own || part.bytes == 0) continue;
    const std::size_t at = std::min(round_ * division.slot_bytes, part.bytes);
    copy_bytes(slot, static_cast<const std::byte*>(part.data) + at,
               std::min(division.slot_bytes, part.bytes - at));
    slot += division.slot_bytes;
  }
}

std::string Exchange::disagreement(const Group& group, int parity) {
  for (int from = 0; from < group.size(); ++from) {
    for (int to = 0; to < group.size(); ++to) {
      const std::uint64_t sent = group.view(from).header->sends[parity][to];
      const std::uint64_t expected = group.view(to).header->receives[parity][from];
      if (sent != expected)
        return fmt::format(
            "ranks disagree on {} #{}: rank {} sends {} bytes to rank {}, which "
            "expects {}",
            what.text(), what.sequence, from, sent, to, expected);
    }
  }
  return "";
}

// The published sizes stay readable for this round only.
void Exchange::learn(const Group& group, int parity) {
  const int own = group.rank();
  for (int from = 0; from < group.size(); ++from) {
    const std::uint64_t* sends = group.view(from).header->sends[parity];
    const Division division(group, sends, from);
    Source source{division.slot_bytes, 0};
    for (int to = 0; to < own; ++to) source.slot += to != from && sends[to] != 0 ? 1 : 0;
    sources_.push_back(source);
    rounds_ = std::max(rounds_, division.rounds);
  }
}

Collective::Next Exchange::take(const Group& group, int parity) {
  const int own = group.rank();
  if (round_ == 0) {
    learn(group, parity);
    const ConstPart& self = sends_[static_cast<std::size_t>(own)];
    copy_bytes(receives_[static_cast<std::size_t>(own)].data, self.data, self.bytes);
  }
  for (int from = 0; from < group.size(); ++from) {
    const Part& part = receives_[static_cast<std::size_t>(from)];
    const Source& source = sources_[static_cast<std::size_t>(from)];
    if (from == own || part.bytes == 0) continue;
    const std::size_t at = std::min(round_ * source.slot_bytes, part.bytes);
    copy_bytes(static_cast<std::byte*>(part.data) + at,
               group.view(from).buffers[parity] + source.slot * source.slot_bytes,
               std::min(source.slot_bytes, part.bytes - at));
  }
  return ++round_ == rounds_ ? Next::kDone : Next::kRound;
}

}  // namespace lockstep::shm
