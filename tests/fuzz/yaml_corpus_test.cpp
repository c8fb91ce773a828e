// Every file of the corpus, and some thousand mutations of them, through the fuzz function: what
// fuzzing has found once stays found, without a fuzzer.
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
  const std::string folder = std::string(source) + "/tests/fuzz/corpus/yaml";
  for (const auto& file : std::filesystem::directory_iterator(folder))
    texts.push_back(lockstep::read_file(file.path()));
  return texts;
}

void run(const std::string& text) {
  fuzz_one(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
}

std::string mutated(std::string text, const std::vector<std::string>& all, std::mt19937& random) {
  static constexpr std::string_view kBytes = " :-#\n\t\"'[]{},&*!|>?%@~\\.0eax\xFF\x80\xC3";
  const auto below = [&](std::size_t n) { return n == 0 ? 0 : random() % n; };
  for (std::size_t i = 0, count = 1 + below(4); i < count; ++i) {
    const std::size_t at = below(text.size() + 1);
    switch (below(4)) {
      case 0:
        text.insert(at, 1, kBytes[below(kBytes.size())]);
        break;
      case 1:
        text.erase(at, 1 + below(8));
        break;
      case 2:
        if (at < text.size()) text[at] = kBytes[below(kBytes.size())];
        break;
      default: {
        const std::string& other = all[below(all.size())];
        text.insert(at, other.substr(below(other.size()), below(40)));
      }
    }
  }
  return text;
}

TEST(YamlCorpus, IsReadOrRefused) {
  const std::vector<std::string> texts = corpus();
  ASSERT_GE(texts.size(), 10u);
  for (const std::string& text : texts) run(text);
}

TEST(YamlCorpus, MutationsAreReadOrRefused) {
  const std::vector<std::string> texts = corpus();
  ASSERT_FALSE(texts.empty());
  std::mt19937 random(20240607);
  for (int i = 0; i < 4000; ++i) run(mutated(texts[random() % texts.size()], texts, random));
}

}  // namespace
