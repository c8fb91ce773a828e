// The two readers, of YAML (by yaml-cpp's events) and of JSON (json.h). Both make a tree with the
// location of every key and value, within the limits of the document.

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <unordered_map>

#include "lockstep/core/document.h"
#include "lockstep/core/json.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/text.h"

namespace lockstep {
namespace {

// The text of a document before it is parsed: its limits, and offsets turned into places.
//
//   DocumentText text(bytes, "train.yaml", limits);   // UsageError: too large
//   refuse_at(text.at(offset), "the key '{}' appears twice.", key);
//
// Lives as long as one parse; refers to the bytes it was given.
class DocumentText {
 public:
  DocumentText(std::string_view bytes, const std::string& name, const DocumentLimits& limits);

  std::string_view text() const { return text_; }  // without the byte order mark
  // Refuses text that is not UTF-8, and control characters.
  void check_bytes() const;
  SourceLocation at(std::size_t offset) const;
  SourceLocation at(int line, int byte_column) const;  // both from 0
  std::size_t offset(int line, int byte_column) const;
  // Counts towards the limits of nodes and depth, or refuses.
  void count(std::size_t nodes, const SourceLocation& location);
  void check_depth(std::size_t depth, const SourceLocation& location) const;

 private:
  struct Counted {
    std::size_t line = 0;
    std::size_t offset = 0;
    std::size_t characters = 0;  // from the line's start to the offset
  };

  std::string_view text_;
  std::shared_ptr<const std::string> name_;
  DocumentLimits limits_;
  std::vector<std::size_t> starts_{0};  // offsets of the lines
  std::size_t nodes_ = 0;
  mutable Counted last_;  // a cache; one thread parses one document
};

DocumentText::DocumentText(std::string_view bytes, const std::string& name,
                           const DocumentLimits& limits)
    : text_(bytes), name_(std::make_shared<const std::string>(name)), limits_(limits) {
  if (bytes.size() > limits.bytes) {
    throw UsageError("config", "{} is larger than {} bytes. Is it the right file?", name,
                     limits.bytes);
  }
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text_.substr(0, kByteOrderMark.size()) == kByteOrderMark)
    text_.remove_prefix(kByteOrderMark.size());
  for (std::size_t i = 0; i < text_.size(); ++i)
    if (text_[i] == '\n') starts_.push_back(i + 1);
}

void DocumentText::check_bytes() const {
  for (std::size_t i = 0; i < text_.size();) {
    const std::size_t size = utf8_size(text_.substr(i));
    const auto byte = static_cast<unsigned char>(text_[i]);
    if (size == 0) {
      refuse_at(at(i), "the byte 0x{:02x} is not valid UTF-8. Save the file as UTF-8.", byte);
    }
    const bool line_end = byte == '\n' || (byte == '\r' && text_.substr(i + 1, 1) == "\n");
    if ((byte < 0x20 && byte != '\t' && !line_end) || byte == 0x7F) {
      refuse_at(at(i),
                "the control character 0x{:02x} is not allowed. Save the file as plain text with "
                "line feeds, or write it as an escape in double quotes.",
                byte);
    }
    i += size;
  }
}

SourceLocation DocumentText::at(std::size_t offset) const {
  offset = std::min(offset, text_.size());
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), offset);
  const auto line = static_cast<std::size_t>(after - starts_.begin());  // from 1
  // Readers go forward: counting on from the last place keeps one very long line from costing the
  // square of its length.
  if (line != last_.line || offset < last_.offset) last_ = {line, starts_[line - 1], 0};
  const std::string_view more = text_.substr(last_.offset, offset - last_.offset);
  last_ = {line, offset, last_.characters + character_count(more)};
  return {name_, static_cast<int>(line), static_cast<int>(last_.characters) + 1};
}

std::size_t DocumentText::offset(int line, int byte_column) const {
  if (line < 0 || byte_column < 0) return 0;
  const auto index = std::min(static_cast<std::size_t>(line), starts_.size() - 1);
  return std::min(starts_[index] + static_cast<std::size_t>(byte_column), text_.size());
}

SourceLocation DocumentText::at(int line, int byte_column) const {
  return at(offset(line, byte_column));
}

void DocumentText::count(std::size_t nodes, const SourceLocation& location) {
  nodes_ += nodes;
  if (nodes_ > limits_.nodes) {
    refuse_at(location,
              "there are more than {} values, counting what aliases repeat. Is it the right file?",
              limits_.nodes);
  }
}

void DocumentText::check_depth(std::size_t depth, const SourceLocation& location) const {
  if (depth > static_cast<std::size_t>(limits_.depth))
    refuse_at(location, "nested deeper than {}. Is it the right file?", limits_.depth);
}

// Throws, or adds to `problems` if it is not null.
void refuse_duplicate(const Entry& first, const std::string& key, const SourceLocation& location,
                      Problems* problems) {
  const auto refuse = [&] {
    refuse_at(location,
              "the key '{}' appears twice (first at line {}, column {}). Delete one of them.", key,
              first.location.line, first.location.column);
  };
  if (problems == nullptr) refuse();
  if (!problems->full()) problems->attempt(refuse);
}

// ---------------------------------------------------------------- YAML
//
// Read from yaml-cpp's parser event by event: its own tree takes the first of two equal keys and
// copies aliases without a limit; ours refuses duplicates and bounds aliases.

struct Anchored {
  Node node;
  std::size_t nodes;
  std::size_t depth;
};

// A list or map that is still open.
struct OpenNode {
  Node node;
  YAML::anchor_t anchor = 0;
  bool has_key = false;   // a map whose next entry has its key and waits for the value
  bool repeated = false;  // ... and that key is a duplicate: its value is dropped
  Entry next{};
  std::size_t key_end = 0;  // where its key ends, when it was written plainly; otherwise 0
  std::unordered_map<std::string, std::size_t> seen{};
};

std::size_t size_of(const Node& node) {
  std::size_t size = 1;
  for (const Node& item : node.items) size += size_of(item);
  for (const Entry& entry : node.entries) size += size_of(entry.value);
  return size;
}

std::size_t depth_of(const Node& node) {
  std::size_t depth = 0;
  for (const Node& item : node.items) depth = std::max(depth, depth_of(item));
  for (const Entry& entry : node.entries) depth = std::max(depth, depth_of(entry.value));
  return depth + (node.is(NodeKind::kList) || node.is(NodeKind::kMap) ? 1 : 0);
}

class TreeBuilder : public YAML::EventHandler {
 public:
  TreeBuilder(DocumentText& text, Problems* problems) : text_(text), problems_(problems) {}

  Node take() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ > 0) {
      // yaml-cpp also ends a document where a map follows a list at the same level.
      const bool marked = text_.text().substr(text_.offset(mark.line, mark.column), 3) == "---";
      refuse_at(at(mark), "{}",
                marked ? "a second document begins. One file holds one: delete the '---' or split "
                         "the file."
                       : "this does not continue the lines above. Check the indentation.");
    }
    root_.location = text_.at(std::size_t{0});
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (wants_key()) refuse_at(at(mark), "a key is missing. Write `key: value`.");
    check_colon();
    Node node;
    node.location = null_location(mark);
    text_.count(1, node.location);
    add(std::move(node), anchor);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const SourceLocation location = at(mark);
    if (wants_key()) refuse_at(location, "an alias cannot be a key. Write the key itself.");
    const auto found = anchored_.find(anchor);
    if (found == anchored_.end())
      refuse_at(location, "an alias is inside the value that it names. Write the value out.");
    text_.count(found->second.nodes, location);
    text_.check_depth(stack_.size() + found->second.depth, location);
    add(found->second.node, 0);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    const SourceLocation location = at(mark);
    check_tag(tag, location);
    text_.count(1, location);
    Node node;
    if (tag == "!") {
      check_quotes(mark);
      node = text_node(value);
      node.location = location;
      node.quoted = true;
    } else {
      node = plain_scalar(value, location);
    }
    if (wants_key()) {
      add_key(node);
      const std::size_t start = text_.offset(mark.line, mark.column);
      stack_.back().key_end = node.quoted ? 0 : start + node.text.size();
    } else {
      add(std::move(node), anchor);
    }
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(NodeKind::kList, mark, tag, anchor);
  }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(NodeKind::kMap, mark, tag, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapEnd() override { close(); }

 private:
  SourceLocation at(const YAML::Mark& mark) const { return text_.at(mark.line, mark.column); }

  bool wants_key() const {
    return !stack_.empty() && stack_.back().node.is(NodeKind::kMap) && !stack_.back().has_key;
  }
  // A value that is not there has the place of its key; a written one (null, ~) its own.
  SourceLocation null_location(const YAML::Mark& mark) const {
    const SourceLocation own = at(mark);
    if (stack_.empty() || stack_.back().node.is(NodeKind::kList)) return own;
    const std::string_view there = text_.text().substr(text_.offset(mark.line, mark.column), 1);
    const bool written = there == "~" || there == "n" || there == "N";
    return written && own.line == key_location().line ? own : key_location();
  }
  const SourceLocation& key_location() const { return stack_.back().next.location; }

  static void check_tag(const std::string& tag, const SourceLocation& location) {
    if (!tag.empty() && tag != "?" && tag != "!")
      refuse_at(location, "tags ('!') are not read. Delete it, or quote the value.");
  }

  // yaml-cpp takes a last line without a colon for a key without a value.
  void check_colon() const {
    if (stack_.empty() || stack_.back().key_end == 0 || !stack_.back().has_key) return;
    const OpenNode& frame = stack_.back();
    const std::string_view text = text_.text();
    const std::size_t after = text.find_first_not_of(' ', std::min(frame.key_end, text.size()));
    if (after != text.npos && text[after] == ':') return;
    refuse_at(key_location(), "'{}' is no `key: value`. A colon and a space follow the key.",
              frame.next.key);
  }

  // yaml-cpp takes the end of the file for a closing quote.
  void check_quotes(const YAML::Mark& mark) const {
    const std::string_view text = text_.text();
    std::size_t i = text_.offset(mark.line, mark.column);
    if (text.substr(i, 1) == "&")  // the mark of a named value is that of its name
      i = text.find_first_not_of(" \r\n", std::min(text.find_first_of(" \r\n", i), text.size()));
    if (i >= text.size() || (text[i] != '"' && text[i] != '\'')) return;
    const char quote = text[i];
    const SourceLocation opened = text_.at(i);
    for (++i; i < text.size(); ++i) {
      if (text[i] == '\\' && quote == '"') {
        ++i;
      } else if (text[i] == quote) {
        if (quote == '"' || text.substr(i + 1, 1) != "'") return;
        ++i;
      }
    }
    refuse_at(opened, "A quote that was opened is not closed. Close it.");
  }

  void open(NodeKind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    const SourceLocation location = at(mark);
    check_tag(tag, location);
    if (wants_key())
      refuse_at(location,
                "a list or a map cannot be a key. Write a string, and close every bracket.");
    text_.count(1, location);
    text_.check_depth(stack_.size() + 1, location);
    OpenNode frame;
    frame.node.kind = kind;
    frame.node.location = location;
    frame.anchor = anchor;
    stack_.push_back(std::move(frame));
  }

  void close() {
    OpenNode frame = std::move(stack_.back());
    stack_.pop_back();
    add(std::move(frame.node), frame.anchor);
  }

  void add_key(const Node& key) {
    if (!key.is(NodeKind::kString)) {
      if (key.is(NodeKind::kNull)) refuse_at(key.location, "a key is missing. Write `key: value`.");
      refuse_at(key.location, "the key {} is a {}. Keys are strings: quote it if it is meant.",
                key.text, key.is(NodeKind::kBool) ? "boolean" : "number");
    }
    if (key.text == "<<" && !key.quoted)
      refuse_at(key.location, "merge keys ('<<') are not read. Write the keys out.");
    OpenNode& frame = stack_.back();
    const auto [found, fresh] = frame.seen.emplace(key.text, frame.node.entries.size());
    if (!fresh)
      refuse_duplicate(frame.node.entries[found->second], key.text, key.location, problems_);
    frame.repeated = !fresh;
    frame.next.key = key.text;
    frame.next.location = key.location;
    frame.has_key = true;
  }

  void add(Node node, YAML::anchor_t anchor) {
    if (anchor != 0) anchored_[anchor] = {node, size_of(node), depth_of(node)};
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    OpenNode& frame = stack_.back();
    if (frame.node.is(NodeKind::kList)) {
      frame.node.items.push_back(std::move(node));
      return;
    }
    frame.next.value = std::move(node);
    if (!frame.repeated) frame.node.entries.push_back(std::move(frame.next));
    frame.next = {};
    frame.has_key = false;
  }

  DocumentText& text_;
  Problems* problems_;
  Node root_;
  int documents_ = 0;
  std::vector<OpenNode> stack_;
  std::map<YAML::anchor_t, Anchored> anchored_;
};

// The remedy for a message of yaml-cpp.
std::string_view remedy(std::string_view message) {
  const auto says = [&](std::string_view part) { return message.find(part) != message.npos; };
  if (says("flow")) return "A bracket that was opened is not closed before this, or not opened.";
  if (says("EOF in scalar")) return "A quote that was opened is not closed.";
  if (says("escape") || says("hex") || says("unicode"))
    return "In double quotes a backslash begins an escape: use single quotes for plain text.";
  if (says("anchor")) return "Write the value out, or name it with '&' before this.";
  if (says("map") || says("block") || says("sequence"))
    return "Check the indentation of this line and the one before, and that every 'key:' is "
           "followed by a space.";
  return "Quote the value if it is meant as text.";
}

// yaml-cpp takes tabs for spaces in some places and not in others, and skips any line that looks
// like a directive.
void check_lines(const DocumentText& document) {
  const std::string_view text = document.text();
  for (std::size_t start = 0; start < text.size();) {
    const std::size_t content = text.find_first_not_of(' ', start);
    if (content == text.npos) return;
    if (text[start] == '%') {
      refuse_at(document.at(start),
                "a line that begins with '%' is a directive, which is not read. Delete it, or "
                "indent it if it is text.");
    }
    if (text[content] == '\t') {
      const std::size_t after = text.find_first_not_of(" \t\r", content);
      if (after != text.npos && text[after] != '\n')
        refuse_at(document.at(content), "there is a tab in the indentation. Use spaces.");
    }
    const std::size_t end = text.find('\n', content);
    if (end == text.npos) return;
    start = end + 1;
  }
}

// ---------------------------------------------------------------- JSON

class JsonTree {
 public:
  JsonTree(DocumentText& document, const DocumentLimits& limits, Problems* problems)
      : document_(document),
        problems_(problems),
        json_(document.text(), 0, static_cast<std::size_t>(limits.depth)) {}

  Node read() {
    if (document_.text().find_first_not_of(" \t\r\n") == std::string_view::npos)
      throw JsonError(document_.text().size(), "the file is empty. Write at least {}");
    Node root = value();
    json_.end();
    return root;
  }

 private:
  Node value() {
    const char first = json_.peek();
    SourceLocation location = document_.at(json_.offset());
    document_.count(1, location);
    Node node;
    if (first == '{') {
      node = map();
    } else if (first == '[') {
      node.kind = NodeKind::kList;
      json_.enter_array();
      while (json_.next_element()) node.items.push_back(value());
    } else if (first == '"') {
      node.kind = NodeKind::kString;
      node.text = json_.string();
      node.quoted = true;
    } else {
      const std::size_t start = json_.offset();
      node = plain_scalar(json_.scalar(), {});
      if (std::isinf(node.real))
        throw JsonError(start, fmt::format("'{}' is too large for a number", node.text));
    }
    node.location = std::move(location);
    return node;
  }

  Node map() {
    Node node;
    node.kind = NodeKind::kMap;
    std::unordered_map<std::string, std::size_t> seen;
    std::string key;
    json_.enter_object();
    while (json_.next_key(key)) {
      SourceLocation location = document_.at(json_.key_offset());
      const auto [found, fresh] = seen.emplace(key, node.entries.size());
      if (!fresh) refuse_duplicate(node.entries[found->second], key, location, problems_);
      Node one = value();
      if (fresh) node.entries.push_back({std::move(key), std::move(location), std::move(one)});
    }
    return node;
  }

  DocumentText& document_;
  Problems* problems_;
  JsonReader json_;
};

}  // namespace

Node parse_yaml(std::string_view text, const std::string& name, const DocumentLimits& limits,
                Problems* problems) {
  DocumentText document(text, name, limits);
  document.check_bytes();
  check_lines(document);
  std::istringstream stream{std::string(document.text())};
  TreeBuilder builder(document, problems);
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const YAML::Exception& error) {
    refuse_at(document.at(error.mark.line, error.mark.column), "this is not YAML ({}). {}",
              error.msg, remedy(error.msg));
  }
  return builder.take();
}

Node parse_json(std::string_view text, const std::string& name, const DocumentLimits& limits,
                Problems* problems) {
  DocumentText document(text, name, limits);
  try {
    return JsonTree(document, limits, problems).read();
  } catch (const JsonError& error) {
    refuse_at(document.at(error.offset()), "{}.", error.what());
  }
}

}  // namespace lockstep
