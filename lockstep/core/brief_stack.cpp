#include "lockstep/core/brief_stack.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kFunctionBytes = 100;
constexpr std::size_t kLines = 12;
constexpr std::size_t kSubstitutes = 3;  // where no frame is the program's own

struct Frame {
  std::string function;
  std::string module;
  std::string place;     // "train+0x2f10"
  std::string location;  // "/src/train.cpp:41"
};

struct Line {
  std::string text;
  std::string_view owner;  // empty: the program
  bool main;
};

struct Owner {
  std::string_view prefix;
  std::string_view name;
};
constexpr std::string_view kLockstep = "Lockstep";
constexpr std::string_view kCxx = "the C++ library";
constexpr Owner kModules[] = {
    {"libtorch", "LibTorch"}, {"libc10", "LibTorch"}, {"libstdc++", kCxx},
    {"libgcc_s", kCxx},       {"libc.so", "libc"},    {"libm.so", "libc"},
    {"libpthread", "libc"},   {"ld-linux", "libc"},   {"linux-vdso", "libc"},
    {"libgomp", "OpenMP"},    {"libcuda", "CUDA"},    {"libcublas", "CUDA"},
    {"libcudnn", "CUDA"},     {"libnccl", "NCCL"},    {"liblockstep", kLockstep}};
constexpr Owner kNamespaces[] = {{"lockstep::", kLockstep}, {"torch::", "LibTorch"},
                                 {"at::", "LibTorch"},      {"c10::", "LibTorch"},
                                 {"gloo::", "LibTorch"},    {"std::", kCxx},
                                 {"__gnu_cxx::", kCxx},     {"_start", "libc"}};

// "f()+0x1c (train+0x2f10) /src/train.cpp:41". False for what is not such a text.
bool parse(std::string_view text, Frame& frame) {
  const auto plus = text.rfind("+0x");
  if (plus == text.npos) return false;
  const auto open = text.rfind('(', plus);
  const auto close = text.find(')', plus);
  if (open == text.npos || close == text.npos) return false;
  frame.module = text.substr(open + 1, plus - open - 1);
  frame.place = text.substr(open + 1, close - open - 1);
  if (close + 2 < text.size()) frame.location = text.substr(close + 2);
  frame.function = text.substr(0, open == 0 ? 0 : open - 1);
  if (const auto offset = frame.function.rfind("+0x"); offset != std::string::npos)
    frame.function.erase(offset);
  return true;
}

bool is_symbol(char c) {
  return std::string_view("<>=-()[]!+*/%^&|~,").find(c) != std::string_view::npos;
}

// "f<A<B>, C>(D<E>)" as "f<...>(D<...>)", "{lambda(A&)#1}" as "{lambda}".
std::string without_arguments(std::string_view text) {
  constexpr std::string_view kOperator = "operator";
  constexpr std::string_view kLambda = "{lambda(";
  std::string result;
  int depth = 0;  // nesting of template arguments
  for (std::size_t i = 0; i < text.size();) {
    if (depth == 0 && text.substr(i).starts_with(kLambda)) {
      result += "{lambda}";
      i = std::min(text.find('}', i), text.size() - 1) + 1;
    } else if (text.substr(i).starts_with(kOperator)) {
      std::size_t end = i + kOperator.size();
      // operator<< <int>(...): the first brackets are its name.
      while (end < text.size() && is_symbol(text[end]) && end < i + kOperator.size() + 3) {
        const bool called = text[end] == '(' && end != i + kOperator.size();
        if (called) break;
        ++end;
      }
      if (depth == 0) result += text.substr(i, end - i);
      i = end;
    } else {
      const char c = text[i++];
      if (c == '<' && depth++ == 0) result += "<...>";
      if (depth == 0) result += c;
      if (c == '>' && depth > 0 && text[i - 2] != '-') --depth;
    }
  }
  return result;
}

// "ns::f" of "void ns::f<...>(A&) const", to see whose namespace it is in.
std::string qualified_name(std::string text) {
  constexpr std::string_view kAnonymous = "(anonymous namespace)";
  for (auto at = text.find(kAnonymous); at != text.npos; at = text.find(kAnonymous))
    text.replace(at, kAnonymous.size(), "{anonymous}");
  text.erase(std::min(text.find('('), text.size()));
  const auto space = text.rfind(' ');
  return space == text.npos ? text : text.substr(space + 1);
}

// The end of a template argument, or of a type before it, that begins there.
std::size_t end_of_argument(std::string_view text, std::size_t begin) {
  int depth = 0;
  for (std::size_t i = begin; i < text.size(); ++i) {
    const char c = text[i];
    if (depth == 0 && (c == ',' || c == '>')) return i;
    if (c == '<' || c == '(' || c == '{') ++depth;
    if (c == '>' || c == ')' || c == '}') --depth;
  }
  return text.size();
}

// The body of a function object is often compiled into the function that std::function calls:
// std::_Function_handler<void (World&), main::{lambda(World&)#1}>::_M_invoke(...). run() wraps it
// in another one. Empty when there is none.
std::string invoked_by(std::string_view function) {
  constexpr std::string_view kHandler = "std::_Function_handler<";
  constexpr std::string_view kBody = "lockstep::RankBody::RankBody<";
  if (!function.starts_with(kHandler)) return {};
  const std::size_t comma = end_of_argument(function, kHandler.size());
  if (comma + 2 >= function.size()) return {};
  std::string_view object = function.substr(comma + 2);
  if (object.starts_with(kBody)) object.remove_prefix(kBody.size());
  object = object.substr(0, end_of_argument(object, 0));
  // A pointer to a function has its own frame.
  return object.find("(*)") == object.npos ? without_arguments(object) : std::string();
}

std::string_view owner_in(std::string_view name, const auto& table) {
  for (const Owner& owner : table)
    if (name.starts_with(owner.prefix)) return owner.name;
  return {};
}

// The program's own function where there is one, in the frame's place of a library's.
std::string_view find_owner(Frame& frame) {
  const std::string body = invoked_by(frame.function);
  frame.function = body.empty() ? without_arguments(frame.function) : body;
  if (const auto owner = owner_in(frame.module, kModules); !owner.empty()) return owner;
  return owner_in(qualified_name(frame.function), kNamespaces);
}

std::string text_of(const Frame& frame) {
  std::string function = frame.function;
  if (function.size() > kFunctionBytes)
    function = std::string(utf8_prefix(function, kFunctionBytes)) + " ...";
  if (!function.empty()) function += ' ';
  return fmt::format("{}({})", function, frame.location.empty() ? frame.place : frame.location);
}

// Consecutive frames of libraries.
class Folded {
 public:
  void add(std::string_view owner) {
    ++count_;
    if (std::ranges::find(owners_, owner) == owners_.end()) owners_.emplace_back(owner);
  }
  void move_to(std::vector<std::string>& lines) {
    if (count_ == 0) return;
    lines.push_back(fmt::format("... {} {} of {}", count_, count_ == 1 ? "frame" : "frames",
                                listed(owners_, "and")));
    *this = {};
  }

 private:
  int count_ = 0;
  std::vector<std::string> owners_;
};

}  // namespace

bool is_library_frame(std::string_view text) {
  Frame frame;
  return parse(text, frame) && !owner_in(frame.module, kModules).empty();
}

std::vector<std::string> brief_stack(const std::vector<std::string>& frames) {
  std::vector<Line> found;
  std::string inner;  // the program's own function that was called last
  for (const std::string& text : frames) {
    Frame frame;
    if (!parse(text, frame)) {
      found.push_back({text, {}, false});
      continue;
    }
    std::string_view owner = find_owner(frame);
    // The body was not compiled into its caller and has a frame already.
    if (owner.empty() && inner.starts_with(frame.function + "::operator()")) owner = kCxx;
    if (owner.empty()) inner = frame.function;
    found.push_back({text_of(frame), owner, frame.function == "main"});
  }
  // A program of ours has little that is not ours, and a thread of a library has nothing else.
  const auto any = [&](auto is) { return std::any_of(found.begin(), found.end(), is); };
  const bool own = any([](const Line& line) { return line.owner.empty() && !line.main; });
  const bool ours = any([](const Line& line) { return line.owner == kLockstep; });
  std::vector<std::string> lines;
  Folded folded;
  std::size_t shown = 0, substitutes = 0;
  for (const Line& line : found) {
    const bool substitute = !own && (line.owner == kLockstep || !ours);
    if (!line.owner.empty() && !(substitute && substitutes++ < kSubstitutes)) {
      folded.add(line.owner);
    } else if (++shown <= kLines) {
      folded.move_to(lines);
      lines.push_back(line.text);
    } else {
      folded.add(line.owner.empty() ? "the program" : line.owner);
    }
  }
  folded.move_to(lines);
  return lines;
}

}  // namespace lockstep
