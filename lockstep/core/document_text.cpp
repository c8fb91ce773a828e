#include "lockstep/core/document_text.h"

#include <algorithm>

#include "lockstep/core/utf8.h"

namespace lockstep {

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

}  // namespace lockstep
