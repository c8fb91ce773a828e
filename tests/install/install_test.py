"""Installs the build, moves the tree, and builds and runs projects outside the repository with it.

    LOCKSTEP_BIN=build/bin LOCKSTEP_SOURCE=. python3 tests/install/install_test.py

Every step prints a line; a step that this machine cannot do prints SKIP and is counted.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(os.environ["LOCKSTEP_SOURCE"]).resolve()
BUILD = pathlib.Path(os.environ["LOCKSTEP_BIN"]).resolve().parent
TIMEOUT_S = 1200


class Failed(Exception):
    pass


def run(*command, ok=True, **options):
    """Output of a command that must succeed (or, with ok=False, must fail)."""
    done = subprocess.run([str(arg) for arg in command], stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False, **options)
    if (done.returncode == 0) != ok:
        raise Failed(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def expect(condition, text):
    if not condition:
        raise Failed(text)


def cache_value(name):
    found = re.search(rf"^{name}:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.MULTILINE)
    return found.group(1) if found else ""


class Test:
    def __init__(self, temp):
        self.temp = temp
        self.prefix = temp / "moved" / "lockstep"
        self.torch = cache_value("LOCKSTEP_TORCH_DIR")
        self.skipped = 0
        # A second run finds its objects again although the directory has another name.
        self.environment = os.environ | {
            "CCACHE_BASEDIR": str(temp), "CCACHE_NOHASHDIR": "1",
            "CCACHE_SLOPPINESS": "time_macros,include_file_mtime,include_file_ctime",
            # Otherwise find_package(Torch) compiles and runs a program that looks for GPUs.
            "TORCH_CUDA_ARCH_LIST": "8.0"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            self.environment.pop(name, None)

    def install(self):
        first = self.temp / "first"
        run("cmake", "--install", BUILD, "--prefix", first)
        self.prefix.parent.mkdir()
        first.rename(self.prefix)
        for path in ("bin/lockstep", "include/lockstep/lockstep.h", "include/lockstep/run.h",
                     "lib/cmake/Lockstep/LockstepConfig.cmake", "libexec/lockstep-bench"):
            expect((self.prefix / path).exists(), f"{path} was not installed")
        page = (SOURCE / "docs/api.md").read_text()
        listed = set(re.findall(r"^\| `(lockstep/[\w/]+\.h)` ", page, re.MULTILINE))
        headers = {str(path.relative_to(self.prefix / "include"))
                   for path in self.prefix.glob("include/**/*.h")}
        expect(headers == listed, f"either installed or in docs/api.md: {sorted(headers ^ listed)}")
        folders = [path for path in self.prefix.rglob("*") if path.is_dir()]
        empty = [path for path in folders if not any(path.iterdir())]
        expect(not empty, f"empty directories were installed: {empty}")
        shared = {path.name for path in (self.prefix / "lib").glob("*.so*")}
        expect(shared <= {"liblockstep_cuda.so"}, f"installed {sorted(shared)}")
        for path in (self.prefix / "lib/cmake/Lockstep").iterdir():
            for tree in (SOURCE, BUILD, first):
                expect(f"{tree}/" not in path.read_text(), f"{path.name} names {tree}")

    def documentation(self):
        """Links of the installed pages lead to installed files; --help names their folder."""
        folder = self.prefix / "share/doc/lockstep"
        pages = sorted(folder.rglob("*.md"))
        expect(folder / "docs/ddp.md" in pages and folder / "README.md" in pages,
               f"installed pages: {pages}")
        broken = []
        for page in pages:
            for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
                if "://" not in target and not (page.parent / target).exists():
                    broken.append(f"{page.relative_to(folder)}: {target}")
        expect(not broken, f"links to what is not installed: {broken}")
        text = run(self.prefix / "bin/lockstep", "--help")
        for page in ("README.md", "docs", "CONTRIBUTING.md"):
            expect(f"{folder / page}" in text, f"--help does not name {page}:\n{text}")

    def programs(self):
        version = run(self.prefix / "bin/lockstep", "--version")
        expect(re.match(r"lockstep \d+\.\d+\.\d+\ncommit \w+\ntorch ", version),
               f"--version says {version!r}")
        run(self.prefix / "bin/lockstep", "bench", "--help")  # lockstep-bench finds LibTorch

    def compilers_known(self, project, build):
        """Gives a tree what CMake has found out about the compilers for an earlier one, which
        takes most of the time; returns the option with which it believes that."""
        for known in (f"{project}-build", "alone-build"):
            for found in (self.temp / known).glob("CMakeFiles/*/CMakeCXXCompiler.cmake"):
                shutil.copytree(found.parent,
                                self.temp / build / "CMakeFiles" / found.parent.name)
                return ["-DCMAKE_PLATFORM_INFO_INITIALIZED=1"]
        return []

    def configure(self, project, build, *options, ok=True):
        options = [*options, *self.compilers_known(project, build)]
        launcher = shutil.which("ccache")
        if launcher:
            options.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}")
        return run("cmake", "-S", self.temp / project, "-B", self.temp / build, "-G", "Ninja",
                   f"-DCMAKE_CXX_COMPILER={cache_value('CMAKE_CXX_COMPILER')}",
                   "-DCMAKE_CXX_FLAGS=-O0", *options, ok=ok, env=self.environment)

    def build(self, build):
        run("cmake", "--build", self.temp / build, env=self.environment)

    def two_ranks(self, program):
        return run(self.prefix / "bin/lockstep", "run", "--standalone", "--nproc-per-node=2",
                   program, env=self.environment)

    def consumer_alone(self):
        shutil.copytree(SOURCE / "examples/readme", self.temp / "alone")
        self.configure("alone", "alone-build", f"-DCMAKE_PREFIX_PATH={self.prefix}")
        self.build("alone-build")
        program = self.temp / "alone-build/own"
        for output in (run(program, env=self.environment), self.two_ranks(program)):
            losses = [float(x) for x in re.findall(r"epoch \d+: loss (\d+\.\d+)", output)]
            expect(len(losses) == 5 and losses[-1] < losses[0] - 0.1, f"no training:\n{output}")
        libraries = run("ldd", program)
        expect("libtorch_cpu" in libraries and "libtorch_cuda" not in libraries,
               f"a CPU program links libtorch_cpu alone:\n{libraries}")

    def consumer_with_cuda_headers(self):
        """A program that includes LibTorch's CUDA headers and calls into c10_cuda and torch_cuda,
        with nothing but Lockstep::lockstep. It runs without a GPU, too."""
        if not (pathlib.Path(self.torch) / "lib/libtorch_cuda.so").exists():
            self.skip("this LibTorch has no CUDA")
            return
        shutil.copytree(SOURCE / "tests/install/with_cuda", self.temp / "cuda")
        text = self.configure("cuda", "cuda-build", f"-DCMAKE_PREFIX_PATH={self.prefix}")
        if "no CUDA headers were found" in text:
            self.skip("this machine has no CUDA headers")
            return
        self.build("cuda-build")
        program = self.temp / "cuda-build/with_cuda"
        libraries = run("ldd", program)
        for name in ("libtorch_cuda", "libc10_cuda"):
            expect(name in libraries, f"{name} is not loaded:\n{libraries}")
        expect(re.search(r"devices: \d+, stream type \d+", run(program, env=self.environment)),
               "a CUDA program does not run")

    def consumer_beside_torch(self):
        shutil.copytree(SOURCE / "tests/install/beside_torch", self.temp / "beside")
        prefixes = f"-DCMAKE_PREFIX_PATH={self.prefix};{self.torch}"
        try:
            self.configure("beside", "beside-build", prefixes)
        except Failed:
            # find_package(Torch) wants the CUDA toolkit when LibTorch was built with CUDA.
            reason = self.torch_alone_fails(prefixes)
            if not reason:
                raise
            self.skip(f"find_package(Torch) does not work on this machine by itself: {reason}")
            return
        self.build("beside-build")
        program = self.temp / "beside-build/beside_torch"
        expect("rank 0 of 1: sum 1" in run(program, env=self.environment), "a world of one")
        # LibTorch's own libraries come first in such a program; ours must not trip over theirs.
        for output in (self.two_ranks(program), run(program, "spawn", env=self.environment)):
            for rank in (0, 1):
                expect(f"rank {rank} of 2: sum 3" in output, f"two ranks:\n{output}")
        self.configure("beside", "beside-first", prefixes, "-DLOCKSTEP_FIRST=ON")
        text = self.configure("beside", "beside-two", prefixes, ok=False,
                              *[f"-DLOCKSTEP_TORCH_DIR={self.temp}"])
        expect("One program can hold one LibTorch" in " ".join(text.split()), text)

    def torch_alone_fails(self, prefixes):
        """Why a project that uses LibTorch without Lockstep cannot be configured; "" if it can."""
        (self.temp / "probe").mkdir()
        (self.temp / "probe/CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(probe LANGUAGES CXX)\n"
            "find_package(Torch REQUIRED)\n")
        try:
            self.configure("probe", "probe-build", prefixes)
        except Failed as failure:
            found = re.search(r"CMake Error[^\n]*\n\s*(.*?)\n\n", str(failure), re.DOTALL)
            return " ".join((found.group(1) if found else str(failure)).split())
        return ""

    def refusals(self):
        """What cannot work is refused when the project is configured, and says what to do."""
        prefix = f"-DCMAKE_PREFIX_PATH={self.prefix}"
        text = self.configure("alone", "no-torch", prefix,
                              f"-DLOCKSTEP_TORCH_DIR={self.temp / 'nowhere'}", ok=False)
        expect("is not a LibTorch" in " ".join(text.split()), text)
        other = self.temp / "other"
        (other / "lib").mkdir(parents=True)
        (other / "lib/libtorch_cpu.so").touch()
        (other / "include/torch/headeronly").mkdir(parents=True)
        (other / "include/torch/headeronly/version.h").write_text(
            "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 12\n"
            "#define TORCH_VERSION_PATCH 1\n")
        text = " ".join(self.configure("alone", "other-torch", prefix,
                                       f"-DLOCKSTEP_TORCH_DIR={other}", ok=False).split())
        expect("Lockstep was built with LibTorch" in text and "is 2.12.1" in text, text)

    def plugin(self):
        """The CUDA part, where it was built, finds LibTorch and is found by consumers."""
        library = self.prefix / "lib/liblockstep_cuda.so"
        if not (BUILD / "lib" / library.name).exists():
            self.skip("this build has no CUDA plug-in")
            return
        if "asan" in run("readelf", "-d", library):
            self.skip("a library with the address sanitizer cannot be loaded into python3")
        else:
            run("python3", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", library,
                env=self.environment)
        rpath = run("readelf", "-d", self.temp / "alone-build/own")
        expect(f"{self.prefix}/lib" in rpath, f"a consumer does not look for plug-ins:\n{rpath}")

    def skip(self, reason):
        self.skipped += 1
        print(f"SKIP {self.skipped}: {reason}", flush=True)


def main():
    with tempfile.TemporaryDirectory(prefix="lockstep-install-") as directory:
        test = Test(pathlib.Path(directory).resolve())
        steps = (test.install, test.documentation, test.programs, test.consumer_alone, test.plugin,
                 test.consumer_with_cuda_headers, test.consumer_beside_torch, test.refusals)
        for step in steps:
            begin = time.monotonic()
            try:
                step()
            except Failed as failure:
                print(f"FAILED {step.__name__}: {failure}")
                return 1
            print(f"{step.__name__}: {time.monotonic() - begin:.1f} s", flush=True)
    print(f"install: {len(steps)} steps, {test.skipped} skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
