"""Enforces the layers of ARCHITECTURE.md: a layer includes only the layers that its row allows.

    python3 tests/style/layers_test.py              the project
    python3 tests/style/layers_test.py --self-test  every rule reports what breaks it

Reads `#include` lines and the DEPENDS of lockstep_layer(); nothing is compiled.
"""

import os
import pathlib
import re
import sys

import tree
from tree import CPP, HEADERS, Violation

# Layer: the layers it may include besides itself. In dependency order, as in ARCHITECTURE.md.
LAYERS = {
    "core": [],
    "rendezvous": ["core"],
    "memory": ["core"],
    "launch": ["core", "rendezvous"],
    "io": ["core"],
    "comm": ["core", "rendezvous"],
    "kernels": ["core"],
    "nn": ["core", "kernels"],
    "optim": ["core", "kernels", "nn", "comm"],
    "parallel": ["core", "memory", "comm", "kernels", "nn", "optim"],
    "data": ["core", "io", "comm"],
    "models": ["core", "io", "kernels", "nn"],
    "plan": ["core", "io", "models"],
    "monitor": ["core", "io", "comm"],
    "train": ["core", "rendezvous", "io", "comm", "kernels", "nn", "optim", "parallel", "data",
              "monitor"],
    "dashboard": ["core", "rendezvous", "launch", "io", "monitor"],
}
ALL = list(LAYERS)
# lockstep/*.h wires layers together for programs (run.h: launch and comm); no layer includes it.
ROOT = "root"
TESTING = "testing"

# What the Trainer knows of the ways to divide training: the interface, the function that chooses
# one, and its options. A question about one of the ways belongs into the interface.
SEEN_BY_TRAIN = {f"lockstep/parallel/{name}.h"
                 for name in ("parallelism", "parallelize", "options")}

# Foreign headers by family. The first match decides; what matches nothing is std or POSIX.
FAMILIES = [
    ("nccl", r"nccl\.h|torch/csrc/distributed/c10d/(ProcessGroup)?NCCL|torch/csrc/cuda/nccl"),
    ("gloo", r"gloo/|torch/csrc/distributed/c10d/ProcessGroupGloo"),
    ("mpi", r"mpi\.h"),
    ("cuda", r"cuda|cublas|cudnn|nvml|nvtx|ATen/(native/)?cu(da|dnn)/|c10/cuda/|torch/csrc/cuda/"),
    ("c10d", r"torch/csrc/distributed/"),
    ("aten", r"torch/version\.h|torch/headeronly/"),  # numbers and macros alone
    ("torch", r"torch/"),
    ("aten", r"ATen/|c10/|caffe2/"),
    ("spdlog", r"spdlog/"),
    ("yaml", r"yaml-cpp/"),
    ("json", r"nlohmann/"),
    ("fmt", r"fmt/"),
    ("cli11", r"CLI/"),
    ("gtest", r"gtest/|gmock/|benchmark/|rapidcheck"),
    ("http", r"microhttpd"),
    ("openssl", r"openssl/"),
    ("unicode", r"pcre2\.h|utf8proc\.h"),
    ("python", r"pybind11/|Python\.h"),
]
# Which families a layer may use; std, POSIX and fmt are everybody's.
ATEN = {"aten"}
TORCH = {"aten", "torch"}
FOREIGN = {
    "core": {"spdlog", "yaml"},
    "rendezvous": {"openssl"},
    "memory": TORCH,
    "launch": {"json"},
    "io": {"openssl"},
    "comm": {"aten", "c10d"},
    "kernels": ATEN | {"cuda"},
    "nn": TORCH,
    "optim": TORCH,
    "parallel": TORCH,
    "data": TORCH | {"unicode"},
    "models": TORCH,
    "plan": set(),
    "train": TORCH,
    "monitor": TORCH,
    "dashboard": {"http"},
    ROOT: TORCH,
}
BACKEND_FOREIGN = {
    "gloo": {"aten", "c10d", "gloo"},
    "nccl": {"aten", "c10d", "cuda", "nccl"},
    "cuda": {"aten", "c10d", "cuda", "nccl"},
    "shm": {"aten", "c10d"},
    "mpi": {"aten", "c10d", "mpi"},
}
# Single files that may use more: the bridge of a torch-free layer to torch, in a target of its own,
# and a test that reads what we write with another library.
FILE_FOREIGN = {
    "lockstep/io/tensors.h": ATEN,
    "lockstep/io/tensors.cpp": ATEN,
    "lockstep/core/crash_test.cpp": {"json"},
}
TORCH_FREE = ("core", "rendezvous", "launch", "plan", "dashboard")
SOURCE_ONLY = {"spdlog", "yaml", "json", "cli11", "http", "openssl", "unicode"}
# A program that includes lockstep.h must compile without the vendors' headers.
VENDOR = {"nccl", "gloo", "mpi", "cuda"}


def family_of(path):
    for name, pattern in FAMILIES:
        if re.match(pattern, path):
            return name
    return "std"


def place_of(path):
    """(layer, backend or "") of a file of one of the wings, or None for one outside."""
    parts = path.split("/")
    if parts[0] == "launcher":
        return "launch", ""
    if parts[0] == "observe":
        return parts[1], ""
    if parts[0] != "lockstep":
        return None
    if len(parts) == 2:
        return ROOT, ""
    if parts[1] == "comm" and len(parts) > 3:
        return "comm", parts[2]
    return parts[1], ""


def is_test(path):
    return re.search(r"_(test|bench|peer|test_main)\.(cpp|cu)$|_for_test\.h$", path) is not None


def allowed_layers(layer):
    if layer in (ROOT, TESTING):
        return set(ALL) | {ROOT}
    return set(LAYERS.get(layer, [])) | {layer}


def check_own_include(path, place, line, target):
    """One `#include "lockstep/..."`."""
    layer, backend = place
    target_layer, target_backend = place_of(target)
    if is_test(path):
        # Tests may look at everything, except that torch-free layers are tested without torch.
        if layer in TORCH_FREE and target_layer not in (*allowed_layers(layer), TESTING):
            yield Violation(path, line, "layer", f"{layer} is tested without {target}")
        return
    if target_layer == TESTING:
        if layer != TESTING:
            yield Violation(path, line, "layer", f"only tests include {target}")
        return
    if target_layer not in allowed_layers(layer):
        may = ", ".join(sorted(allowed_layers(layer) - {layer})) or "no other layer"
        yield Violation(path, line, "layer", f"{layer} includes {target}; it may include {may}")
        return
    if layer == "train" and target_layer == "parallel" and target not in SEEN_BY_TRAIN:
        yield Violation(path, line, "layer", f"train includes {target}; of parallel it may include "
                                             f"{', '.join(sorted(SEEN_BY_TRAIN))}")
        return
    if target_backend and target_backend != backend and layer != TESTING:
        yield Violation(path, line, "backend",
                        f"{target} is private to its backend; comm/backend.h declares what others "
                        "may call")


def check_foreign_include(path, place, line, target):
    layer, backend = place
    family = family_of(target)
    if family in ("std", "fmt"):
        return
    if family in SOURCE_ONLY and pathlib.PurePosixPath(path).suffix in HEADERS:
        yield Violation(path, line, "source-only", f"<{target}> belongs into a .cpp")
        return
    if family == "gtest":
        if not is_test(path) and layer != TESTING:
            yield Violation(path, line, "foreign", f"<{target}> outside of tests")
        return
    if layer == TESTING or (is_test(path) and layer not in TORCH_FREE):
        return
    allowed = BACKEND_FOREIGN.get(backend, set()) if backend else FOREIGN.get(layer, set())
    if family not in allowed | FILE_FOREIGN.get(path, set()):
        yield Violation(path, line, "foreign",
                        f"<{target}> ({family}) is not for {'/'.join(filter(None, place))}")


def check_file(path, text):
    place = place_of(path)
    if place[0] not in (*LAYERS, ROOT, TESTING):
        yield Violation(path, 1, "unknown-layer", f"{place[0]} is not in the table of layers")
        return
    for line, delimiter, target in tree.includes(text):
        if target.startswith(tree.WINGS):
            if delimiter != '"':
                yield Violation(path, line, "spelling", f'write "{target}" with quotes')
            yield from check_own_include(path, place, line, target)
        elif delimiter == '"':
            yield Violation(path, line, "spelling",
                            f'"{target}": own headers are named from the top, others in <>')
        else:
            yield from check_foreign_include(path, place, line, target)


def check_python(path, text):
    """python/csrc stands beside the layers: over the engine and core, with nothing of World's."""
    for line, delimiter, target in tree.includes(text):
        if target.startswith(("lockstep/", "python/")):
            if delimiter != '"':
                yield Violation(path, line, "spelling", f'write "{target}" with quotes')
            if not target.startswith(("lockstep/core/", "lockstep/rendezvous/", "lockstep/memory/",
                                      "lockstep/comm/shm/", "python/csrc/")):
                yield Violation(path, line, "layer", f"{path} includes {target}; it may include "
                                                     "core, rendezvous, memory and the engine")
        elif delimiter == '"':
            yield Violation(path, line, "spelling",
                            f'"{target}": own headers are named from the root, others in <>')
        elif family_of(target) not in ("std", "fmt", "aten", "c10d", "python"):
            yield Violation(path, line, "foreign", f"<{target}> ({family_of(target)}) is not for "
                                                   "the Python package")


def check_cycles(texts):
    """Own headers never include each other in a circle, also inside one layer."""
    graph = {path: [t for _, _, t in tree.includes(text) if t in texts]
             for path, text in texts.items()}
    done = set()

    def walk(path, trail):
        if path in trail:
            circle = trail[trail.index(path):] + [path]
            return [Violation(path, 1, "cycle", " -> ".join(circle))]
        if path in done:
            return []
        found = []
        for target in graph[path]:
            found += walk(target, trail + [path])
        done.add(path)
        return found

    return [v for path in graph for v in walk(path, [])]


def check_reach(texts):
    """What lockstep.h reaches holds no vendor header."""
    found = []
    pending, seen = ["lockstep/lockstep.h"], set()
    while pending:
        path = pending.pop()
        if path in seen or path not in texts:
            continue
        seen.add(path)
        for line, _, target in tree.includes(texts[path]):
            if target.startswith(tree.WINGS):
                pending.append(target)
            elif family_of(target) in VENDOR:
                found.append(Violation(path, line, "vendor",
                                       f"<{target}> is reachable from lockstep/lockstep.h"))
    return found


def check_targets(path, text):
    """lockstep_layer(x ... DEPENDS a b) names no layer that x may not include."""
    text = re.sub(r"#[^\n]*", "", text)
    for match in re.finditer(r"lockstep_layer\(\s*(\w+)([^)]*)\)", text):
        layer = match.group(1)
        arguments = match.group(2).split()
        if layer not in LAYERS or "DEPENDS" not in arguments:
            continue
        own_backends = ["shm"] if layer == "comm" else []  # its engine, without torch
        for argument in arguments[arguments.index("DEPENDS") + 1:]:
            if argument in own_backends:
                continue
            if argument.isupper():
                break
            if argument.removesuffix("_torch") not in LAYERS[layer]:
                yield Violation(path, tree.line_of(text, match.start()), "target",
                                f"{layer} links {argument}, which it may not include")


def check(root):
    texts = {p: tree.read(root, p) for p in tree.files(root)
             if p.startswith(tree.WINGS) and pathlib.PurePosixPath(p).suffix in CPP}
    found = []
    for path, text in texts.items():
        found += check_file(path, text)
    for path in tree.files(root):
        if path.startswith(tree.WINGS) and path.endswith("CMakeLists.txt"):
            found += check_targets(path, tree.read(root, path))
        if path.startswith("python/") and pathlib.PurePosixPath(path).suffix in CPP:
            found += check_python(path, tree.read(root, path))
    return found + check_cycles(texts) + check_reach(texts)


def self_test():
    def one(path, *lines):
        return {path: "".join(f"#include {line}\n" for line in lines)}

    planted = {
        None: [
            one("lockstep/comm/world.cpp", '"lockstep/core/error.h"', '"lockstep/comm/backend.h"',
                "<ATen/core/Tensor.h>", "<torch/csrc/distributed/c10d/Backend.hpp>", "<vector>"),
            one("lockstep/comm/gloo/gloo.cpp", '"lockstep/comm/world.h"', "<fmt/format.h>",
                "<torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>"),
            one("lockstep/core/log.cpp", "<spdlog/spdlog.h>", "<sys/socket.h>"),
            one("lockstep/rendezvous/secure_channel.cpp", "<openssl/ssl.h>"),
            one("lockstep/run.cpp", '"launcher/plan.h"', '"lockstep/comm/world.h"'),
            one("lockstep/core/env_test.cpp", "<gtest/gtest.h>", '"lockstep/core/env.h"'),
            one("lockstep/parallel/ddp_test.cpp", '"lockstep/models/causal_lm.h"',
                '"lockstep/testing/world.h"', "<torch/torch.h>"),
            one("lockstep/train/loop.cpp", '"lockstep/parallel/parallelize.h"'),
            one("lockstep/train/loop_test.cpp", '"lockstep/parallel/fully_shard.h"'),
            {"lockstep/core/a.cpp": '// #include <torch/torch.h>\nauto a = "#include <mpi.h>";\n'},
            {"lockstep/comm/CMakeLists.txt": "lockstep_layer(comm SOURCES a DEPENDS core TORCH)\n"},
            one("lockstep/comm/nccl/impl.cpp", "<nccl.h>", "<c10/cuda/CUDAStream.h>"),
            one("lockstep/io/tensors.h", "<ATen/core/Tensor.h>"),
        ],
        "layer": [
            one("lockstep/core/a.cpp", '"launcher/plan.h"'),
            one("lockstep/train/a.cpp", '"launcher/plan.h"'),
            one("lockstep/train/a.cpp", '"lockstep/parallel/fully_shard.h"'),
            one("lockstep/train/a.h", '"lockstep/parallel/ddp.h"'),
            one("lockstep/train/a.cpp", '"observe/dashboard/page.h"'),
            one("lockstep/core/a.cpp", '"lockstep/rendezvous/rank_env.h"'),
            one("lockstep/rendezvous/a.cpp", '"launcher/plan.h"'),
            one("lockstep/rendezvous/a_test.cpp", '"lockstep/comm/world.h"'),
            one("launcher/a.cpp", '"lockstep/comm/world.h"'),
            one("lockstep/comm/a.h", '"lockstep/parallel/ddp.h"'),
            one("lockstep/models/a.h", '"lockstep/comm/world.h"'),
            one("lockstep/parallel/a.cpp", '"lockstep/run.h"'),
            one("lockstep/comm/a.cpp", '"lockstep/testing/world.h"'),
            one("launcher/a_test.cpp", '"lockstep/comm/world.h"'),
            one("python/csrc/a.cpp", '"lockstep/comm/world.h"'),
        ],
        "backend": [
            one("lockstep/comm/world.h", '"lockstep/comm/gloo/socket.h"'),
            one("lockstep/comm/world.cpp", '"lockstep/comm/gloo/socket.h"'),
            one("lockstep/comm/nccl/a.cpp", '"lockstep/comm/gloo/socket.h"'),
            one("lockstep/parallel/a.cpp", '"lockstep/comm/nccl/plugin.h"'),
        ],
        "foreign": [
            one("lockstep/core/a.cpp", "<ATen/core/Tensor.h>"),
            one("launcher/a.h", "<c10/core/Device.h>"),
            one("launcher/a.cpp", "<openssl/ssl.h>"),
            one("lockstep/rendezvous/a.cpp", "<torch/csrc/distributed/c10d/Store.hpp>"),
            one("lockstep/io/safetensors.cpp", "<ATen/core/Tensor.h>"),
            one("launcher/a.cpp", "<cuda.h>"),
            one("launcher/a_test.cpp", "<torch/torch.h>"),
            one("lockstep/comm/a.h", "<torch/torch.h>"),
            one("lockstep/comm/a.cpp", "<nccl.h>"),
            one("lockstep/comm/gloo/a.cpp", "<mpi.h>"),
            one("lockstep/parallel/a.cpp", "<cuda_runtime.h>"),
            one("lockstep/parallel/a.cpp", "<spdlog/spdlog.h>"),
            one("lockstep/core/a.cpp", "<nlohmann/json.hpp>"),
            one("lockstep/core/a.h", "<gtest/gtest.h>"),
            one("lockstep/comm/a.cpp", "<pybind11/pybind11.h>"),
            one("python/csrc/a.cpp", "<torch/torch.h>"),
            one("python/csrc/a.cpp", "<spdlog/spdlog.h>"),
        ],
        "source-only": [
            one("lockstep/core/a.h", "<spdlog/spdlog.h>"),
            one("lockstep/core/c.h", "<yaml-cpp/yaml.h>"),
        ],
        "spelling": [
            one("lockstep/core/a.cpp", '"error.h"'),
            one("lockstep/core/a.cpp", "<lockstep/core/error.h>"),
            one("python/csrc/a.cpp", '"mailbox.h"'),
        ],
        "vendor": [
            one("lockstep/lockstep.h", '"lockstep/kernels/adamw.h"')
            | one("lockstep/kernels/adamw.h", "<cuda_runtime.h>"),
        ],
        "cycle": [one("lockstep/core/a.h", '"lockstep/core/b.h"')
                  | one("lockstep/core/b.h", '"lockstep/core/a.h"')],
        "unknown-layer": [one("lockstep/misc/a.h", "<vector>")],
        "target": [{"lockstep/comm/CMakeLists.txt":
                    "lockstep_layer(comm\n  SOURCES a.cpp\n  DEPENDS core parallel\n  TORCH)\n"}],
    }
    return tree.expect_planted("layers", check, planted)


def main():
    root = os.environ.get("LOCKSTEP_SOURCE") or pathlib.Path(__file__).resolve().parents[2]
    if "--self-test" in sys.argv:
        return self_test()
    count = sum(p.startswith(tree.WINGS) and pathlib.PurePosixPath(p).suffix in CPP
                for p in tree.files(root))
    return tree.report("layers", check(root), f"{count} files")


if __name__ == "__main__":
    sys.exit(main())
