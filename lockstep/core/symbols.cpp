#include "lockstep/core/symbols.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
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

std::optional<Symbol> search(const MappedFile& file, const ElfW(Shdr) & table,
                             std::span<const ElfW(Shdr)> sections, std::uint64_t address) {
  if (table.sh_link >= sections.size()) return std::nullopt;
  const auto names =
      file.at<char>(sections[table.sh_link].sh_offset, sections[table.sh_link].sh_size);
  for (const auto& symbol :
       file.at<ElfW(Sym)>(table.sh_offset, table.sh_size / sizeof(ElfW(Sym)))) {
    if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_shndx == SHN_UNDEF) continue;
    if (address < symbol.st_value || address >= symbol.st_value + symbol.st_size) continue;
    if (symbol.st_name >= names.size()) continue;
    const char* name = names.data() + symbol.st_name;
    return Symbol{std::string(name, ::strnlen(name, names.size() - symbol.st_name)),
                  address - symbol.st_value};
  }
  return std::nullopt;
}

// `address` is relative to the file, not to where it was loaded.
std::optional<Symbol> find_in_file(const char* path, std::uint64_t address,
                                   ElfW(Word) table = SHT_SYMTAB) {
  const MappedFile file(path);
  const auto header = file.at<ElfW(Ehdr)>(0, 1);
  if (header.empty() || std::memcmp(header[0].e_ident, ELFMAG, SELFMAG) != 0) return std::nullopt;
  const auto sections = file.at<ElfW(Shdr)>(header[0].e_shoff, header[0].e_shnum);
  for (const auto& section : sections) {
    if (section.sh_type != table) continue;
    if (auto found = search(file, section, sections, address)) return found;
  }
  return std::nullopt;
}

bool is_named(std::span<const char> names, std::uint32_t at, std::string_view name) {
  return at < names.size() &&
         std::string_view(names.data() + at, ::strnlen(names.data() + at, names.size() - at)) ==
             name;
}

// A path that another process can open. A program that was replaced while it runs has none.
std::string program_file() {
  char path[4096];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path - 1);
  path[std::max<ssize_t>(length, 0)] = '\0';
  return length > 0 && ::access(path, R_OK) == 0 ? path : fmt::format("/proc/{}/exe", ::getpid());
}

// What a person would write: no suffixes of the compiler (".cold", ".part.0"), strings by name.
std::string readable(const char* symbol) {
  std::string name = demangle(symbol);
  if (const auto clone = name.find(" [clone "); clone != std::string::npos) name.erase(clone);
  constexpr std::string_view kString =
      "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >";
  for (auto at = name.find(kString); at != std::string::npos; at = name.find(kString, at))
    name.replace(at, kString.size(), "std::string");
  return name;
}

}  // namespace

std::string demangle(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

std::string frame_text(void* return_address) {
  Dl_info info{};
  link_map* map = nullptr;
  // A return address may be the first byte after a function that never returns.
  char* inside = static_cast<char*>(return_address) - 1;
  if (::dladdr1(inside, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 ||
      info.dli_fname == nullptr) {
    return fmt::format("{}", return_address);
  }
  const auto value = reinterpret_cast<std::uintptr_t>(return_address);
  const auto loaded_at = map != nullptr ? static_cast<std::uintptr_t>(map->l_addr) : 0;
  // The program's own name may be relative to where it was started.
  const bool is_program = map != nullptr && map->l_name[0] == '\0';
  const std::string_view path = info.dli_fname;
  const std::string where =
      fmt::format("({}+{:#x})", path.substr(path.rfind('/') + 1), value - loaded_at);
  const char* file = is_program ? "/proc/self/exe" : info.dli_fname;
  if (const auto symbol = find_in_file(file, value - 1 - loaded_at)) {
    return fmt::format("{}+{:#x} {}", readable(symbol->name.c_str()), symbol->offset + 1, where);
  }
  if (info.dli_sname == nullptr) return where;
  return fmt::format("{}+{:#x} {}", readable(info.dli_sname),
                     value - reinterpret_cast<std::uintptr_t>(info.dli_saddr), where);
}

std::string frame_text(const std::string& file, std::uint64_t return_address, std::uint64_t bias) {
  const std::uint64_t address = return_address - bias;
  const std::string where = fmt::format("({}+{:#x})", file.substr(file.rfind('/') + 1), address);
  auto symbol = find_in_file(file.c_str(), address - 1);
  // A stripped file has nothing else; in the file's own process dladdr() reads it.
  if (!symbol) symbol = find_in_file(file.c_str(), address - 1, SHT_DYNSYM);
  if (!symbol) return where;
  return fmt::format("{}+{:#x} {}", readable(symbol->name.c_str()), symbol->offset + 1, where);
}

Place place_of(void* return_address) {
  Dl_info info{};
  link_map* map = nullptr;
  char* inside = static_cast<char*>(return_address) - 1;
  if (::dladdr1(inside, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 ||
      info.dli_fname == nullptr || map == nullptr)
    return {};
  const auto address = reinterpret_cast<std::uintptr_t>(inside) - map->l_addr;
  if (map->l_name[0] == '\0') return {program_file(), address};
  return {info.dli_fname, address};
}

bool has_line_numbers(const std::string& path) {
  const MappedFile file(path.c_str());
  const auto header = file.at<ElfW(Ehdr)>(0, 1);
  if (header.empty() || std::memcmp(header[0].e_ident, ELFMAG, SELFMAG) != 0) return false;
  const auto sections = file.at<ElfW(Shdr)>(header[0].e_shoff, header[0].e_shnum);
  if (header[0].e_shstrndx >= sections.size()) return false;
  const ElfW(Shdr)& table = sections[header[0].e_shstrndx];
  const auto names = file.at<char>(table.sh_offset, table.sh_size);
  return std::any_of(sections.begin(), sections.end(), [&](const ElfW(Shdr) & section) {
    return is_named(names, section.sh_name, ".debug_line") ||
           is_named(names, section.sh_name, ".gnu_debuglink");
  });
}

}  // namespace lockstep::symbols
