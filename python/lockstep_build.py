"""Compiles the extension and packs it into a wheel, with nothing but Python and a C++ compiler.

    pip install ./python                            uses the functions below (PEP 517)
    python python/lockstep_build.py --into DIR      the package in DIR, for a build tree
    ./dev wheel                                     the wheel of the build tree

torch's own build tools would be imported from an environment that pip makes for the occasion, and
a second torch downloaded into it. The headers and libraries of the torch that will load the
extension are all that is needed; they are found without importing it. The launcher, which has no
torch in it, is built by CMake.
"""

import argparse
import base64
import concurrent.futures
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

NAME = "lockstep_torch"
HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
CORE = ("env.cpp", "error.cpp", "fd.cpp", "host.cpp", "ledger.cpp", "text.cpp")
MEMORY = ("block_cache.cpp", "cpu_cache.cpp")
# The engine's vector code by machine; what is not listed uses the compiler's own vectors.
KERNELS = {
    "x86_64": {"kernels_x86.cpp": [], "kernels_avx2.cpp": ["-mavx2", "-mf16c"],
               "kernels_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl"]},
    "aarch64": {"kernels_neon.cpp": ["-O3"]},
}
GENERIC = {"kernels_generic.cpp": []}
FLAGS = {"reduce.cpp": ["-O3"]}  # loops that only the vectoriser makes fast
# World's adaptor over the engine.
ELSEWHERE = ("shm.cpp",)


class BuildError(SystemExit):
    """A message for the user instead of a traceback, also under pip."""

    def __init__(self, text):
        super().__init__(f"lockstep_torch: {text}")


def torch_folder():
    """Where the torch of this interpreter is. Not imported: pip may have hidden it."""
    folders = [os.path.join(sysconfig.get_path(kind), "torch") for kind in ("platlib", "purelib")]
    folders += [os.path.join(path, "torch") for path in sys.path]
    folders += [os.environ.get("LOCKSTEP_TORCH", "")]
    for folder in folders:
        if folder and os.path.exists(os.path.join(folder, "lib", "libtorch_cpu.so")):
            return pathlib.Path(folder)
    raise BuildError(f"{sys.executable} has no torch. Install torch 2.11 or newer into it first, "
                     "or set LOCKSTEP_TORCH to the directory with its include/ and lib/.")


def torch_version(folder):
    text = (folder / "version.py").read_text(encoding="utf-8")
    return re.search(r"__version__ = '([^']+)'", text).group(1)


def version():
    text = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "([^"]+)"', text, re.MULTILINE).group(1)


def sources():
    """(path, flags of its own) of everything the extension is made of: the engine comes along."""
    kernels = KERNELS.get(platform.machine(), GENERIC)
    engine = [p for p in sorted((ROOT / "lockstep/comm/shm").glob("*.cpp"))
              if p.name not in ELSEWHERE and not re.search(r"_(test|peer|test_main)\.cpp$", p.name)
              and (p.name in kernels or not p.name.startswith("kernels_"))]
    if not engine:
        raise BuildError(f"the engine's sources are not in {ROOT}. Install from a checkout of "
                         "Lockstep: pip install ./python")
    own = sorted((HERE / "csrc").glob("*.cpp"))
    core = [ROOT / "lockstep/core" / name for name in CORE]
    core += [ROOT / "lockstep/memory" / name for name in MEMORY]
    # The slowest first.
    return [(p, kernels.get(p.name) or FLAGS.get(p.name, [])) for p in own + engine + core]


def units():
    """{name: (sources that are compiled as one file, their flags)}. What a source costs is mostly
    its headers, so those of a folder are compiled together, as CMake does with a layer's."""
    found = {}
    for path, extra in sources():
        name = path.parent.relative_to(ROOT).as_posix().replace("/", "-")
        if extra:  # has the instructions of one processor
            name += f"-{path.stem}"
        found.setdefault(name, ([], extra))[0].append(path)
    return found


def python_headers():
    folder = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(folder, "Python.h")):
        raise BuildError(f"{folder} has no Python.h. Install the headers of this interpreter, e.g. "
                         "apt-get install python3-dev.")
    return folder


def standard_library(compiler):
    """libstdc++.so.6 where the compiler does not find it by name and would take the archive: with a
    copy of its own beside torch's the extension crashes in the first stream it uses."""
    def place(name):
        answer = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True,
                                text=True, check=False).stdout.strip()
        return answer if os.path.isabs(answer) else ""

    library = place("libstdc++.so.6")
    return [library] if library and not place("libstdc++.so") else []


def commands(torch, objects, into):
    """(compile commands by object, link command, library)."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"the compiler {compiler[0]} is not there. Install g++ 12 or newer, or "
                         "set CXX.")
    if len(compiler) == 1 and shutil.which("ccache"):
        compiler.insert(0, "ccache")
    flags = ["-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-pthread", "-Wall", "-Wextra",
             "-fvisibility=hidden", "-DFMT_HEADER_ONLY", f"-I{ROOT}"]
    # One fmt for all files: the one that torch brings. Nothing else has to be installed.
    for folder in (torch / "include", torch / "include/torch/csrc/api/include", python_headers()):
        flags += ["-isystem", str(folder)]
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    compiles = {}
    for name, (_, extra) in units().items():
        source, target = objects / f"{name}.cpp", objects / f"{name}.o"
        compiles[target] = [*compiler, *flags, *extra, "-MD", "-MF", f"{target}.d", "-c",
                            str(source), "-o", str(target)]
    linker = compiler[1:] if compiler[0] == "ccache" else compiler
    library = into / NAME / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))
    link = [*linker, "-shared", "-pthread", *map(str, compiles), "-o", str(library),
            f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", *standard_library(linker)]
    link += shlex.split(os.environ.get("LDFLAGS", ""))
    return compiles, link, library


def is_current(target, command):
    """Built by the same command, and newer than all its inputs."""
    record, list_file = pathlib.Path(f"{target}.cmd"), pathlib.Path(f"{target}.d")
    if not (target.exists() and record.exists() and list_file.exists()):
        return False
    if record.read_text(encoding="utf-8") != shlex.join(command):
        return False
    made = target.stat().st_mtime
    names = list_file.read_text(encoding="utf-8").split(":", 1)[1].replace("\\\n", " ").split()
    try:
        return all(os.stat(name).st_mtime <= made for name in names)
    except FileNotFoundError:
        return False


def run(command):
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise BuildError(f"{shlex.join(command)}\n{outcome.stdout}{outcome.stderr}")
    if outcome.stderr:
        sys.stderr.write(outcome.stderr)


def jobs():
    return int(os.environ.get("LOCKSTEP_JOBS") or 0) or len(os.sched_getaffinity(0))


def compile_one(item):
    target, command = item
    if is_current(target, command):
        return False
    run(command)
    pathlib.Path(f"{target}.cmd").write_text(shlex.join(command), encoding="utf-8")
    return True


def build(into, objects):
    """Puts the package into `into`; object files are cached."""
    torch = torch_folder()
    into, objects = pathlib.Path(into).resolve(), pathlib.Path(objects).resolve()
    (into / NAME).mkdir(parents=True, exist_ok=True)
    objects.mkdir(parents=True, exist_ok=True)
    for name, (paths, _) in units().items():
        source = objects / f"{name}.cpp"
        text = "".join(f'#include "{path}"\n' for path in paths)
        if not source.exists() or source.read_text(encoding="utf-8") != text:
            source.write_text(text, encoding="utf-8")
    compiles, link, library = commands(torch, objects, into)
    with concurrent.futures.ThreadPoolExecutor(jobs()) as pool:
        changed = list(pool.map(compile_one, compiles.items()))
    record = objects / "link.cmd"
    same = record.exists() and record.read_text(encoding="utf-8") == shlex.join(link)
    newest = max(target.stat().st_mtime for target in compiles)
    if not same or not library.exists() or library.stat().st_mtime < newest:
        run(link)
        record.write_text(shlex.join(link), encoding="utf-8")
    for path in (HERE / NAME).glob("*.py"):
        shutil.copyfile(path, into / NAME / path.name)
    return sum(changed)


# What CMake needs for the launcher, as Debian and Ubuntu call it.
PACKAGES = ("cmake ninja-build g++ libfmt-dev libspdlog-dev libyaml-cpp-dev "
            "nlohmann-json3-dev libcli11-dev libmicrohttpd-dev libssl-dev")


def build_launcher(folder):
    """The program `lockstep`, which needs no library but glibc. LOCKSTEP_LAUNCHER names a finished
    one; with none there, nothing is built."""
    given = os.environ.get("LOCKSTEP_LAUNCHER", "")
    if given:
        if given != "none" and not os.path.isfile(given):
            raise BuildError(f"LOCKSTEP_LAUNCHER={given} is not a file. Unset it to build the "
                             "launcher, or set it to none to install the backend alone.")
        return None if given == "none" else pathlib.Path(given)
    hint = (f"The launcher needs: apt-get install {PACKAGES}. Or set LOCKSTEP_LAUNCHER=none to "
            "install the backend alone.")
    if shutil.which("cmake") is None:
        raise BuildError(f"cmake is not there. {hint}")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLOCKSTEP_TORCH_FREE_ONLY=ON",
               "-DLOCKSTEP_BUILD_TESTS=OFF"]
    if shutil.which("ninja"):
        options.append("-GNinja")
    try:
        run(["cmake", "-S", str(ROOT), "-B", str(folder), *options])
    except BuildError as error:
        raise BuildError(f"{error}\n{hint}") from None
    run(["cmake", "--build", str(folder), "--target", "lockstep_portable", "--parallel",
         str(jobs())])
    return folder / "portable/lockstep"


# ---------------------------------------------------------------- what pip calls

def get_requires_for_build_wheel(config_settings=None):
    return []


def metadata():
    torch = torch_version(torch_folder())
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    return (f"Metadata-Version: 2.1\nName: lockstep-torch\nVersion: {version()}\n"
            "Summary: torch.distributed between the processes of one host at memory speed\n"
            f"Requires-Python: >=3.10\nRequires-Dist: torch (=={torch.split('+')[0]})\n"
            f"Description-Content-Type: text/markdown\n\n{readme}")


# torch loads such modules itself, so that the backend's name is known without an import.
ENTRY_POINTS = "[torch.backends]\nlockstep = lockstep_torch:autoload\n"


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Without this pip would build twice."""
    name = f"{NAME}-{version()}.dist-info"
    folder = pathlib.Path(metadata_directory) / name
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(metadata(), encoding="utf-8")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with tempfile.TemporaryDirectory(prefix="lockstep-torch-") as scratch:
        package = pathlib.Path(scratch) / "package"
        program = build_launcher(pathlib.Path(scratch) / "launcher")
        build(package, pathlib.Path(scratch) / "objects")
        return pack(package, program, wheel_directory)


def pack(package, program, wheel_directory):
    """The wheel of a package that build() has made, and of the launcher if there is one. Its tag
    names this interpreter and this machine, for which the extension was compiled."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    name = f"{NAME}-{version()}-{tag}-{tag}-{machine}.whl"
    folder = f"{NAME}-{version()}.dist-info"
    files = {f"{NAME}/{p.name}": p.read_bytes() for p in sorted((package / NAME).glob("*.*"))}
    if program:
        files[f"{NAME}-{version()}.data/scripts/lockstep"] = program.read_bytes()
    files[f"{folder}/METADATA"] = metadata().encode()
    files[f"{folder}/WHEEL"] = (f"Wheel-Version: 1.0\nGenerator: lockstep_build\n"
                                f"Root-Is-Purelib: false\nTag: {tag}-{tag}-{machine}\n").encode()
    files[f"{folder}/entry_points.txt"] = ENTRY_POINTS.encode()
    record = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(data)}\n")
    files[f"{folder}/RECORD"] = "".join([*record, f"{folder}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))  # the same bytes every time
            entry.external_attr = (0o100755 if "/scripts/" in path else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return name


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--into", help="the directory that gets lockstep_torch/")
    parser.add_argument("--objects", help="where object files are cached (default: INTO/objects)")
    parser.add_argument("--wheel", help="the directory that gets the wheel of what INTO holds "
                        "already; its launcher is the one of LOCKSTEP_LAUNCHER")
    parser.add_argument("--check", action="store_true", help="only say whether it can be built")
    parsed = parser.parse_args()
    if not parsed.into and not parsed.check:
        parser.error("--into DIR is missing")
    if parsed.check:
        commands(torch_folder(), pathlib.Path(), pathlib.Path())
        return 0
    objects = pathlib.Path(parsed.objects or os.path.join(parsed.into, "objects"))
    if parsed.wheel:
        os.makedirs(parsed.wheel, exist_ok=True)
        name = pack(pathlib.Path(parsed.into), build_launcher(objects / "launcher"), parsed.wheel)
        print(os.path.join(parsed.wheel, name))
        return 0
    count = build(parsed.into, objects)
    print(f"lockstep_torch: {count} files compiled, in {parsed.into}")
    # As if it were installed: with this folder in PYTHONPATH, `import torch` loads the package.
    prepare_metadata_for_build_wheel(parsed.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
