// One message of a chat, for Tokenizer::apply_chat_template().
//
//   const std::vector<ChatMessage> chat{{"system", "Be brief."}, {"user", "Why?"}};
#pragma once

#include <string>

namespace lockstep::data {

struct ChatMessage {
  std::string role;  // system, user or assistant
  std::string content;
};

}  // namespace lockstep::data
