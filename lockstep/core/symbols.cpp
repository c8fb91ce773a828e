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
