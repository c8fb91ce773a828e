#include "lockstep/data/instruction_file.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/json.h"
#include "lockstep/core/utf8.h"
#include "lockstep/io/file.h"

namespace lockstep::data {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

struct Field {
  std::string_view name;
  std::string Instruction::*member;
  bool required;
};
constexpr std::array<Field, 4> kFields{{{"instruction", &Instruction::instruction, true},
                                        {"input", &Instruction::input, false},
                                        {"output", &Instruction::output, true},
                                        {"answer", &Instruction::answer, false}}};

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

Instruction read_object(JsonReader& json) {
  Instruction item;
  std::array<bool, kFields.size()> seen{};
  json.enter_object();
  std::string key;
  while (json.next_key(key)) {
    const auto field =
        std::find_if(kFields.begin(), kFields.end(), [&](const Field& f) { return f.name == key; });
    if (field == kFields.end()) {
      json.skip();
      continue;
    }
    bool& again = seen[static_cast<std::size_t>(field - kFields.begin())];
    if (std::exchange(again, true)) json.fail(fmt::format("the key '{}' appears twice", key));
    item.*(field->member) = value_text(json);
  }
  for (std::size_t i = 0; i < kFields.size(); ++i)
    if (kFields[i].required && !seen[i])
      json.fail(fmt::format("the object that ends here has no '{}'", kFields[i].name));
  return item;
}

// Calls `progress` now and then, not for every object.
class Milestones {
 public:
  Milestones(const ReadProgress& progress, std::size_t total)
      : progress_(progress), total_(total) {}
  void reach(std::size_t offset) {
    if (!progress_ || offset < next_) return;
    next_ = offset + kStride;
    progress_(offset, total_);
  }

 private:
  static constexpr std::size_t kStride = std::size_t{1} << 20;
  const ReadProgress& progress_;
  std::size_t total_;
  std::size_t next_ = kStride;
};

std::vector<Instruction> read_list(std::string_view text, Milestones milestones) {
  std::vector<Instruction> items;
  JsonReader json(text);
  json.enter_array();
  while (json.next_element()) {
    items.push_back(read_object(json));
    milestones.reach(json.offset());
  }
  json.end();
  return items;
}

std::vector<Instruction> read_lines(std::string_view text, Milestones milestones) {
  std::vector<Instruction> items;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    if (line.find_first_not_of(kSpace) != std::string_view::npos) {
      JsonReader json(text.substr(0, end), begin);
      items.push_back(read_object(json));
      json.end();
    }
    begin = end + 1;
    milestones.reach(end);
  }
  return items;
}

const std::string* field_of(const Instruction& item, std::string_view name) {
  for (const Field& field : kFields)
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
    const Milestones milestones(progress, text.size());
    auto items = body[first] == '[' ? read_list(body, milestones) : read_lines(body, milestones);
    if (progress) progress(text.size(), text.size());
    return items;
  } catch (const JsonError& error) {
    throw UsageError("instructions",
                     "{}: {}. The file must be a JSON list of objects, or one object per line, "
                     "with the keys instruction, input, output and answer.",
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
  return {fill(item.input.empty() ? format.prompt_without_input : format.prompt, item),
          fill(format.response, item)};
}

}  // namespace lockstep::data
