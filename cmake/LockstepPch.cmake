# torch/torch.h costs 25 s per file to parse; precompiled once (about 35 s) a file costs 10.
# Targets that reuse it must have the same flags, which lockstep_common guarantees. Tests have one
# of their own, because they are compiled without optimization: it takes more than half of a
# compiler's time, and what they test is compiled as always.

function(lockstep_make_pch name)
  file(WRITE ${CMAKE_BINARY_DIR}/pch/${name}.cpp "// Exists to own the precompiled header.\n")
  add_library(${name} STATIC ${CMAKE_BINARY_DIR}/pch/${name}.cpp)
  target_link_libraries(${name} PUBLIC lockstep_torch fmt::fmt)
  target_precompile_headers(${name} PRIVATE <torch/torch.h> <fmt/format.h> ${ARGN})
  lockstep_common(${name})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${name} PRIVATE -fpch-preprocess)
  endif()
endfunction()

lockstep_make_pch(lockstep_pch)
if(LOCKSTEP_BUILD_TESTS)
  lockstep_make_pch(lockstep_test_pch <gmock/gmock.h> <gtest/gtest.h>)
  target_link_libraries(lockstep_test_pch PUBLIC GTest::gtest GTest::gmock)
  target_compile_options(lockstep_test_pch PRIVATE ${LOCKSTEP_TEST_OPTIONS})
endif()

# For sources that include few of torch's headers. Whatever the precompiled header holds of pending
# templates is instantiated for each file that uses it: 10 s of a compiler for an empty one, beside
# 5 s for all of a file that includes ATen/core/Tensor.h and some of ATen/ops.
function(lockstep_without_pch)
  set_target_properties(${ARGN} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)
endfunction()

function(lockstep_use_pch target pch)
  target_precompile_headers(${target} REUSE_FROM ${pch})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()
