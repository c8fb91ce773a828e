// The files of the dashboard's page, which the build puts into the program (CMakeLists.txt).
#pragma once

#include <span>
#include <string_view>

namespace lockstep::dashboard {

struct PageFile {
  std::string_view path;  // "/", "/page.css"
  std::string_view type;
  std::string_view body;
};
std::span<const PageFile> page_files();

}  // namespace lockstep::dashboard
