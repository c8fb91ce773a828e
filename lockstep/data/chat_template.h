// Renders chats as text, for the templates of a few model families. Private to this layer.
//
// A template is a Jinja program. It is not executed: its family is recognised by its literal text,
// and that family is rendered here. The literal text is everything outside the tags and in the
// tags' string literals, joined; it has the special tokens with the line ends between them:
//
//   Phi-3    <|user|>, <|assistant|>, <|end|>; three releases of it
//   Llama 2  [INST], [/INST], <<SYS>>
//   Llama 3  <|start_header_id|>, <|end_header_id|>, <|eot_id|>
//   ChatML   <|im_start|>, <|im_end|>; also with Qwen2's system prompt for chats without one
//   Mistral  [INST], [/INST]; three releases of it, Mixtral's among them
//   Gemma    <start_of_turn>, <end_of_turn>
//
// A template that writes anything else (tools, as those of Qwen2.5 do; another line end) is none of
// these and is refused. bos_token, eos_token, add_generation_prompt and trim are used where the
// template names them.
//
//   const ChatTemplate chat = recognise_chat_template(text, path);
//   chat.render(messages, add_generation_prompt, {.bos = "<s>", .eos = "</s>"});
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "lockstep/data/chat_message.h"

namespace lockstep::data {

struct ChatTokens {
  std::string bos{};
  std::string eos{};
};

struct ChatTemplate {
  enum class Family {
    kPhi3,       // system, user and assistant turns
    kPhi3First,  // no system turn; every user turn ends with the beginning of an answer
    kPhi3Any,    // turns of any role
    kLlama2,
    kLlama3,
    kChatMl,
    kMistral,
    kGemma,
  };

  Family family = Family::kChatMl;
  bool writes_bos = false;
  bool writes_eos = false;       // Phi-3: after a chat without a generation prompt
  bool asks_for_prompt = false;  // reads add_generation_prompt; others always write it
  bool begins_answer = true;     // has a generation prompt at all
  bool trims = false;
  bool skips_empty_system = false;  // Phi-3.5
  std::string default_system{};     // ChatML: of a chat that does not begin with one
  // Mistral: a system message is a part of the first user's, and [INST] has a space before it.
  bool takes_system = false;
  bool space_before_answer = false;
  bool space_after_answer = false;

  // UsageError for messages that the family's template cannot render.
  ChatText render(std::span<const ChatMessage> messages, bool add_generation_prompt,
                  const ChatTokens& tokens) const;
};

// UsageError for a template of an unknown family; `where` names its file.
ChatTemplate recognise_chat_template(std::string_view text, const std::string& where);

}  // namespace lockstep::data
