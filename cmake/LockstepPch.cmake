# torch/torch.h costs 25 s per file to parse; precompiled once (about 35 s) a file costs 10.
# Targets that reuse it must have the same flags, which lockstep_common guarantees.

file(WRITE ${CMAKE_BINARY_DIR}/pch/pch.cpp "// Exists to own the precompiled header.\n")
add_library(lockstep_pch STATIC ${CMAKE_BINARY_DIR}/pch/pch.cpp)
target_link_libraries(lockstep_pch PUBLIC lockstep_torch fmt::fmt)
target_precompile_headers(lockstep_pch PRIVATE <torch/torch.h> <fmt/format.h>)
lockstep_common(lockstep_pch)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(lockstep_pch PRIVATE -fpch-preprocess)
endif()

function(lockstep_use_pch target)
  target_precompile_headers(${target} REUSE_FROM lockstep_pch)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()
