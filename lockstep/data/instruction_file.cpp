#include "lockstep/data/instruction_file.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/json.h"
#include "lockstep/core/text.h"
#include "lockstep/io/file.h"

namespace lockstep::data {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

struct TextField {
  std::string_view name;
  std::string Instruction::*member;
};
constexpr std::array<TextField, 4> kFields{{{"instruction", &Instruction::instruction},
                                            {"input", &Instruction::input},
                                            {"output", &Instruction::output},
                                            {"answer", &Instruction::answer}}};

// file:line:column of an offset; columns count characters, as editors do.
std::string place(std::string_view text, const std::string& name, std::size_t offset) {
  const std::string_view before = text.substr(0, offset);
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const std::size_t start = before.rfind('\n') + 1;  // npos + 1 is 0
  return fmt::format("{}:{}:{}", name, line, character_count(before.substr(start)) + 1);
}

// A string; a number or a truth value as it is written; nothing for null.
std::string value_text(JsonReader& json) {
  const char first = json.peek();
  if (first == '"') return json.string();
  if (first == '{' || first == '[') json.fail("expected a text, not a list or an object");
  const std::string_view written = json.scalar();
  return written == "null" ? std::string() : std::string(written);
}

ChatMessage read_message(JsonReader& json) {
  ChatMessage message;
  bool role = false, content = false;
  json.enter_object();
  std::string key;
  while (json.next_key(key)) {
    if (key == "role" && !std::exchange(role, true)) {
      message.role = json.string();
    } else if (key == "content" && !std::exchange(content, true)) {
      if (json.peek() != '"') json.fail("the content of a message must be a text");
      message.content = json.string();
    } else if (key == "role" || key == "content") {
      json.fail(fmt::format("the key '{}' appears twice", key));
    } else if (key == "tool_calls" && json.peek() == '[') {
      json.fail("tool_calls of a message are not supported");
    } else {
      json.skip();
    }
  }
  if (!role || !content)
    json.fail(fmt::format("the message that ends here has no '{}'", role ? "content" : "role"));
  return message;
}

// The value of "messages", "prompt" or "completion". Parsed when the whole object is known: other
// records may have anything under these keys.
struct ChatField {
  std::size_t offset = 0;  // 0: the key is not there
  bool chat = false;
  std::string text{};
  std::vector<ChatMessage> messages{};

  bool seen() const { return offset > 0; }
  void read(std::string_view file) {
    JsonReader json(file, offset);
    chat = json.peek() == '[';
    if (!chat) {
      text = value_text(json);
      return;
    }
    json.enter_array();
    while (json.next_element()) messages.push_back(read_message(json));
  }
};

// The values of one object by their keys, in any order, and the record that they make.
class Record {
 public:
  explicit Record(std::string_view file) : file_(file) {}

  void read(JsonReader& json) {
    json.enter_object();
    std::string key;
    while (json.next_key(key)) {
      const auto field = std::find_if(kFields.begin(), kFields.end(),
                                      [&](const TextField& f) { return f.name == key; });
      ChatField* const chat_field = key == "prompt"       ? &prompt_
                                    : key == "completion" ? &completion_
                                    : key == "messages"   ? &messages_
                                                          : nullptr;
      if (field != kFields.end()) {
        bool& again = seen_[static_cast<std::size_t>(field - kFields.begin())];
        if (std::exchange(again, true)) refuse_again(json, key);
        item_.*(field->member) = value_text(json);
      } else if (chat_field != nullptr) {
        if (chat_field->seen()) refuse_again(json, key);
        json.peek();
        chat_field->offset = json.offset();
        json.skip();
      } else {
        json.skip();
      }
    }
  }

  Instruction finish(JsonReader& json) {
    if (seen_[0] && seen_[2]) return std::move(item_);
    if (prompt_.seen() && completion_.seen()) return completion(json);
    if (messages_.seen()) return chat(json);
    json.fail(fmt::format("the object that ends here has no '{}'", missing()));
  }

 private:
  [[noreturn]] static void refuse_again(JsonReader& json, const std::string& key) {
    json.fail(fmt::format("the key '{}' appears twice", key));
  }

  const char* missing() const {
    if (seen_[0]) return "output";
    if (seen_[2]) return "instruction";
    if (prompt_.seen()) return "completion";
    return completion_.seen() ? "prompt" : "instruction";
  }

  Instruction completion(JsonReader& json) {
    prompt_.read(file_);
    completion_.read(file_);
    if (prompt_.chat != completion_.chat)
      json.fail("prompt and completion must both be texts, or both be lists of messages");
    Instruction item;
    item.kind = prompt_.chat ? RecordKind::kChat : RecordKind::kCompletion;
    item.instruction = std::move(prompt_.text);
    item.output = std::move(completion_.text);
    if (prompt_.chat && (prompt_.messages.empty() || completion_.messages.empty()))
      json.fail("prompt and completion must each have at least one message");
    item.given = prompt_.messages.size();
    item.messages = std::move(prompt_.messages);
    for (ChatMessage& message : completion_.messages) item.messages.push_back(std::move(message));
    return item;
  }

  Instruction chat(JsonReader& json) {
    messages_.read(file_);
    if (!messages_.chat) json.fail("messages must be a list of objects with role and content");
    Instruction item;
    item.kind = RecordKind::kChat;
    item.messages = std::move(messages_.messages);
    const auto answers = [](const ChatMessage& message) { return message.role == "assistant"; };
    if (std::none_of(item.messages.begin(), item.messages.end(), answers))
      json.fail("the chat that ends here has no message of the assistant to learn");
    return item;
  }

  std::string_view file_;
  Instruction item_;
  std::array<bool, kFields.size()> seen_{};
  ChatField prompt_, completion_, messages_;
};

const char* kind_name(RecordKind kind) {
  if (kind == RecordKind::kChat) return "a chat";
  return kind == RecordKind::kCompletion ? "prompt and completion" : "an instruction";
}

// The next object, which is of the kind of those before it.
void read_object(std::string_view file, JsonReader& json, std::vector<Instruction>& items) {
  Record record(file);
  record.read(json);
  Instruction item = record.finish(json);
  if (!items.empty() && item.kind != items.front().kind)
    json.fail(fmt::format("the object that ends here is {}, and the first of the file is {}",
                          kind_name(item.kind), kind_name(items.front().kind)));
  items.push_back(std::move(item));
}

using Reached = std::function<void(std::size_t offset)>;

std::vector<Instruction> read_list(std::string_view text, const Reached& reached) {
  std::vector<Instruction> items;
  JsonReader json(text);
  json.enter_array();
  while (json.next_element()) {
    read_object(text, json, items);
    reached(json.offset());
  }
  json.end();
  return items;
}

std::vector<Instruction> read_lines(std::string_view text, const Reached& reached) {
  std::vector<Instruction> items;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    if (line.find_first_not_of(kSpace) != std::string_view::npos) {
      JsonReader json(text.substr(0, end), begin);
      read_object(text, json, items);
      json.end();
    }
    begin = end + 1;
    reached(end);
  }
  return items;
}

const std::string* field_of(const Instruction& item, std::string_view name) {
  for (const TextField& field : kFields)
    if (field.name == name) return &(item.*(field.member));
  return nullptr;
}

std::string fill(const std::string& pattern, const Instruction& item) {
  std::string text;
  for (std::size_t at = 0; at < pattern.size(); ++at) {
    const char c = pattern[at];
    const bool twice = at + 1 < pattern.size() && pattern[at + 1] == c;
    if ((c == '{' || c == '}') && twice) {
      text += c;
      ++at;
    } else if (c == '{') {
      const std::size_t end = pattern.find('}', at);
      const std::string name =
          pattern.substr(at + 1, end == std::string::npos ? std::string::npos : end - at - 1);
      const std::string* value = end == std::string::npos ? nullptr : field_of(item, name);
      if (value == nullptr)
        throw UsageError(
            "prompt",
            "the template has '{{{}' at position {}, which is not a field. The fields are "
            "{{instruction}}, {{input}}, {{output}} and {{answer}}; write {{{{ for a "
            "brace.",
            name, at);
      text += *value;
      at = end;
    } else if (c == '}') {
      throw UsageError("prompt",
                       "the template has a '}}' at position {} that closes nothing. Write }}}} for "
                       "a brace.",
                       at);
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace

std::vector<Instruction> parse_instructions(std::string_view text, const std::string& name,
                                            const ReadProgress& progress) {
  std::string_view body = text;
  if (body.starts_with("\xEF\xBB\xBF")) body.remove_prefix(3);  // a byte order mark says nothing
  const std::size_t skipped = text.size() - body.size();
  const std::size_t first = body.find_first_not_of(kSpace);
  try {
    if (first == std::string_view::npos) throw JsonError(body.size(), "there is nothing in it");
    constexpr std::size_t kStride = std::size_t{1} << 20;
    const Reached reached = [&, next = kStride](std::size_t offset) mutable {
      if (!progress || offset < next) return;
      next = offset + kStride;
      progress(offset, text.size());
    };
    auto items = body[first] == '[' ? read_list(body, reached) : read_lines(body, reached);
    if (progress) progress(text.size(), text.size());
    return items;
  } catch (const JsonError& error) {
    throw UsageError("instructions",
                     "{}: {}. The file must be a JSON list of objects, or one object per line, "
                     "each with instruction and output (input and answer may be beside them), with "
                     "messages, or with prompt and completion.",
                     place(text, name, skipped + error.offset()), error.what());
  }
}

std::vector<Instruction> load_instructions(const std::string& path, const ReadProgress& progress) {
  const io::MappedFile file(path);
  const auto bytes = file.bytes();
  return parse_instructions({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path,
                            progress);
}

PromptAndResponse apply(const PromptTemplate& format, const Instruction& item) {
  if (item.kind == RecordKind::kCompletion) return {item.instruction, item.output};
  return {fill(item.input.empty() ? format.prompt_without_input : format.prompt, item),
          fill(format.response, item)};
}

namespace {

// How many leading tokens two texts share, where one text is the beginning of the other. A token
// that spans the border between prompt and response is not shared: it is the first that is learned.
std::size_t common(const Tokens& beginning, const Tokens& whole) {
  const auto border = std::mismatch(beginning.begin(), beginning.end(), whole.begin(), whole.end());
  return static_cast<std::size_t>(border.first - beginning.begin());
}

// How many of a text's tokens lie wholly before `at`. The last of them may depend on the next
// character: GPT-2's tokenizer makes two line ends one token at the end of a text.
template <typename Encode>
std::size_t tokens_before(const Encode& encode, std::string_view text, std::size_t at,
                          const Tokens& whole) {
  const Tokens alone = encode(text.substr(0, at));
  const std::size_t count = common(alone, whole);
  if (count == alone.size() || at == text.size()) return count;
  std::string longer(text.substr(0, at));
  longer += static_cast<unsigned char>(text[at]) < 0x80 ? text[at] : 'a';  // a letter like others
  const Tokens followed = encode(longer);
  return std::max(count, std::min(common(followed, whole), followed.size() - 1));
}

}  // namespace

InstructionRows::InstructionRows(const std::vector<Instruction>& items, InstructionOptions options,
                                 const ReadProgress& progress)
    : options_(std::move(options)), where_(options_.source.empty() ? "" : options_.source + ": ") {
  if (options_.max_length < 2)
    throw UsageError("instructions", "{} is {}, and must be 2 or more.", options_.length_key,
                     options_.max_length);
  if (options_.pad_to_multiple_of < 1)
    throw UsageError("instructions", "pad_to_multiple_of is {}, and must be 1 or more.",
                     options_.pad_to_multiple_of);
  if (!items.empty()) kind_ = items.front().kind;
  constexpr std::size_t kStride = 1024;
  for (std::size_t i = 0; i < items.size(); ++i) {
    ++counts_.read;
    if (items[i].kind == RecordKind::kChat)
      add_chat(items[i]);
    else
      add_text(apply(options_.prompt, items[i]));
    if (progress && (i + 1) % kStride == 0) progress(i + 1, items.size());
  }
  if (items.empty())
    throw UsageError("instructions", "{}there are no samples. Give a file that has some.", where_);
  if (samples_.empty())
    throw UsageError("instructions",
                     "{}of {} samples none has anything to learn from: {} prompts alone fill "
                     "{} = {}. Raise {}.",
                     where_, counts_.read, counts_.dropped, options_.length_key,
                     options_.max_length, options_.length_key);
  if (options_.padding == Padding::kPacked) pack();
}

void InstructionRows::add_text(const PromptAndResponse& texts) {
  // Encoded as the one text that a model will see.
  const std::int32_t end = options_.encoder.end_of_text;
  Tokens prompt = options_.encoder.encode(texts.prompt);
  if (!prompt.empty() && prompt.back() == end) prompt.pop_back();  // the encoder's own
  Tokens tokens = options_.encoder.encode(texts.prompt + texts.response);
  const std::size_t border = common(prompt, tokens);
  if (tokens.empty() || tokens.back() != end) tokens.push_back(end);
  std::vector<std::uint8_t> learned(tokens.size(), 1);
  std::fill_n(learned.begin(), border, 0);
  add_tokens(tokens, std::move(learned));
}

// The template has written every special token, so nothing is added to its text.
void InstructionRows::add_chat(const Instruction& item) {
  if (!options_.chat)
    throw UsageError("instructions",
                     "{}the records are chats, whose text a model's chat template makes. Name that "
                     "model's folder as the tokenizer (data.tokenizer of a training file).",
                     where_);
  const Tokenizer& chat = *options_.chat;
  const auto encode = [&](std::string_view text) {
    const auto ids = chat.encode(text, {.add_special_tokens = false});
    return Tokens(ids.begin(), ids.end());
  };
  const std::span<const ChatMessage> messages = item.messages;
  const ChatText whole = chat.chat_text(messages);
  const std::string_view text = whole.text;
  const Tokens tokens = encode(text);
  std::vector<std::uint8_t> learned(tokens.size(), 0);
  if (item.given > 0) {
    const ChatText prompt =
        chat.chat_text(messages.first(item.given), {.add_generation_prompt = true});
    const std::size_t border = common(encode(prompt.text), tokens);
    std::fill(learned.begin() + static_cast<std::ptrdiff_t>(border), learned.end(), 1);
  } else {
    for (const ChatText::Range& answer : whole.answers) {
      const std::size_t begin = tokens_before(encode, text, answer.begin, tokens);
      const std::size_t end = tokens_before(encode, text, answer.end, tokens);
      for (std::size_t t = begin; t < end; ++t) learned[t] = 1;
    }
  }
  add_tokens(tokens, std::move(learned));
}

void InstructionRows::add_tokens(const Tokens& tokens, std::vector<std::uint8_t> learned) {
  // An unpacked row loses one token, since the last is only a target; a packed sample keeps it, as
  // the mark that the next one begins.
  const std::int64_t most = options_.max_length + (options_.padding == Padding::kPacked ? 0 : 1);
  const auto whole = static_cast<std::int64_t>(tokens.size());
  const std::int64_t length = std::min(whole, most);
  const auto used = static_cast<std::ptrdiff_t>(length);
  // The first token is never a target.
  if (length < 2 ||
      std::find(learned.begin() + 1, learned.begin() + used, 1) == learned.begin() + used) {
    ++counts_.dropped;
    return;
  }
  if (length < whole) ++counts_.truncated;
  if (options_.train_on_prompt) std::fill(learned.begin(), learned.end(), 1);
  samples_.push_back({static_cast<std::int64_t>(tokens_.size()), length});
  counts_.tokens += length;
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.begin() + used);
  learned_.insert(learned_.end(), learned.begin(), learned.begin() + used);
}

// Best fit, longest first: each sample goes into the fullest row that still has room.
void InstructionRows::pack() {
  std::vector<std::int64_t> order(samples_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto length = [this](std::int64_t i) {
    return samples_[static_cast<std::size_t>(i)].length;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return length(a) > length(b); });
  std::set<std::pair<std::int64_t, std::size_t>> room;  // tokens left, row
  for (const std::int64_t sample : order) {
    auto best = room.lower_bound({length(sample), 0});
    std::pair<std::int64_t, std::size_t> row{options_.max_length, rows_.size()};
    if (best == room.end()) {
      rows_.emplace_back();
    } else {
      row = *best;
      room.erase(best);
    }
    rows_[row.second].push_back(sample);
    row.first -= length(sample);
    if (row.first > 0) room.insert(row);
  }
}

std::int64_t InstructionRows::size() const {
  return static_cast<std::int64_t>(rows_.empty() ? samples_.size() : rows_.size());
}

std::vector<InstructionRows::Sample> InstructionRows::row(std::int64_t index) const {
  if (index < 0 || index >= size())
    throw UsageError("instructions", "there is no sample {} of {}.", index, size());
  const auto at = static_cast<std::size_t>(index);
  if (rows_.empty()) return {samples_[at]};
  std::vector<Sample> row;
  for (const std::int64_t sample : rows_[at])
    row.push_back(samples_[static_cast<std::size_t>(sample)]);
  return row;
}

std::span<const std::int32_t> InstructionRows::tokens(const Sample& sample) const {
  return std::span<const std::int32_t>(tokens_).subspan(static_cast<std::size_t>(sample.begin),
                                                        static_cast<std::size_t>(sample.length));
}

std::span<const std::uint8_t> InstructionRows::learned(const Sample& sample) const {
  return std::span<const std::uint8_t>(learned_).subspan(static_cast<std::size_t>(sample.begin),
                                                         static_cast<std::size_t>(sample.length));
}

std::vector<std::int64_t> InstructionRows::lengths() const {
  std::vector<std::int64_t> lengths;
  lengths.reserve(static_cast<std::size_t>(size()));
  for (const auto& row : rows_) {
    std::int64_t sum = 0;
    for (const std::int64_t sample : row) sum += samples_[static_cast<std::size_t>(sample)].length;
    lengths.push_back(sum);
  }
  if (rows_.empty())
    for (const Sample& sample : samples_) lengths.push_back(sample.length - 1);
  return lengths;
}

}  // namespace lockstep::data
