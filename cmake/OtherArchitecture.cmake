# Toolchain file of the preset other-arch: x86_64 builds for aarch64 and aarch64 for x86_64, with
# Debian's cross compilers. LOCKSTEP_SYSROOT is a folder with the packages of that architecture,
# unpacked and not installed: `./dev test --other-arch` makes it.
if(CMAKE_HOST_SYSTEM_PROCESSOR STREQUAL "aarch64")
  set(CMAKE_SYSTEM_PROCESSOR x86_64)
elseif(CMAKE_HOST_SYSTEM_PROCESSOR STREQUAL "x86_64")
  set(CMAKE_SYSTEM_PROCESSOR aarch64)
else()
  message(FATAL_ERROR "other-arch builds on x86_64 and aarch64, not on "
    "${CMAKE_HOST_SYSTEM_PROCESSOR}.")
endif()
set(CMAKE_SYSTEM_NAME Linux)
set(_triple ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu)
set(CMAKE_C_COMPILER ${_triple}-gcc)
set(CMAKE_CXX_COMPILER ${_triple}-g++)
set(CMAKE_LIBRARY_ARCHITECTURE ${_triple})

list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LOCKSTEP_SYSROOT)
set(CMAKE_FIND_ROOT_PATH ${LOCKSTEP_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# Headers that differ between architectures.
set(CMAKE_CXX_STANDARD_INCLUDE_DIRECTORIES ${LOCKSTEP_SYSROOT}/usr/include/${_triple})

# Programs name the loader and the libraries of the sysroot, so that they and the processes that
# they start run without a variable for the emulator. The older tag (DT_RPATH) also applies to the
# libraries of libraries.
set(_folders ${LOCKSTEP_SYSROOT}/lib/${_triple}:${LOCKSTEP_SYSROOT}/usr/lib/${_triple})
file(GLOB_RECURSE _loader ${LOCKSTEP_SYSROOT}/ld-linux-*.so.*)
list(FILTER _loader INCLUDE REGEX "/lib/${_triple}/")
set(CMAKE_EXE_LINKER_FLAGS_INIT "-Wl,--dynamic-linker=${_loader} -Wl,--disable-new-dtags \
-Wl,-rpath,${_folders} -Wl,-rpath-link,${_folders}")
