// Renders chats as text, for the templates of a few model families.
//
// A template is a Jinja program. It is not executed: its family is recognised by its literal text,
// and that family is rendered here. The literal text joins everything outside the tags and the
// string literals inside them; it contains the special tokens and the line ends between them:
//
//   Phi-3    <|user|>, <|assistant|>, <|end|>; three releases of it
//   Llama 2  [INST], [/INST], <<SYS>>
//   Llama 3  <|start_header_id|>, <|end_header_id|>, <|eot_id|>
//   ChatML   <|im_start|>, <|im_end|>; also with Qwen2's system prompt for chats without one
//   Mistral  [INST], [/INST]; three releases of it, Mixtral's among them
//   Gemma    <start_of_turn>, <end_of_turn>
//
// A template that writes anything else (tools, as Qwen2.5's do; another line end) is refused.
// bos_token, eos_token, add_generation_prompt and trim are used where the template names them.
#include <algorithm>
#include <array>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/data/tokenizer_parts.h"

namespace lockstep::data {
namespace {

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

struct Recognised {
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
};

struct Known {
  Family family;
  std::string_view written;
};

// Since the second release a system message is a part of the first user's message.
constexpr std::string_view kMistralWithSystem = " [INST] \n\n [/INST] [INST]  [/INST] ";

constexpr std::array<Known, 12> kKnown{{
    {Family::kPhi3,
     "<|system|>\n<|end|>\n<|user|>\n<|end|>\n<|assistant|>\n<|end|>\n<|assistant|>\n"},
    {Family::kPhi3First, "<|user|>\n<|end|>\n<|assistant|>\n<|end|>\n"},
    {Family::kPhi3Any, "<||>\n<|end|>\n<|assistant|>\n"},
    {Family::kLlama2, "<<SYS>>\n\n<</SYS>>\n\n[INST]  [/INST]<<SYS>>\n\n<</SYS>>\n\n  "},
    {Family::kLlama2, "<<SYS>>\n\n<</SYS>>\n\n[INST]  [/INST]  "},
    {Family::kLlama3,
     "<|start_header_id|><|end_header_id|>\n\n<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n"},
    {Family::kChatMl, "<|im_start|>\n<|im_end|>\n<|im_start|>assistant\n"},
    {Family::kChatMl, "<|im_start|>\n<|im_end|>\n"},  // never begins an answer
    {Family::kMistral, "[INST]  [/INST]"},
    {Family::kMistral, "[INST]  [/INST] "},
    {Family::kMistral, kMistralWithSystem},
    {Family::kGemma, "<start_of_turn>\n<end_of_turn>\n<start_of_turn>model\n"},
}};

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != text.npos;
}

bool is_name(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
}

// The literal text of a template, without messages and variables, in its order. Names of keys and
// roles ('role', 'user') and texts of exceptions are skipped.
class WrittenText {
 public:
  explicit WrittenText(std::string_view text) : text_(text) {
    if (text_.ends_with('\n')) text_.remove_suffix(1);  // as Jinja does
  }

  std::string collect() {
    std::size_t at = 0;
    std::string_view before;  // how the tag before ends
    while (at < text_.size()) {
      const std::size_t tag = next_tag(at);
      plain(text_.substr(at, tag - at), before, text_.substr(tag, 3));
      if (tag == text_.size()) break;
      const char kind = text_[tag + 1];
      const std::string_view closing = kind == '{' ? "}}" : kind == '%' ? "%}" : "#}";
      const std::size_t end = kind == '#' ? text_.find(closing, tag) : tag_end(tag + 2, closing);
      if (end == text_.npos) break;
      at = end + 2;
      before = text_.substr(end - 1, 3);
    }
    return out_;
  }

 private:
  std::size_t next_tag(std::size_t at) const {
    for (; at + 1 < text_.size(); ++at)
      if (text_[at] == '{' && std::string_view("{%#").find(text_[at + 1]) != std::string_view::npos)
        return at;
    return text_.size();
  }

  // Text between two tags, less the white space that transformers' Jinja settings take away.
  void plain(std::string_view part, std::string_view before, std::string_view after) {
    constexpr std::string_view kSpace = " \t\r\n";
    if (before.starts_with('-'))
      part.remove_prefix(std::min(part.find_first_not_of(kSpace), part.size()));
    else if (before.ends_with("%}") && part.starts_with('\n'))
      part.remove_prefix(1);
    if (after.ends_with('-')) {
      part = part.substr(0, part.find_last_not_of(kSpace) + 1);
    } else if (after.starts_with("{%")) {
      const std::size_t line = part.find_last_not_of(" \t") + 1;
      if (line == 0 || part[line - 1] == '\n') part = part.substr(0, line);
    }
    out_ += part;
  }

  // Skips the string literals of a tag, up to its end.
  std::size_t tag_end(std::size_t at, std::string_view closing) {
    for (const std::size_t begin = at; at + 1 < text_.size(); ++at) {
      if (text_.substr(at, 2) == closing) return at;
      if (text_[at] != '\'' && text_[at] != '"') continue;
      const bool exception = text_.substr(begin, at - begin).ends_with("raise_exception(");
      const std::string value = literal(at);
      if (!exception && !is_name(value)) out_ += value;
    }
    return text_.npos;
  }

  // The value of the literal at `at`, which moves to its closing quote.
  std::string literal(std::size_t& at) const {
    const char quote = text_[at];
    std::string value;
    for (++at; at < text_.size() && text_[at] != quote; ++at) {
      if (text_[at] != '\\' || at + 1 >= text_.size()) {
        value += text_[at];
        continue;
      }
      const char c = text_[++at];
      value += c == 'n' ? '\n' : c == 't' ? '\t' : c;
    }
    return value;
  }

  std::string_view text_;
  std::string out_;
};

// Like Python's str.strip(), which also treats the four separators of ASCII as white space.
std::string trimmed(std::string_view text) {
  const auto space = [](char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); };
  std::string storage;
  text = valid_utf8(text, storage);
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size() && space(next_character(text, at));) begin = at;
  std::size_t end = text.size();
  for (std::size_t at = end; at > begin && space(previous_character(text, at));) end = at;
  return std::string(text.substr(begin, end - begin));
}

[[noreturn]] void refuse_message(std::size_t index, const ChatMessage& message,
                                 std::string_view rule) {
  throw UsageError("tokenizer", "message {} of the chat is of '{}', and {}.", index, message.role,
                   rule);
}

// Users and assistants in turn, from message `first` on.
void check_turns(std::span<const ChatMessage> messages, std::size_t first, std::string_view rule) {
  for (std::size_t i = first; i < messages.size(); ++i)
    if (messages[i].role != ((i - first) % 2 == 0 ? "user" : "assistant"))
      refuse_message(i, messages[i], rule);
}

// Llama 2 and Mistral: a system message is a part of the first user's.
ChatText render_instructions(const Recognised& chat, std::span<const ChatMessage> messages,
                             const TokenizerConfig& files) {
  const auto content = [&](const std::string& text) { return chat.trims ? trimmed(text) : text; };
  const bool llama = chat.family == Family::kLlama2, takes_system = llama || chat.takes_system;
  const bool system = takes_system && !messages.empty() && messages[0].role == "system";
  const std::size_t first = system ? 1 : 0;
  check_turns(messages, first,
              takes_system ? "this template wants user and assistant in turn, after one system "
                             "message at most"
                           : "this template wants user and assistant in turn");
  ChatText out;
  if (!llama && chat.writes_bos) out.text += files.bos;
  for (std::size_t i = first; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    const bool with_system = system && i == first;
    if (message.role == "user" && llama) {
      const std::string before =
          with_system ? "<<SYS>>\n" + messages[0].content + "\n<</SYS>>\n\n" : "";
      out.text += (chat.writes_bos ? files.bos : "") + "[INST] " +
                  content(before + message.content) + " [/INST]";
    } else if (message.role == "user") {
      const std::string before = with_system ? content(messages[0].content) + "\n\n" : "";
      out.text +=
          (takes_system ? " [INST] " : "[INST] ") + before + content(message.content) + " [/INST]";
    } else {
      const std::size_t begin = out.text.size();
      const std::string answer = content(message.content);
      out.text += llama ? " " + answer + " " : (chat.space_before_answer ? " " : "") + answer;
      out.text += files.eos;
      out.answers.push_back({begin, out.text.size()});
      if (chat.space_after_answer) out.text += " ";
    }
  }
  return out;
}

// The text around the role and the content of a turn.
struct Turn {
  std::string begin, head, end, line_end;
};

Turn turn_of(Family family) {
  if (family == Family::kLlama3)
    return {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", ""};
  if (family == Family::kGemma) return {"<start_of_turn>", "\n", "<end_of_turn>", "\n"};
  if (family == Family::kChatMl) return {"<|im_start|>", "\n", "<|im_end|>", "\n"};
  return {"<|", "|>\n", "<|end|>", "\n"};
}

std::string head_of(Family family, const std::string& role) {
  const Turn turn = turn_of(family);
  const bool model = family == Family::kGemma && role == "assistant";
  return turn.begin + (model ? "model" : role) + turn.head;
}

// Renders one message, without the text that precedes the first. Empty: the template leaves it out.
std::string render_turn(Family family, const std::string& role, const std::string& content) {
  const bool first = family == Family::kPhi3First, answer = role == "assistant";
  const bool known = answer || role == "user" || (role == "system" && !first);
  if ((first || family == Family::kPhi3) && !known) return "";
  const Turn turn = turn_of(family);
  const std::string body = content + turn.end + turn.line_end;
  if (first) return answer ? body : head_of(family, role) + body + head_of(family, "assistant");
  return head_of(family, role) + body;
}

// Removes the system prompt that a ChatML template writes for chats without one.
std::string take_default_system(std::string_view text, std::string& written) {
  constexpr std::string_view kBegin = "<|im_start|>system\n", kEnd = "<|im_end|>\n";
  const bool for_others = has(text, "messages[0]['role'] != 'system'") ||
                          has(text, "messages[0].role != 'system'") ||
                          has(text, "messages[0][\"role\"] != \"system\"") ||
                          has(text, "messages[0].role != \"system\"");
  const std::size_t end = written.find(kEnd);
  if (!for_others || !written.starts_with(kBegin) || end == written.npos) return {};
  const std::string prompt = written.substr(kBegin.size(), end - kBegin.size());
  written.erase(0, end + kEnd.size());
  return prompt;
}

// Reads the properties of Mistral's templates that their literal text does not show.
void read_mistral(std::string_view text, std::string_view written, Recognised& chat) {
  chat.begins_answer = false;
  chat.takes_system = written == kMistralWithSystem;
  const std::size_t space = std::max(text.rfind("' '") + 1, text.rfind("\" \"") + 1);
  const bool after = space > text.rfind("eos_token") + 1;
  chat.space_after_answer = written.ends_with(' ') && after;
  chat.space_before_answer = written.ends_with(' ') && !after;
}

Recognised recognise(std::string_view text, const std::string& where) {
  std::string written = WrittenText(text).collect();
  std::string default_system = take_default_system(text, written);
  const auto known = std::find_if(kKnown.begin(), kKnown.end(),
                                  [&](const Known& other) { return other.written == written; });
  const auto refuse = [&](std::string_view why) {
    throw UsageError("tokenizer",
                     "{}: the chat template is not supported: {}. Supported are the templates of "
                     "Phi-3, Llama 2 and Llama 3, Mistral, Gemma and Qwen2 and plain ChatML, all "
                     "without tools. Write the text of the chat yourself and encode it without "
                     "special tokens.",
                     where, why);
  };
  if (known == kKnown.end())
    refuse(
        fmt::format("it writes '{}{}'", written.substr(0, 120), written.size() > 120 ? "..." : ""));
  Recognised chat{.family = known->family, .default_system = std::move(default_system)};
  chat.writes_bos = has(text, "bos_token");
  chat.writes_eos = has(text, "eos_token");
  chat.asks_for_prompt = has(text, "add_generation_prompt");
  chat.trims = has(text, "trim") || has(text, ".strip()");
  chat.skips_empty_system = has(text, "'system' and message['content']");
  chat.begins_answer = known->written.ends_with("assistant\n") ||
                       known->written.ends_with("<|assistant|>\n") ||
                       known->family == Family::kLlama3 || known->family == Family::kGemma;
  if (chat.family == Family::kMistral) read_mistral(text, written, chat);
  const bool at_first = has(text, "loop.first") || has(text, "loop.index0 == 0");
  const bool phi = chat.family == Family::kPhi3 || chat.family == Family::kPhi3Any;
  const bool at_end = phi && chat.asks_for_prompt && text.rfind("else") < text.find("eos_token");
  const bool of_turns = chat.family == Family::kLlama2 || chat.family == Family::kMistral;
  if (chat.writes_eos && !of_turns && !at_end) refuse("it writes eos_token in another place");
  if (chat.family == Family::kMistral && (!chat.writes_eos || chat.takes_system != at_first))
    refuse("it has eos_token or a system message in another place");
  if (chat.family == Family::kGemma && !has(text, "'model'") && !has(text, "\"model\""))
    refuse("it does not call the assistant 'model'");
  if (!chat.default_system.empty() && chat.family != Family::kChatMl)
    refuse("it writes a system prompt of its own");
  return chat;
}

}  // namespace

ChatText render_chat(const TokenizerConfig& files, std::span<const ChatMessage> messages,
                     bool add_generation_prompt) {
  const Recognised chat = recognise(files.chat_template, files.chat_template_file);
  const Family family = chat.family;
  if (family == Family::kLlama2 || family == Family::kMistral)
    return render_instructions(chat, messages, files);
  if (family == Family::kGemma)
    check_turns(messages, 0,
                "this template wants user and assistant in turn. Put the text of a system message "
                "into the first user's");
  ChatText out;
  if (chat.writes_bos) out.text += files.bos;
  if (!chat.default_system.empty() && !messages.empty() && messages[0].role != "system")
    out.text += render_turn(family, "system", chat.default_system);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (chat.skips_empty_system && message.role == "system" && message.content.empty()) continue;
    const std::string content = chat.trims ? trimmed(message.content) : message.content;
    const std::string turn = render_turn(family, message.role, content);
    if (turn.empty())
      refuse_message(i, message, "this template would leave it out. Put its text into a user's");
    out.text += turn;
    if (message.role == "assistant") {
      const std::size_t end = out.text.size() - (turn.ends_with('\n') ? 1 : 0);
      out.answers.push_back({end - content.size() - turn_of(family).end.size(), end});
    }
  }
  const bool prompts = add_generation_prompt || !chat.asks_for_prompt;
  if (prompts && chat.begins_answer) out.text += head_of(family, "assistant");
  if (!prompts && chat.writes_eos) out.text += files.eos;
  return out;
}

}  // namespace lockstep::data
