# The install tree: headers, one static library per layer, the programs, and
# find_package(Lockstep). Nothing in it names the source or build tree, so it can be moved; the one
# absolute path is LibTorch's, as a last but one guess (LockstepConfig.cmake.in).

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(LOCKSTEP_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)

# Layers that programs link; lockstep/testing serves our own tests alone.
get_property(layers GLOBAL PROPERTY LOCKSTEP_LAYERS)
list(REMOVE_ITEM layers lockstep_testing)
set(exported ${layers})
set(torch_rpath "")
if(TARGET lockstep_torch)
  list(APPEND exported lockstep_torch)
  set(torch_rpath ${LOCKSTEP_TORCH_DIR}/lib)
endif()
install(TARGETS ${exported} EXPORT LockstepTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT LockstepTargets NAMESPACE Lockstep:: DESTINATION ${LOCKSTEP_CMAKE_DIR})

# The headers that docs/api.md lists; tests/style/api_test.py checks that they include no others.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/docs/api.md)
file(STRINGS ${CMAKE_SOURCE_DIR}/docs/api.md headers REGEX "^\\| `lockstep/[a-z0-9_/]+[.]h` ")
foreach(header ${headers})
  string(REGEX REPLACE "^[^`]*`([^`]+)`.*" "\\1" header "${header}")
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${CMAKE_SOURCE_DIR}/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
endforeach()

# Every target of `kinds` in a directory and those below it.
function(lockstep_targets_of directory kinds result)
  get_property(found DIRECTORY ${directory} PROPERTY BUILDSYSTEM_TARGETS)
  get_property(below DIRECTORY ${directory} PROPERTY SUBDIRECTORIES)
  foreach(subdirectory ${below})
    lockstep_targets_of(${subdirectory} "${kinds}" more)
    list(APPEND found ${more})
  endforeach()
  set(wanted)
  foreach(target ${found})
    get_target_property(type ${target} TYPE)
    if(type IN_LIST kinds)
      list(APPEND wanted ${target})
    endif()
  endforeach()
  set(${result} "${wanted}" PARENT_SCOPE)
endfunction()

# A program lies in bin/ (without torch) or libexec/ (with it), as in the build tree. It looks for
# plug-ins relative to itself and for LibTorch where it was at the build.
lockstep_targets_of(${CMAKE_SOURCE_DIR} EXECUTABLE programs)
foreach(program ${programs})
  get_target_property(place ${program} RUNTIME_OUTPUT_DIRECTORY)
  file(RELATIVE_PATH place ${CMAKE_BINARY_DIR} ${place})
  if(place STREQUAL "libexec")
    set_target_properties(${program} PROPERTIES
      INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${torch_rpath}")
  endif()
  if(place MATCHES "^(bin|libexec)$")
    install(TARGETS ${program} RUNTIME DESTINATION ${place})
  endif()
endforeach()

# Plug-ins: the shared objects in lib/ (the CUDA part, where it was built). Tests put theirs below.
lockstep_targets_of(${CMAKE_SOURCE_DIR} "MODULE_LIBRARY;SHARED_LIBRARY" plugins)
set(LOCKSTEP_INSTALLED_PLUGINS "")
foreach(plugin ${plugins})
  get_target_property(place ${plugin} LIBRARY_OUTPUT_DIRECTORY)
  if(place STREQUAL "${CMAKE_BINARY_DIR}/lib")
    set_target_properties(${plugin} PROPERTIES INSTALL_RPATH "$ORIGIN;${torch_rpath}")
    install(TARGETS ${plugin} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    list(APPEND LOCKSTEP_INSTALLED_PLUGINS ${plugin})
  endif()
endforeach()

foreach(layer ${layers})
  string(REPLACE lockstep_ Lockstep:: layer ${layer})
  list(APPEND LOCKSTEP_EXPORTED_LAYERS ${layer})
endforeach()
configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/LockstepConfig.cmake.in
  ${CMAKE_BINARY_DIR}/LockstepConfig.cmake INSTALL_DESTINATION ${LOCKSTEP_CMAKE_DIR}
  PATH_VARS CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/LockstepConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/LockstepConfig.cmake
  ${CMAKE_BINARY_DIR}/LockstepConfigVersion.cmake
  ${CMAKE_SOURCE_DIR}/cmake/LockstepTorchVersion.cmake
  ${CMAKE_SOURCE_DIR}/cmake/LockstepStandardLibrary.cmake DESTINATION ${LOCKSTEP_CMAKE_DIR})
# The documentation, laid out as in the source tree, so that its links work.
set(LOCKSTEP_DOC_DIR ${CMAKE_INSTALL_DATADIR}/doc/lockstep)
foreach(page LICENSE README.md ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md)
  install(FILES ${CMAKE_SOURCE_DIR}/${page} DESTINATION ${LOCKSTEP_DOC_DIR})
endforeach()
install(DIRECTORY ${CMAKE_SOURCE_DIR}/docs ${CMAKE_SOURCE_DIR}/examples
  DESTINATION ${LOCKSTEP_DOC_DIR}
  PATTERN __pycache__ EXCLUDE REGEX "/examples/(CMakeLists.txt|.*check_.*|.*_test[.]py)$" EXCLUDE)
foreach(page python/README.md tests/fuzz/README.md)
  get_filename_component(folder ${page} DIRECTORY)
  install(FILES ${CMAKE_SOURCE_DIR}/${page} DESTINATION ${LOCKSTEP_DOC_DIR}/${folder})
endforeach()
# The Python side of `lockstep bench`.
install(DIRECTORY ${CMAKE_SOURCE_DIR}/bench/peers DESTINATION ${CMAKE_INSTALL_DATADIR}/lockstep)
