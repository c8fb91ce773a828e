# One target per layer, with the same warnings, sanitizers and output places for all.
#
#   lockstep_layer(comm SOURCES world.cpp ... DEPENDS core TORCH)
#   lockstep_test(world_test SOURCES world_test.cpp DEPENDS comm testing TORCH LABELS unit)

set(LOCKSTEP_WARNINGS -Wall -Wextra -Wpedantic -Wshadow=local -Wnon-virtual-dtor -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  set(LOCKSTEP_WARNINGS -Wall -Wextra)  # it builds the fuzzers alone
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # Raised by the optimizer for code of spdlog, fmt and the standard library that it has inlined
  # into ours, and wrong there; system headers do not silence these.
  list(APPEND LOCKSTEP_WARNINGS -Wno-array-bounds -Wno-stringop-overflow -Wno-dangling-reference)
endif()

function(lockstep_common target)
  # -fPIC for programs too (not CMake's -fPIE): one precompiled header serves every target.
  target_compile_options(${target} PRIVATE ${LOCKSTEP_WARNINGS} -fPIC)
  if(LOCKSTEP_SANITIZE)
    # The checks that sanitizers add lead the optimizer to wrong warnings: the release build judges
    # those. Gloo's classes are only declared here, so their type information is not ours to check.
    target_compile_options(${target} PRIVATE
      -fsanitize=${LOCKSTEP_SANITIZE} -fno-sanitize=vptr -fno-omit-frame-pointer -Wno-error)
    target_link_options(${target} PUBLIC -fsanitize=${LOCKSTEP_SANITIZE})
  endif()
  if(LOCKSTEP_FUZZ STREQUAL "libfuzzer")
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link -fno-sanitize-recover=all)
  elseif(LOCKSTEP_FUZZ)
    target_compile_options(${target} PRIVATE
      -fsanitize-coverage=trace-pc -fno-sanitize-recover=all)
  endif()
endfunction()

# What a source costs is mostly its headers: torch's pending templates (6 s of a compiler, also with
# the precompiled header) and inline functions, or fmt's and the standard library's (3 of 4 s). With
# torch a file takes 17 s and then 1 s for each source in it: optim's 19 take 38 s in one file, 72
# in three; the launcher's 32 take 25 instead of 120. So names in unnamed namespaces must be unique
# within a layer; with the option LOCKSTEP_UNITY off sources are compiled one by one.
#
#   lockstep_compile_together(lockstep_train_cli 20)  # as many sources in a file; 8 unless given
function(lockstep_compile_together target)
  if(LOCKSTEP_UNITY)
    set(count 8)
    if(ARGC GREATER 1)
      set(count ${ARGV1})
    endif()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${count})
    # It takes what is included for a header, where a local type would be a mistake.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

function(lockstep_layer name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS;LINK" ${ARGN})
  add_library(lockstep_${name} STATIC ${ARG_SOURCES})
  add_library(Lockstep::${name} ALIAS lockstep_${name})
  set_target_properties(lockstep_${name} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(lockstep_${name} PUBLIC
    $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}> $<INSTALL_INTERFACE:include>)
  target_compile_features(lockstep_${name} PUBLIC cxx_std_20)
  foreach(dep ${ARG_DEPENDS})
    target_link_libraries(lockstep_${name} PUBLIC lockstep_${dep})
  endforeach()
  target_link_libraries(lockstep_${name} PUBLIC ${ARG_LINK})
  lockstep_common(lockstep_${name})
  if(ARG_TORCH)
    target_link_libraries(lockstep_${name} PUBLIC lockstep_torch)
    lockstep_use_pch(lockstep_${name} lockstep_pch)
    lockstep_compile_together(lockstep_${name} 20)
  else()
    lockstep_compile_together(lockstep_${name})
  endif()
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_LAYERS lockstep_${name})
endfunction()

# What a test is compiled with beside lockstep_common's: tests do nothing for long themselves.
set(LOCKSTEP_TEST_OPTIONS $<$<CONFIG:Release>:-O0>)

# A program: -rdynamic so that its failure report can name its functions. Those in bin/tests and
# bin/examples are compiled as tests are.
function(lockstep_program name)
  cmake_parse_arguments(ARG "TORCH" "OUTPUT_DIR;OUTPUT_NAME" "SOURCES;DEPENDS;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  foreach(dep ${ARG_DEPENDS})
    target_link_libraries(${name} PRIVATE lockstep_${dep})
  endforeach()
  target_link_libraries(${name} PRIVATE ${ARG_LINK})
  lockstep_common(${name})
  set_target_properties(${name} PROPERTIES ENABLE_EXPORTS ON)
  if(ARG_OUTPUT_DIR)
    set_target_properties(${name} PROPERTIES
      RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/${ARG_OUTPUT_DIR})
  endif()
  if(ARG_OUTPUT_NAME)
    set_target_properties(${name} PROPERTIES OUTPUT_NAME ${ARG_OUTPUT_NAME})
  endif()
  if(ARG_TORCH)
    target_link_libraries(${name} PRIVATE lockstep_torch)
  endif()
  set(unoptimized OFF)
  if(ARG_OUTPUT_DIR MATCHES "^bin/(tests|examples)$")
    set(unoptimized ON)
    target_compile_options(${name} PRIVATE ${LOCKSTEP_TEST_OPTIONS})
  endif()
  if(ARG_TORCH AND unoptimized)
    lockstep_use_pch(${name} lockstep_test_pch)
    # As the header has it, also where a peer of a test does not link GoogleTest.
    target_compile_definitions(${name} PRIVATE
      $<TARGET_PROPERTY:GTest::gtest,INTERFACE_COMPILE_DEFINITIONS>)
    target_compile_options(${name} PRIVATE
      $<TARGET_PROPERTY:GTest::gtest,INTERFACE_COMPILE_OPTIONS>)
  elseif(ARG_TORCH)
    lockstep_use_pch(${name} lockstep_pch)
  endif()
endfunction()

# What every test may read from its environment. Tests run on the CPU, also where there is a GPU;
# those under tests/gpu choose it themselves. Their models are small, so gradients of any size are
# allocated in place, as the large ones of real models are.
set(LOCKSTEP_TEST_ENV
  LOCKSTEP_BIN=${CMAKE_BINARY_DIR}/bin LOCKSTEP_SOURCE=${CMAKE_SOURCE_DIR}
  LOCKSTEP_PYTHON=${LOCKSTEP_PYTHON} LOCKSTEP_DEVICE=cpu
  LOCKSTEP_GRAD_INPLACE_MIN_BYTES=1 LOCKSTEP_CPU_CACHE_MAX_BYTES= OMP_NUM_THREADS=1
  PYTHONDONTWRITEBYTECODE=1)
if(LOCKSTEP_SANITIZE)
  list(APPEND LOCKSTEP_TEST_ENV SANITIZED=${LOCKSTEP_SANITIZE})
endif()

# An empty file takes 12 s of a compiler with torch's precompiled header, so small tests share a
# program. WITH is the test of this folder whose program has these sources, too; each of the two
# runs suites of its own, and a suite that is not found in SOURCES here runs with the other's.
#
#   lockstep_test(fp8_test WITH nn_test SOURCES fp8_test.cpp LABELS unit)
function(lockstep_test name)
  cmake_parse_arguments(ARG "TORCH" "TIMEOUT;WITH" "SOURCES;DEPENDS;LINK;LABELS" ${ARGN})
  if(NOT LOCKSTEP_BUILD_TESTS)
    return()
  endif()
  if(ARG_WITH)
    target_sources(${ARG_WITH} PRIVATE ${ARG_SOURCES})
    list(TRANSFORM ARG_DEPENDS PREPEND lockstep_)
    target_link_libraries(${ARG_WITH} PRIVATE ${ARG_DEPENDS} ${ARG_LINK})
    add_custom_target(${name})
    add_dependencies(${name} ${ARG_WITH})
    add_test(NAME ${name} COMMAND ${ARG_WITH})
    lockstep_test_properties(${name} TIMEOUT ${ARG_TIMEOUT} LABELS ${ARG_LABELS})
    lockstep_divide_suites(${name} ${ARG_WITH} ${ARG_SOURCES})
    return()
  endif()
  set(torch)
  if(ARG_TORCH)
    set(torch TORCH)
  endif()
  lockstep_program(${name} ${torch} OUTPUT_DIR bin/tests SOURCES ${ARG_SOURCES}
    DEPENDS ${ARG_DEPENDS} LINK ${ARG_LINK} GTest::gtest_main GTest::gmock)
  lockstep_compile_together(${name} 16)
  add_test(NAME ${name} COMMAND ${name})
  lockstep_test_properties(${name} TIMEOUT ${ARG_TIMEOUT} LABELS ${ARG_LABELS})
endfunction()

# GoogleTest's filters: a test runs the suites of these sources, and the other all but those.
function(lockstep_divide_suites name other)
  set(suites)
  foreach(source ${ARGN})
    file(STRINGS ${source} lines REGEX "^(TEST|TEST_F|TEST_P|TYPED_TEST)\\(")
    foreach(line ${lines})
      string(REGEX REPLACE "^[A-Z_]+\\(([A-Za-z0-9_]+).*" "\\1" suite "${line}")
      list(APPEND suites "${suite}.*" "*/${suite}.*" "${suite}/*")  # parameters, types
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES suites)
  set_property(TARGET ${other} APPEND PROPERTY LOCKSTEP_SUITES_ELSEWHERE ${suites})
  get_target_property(elsewhere ${other} LOCKSTEP_SUITES_ELSEWHERE)
  list(JOIN suites ":" suites)
  list(JOIN elsewhere ":" elsewhere)
  set_tests_properties(${name} PROPERTIES
    ENVIRONMENT "${LOCKSTEP_TEST_ENV};GTEST_FILTER=${suites}")
  set_tests_properties(${other} PROPERTIES
    ENVIRONMENT "${LOCKSTEP_TEST_ENV};GTEST_FILTER=-${elsewhere}")
endfunction()

# A test that is a script: lockstep_script_test(style_layers COMMAND python3 layers.py)
# Tests run four at a time, since most wait more than they compute; ALONE is for those that
# measure a speed. COST: the seconds of a long one, which begins before the others.
#
# CASES are arguments of the script: those of its cases that this test runs, or all of them. The
# label `quick` makes it one of the quick tests (`./dev test`), QUICK_CASES only these cases. NEEDS:
# the programs that the script runs beside `lockstep`, which the quick tests then build.
#
#   lockstep_script_test(train_resume_test COMMAND python3 resume_test.py LABELS train
#     QUICK_CASES Resume.test_bits NEEDS lockstep_train_cli)
function(lockstep_script_test name)
  cmake_parse_arguments(ARG "ALONE" "TIMEOUT;COST" "COMMAND;CASES;QUICK_CASES;LABELS;NEEDS" ${ARGN})
  set(tests ${name})
  add_test(NAME ${name} COMMAND ${ARG_COMMAND} ${ARG_CASES})
  lockstep_test_properties(${name} TIMEOUT ${ARG_TIMEOUT} LABELS ${ARG_LABELS})
  if(ARG_QUICK_CASES)
    list(APPEND tests ${name}_quick)
    add_test(NAME ${name}_quick COMMAND ${ARG_COMMAND} ${ARG_QUICK_CASES})
    lockstep_test_properties(${name}_quick TIMEOUT ${ARG_TIMEOUT}
      LABELS ${ARG_LABELS} quick excerpt)
  endif()
  if(ARG_ALONE)
    set_tests_properties(${tests} PROPERTIES RUN_SERIAL ON)
  endif()
  if(ARG_COST)
    set_tests_properties(${tests} PROPERTIES COST ${ARG_COST})
  endif()
  if(ARG_QUICK_CASES OR "quick" IN_LIST ARG_LABELS)
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_QUICK_PROGRAMS lockstep_cli ${ARG_NEEDS})
  endif()
endfunction()

# The target that `./dev test` builds. A program that this build does not have (without torch) is
# needed by no test of it.
function(lockstep_quick_tests)
  get_property(programs GLOBAL PROPERTY LOCKSTEP_QUICK_PROGRAMS)
  add_custom_target(quick_tests)
  foreach(program ${programs})
    if(TARGET ${program})
      add_dependencies(quick_tests ${program})
    endif()
  endforeach()
endfunction()

function(lockstep_test_properties name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)  # only what hangs takes as long, on whatever machine
  endif()
  if(CMAKE_CROSSCOMPILING)
    math(EXPR ARG_TIMEOUT "5 * ${ARG_TIMEOUT}")  # an emulator runs it
  endif()
  if("quick" IN_LIST ARG_LABELS AND TARGET ${name})
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_QUICK_PROGRAMS ${name})
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
    ENVIRONMENT "${LOCKSTEP_TEST_ENV}" SKIP_RETURN_CODE 77)
endfunction()
