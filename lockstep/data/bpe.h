// Byte pair encoding: a word becomes its characters, and neighbours are merged in the order of
// training until no two can be merged.
//
//   Bpe bpe({.byte_level = true});
//   bpe.add_token("h", 0); ...; bpe.add_merge("h", "e");
//   bpe.finish();
//   BpeScratch scratch;                       // one per thread
//   bpe.encode("hello", scratch, ids);        // appends
//
// Most words of a text have been seen before, so each scratch keeps a table of words and their ids.
// A new word of few symbols is merged by searching the lowest rank again and again, a long one with
// a heap: the time is O(n log n) for any word. Nothing is allocated per merge.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

struct BpeOptions {
  // Words are bytes, and each of 256 characters of the vocabulary stands for one of them.
  bool byte_level = false;
  std::optional<std::string> unk_token{};  // for a character without a token; none: it is dropped
  bool fuse_unk = false;                   // one such token for several characters in a row
  bool byte_fallback = false;              // <0x00> to <0xFF> for its bytes, if there are these
  bool ignore_merges = false;              // a word that is a token is that token
};

// A cache of words and their ids. When it is full it is emptied.
class WordCache {
 public:
  using Ids = std::vector<std::int64_t>;

  static constexpr std::size_t kMaxWord = 256;  // longer words are not cached

  // Appends the ids of a word and returns true, or returns false.
  bool find(std::string_view word, std::uint64_t hash, Ids& ids) const;
  void add(std::string_view word, std::uint64_t hash, const std::int64_t* ids, std::size_t count);

 private:
  struct Slot {
    std::uint64_t hash = 0;
    std::uint32_t text = 0;  // where it begins in texts_
    std::uint32_t ids = 0;
    std::uint32_t size = 0;  // the word's length; 0: a free slot
    std::uint32_t count = 0;
  };
  static constexpr std::size_t kSlots = std::size_t{1} << 16;

  std::vector<Slot> slots_ = std::vector<Slot>(kSlots);
  std::size_t used_ = 0;
  std::string texts_;
  std::vector<std::int32_t> ids_;
};

// The working memory of encode(); one thread at a time.
struct BpeScratch {
  struct Symbol {
    std::int32_t id;
    std::uint32_t previous;
    std::uint32_t next;
  };

  WordCache cache;
  std::string text;  // the word in the vocabulary's characters
  std::vector<std::int32_t> ids;
  std::vector<std::uint32_t> ranks;
  std::vector<Symbol> symbols;
  std::vector<std::uint64_t> heap;
};

// Built by one thread, then read-only for any.
class Bpe {
 public:
  using Ids = std::vector<std::int64_t>;

  explicit Bpe(BpeOptions options);

  void reserve(std::size_t tokens, std::size_t merges);
  // False when the id has another text already, is negative or beyond kMaxId.
  bool add_token(std::string text, std::int64_t id);
  // In the order of training. False when a part or both together are not in the vocabulary.
  bool add_merge(std::string_view left, std::string_view right);
  void finish();

  void encode(std::string_view word, BpeScratch& scratch, Ids& ids) const;

  std::int32_t id_of(std::string_view text) const;  // -1: none
  // Empty if the id has no token; no token has an empty text.
  std::string_view text_of(std::int64_t id) const;
  std::size_t size() const { return count_; }
  std::int64_t max_id() const { return static_cast<std::int64_t>(tokens_.size()) - 1; }

  static constexpr std::int64_t kMaxId = 16'777'215;

 private:
  struct Merge {
    std::uint64_t pair = kNoPair;
    std::uint32_t rank = 0;
    std::int32_t id = 0;
  };
  static constexpr std::uint64_t kNoPair = ~std::uint64_t{0};

  const Merge* merge_of(std::int32_t left, std::int32_t right) const;
  std::uint32_t rank_of(std::int32_t left, std::int32_t right) const;
  void insert(const Merge& merge);
  void encode_part(std::string_view word, BpeScratch& scratch, Ids& ids) const;
  void encode_new(std::string_view word, BpeScratch& scratch, Ids& ids) const;
  void characters_of(std::string_view text, std::vector<std::int32_t>& out) const;
  void merge_few(BpeScratch& scratch) const;
  void merge_many(BpeScratch& scratch) const;

  BpeOptions options_;
  std::vector<std::string> tokens_;  // by id; empty: none
  std::size_t count_ = 0;
  std::vector<std::int32_t> slots_;  // ids by the hash of their text; -1: free
  std::vector<Merge> merges_;        // by the hash of the pair
  std::size_t merge_count_ = 0;
  std::uint32_t next_rank_ = 0;
  std::int32_t unk_ = -1;
  std::array<std::int32_t, 256> bytes_{};  // for byte fallback; -1: none
  bool splits_at_spaces_ = false;
};

// GPT-2's substitutes for bytes that are not printable: U+0100 and others.
char32_t byte_level_character(unsigned char byte);
// -1 for a character that represents no byte.
int byte_of_character(char32_t character);

}  // namespace lockstep::data
