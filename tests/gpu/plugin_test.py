"""The CUDA plug-in opens and has its kernels, also on a machine without a GPU.

Skipped where the build has none. Every symbol must be found in what LibTorch brings along: the
plug-in names neither libcudart nor libcublasLt, so that no second copy of them is loaded.
"""
import ctypes
import os
import pathlib
import re
import sys

PLUGIN = pathlib.Path(os.environ["LOCKSTEP_BIN"]).parent / "lib" / "liblockstep_cuda.so"
HEADER = pathlib.Path(os.environ["LOCKSTEP_SOURCE"]) / "lockstep/kernels/cuda/table.h"


def main():
    if not PLUGIN.exists():
        print("SKIPPED: this build has no CUDA plug-in")
        return 77
    plugin = ctypes.CDLL(str(PLUGIN), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    plugin.lockstep_cuda_kernels.restype = ctypes.c_void_p
    table = plugin.lockstep_cuda_kernels()
    version = ctypes.c_int.from_address(table).value
    wanted = int(re.search(r"kTableVersion = (\d+)", HEADER.read_text()).group(1))
    mapped = pathlib.Path("/proc/self/maps").read_text().splitlines()
    failed = version != wanted
    print(f"kernel table of version {version}, the header's is {wanted}")
    for library in ("libcudart.so", "libcublasLt.so"):
        files = {line.split()[-1] for line in mapped if library in line}
        print(f"{library}: {sorted(files)}")
        failed |= len(files) != 1
    return 1 if failed else 0


sys.exit(main())
