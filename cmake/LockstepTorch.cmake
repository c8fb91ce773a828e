# LibTorch as our own imported targets, from the directory that holds include/ and lib/.
#
# find_package(Torch) demands a CUDA toolkit when the wheel was built for CUDA; a CPU program needs
# only libtorch_cpu and libc10. Nothing here loads libtorch_cuda: the CUDA part is a plug-in that is
# opened when a CUDA device is asked for (docs/adr/0002).

set(LOCKSTEP_TORCH_DIR "" CACHE PATH "LibTorch: the directory with include/ and lib/")
include(LockstepTorchVersion)
lockstep_torch_version("${LOCKSTEP_TORCH_DIR}" LOCKSTEP_TORCH_VERSION)
if(NOT LOCKSTEP_TORCH_VERSION OR LOCKSTEP_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "LOCKSTEP_TORCH_DIR='${LOCKSTEP_TORCH_DIR}' is not a LibTorch of 2.11 or "
    "newer. Use ./dev build, or pass the directory with its include/ and lib/.")
endif()

add_library(lockstep_torch INTERFACE)
add_library(Lockstep::torch ALIAS lockstep_torch)
set_target_properties(lockstep_torch PROPERTIES EXPORT_NAME torch)
target_include_directories(lockstep_torch SYSTEM INTERFACE
  $<BUILD_INTERFACE:${LOCKSTEP_TORCH_DIR}/include>
  $<BUILD_INTERFACE:${LOCKSTEP_TORCH_DIR}/include/torch/csrc/api/include>)
target_link_libraries(lockstep_torch INTERFACE
  $<BUILD_INTERFACE:${LOCKSTEP_TORCH_DIR}/lib/libtorch_cpu.so>
  $<BUILD_INTERFACE:${LOCKSTEP_TORCH_DIR}/lib/libc10.so> Threads::Threads)
# LibTorch's include directory holds its own, newer fmt without a library for it. Where torch is
# included that one wins, so it is used header-only there; torch-free layers use the system's fmt.
# The two live in different inline namespaces (fmt::v9, fmt::v12) and do not clash.
target_compile_definitions(lockstep_torch INTERFACE FMT_HEADER_ONLY)

# The plug-in is compiled with the CUDA that LibTorch itself was built for, or not at all.
set(LOCKSTEP_HAVE_CUDA OFF)
set(reason "")
if(NOT LOCKSTEP_CUDA)
  set(reason " (LOCKSTEP_CUDA is off)")
elseif(NOT EXISTS ${LOCKSTEP_TORCH_DIR}/lib/libtorch_cuda.so)
  set(reason " (this LibTorch has no CUDA)")
else()
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(LOCKSTEP_NVCC nvcc HINTS /usr/local/cuda/bin)
    if(LOCKSTEP_NVCC)
      set(ENV{CUDACXX} ${LOCKSTEP_NVCC})
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80 90)
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    execute_process(COMMAND ${CMAKE_READELF} -d ${LOCKSTEP_TORCH_DIR}/lib/libtorch_cuda.so
      OUTPUT_VARIABLE needed ERROR_QUIET)
    if(needed MATCHES "libcudart\\.so\\.([0-9]+)"
        AND NOT CMAKE_MATCH_1 EQUAL CUDAToolkit_VERSION_MAJOR)
      set(reason " (nvcc is ${CUDAToolkit_VERSION}, LibTorch was built for CUDA ${CMAKE_MATCH_1})")
    else()
      set(LOCKSTEP_HAVE_CUDA ON)
    endif()
  else()
    set(reason " (no working nvcc)")
  endif()
endif()
message(STATUS "LibTorch ${LOCKSTEP_TORCH_VERSION}: ${LOCKSTEP_TORCH_DIR}")
message(STATUS "CUDA plug-in: ${LOCKSTEP_HAVE_CUDA}${reason}")
