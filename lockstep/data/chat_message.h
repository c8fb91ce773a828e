// One message of a chat, for Tokenizer::apply_chat_template(), and the text of a whole chat.
//
//   const std::vector<ChatMessage> chat{{"system", "Be brief."}, {"user", "Why?"}};
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::data {

struct ChatMessage {
  std::string role;  // system, user or assistant
  std::string content;

  bool operator==(const ChatMessage&) const = default;
};

struct ChatText {
  struct Range {
    std::size_t begin;
    std::size_t end;
  };
  std::string text;
  // The byte ranges of the assistant's messages, each with the token that ends it: what a template
  // in Hugging Face's form would put between {% generation %} and {% endgeneration %}.
  std::vector<Range> answers{};
};

}  // namespace lockstep::data
