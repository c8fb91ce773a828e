#include "lockstep/data/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "lockstep/core/text.h"

namespace lockstep::data {
namespace {

constexpr std::uint32_t kNoRank = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t kNobody = std::numeric_limits<std::uint32_t>::max();
constexpr std::size_t kFew = 48;                         // symbols; a heap pays above
constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581

std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a ^ 0x9E3779B97F4A7C15u) * (b ^ 0xD6E8FEB86659FD93u);
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = text.size();
  const char* at = text.data();
  std::size_t left = text.size();
  for (; left >= 8; at += 8, left -= 8) {
    std::uint64_t block;
    std::memcpy(&block, at, 8);
    hash = mixed(hash, block);
  }
  std::uint64_t block = 0;
  std::memcpy(&block, at, left);
  return mixed(hash, block);
}

std::size_t slots_for(std::size_t count) {
  std::size_t slots = 16;
  while (slots < 2 * count) slots *= 2;
  return slots;
}

struct ByteCharacters {
  std::array<char32_t, 256> of_byte{};
  std::array<int, 0x144> of_character{};

  ByteCharacters() {
    of_character.fill(-1);
    char32_t next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
      of_byte[byte] = printable ? byte : next++;
      of_character[of_byte[byte]] = static_cast<int>(byte);
    }
  }
};

const ByteCharacters& byte_characters() {
  static const ByteCharacters table;
  return table;
}

}  // namespace

char32_t byte_level_character(unsigned char byte) {
  return byte_characters().of_byte[byte];
}

int byte_of_character(char32_t character) {
  const auto& table = byte_characters().of_character;
  return character < table.size() ? table[character] : -1;
}

// ---------------------------------------------------------------- the cache

bool WordCache::find(std::string_view word, std::uint64_t hash, Ids& ids) const {
  for (std::size_t at = hash % kSlots;; at = (at + 1) % kSlots) {
    const Slot& slot = slots_[at];
    if (slot.size == 0) return false;
    if (slot.hash != hash || slot.size != word.size() ||
        std::memcmp(texts_.data() + slot.text, word.data(), word.size()) != 0)
      continue;
    ids.insert(ids.end(), ids_.begin() + slot.ids, ids_.begin() + slot.ids + slot.count);
    return true;
  }
}

void WordCache::add(std::string_view word, std::uint64_t hash, const std::int64_t* ids,
                    std::size_t count) {
  if (used_ == kSlots / 2) {
    std::fill(slots_.begin(), slots_.end(), Slot{});
    texts_.clear();
    ids_.clear();
    used_ = 0;
  }
  std::size_t at = hash % kSlots;
  while (slots_[at].size != 0) at = (at + 1) % kSlots;
  slots_[at] = {hash, static_cast<std::uint32_t>(texts_.size()),
                static_cast<std::uint32_t>(ids_.size()), static_cast<std::uint32_t>(word.size()),
                static_cast<std::uint32_t>(count)};
  texts_ += word;
  for (std::size_t i = 0; i < count; ++i) ids_.push_back(static_cast<std::int32_t>(ids[i]));
  ++used_;
}

// ---------------------------------------------------------------- building

Bpe::Bpe(BpeOptions options) : options_(std::move(options)), slots_(16, -1), merges_(16) {
  bytes_.fill(-1);
}

void Bpe::reserve(std::size_t tokens, std::size_t merges) {
  tokens_.reserve(tokens);
  slots_.assign(slots_for(tokens), -1);
  merges_.assign(slots_for(merges), Merge{});
}

std::int32_t Bpe::id_of(std::string_view text) const {
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t at = hash_of(text) & mask; slots_[at] >= 0; at = (at + 1) & mask)
    if (tokens_[static_cast<std::size_t>(slots_[at])] == text) return slots_[at];
  return -1;
}

std::string_view Bpe::text_of(std::int64_t id) const {
  return id >= 0 && id <= max_id() ? std::string_view(tokens_[static_cast<std::size_t>(id)])
                                   : std::string_view();
}

bool Bpe::add_token(std::string text, std::int64_t id) {
  if (id < 0 || id > kMaxId || !text_of(id).empty()) return false;
  const auto index = static_cast<std::size_t>(id);
  if (index >= tokens_.size()) tokens_.resize(index + 1);
  ++count_;
  if (text.empty()) return true;  // no word has it
  if (2 * count_ > slots_.size()) {
    std::vector<std::int32_t> old =
        std::exchange(slots_, std::vector<std::int32_t>(slots_for(2 * count_), -1));
    const std::size_t mask = slots_.size() - 1;
    for (const std::int32_t other : old) {
      if (other < 0) continue;
      std::size_t at = hash_of(tokens_[static_cast<std::size_t>(other)]) & mask;
      while (slots_[at] >= 0) at = (at + 1) & mask;
      slots_[at] = other;
    }
  }
  const std::size_t mask = slots_.size() - 1;
  std::size_t at = hash_of(text) & mask;
  while (slots_[at] >= 0) at = (at + 1) & mask;
  slots_[at] = static_cast<std::int32_t>(id);
  tokens_[index] = std::move(text);
  return true;
}

void Bpe::insert(const Merge& merge) {
  const std::size_t mask = merges_.size() - 1;
  std::size_t at = mixed(merge.pair, 0) & mask;
  while (merges_[at].pair != kNoPair && merges_[at].pair != merge.pair) at = (at + 1) & mask;
  merge_count_ += merges_[at].pair == kNoPair ? 1 : 0;
  merges_[at] = merge;  // where a pair appears twice the later rank counts
}

bool Bpe::add_merge(std::string_view left, std::string_view right) {
  const std::int32_t left_id = id_of(left);
  const std::int32_t right_id = id_of(right);
  const std::int32_t both = id_of(std::string(left).append(right));
  if (left_id < 0 || right_id < 0 || both < 0) return false;
  if (2 * (merge_count_ + 1) > merges_.size()) {
    std::vector<Merge> old = std::exchange(merges_, std::vector<Merge>(2 * merges_.size()));
    merge_count_ = 0;
    for (const Merge& merge : old)
      if (merge.pair != kNoPair) insert(merge);
  }
  insert({static_cast<std::uint64_t>(left_id) << 32 | static_cast<std::uint32_t>(right_id),
          next_rank_++, both});
  return true;
}

void Bpe::finish() {
  if (options_.unk_token) unk_ = id_of(*options_.unk_token);
  if (options_.byte_fallback)
    for (unsigned byte = 0; byte < 256; ++byte)
      bytes_[byte] = id_of(fmt::format("<0x{:02X}>", byte));
  // If no token has a space mark after another character, no merge crosses the position before a
  // mark: the text can then be encoded, and cached, word by word.
  splits_at_spaces_ = !options_.byte_level && !options_.ignore_merges && id_of(kSpaceMark) >= 0 &&
                      std::all_of(merges_.begin(), merges_.end(), [this](const Merge& merge) {
                        if (merge.pair == kNoPair) return true;
                        const std::string_view text = text_of(merge.id);
                        for (std::size_t at = text.find(kSpaceMark); at != text.npos;
                             at = text.find(kSpaceMark, at + kSpaceMark.size()))
                          if (at != 0 && !text.substr(0, at).ends_with(kSpaceMark)) return false;
                        return true;
                      });
}

// ---------------------------------------------------------------- encoding

const Bpe::Merge* Bpe::merge_of(std::int32_t left, std::int32_t right) const {
  const std::uint64_t pair =
      static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
  const std::size_t mask = merges_.size() - 1;
  for (std::size_t at = mixed(pair, 0) & mask; merges_[at].pair != kNoPair; at = (at + 1) & mask)
    if (merges_[at].pair == pair) return &merges_[at];
  return nullptr;
}

std::uint32_t Bpe::rank_of(std::int32_t left, std::int32_t right) const {
  const Merge* merge = merge_of(left, right);
  return merge == nullptr ? kNoRank : merge->rank;
}

void Bpe::encode(std::string_view word, BpeScratch& scratch, Ids& ids) const {
  if (!splits_at_spaces_) return encode_part(word, scratch, ids);
  for (std::size_t begin = 0; begin < word.size();) {
    // Skips the marks that it begins with, then stops at the next one.
    std::size_t end = begin;
    while (word.compare(end, kSpaceMark.size(), kSpaceMark) == 0) end += kSpaceMark.size();
    end = std::min(word.find(kSpaceMark, end), word.size());
    encode_part(word.substr(begin, end - begin), scratch, ids);
    begin = end;
  }
}

void Bpe::encode_part(std::string_view word, BpeScratch& scratch, Ids& ids) const {
  if (word.empty()) return;
  if (word.size() > WordCache::kMaxWord) return encode_new(word, scratch, ids);
  const std::uint64_t hash = hash_of(word);
  if (scratch.cache.find(word, hash, ids)) return;
  const std::size_t before = ids.size();
  encode_new(word, scratch, ids);
  scratch.cache.add(word, hash, ids.data() + before, ids.size() - before);
}

void Bpe::encode_new(std::string_view word, BpeScratch& scratch, Ids& ids) const {
  if (options_.byte_level) {
    scratch.text.clear();
    for (const char byte : word)
      append_utf8(scratch.text, byte_level_character(static_cast<unsigned char>(byte)));
    word = scratch.text;
  }
  if (options_.ignore_merges) {
    if (const std::int32_t id = id_of(word); id >= 0) {
      ids.push_back(id);
      return;
    }
  }
  scratch.ids.clear();
  characters_of(word, scratch.ids);
  if (scratch.ids.size() <= kFew)
    merge_few(scratch);
  else
    merge_many(scratch);
  ids.insert(ids.end(), scratch.ids.begin(), scratch.ids.end());
}

// Unknown tokens come in the tokenizers package's order: one that waits to be fused is written
// before the next character with a token, but after bytes.
void Bpe::characters_of(std::string_view text, std::vector<std::int32_t>& out) const {
  bool unknown = false;
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view character = text.substr(at, character_size(text[at]));
    at += character.size();
    if (const std::int32_t id = id_of(character); id >= 0) {
      if (std::exchange(unknown, false)) out.push_back(unk_);
      out.push_back(id);
      continue;
    }
    const auto id_of_byte = [this](char byte) { return bytes_[static_cast<unsigned char>(byte)]; };
    if (std::all_of(character.begin(), character.end(),
                    [&](char byte) { return id_of_byte(byte) >= 0; })) {
      for (const char byte : character) out.push_back(id_of_byte(byte));
    } else if (unk_ >= 0) {
      if (unknown && !options_.fuse_unk) out.push_back(unk_);
      unknown = true;
    }
  }
  if (unknown) out.push_back(unk_);
}

void Bpe::merge_few(BpeScratch& scratch) const {
  std::vector<std::int32_t>& ids = scratch.ids;
  std::vector<std::uint32_t>& ranks = scratch.ranks;  // ranks of each symbol and the next
  if (ids.size() < 2) return;
  ranks.resize(ids.size() - 1);
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = rank_of(ids[i], ids[i + 1]);
  while (!ranks.empty()) {
    const auto lowest = std::min_element(ranks.begin(), ranks.end());
    if (*lowest == kNoRank) return;
    const auto at = static_cast<std::size_t>(lowest - ranks.begin());
    ids[at] = merge_of(ids[at], ids[at + 1])->id;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    ranks.erase(lowest);
    if (at > 0) ranks[at - 1] = rank_of(ids[at - 1], ids[at]);
    if (at < ranks.size()) ranks[at] = rank_of(ids[at], ids[at + 1]);
  }
}

void Bpe::merge_many(BpeScratch& scratch) const {
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;  // rank and place of the left one, lowest first
  symbols.clear();
  heap.clear();
  const auto candidate = [&](std::uint32_t left, std::uint32_t right) {
    const std::uint32_t rank = rank_of(symbols[left].id, symbols[right].id);
    if (rank != kNoRank) heap.push_back(static_cast<std::uint64_t>(rank) << 32 | left);
    return rank != kNoRank;
  };
  const auto push = [&](std::uint32_t left, std::uint32_t right) {
    if (candidate(left, right)) std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  const auto count = static_cast<std::uint32_t>(scratch.ids.size());
  for (std::uint32_t i = 0; i < count; ++i)
    symbols.push_back({scratch.ids[i], i == 0 ? kNobody : i - 1, i + 1 == count ? kNobody : i + 1});
  for (std::uint32_t i = 0; i + 1 < count; ++i) candidate(i, i + 1);
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const std::uint64_t top = heap.back();
    heap.pop_back();
    auto& left = symbols[static_cast<std::uint32_t>(top)];
    if (left.id < 0 || left.next == kNobody) continue;
    auto& right = symbols[left.next];
    const Merge* merge = merge_of(left.id, right.id);
    if (merge == nullptr || merge->rank != top >> 32) continue;  // one of them was merged since
    left.id = merge->id;
    left.next = right.next;
    right.id = -1;
    if (left.next != kNobody) symbols[left.next].previous = static_cast<std::uint32_t>(top);
    if (left.previous != kNobody) push(left.previous, static_cast<std::uint32_t>(top));
    if (left.next != kNobody) push(static_cast<std::uint32_t>(top), left.next);
  }
  scratch.ids.clear();
  for (const auto& symbol : symbols)
    if (symbol.id >= 0) scratch.ids.push_back(symbol.id);
}

}  // namespace lockstep::data
