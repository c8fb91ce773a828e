// Encodes, decodes and renders chats for tokenizer_oracle_test.py.
//
//   tokenizer_peer run FOLDER REQUESTS ANSWERS
//   tokenizer_peer load FOLDER                    exit code 2, and why, for what is refused
//
// Requests and answers are records: a count in 8 bytes and that many bytes or int64. A request is a
// letter and what follows: 'e' a text (answer: ids with and without special tokens), 'd' ids
// (answer: text without and with special tokens), 'i' an instruction and its output
// (answer: the ids of the row, and the length of its prompt), 'c' and 'C' a number of texts, roles
// and contents by turns (answer: the chat without and with a generation prompt, or what the error
// says), 'm' the number of messages that are a prompt, then a chat (answer: the ids of the row, and
// 0 or 1 for each of them that is learned).
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/data/instruction_file.h"
#include "lockstep/data/tokenizer.h"

namespace {

using lockstep::data::Tokenizer;
using Ids = std::vector<std::int64_t>;

class Requests {
 public:
  explicit Requests(std::string bytes) : bytes_(std::move(bytes)) {}

  bool next(char& kind) {
    if (at_ == bytes_.size()) return false;
    kind = bytes_[at_++];
    return true;
  }
  std::int64_t number() {
    std::int64_t value = 0;
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text() {
    const auto size = static_cast<std::size_t>(number());
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }
  Ids ids() {
    Ids all(static_cast<std::size_t>(number()));
    for (std::int64_t& id : all) id = number();
    return all;
  }

 private:
  std::string bytes_;
  std::size_t at_ = 0;
};

class Answers {
 public:
  explicit Answers(const char* path) : file_(path, std::ios::binary) {}

  void put(const Ids& ids) {
    put(static_cast<std::int64_t>(ids.size()));
    for (const std::int64_t id : ids) put(id);
  }
  void put(const std::string& text) {
    put(static_cast<std::int64_t>(text.size()));
    file_ << text;
  }

 private:
  void put(std::int64_t value) { file_.write(reinterpret_cast<const char*>(&value), sizeof value); }

  std::ofstream file_;
};

std::vector<lockstep::data::ChatMessage> messages_of(Requests& requests) {
  std::vector<lockstep::data::ChatMessage> messages(static_cast<std::size_t>(requests.number()));
  for (auto& message : messages) {
    message.role = requests.text();
    message.content = requests.text();
  }
  return messages;
}

std::string chat(const Tokenizer& tokenizer, Requests& requests, bool prompt) {
  const auto messages = messages_of(requests);
  try {
    return tokenizer.apply_chat_template(messages, {.add_generation_prompt = prompt});
  } catch (const lockstep::UsageError& error) {
    return error.what();
  }
}

// The ids of the only row, and which of them are learned.
std::pair<Ids, Ids> row_of(const Tokenizer& tokenizer, const lockstep::data::Instruction& item) {
  const lockstep::data::InstructionRows rows(
      {item}, {.max_length = 1'000'000, .encoder = tokenizer.text_encoder(), .chat = tokenizer});
  const auto sample = rows.row(0).at(0);
  const auto tokens = rows.tokens(sample);
  const auto learned = rows.learned(sample);
  return {Ids(tokens.begin(), tokens.end()), Ids(learned.begin(), learned.end())};
}

void put_row(const Tokenizer& tokenizer, Requests& requests, Answers& answers) {
  lockstep::data::Instruction item;
  item.instruction = requests.text();
  item.output = requests.text();
  const auto [tokens, learned] = row_of(tokenizer, item);
  answers.put(tokens);
  answers.put(Ids{std::find(learned.begin(), learned.end(), 1) - learned.begin()});
}

void put_chat_row(const Tokenizer& tokenizer, Requests& requests, Answers& answers) {
  lockstep::data::Instruction item;
  item.kind = lockstep::data::RecordKind::kChat;
  item.given = static_cast<std::size_t>(requests.number());
  item.messages = messages_of(requests);
  const auto [tokens, learned] = row_of(tokenizer, item);
  answers.put(tokens);
  answers.put(learned);
}

void run(const Tokenizer& tokenizer, Requests requests, Answers answers) {
  for (char kind = 0; requests.next(kind);) {
    if (kind == 'e') {
      const std::string text = requests.text();
      answers.put(tokenizer.encode(text));
      answers.put(tokenizer.encode(text, {.add_special_tokens = false}));
    } else if (kind == 'd') {
      const Ids ids = requests.ids();
      answers.put(tokenizer.decode(ids));
      answers.put(tokenizer.decode(ids, {.skip_special_tokens = false}));
    } else if (kind == 'i') {
      put_row(tokenizer, requests, answers);
    } else if (kind == 'm') {
      put_chat_row(tokenizer, requests, answers);
    } else {
      answers.put(chat(tokenizer, requests, kind == 'C'));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Tokenizer tokenizer = Tokenizer::from_file(argc > 2 ? argv[2] : "");
    if (argc == 5)
      run(tokenizer, Requests(lockstep::read_file(argv[3], std::size_t{1} << 30)),
          Answers(argv[4]));
  } catch (const lockstep::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 2;
  }
  return 0;
}
