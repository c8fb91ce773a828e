// Every file of a corpus, and some thousand mutations of them, through the fuzz function that this
// is linked with: what fuzzing has found once stays found, without a fuzzer.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "lockstep/core/fd.h"

int fuzz_one(const std::uint8_t* data, std::size_t size);

namespace {

std::vector<std::string> corpus() {
  std::vector<std::string> texts;
  const char* source = std::getenv("LOCKSTEP_SOURCE");
  if (source == nullptr) return texts;
  const std::string folder = std::string(source) + "/tests/fuzz/corpus/" LOCKSTEP_CORPUS;
  for (const auto& file : std::filesystem::directory_iterator(folder))
    texts.push_back(lockstep::read_file(file.path()));
  return texts;
}

void run(const std::string& text) {
  fuzz_one(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
}

std::string mutated(std::string text, const std::vector<std::string>& all, std::mt19937& random) {
  const auto below = [&](std::size_t n) { return n == 0 ? 0 : random() % n; };
  for (std::size_t i = 0, count = 1 + below(4); i < count; ++i) {
    // Heads and keys matter more than what is far behind.
    const std::size_t at =
        below(2) == 0 ? below(std::min<std::size_t>(text.size() + 1, 16)) : below(text.size() + 1);
    switch (below(4)) {
      case 0:
        text.insert(at, 1, static_cast<char>(random()));
        break;
      case 1:
        text.erase(at, 1 + below(8));
        break;
      case 2:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      default: {
        const std::string& other = all[below(all.size())];
        text.insert(at, other.substr(below(other.size()), below(40)));
      }
    }
  }
  return text;
}

TEST(Corpus, IsReadOrRefused) {
  const std::vector<std::string> texts = corpus();
  ASSERT_GE(texts.size(), 8u);
  for (const std::string& text : texts) run(text);
}

TEST(Corpus, MutationsAreReadOrRefused) {
  const std::vector<std::string> texts = corpus();
  ASSERT_FALSE(texts.empty());
  std::mt19937 random(20240520);
  for (int i = 0; i < 4000; ++i) run(mutated(texts[random() % texts.size()], texts, random));
}

}  // namespace
