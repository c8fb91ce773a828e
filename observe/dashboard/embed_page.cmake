# cmake -DOUTPUT=page_files.cpp -DFOLDER=page -P embed_page.cmake: the page's files as a C++ source.
# A file is an array of bytes: it may hold whatever a string literal cannot.
set(files index.html page.css charts.js page.js icon.svg)
set(index.html_path /)
set(index.html_type "text/html; charset=utf-8")
set(page.css_type "text/css; charset=utf-8")
set(charts.js_type "text/javascript; charset=utf-8")
set(page.js_type "text/javascript; charset=utf-8")
set(icon.svg_type image/svg+xml)

set(arrays "")
set(rows "")
set(number 0)
foreach(name ${files})
  file(READ ${FOLDER}/${name} bytes HEX)
  string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  string(APPEND arrays "constexpr unsigned char kFile${number}[] = {\n${bytes}};\n")
  if(NOT DEFINED ${name}_path)
    set(${name}_path /${name})
  endif()
  string(APPEND rows "    {\"${${name}_path}\", \"${${name}_type}\", text(kFile${number})},\n")
  math(EXPR number "${number} + 1")
endforeach()
set(source "// Made by embed_page.cmake.
#include \"observe/dashboard/page.h\"

namespace lockstep::dashboard {
namespace {

${arrays}
template <std::size_t Size>
std::string_view text(const unsigned char (&bytes)[Size]) {
  return {reinterpret_cast<const char*>(bytes), Size};
}

const PageFile kFiles[] = {
${rows}};

}  // namespace

std::span<const PageFile> page_files() {
  return kFiles;
}

}  // namespace lockstep::dashboard
")
file(WRITE ${OUTPUT} "${source}")
