# The version of the LibTorch in a directory, e.g. 2.11.0; empty when it is not one.
# Used at the build and, installed beside LockstepConfig.cmake, by find_package(Lockstep).
function(lockstep_torch_version directory result)
  set(version "")
  # The numbers moved to headeronly/ in 2.11; the older place includes it.
  foreach(place headeronly csrc/api/include/torch)
    set(header "${directory}/include/torch/${place}/version.h")
    if(NOT version AND EXISTS "${header}" AND EXISTS "${directory}/lib/libtorch_cpu.so")
      file(STRINGS "${header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      string(REGEX REPLACE "[^;]*VERSION_[A-Z]+ +([0-9]+)[^;]*" "\\1" version "${lines}")
      string(REPLACE ";" "." version "${version}")
    endif()
  endforeach()
  set(${result} "${version}" PARENT_SCOPE)
endfunction()
