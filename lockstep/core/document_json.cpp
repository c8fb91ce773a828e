// The tree of a JSON text: the reader of json.h, with the location of every key and value.
#include <cmath>
#include <unordered_map>

#include "lockstep/core/document_text.h"
#include "lockstep/core/json.h"

namespace lockstep {
namespace {

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
