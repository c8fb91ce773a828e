#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "tests/fuzz/driver.h"

namespace lockstep::fuzz {
namespace {

// Where sizes, offsets and counts go wrong.
constexpr std::array<std::uint64_t, 14> kNumbers{
    0,     1,           7,           127,        255,         256,         65535,
    65536, 100'000'000, 0x7fff'ffff, 0xffffffff, 0x100000000, ~0ull >> 1u, ~0ull};

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

}  // namespace

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

std::vector<std::string> parse_dictionary(std::string_view text) {
  std::vector<std::string> tokens;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::size_t open = line.find('"');
    const std::size_t close = line.rfind('"');
    if (line.starts_with('#') || open == close) continue;
    line = line.substr(open + 1, close - open - 1);
    std::string token;
    for (std::size_t i = 0; i < line.size(); ++i) {
      if (line[i] != '\\' || i + 1 == line.size()) {
        token += line[i];
      } else if (line[i + 1] == 'x' && i + 3 < line.size()) {
        token += static_cast<char>(hex_digit(line[i + 2]) * 16 + hex_digit(line[i + 3]));
        i += 3;
      } else {
        token += line[++i];
      }
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

Mutator::Mutator(std::uint64_t seed, std::size_t max_bytes, std::vector<std::string> dictionary)
    : random_(seed), max_bytes_(max_bytes), dictionary_(std::move(dictionary)) {}

std::size_t Mutator::below(std::size_t count) {
  return count == 0 ? 0 : random_() % count;
}

void Mutator::change_byte(std::string& text) {
  if (text.empty()) return;
  char& byte = text[below(text.size())];
  byte = below(2) == 0 ? static_cast<char>(byte ^ (1 << below(8))) : static_cast<char>(random_());
}

// A number in the text, or the bytes of a binary one.
void Mutator::change_number(std::string& text) {
  const std::uint64_t value = kNumbers[below(kNumbers.size())] + below(3) - 1;
  const auto digit = std::find_if(text.begin() + static_cast<std::ptrdiff_t>(below(text.size())),
                                  text.end(), is_digit);
  if (digit != text.end() && below(4) != 0) {
    const auto end = std::find_if_not(digit, text.end(), is_digit);
    text.replace(digit, end, std::to_string(value));
    return;
  }
  const std::size_t width = std::size_t{1} << below(4);
  if (text.size() < width) return;
  const std::size_t at = below(text.size() - width + 1);
  for (std::size_t i = 0; i < width; ++i) text[at + i] = static_cast<char>(value >> (8 * i));
}

void Mutator::cut(std::string& text) {
  const std::size_t at = below(text.size() + 1);
  text.erase(at, below(8) == 0 ? std::string::npos : 1 + below(below(8) == 0 ? 256 : 8));
}

void Mutator::copy_piece(std::string& text, const std::string& from) {
  if (from.empty()) return;
  const std::size_t begin = below(from.size());
  const std::string piece = from.substr(begin, 1 + below(below(4) == 0 ? from.size() : 40));
  const std::size_t at = below(text.size() + 1);
  if (below(3) == 0)
    text.replace(at, piece.size(), piece);
  else
    text.insert(at, piece);
}

void Mutator::put_token(std::string& text) {
  if (dictionary_.empty()) return change_byte(text);
  const std::string& token = dictionary_[below(dictionary_.size())];
  const std::size_t at = below(text.size() + 1);
  if (below(3) == 0)
    text.replace(at, token.size(), token);
  else
    text.insert(at, token);
}

void Mutator::change(std::string& text, const std::vector<std::string>& pool) {
  switch (below(8)) {
    case 0:
    case 1:
      return change_byte(text);
    case 2:
      return change_number(text);
    case 3:
      return cut(text);
    case 4:
      return copy_piece(text, text);
    case 5:
      return copy_piece(text, pool[below(pool.size())]);
    default:
      return put_token(text);
  }
}

std::string Mutator::next(const std::vector<std::string>& pool) {
  // Half of the time from the newest inputs: they reached something that the others did not.
  const std::size_t recent = std::min<std::size_t>(pool.size(), 64);
  const std::size_t chosen = below(2) == 0 ? pool.size() - 1 - below(recent) : below(pool.size());
  std::string text = pool[chosen];
  for (std::size_t count = std::size_t{1} << below(4); count > 0; --count) change(text, pool);
  if (text.size() > max_bytes_) text.resize(max_bytes_);
  return text;
}

}  // namespace lockstep::fuzz
