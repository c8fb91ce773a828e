// The text of a document before it is parsed: its limits, and offsets turned into places.
// Private to this layer; the two readers (document_yaml.cpp, document_json.cpp) share it.
//
//   DocumentText text(bytes, "train.yaml", limits);   // UsageError: too large
//   text.refuse(text.at(offset), "the key '{}' appears twice.", key);
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/core/problems.h"

namespace lockstep {

// Lives as long as one parse; refers to the bytes it was given.
class DocumentText {
 public:
  DocumentText(std::string_view bytes, const std::string& name, const DocumentLimits& limits);

  std::string_view text() const { return text_; }  // without the byte order mark
  // Refuses what is not UTF-8, and control characters.
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

// Throws, or adds to `problems` if it is not null.
void refuse_duplicate(const Entry& first, const std::string& key, const SourceLocation& location,
                      Problems* problems);

}  // namespace lockstep
