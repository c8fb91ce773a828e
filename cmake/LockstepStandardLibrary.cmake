# LibTorch brings libstdc++.so. Some compilers have the archive alone and do not find the name
# libstdc++.so; a program of theirs has two copies: streams and exceptions of the one do not know
# the other's, and a throw cannot be traced (lockstep/core/throw_trace.cpp). So the library itself
# comes before the archive where the name is missing.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so
  OUTPUT_VARIABLE _lockstep_by_name OUTPUT_STRIP_TRAILING_WHITESPACE)
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6
  OUTPUT_VARIABLE _lockstep_library OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT IS_ABSOLUTE "${_lockstep_by_name}" AND IS_ABSOLUTE "${_lockstep_library}")
  message(STATUS "libstdc++.so has no name here; linking ${_lockstep_library}")
  string(APPEND CMAKE_CXX_STANDARD_LIBRARIES " ${_lockstep_library}")
endif()
unset(_lockstep_by_name)
unset(_lockstep_library)
