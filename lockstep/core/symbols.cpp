#include "lockstep/core/symbols.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string_view>

#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"

namespace lockstep::symbols {
namespace {

struct Symbol {
  std::string name;
  std::uint64_t offset;  // of the address inside it
};

// A file mapped for reading; empty when it cannot be.
class MappedFile {
 public:
  explicit MappedFile(const char* path) {
    const Fd fd(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // does not wait for a fifo
    struct stat status {};
    if (!fd || ::fstat(fd.get(), &status) != 0 || status.st_size <= 0) return;
    const auto size = static_cast<std::size_t>(status.st_size);
    void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
    if (data != MAP_FAILED) bytes_ = {static_cast<const char*>(data), size};
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    if (!bytes_.empty()) ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
  }

  // `count` objects at `offset`; empty when the file is too short for them.
  template <typename T>
  std::span<const T> at(std::uint64_t offset, std::uint64_t count) const {
    if (offset > bytes_.size() || count > (bytes_.size() - offset) / sizeof(T)) return {};
    return {reinterpret_cast<const T*>(bytes_.data() + offset), static_cast<std::size_t>(count)};
  }

 private:
  std::span<const char> bytes_;
};

// The sections of an ELF file; none where it is not one.
class ElfFile {
 public:
  explicit ElfFile(const char* path) : file_(path) {
    const auto header = file_.at<ElfW(Ehdr)>(0, 1);
    if (header.empty() || std::memcmp(header[0].e_ident, ELFMAG, SELFMAG) != 0) return;
    sections_ = file_.at<ElfW(Shdr)>(header[0].e_shoff, header[0].e_shnum);
    names_ = bytes_of(header[0].e_shstrndx);
  }

  // The function of this table that the address, relative to the file, is in.
  std::optional<Symbol> find(std::uint64_t address, ElfW(Word) table) const {
    for (const auto& section : sections_) {
      if (section.sh_type != table) continue;
      const auto names = bytes_of(section.sh_link);
      for (const auto& symbol :
           file_.at<ElfW(Sym)>(section.sh_offset, section.sh_size / sizeof(ElfW(Sym)))) {
        if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_shndx == SHN_UNDEF) continue;
        if (address < symbol.st_value || address >= symbol.st_value + symbol.st_size) continue;
        if (symbol.st_name >= names.size()) continue;
        return Symbol{text_at(names, symbol.st_name), address - symbol.st_value};
      }
    }
    return std::nullopt;
  }

  bool has_section(std::string_view name) const {
    return std::any_of(sections_.begin(), sections_.end(), [&](const ElfW(Shdr) & section) {
      return text_at(names_, section.sh_name) == name;
    });
  }

 private:
  std::span<const char> bytes_of(std::size_t section) const {
    if (section >= sections_.size()) return {};
    return file_.at<char>(sections_[section].sh_offset, sections_[section].sh_size);
  }
  static std::string text_at(std::span<const char> names, std::size_t at) {
    if (at >= names.size()) return {};
    return std::string(names.data() + at, ::strnlen(names.data() + at, names.size() - at));
  }

  MappedFile file_;
  std::span<const ElfW(Shdr)> sections_;
  std::span<const char> names_;
};

// The file that an address of this process was loaded from.
struct Loaded {
  std::string name;
  bool program = false;  // its name may be relative to where it was started
  std::uint64_t bias = 0;
};

std::optional<Loaded> loaded_at(void* return_address) {
  Dl_info info{};
  link_map* map = nullptr;
  // A return address may be the first byte after a function that never returns.
  char* inside = static_cast<char*>(return_address) - 1;
  if (::dladdr1(inside, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 ||
      info.dli_fname == nullptr || map == nullptr)
    return std::nullopt;
  return Loaded{info.dli_fname, map->l_name[0] == '\0', map->l_addr};
}

// A path that another process can open. A program that was replaced while it runs has none.
std::string program_file() {
  char path[4096];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path - 1);
  path[std::max<ssize_t>(length, 0)] = '\0';
  return length > 0 && ::access(path, R_OK) == 0 ? path : fmt::format("/proc/{}/exe", ::getpid());
}

// A name as in the source: no suffixes of the compiler (".cold", ".part.0"), strings by name.
std::string readable(const char* symbol) {
  std::string name = demangle(symbol);
  if (const auto clone = name.find(" [clone "); clone != std::string::npos) name.erase(clone);
  constexpr std::string_view kString =
      "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >";
  for (auto at = name.find(kString); at != std::string::npos; at = name.find(kString, at))
    name.replace(at, kString.size(), "std::string");
  return name;
}

// `address` is relative to the file, not to where it was loaded.
std::string text_of(const char* path, std::string_view name, std::uint64_t address) {
  const std::string where = fmt::format("({}+{:#x})", name.substr(name.rfind('/') + 1), address);
  const ElfFile file(path);
  auto symbol = file.find(address - 1, SHT_SYMTAB);
  if (!symbol) symbol = file.find(address - 1, SHT_DYNSYM);  // a stripped file has nothing else
  if (!symbol) return where;
  return fmt::format("{}+{:#x} {}", readable(symbol->name.c_str()), symbol->offset + 1, where);
}

}  // namespace

std::string demangle(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

std::string frame_text(void* return_address) {
  const auto loaded = loaded_at(return_address);
  if (!loaded) return fmt::format("{}", return_address);
  return text_of(loaded->program ? "/proc/self/exe" : loaded->name.c_str(), loaded->name,
                 reinterpret_cast<std::uintptr_t>(return_address) - loaded->bias);
}

std::string frame_text(const std::string& file, std::uint64_t return_address, std::uint64_t bias) {
  return text_of(file.c_str(), file, return_address - bias);
}

Place place_of(void* return_address) {
  const auto loaded = loaded_at(return_address);
  if (!loaded) return {};
  return {loaded->program ? program_file() : loaded->name,
          reinterpret_cast<std::uintptr_t>(return_address) - 1 - loaded->bias};
}

bool has_line_numbers(const std::string& path) {
  const ElfFile file(path.c_str());
  return file.has_section(".debug_line") || file.has_section(".gnu_debuglink");
}

// ---------------------------------------------------------------- source lines

namespace {

struct SpawnActions {
  SpawnActions() {
    ::posix_spawn_file_actions_init(&files);
    ::posix_spawnattr_init(&attributes);
  }
  ~SpawnActions() {
    ::posix_spawn_file_actions_destroy(&files);
    ::posix_spawnattr_destroy(&attributes);
  }
  SpawnActions(const SpawnActions&) = delete;
  SpawnActions& operator=(const SpawnActions&) = delete;
  posix_spawn_file_actions_t files{};
  posix_spawnattr_t attributes{};
};

// A program that is found in PATH, with its output in `out` and nothing on stderr.
pid_t start(const std::vector<std::string>& command, int out) {
  SpawnActions actions;
  ::posix_spawn_file_actions_addopen(&actions.files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions.files, out, STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&actions.files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&actions.attributes, &none);
  ::posix_spawnattr_setsigdefault(&actions.attributes, &all);
  ::posix_spawnattr_setflags(&actions.attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  // It gets nothing else of the environment: a preloaded library or a server of debug information
  // (DEBUGINFOD_URLS) would only delay it.
  const char* path = std::getenv("PATH");
  std::string variable = fmt::format("PATH={}", path != nullptr ? path : "/usr/bin:/bin");
  char* environment[] = {variable.data(), nullptr};
  pid_t pid = -1;
  const int problem = ::posix_spawnp(&pid, arguments[0], &actions.files, &actions.attributes,
                                     arguments.data(), environment);
  return problem == 0 ? pid : -1;
}

// "/src/train.cpp:41 (discriminator 2)", "??:0", "/src/train.cpp:?"
std::string location_of(std::string line) {
  if (const auto note = line.find(" (discriminator"); note != line.npos) line.erase(note);
  const auto colon = line.rfind(':');
  if (colon == line.npos || line.starts_with("??")) return {};
  const std::string number = line.substr(colon + 1);
  const bool known = number != "0" && number.find_first_not_of("0123456789") == number.npos;
  if (!known || number.empty()) return {};
  return std::filesystem::path(line).lexically_normal().string();
}

std::vector<std::string> locations_in(const std::string& text, std::size_t count) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(location_of(line));
  if (lines.size() != count) lines.assign(count, "");
  return lines;
}

}  // namespace

std::vector<std::string> source_lines(const std::string& file,
                                      const std::vector<std::uint64_t>& addresses,
                                      const Deadline& deadline) {
  std::vector<std::string> unknown(addresses.size());
  if (addresses.empty() || !has_line_numbers(file)) return unknown;
  for (const char* tool : {"addr2line", "llvm-addr2line", "eu-addr2line"}) {
    std::vector<std::string> command = {tool, "-e", file};
    for (const std::uint64_t address : addresses) command.push_back(fmt::format("{:#x}", address));
    Pipe pipe = make_pipe();
    const pid_t pid = start(command, pipe.write.get());
    if (pid < 0) continue;  // it is not installed
    pipe.write.reset();
    const auto text = read_until_closed(pipe.read.get(), deadline);
    end_child(pid);
    return text ? locations_in(*text, addresses.size()) : unknown;
  }
  return unknown;
}

}  // namespace lockstep::symbols

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
