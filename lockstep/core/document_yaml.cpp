// YAML, read from yaml-cpp's parser event by event: its own tree takes the first of two equal keys
// and copies aliases without a limit; ours refuses duplicates and bounds aliases.
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <unordered_map>

#include "lockstep/core/document_text.h"

namespace lockstep {
namespace {

struct Anchored {
  Node node;
  std::size_t nodes;
  std::size_t depth;
};

// A list or map that is still open.
struct Frame {
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
    const Frame& frame = stack_.back();
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
    Frame frame;
    frame.node.kind = kind;
    frame.node.location = location;
    frame.anchor = anchor;
    stack_.push_back(std::move(frame));
  }

  void close() {
    Frame frame = std::move(stack_.back());
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
    Frame& frame = stack_.back();
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
    Frame& frame = stack_.back();
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
  std::vector<Frame> stack_;
  std::map<YAML::anchor_t, Anchored> anchored_;
};

// What to try, by yaml-cpp's message.
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

}  // namespace lockstep
