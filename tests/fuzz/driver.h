// A fuzzer is one function per parser, and a driver that feeds it.
//
// The driver must survive the parser. Inputs run in a child process that shares the current input
// with its parent; whatever ends or stops the child (a signal, a sanitizer, an exception, a loop,
// running out of memory), the parent still has the bytes and saves them.
//
//   int fuzz_one(const std::uint8_t* data, std::size_t size);      // in <name>_fuzz.cpp
//   lockstep_fuzzer(name DEPENDS io)                                // in CMakeLists.txt
//
// A file with several of them has each in a namespace fuzz_<name> and ends with
// LOCKSTEP_FUZZ_ONE().
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

// Returns 0. Aborts when the parser did something that it must not do.
int fuzz_one(const std::uint8_t* data, std::size_t size);

// Defines fuzz_one() by the one of the namespace that a program is compiled for.
#define LOCKSTEP_FUZZ_ONE()                                  \
  int fuzz_one(const std::uint8_t* data, std::size_t size) { \
    return LOCKSTEP_FUZZER::fuzz_one(data, size);            \
  }

namespace lockstep::fuzz {

// Aborts with the sentence when it does not hold.
void require(bool holds, const char* what);

// Tokens of a libFuzzer dictionary: one quoted text a line, with \\, \" and \xAB; # comments.
std::vector<std::string> parse_dictionary(std::string_view text);

// Makes inputs from inputs. One thread; the same seed and calls give the same inputs.
class Mutator {
 public:
  Mutator(std::uint64_t seed, std::size_t max_bytes, std::vector<std::string> dictionary);

  // Some changes to one of `pool`, which is not empty: bits, bytes, numbers, pieces cut, doubled,
  // moved in from another, tokens of the dictionary.
  std::string next(const std::vector<std::string>& pool);

 private:
  std::size_t below(std::size_t count);
  void change_byte(std::string& text);
  void change_number(std::string& text);
  void cut(std::string& text);
  void copy_piece(std::string& text, const std::string& from);
  void put_token(std::string& text);
  void change(std::string& text, const std::vector<std::string>& pool);

  std::mt19937_64 random_;
  std::size_t max_bytes_;
  std::vector<std::string> dictionary_;
};

}  // namespace lockstep::fuzz
