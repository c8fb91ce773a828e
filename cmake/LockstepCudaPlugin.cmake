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

add_library(lockstep_cuda SHARED ${CMAKE_SOURCE_DIR}/lockstep/comm/nccl/plugin.cpp)
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
