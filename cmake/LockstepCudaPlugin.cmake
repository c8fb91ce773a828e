# liblockstep_cuda.so: the one library that is linked to libtorch_cuda (docs/adr/0002). Programs
# open it when they want a CUDA device, and never otherwise.

# nccl.h must be the one LibTorch was built with, because its structures are part of LibTorch's own;
# the wheel brings it along.
find_path(LOCKSTEP_NCCL_INCLUDE nccl.h
  HINTS ${LOCKSTEP_TORCH_DIR}/../nvidia/nccl/include ${CUDAToolkit_INCLUDE_DIRS}
  NO_DEFAULT_PATH)
if(NOT LOCKSTEP_NCCL_INCLUDE)
  find_path(LOCKSTEP_NCCL_INCLUDE nccl.h REQUIRED)
endif()

# Kernels: machine code for Hopper, and PTX that the driver compiles for every later or other GPU
# from compute capability 8.0 on. One needs instructions of 9.0 and is launched there only.
set(kernels ${CMAKE_SOURCE_DIR}/lockstep/kernels/cuda)
add_library(lockstep_cuda_kernels OBJECT
  ${kernels}/norm.cu ${kernels}/cross_entropy.cu
  ${kernels}/elementwise.cu ${kernels}/adamw.cu ${kernels}/lora.cu ${kernels}/fp8.cu
  ${kernels}/nf4.cu)
add_library(lockstep_cuda_kernels_90 OBJECT ${kernels}/cross_entropy_pipelined.cu)
set_target_properties(lockstep_cuda_kernels PROPERTIES CUDA_ARCHITECTURES "80-virtual;90a-real")
set_target_properties(lockstep_cuda_kernels_90 PROPERTIES
  CUDA_ARCHITECTURES "90-virtual;90a-real")
foreach(objects lockstep_cuda_kernels lockstep_cuda_kernels_90)
  # CMake 3.25 does not know that nvcc 13 has C++20.
  set_target_properties(${objects} PROPERTIES CUDA_STANDARD 17 POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${objects} PRIVATE ${CMAKE_SOURCE_DIR})
endforeach()

add_library(lockstep_cuda SHARED ${CMAKE_SOURCE_DIR}/lockstep/comm/nccl/plugin.cpp
  ${kernels}/plugin.cpp ${kernels}/gemm.cpp
  $<TARGET_OBJECTS:lockstep_cuda_kernels> $<TARGET_OBJECTS:lockstep_cuda_kernels_90>)
# libcudart and libcublasLt are those that libtorch_cuda has brought: naming them here could load
# the system's beside them.
set_target_properties(lockstep_cuda PROPERTIES LINKER_LANGUAGE CXX)
target_include_directories(lockstep_cuda PRIVATE ${CMAKE_SOURCE_DIR})
target_include_directories(lockstep_cuda SYSTEM PRIVATE
  ${LOCKSTEP_NCCL_INCLUDE} ${CUDAToolkit_INCLUDE_DIRS})
target_compile_definitions(lockstep_cuda PRIVATE USE_C10D_NCCL)
# Opening the plug-in must bring libtorch_cuda along even where no symbol of it is used directly:
# its static initialisers are what registers CUDA with LibTorch.
target_link_options(lockstep_cuda PRIVATE -Wl,--no-as-needed)
target_link_libraries(lockstep_cuda PRIVATE lockstep_torch
  ${LOCKSTEP_TORCH_DIR}/lib/libtorch_cuda.so ${LOCKSTEP_TORCH_DIR}/lib/libc10_cuda.so)
lockstep_common(lockstep_cuda)
