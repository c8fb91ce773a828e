"""The C++ in documents and in the comments that open headers compiles.

    python3 tests/snippets/snippets_test.py              one translation unit of all snippets
    python3 tests/snippets/snippets_test.py --self-test  a snippet that does not compile is named

Checked: every block of docs/ that opens with ```cpp, and the indented lines of the opening comment
of each header in HEADERS. A snippet stands in a function of its own, where tests/snippets/context.h
declares what it takes as given (world, net, model, ...); one that defines functions stands in a
namespace of its own. One that never writes `lockstep::` stands below `using namespace lockstep`
(in a header also that of its folder). Errors carry the snippet's file and line. Nothing is linked.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

# The compile command whose flags and precompiled header are borrowed.
BORROWED = "tests/ledger/stall_peer.cpp"
TIMEOUT_S = 1200
CONTEXT = '#include "tests/snippets/context.h"\n'
# For the self-test, which is about errors and their places: without torch it takes a second.
FEW_WORDS = "namespace lockstep { struct World { int rank(); }; }\nextern lockstep::World world;\n"
HEADERS = (
    "lockstep/comm/mesh.h",
    "lockstep/comm/world.h",
    "lockstep/data/loader.h",
    "lockstep/data/token_shards.h",
    "lockstep/data/window.h",
    "lockstep/memory/cpu_cache.h",
    "lockstep/optim/algorithms.h",
    "lockstep/optim/amp.h",
    "lockstep/optim/clip.h",
    "lockstep/optim/determinism.h",
    "lockstep/optim/ema.h",
    "lockstep/optim/schedule.h",
    "lockstep/optim/optimizer.h",
    "lockstep/parallel/activation_checkpoint.h",
    "lockstep/parallel/ddp.h",
    "lockstep/parallel/fully_shard.h",
    "lockstep/parallel/sync_batch_norm.h",
    "lockstep/run.h",
    "lockstep/train/arguments.h",
    "lockstep/train/task.h",
    "lockstep/train/trainer.h",
)


def fenced(text):
    """(line, code) of each block that opens with ```cpp alone."""
    for match in re.finditer(r"^```cpp\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, match.start()) + 2, match.group(1)


def commented(text):
    """(line, code) of each run of indented lines in the comment that opens a header."""
    code, first = [], 0
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("//   "):
            first = first or number
            code.append(line[5:])
            continue
        if code:
            yield first, "\n".join(code) + "\n"
        code, first = [], 0
        if not line.startswith("//"):
            return


def snippets(root):
    for path in sorted(pathlib.Path(root, "docs").glob("**/*.md")):
        for line, code in fenced(path.read_text()):
            yield path.relative_to(root), line, code
    for name in HEADERS:
        for line, code in commented(pathlib.Path(root, name).read_text()):
            yield name, line, code


def defines_functions(code):
    return re.search(r"^(?:int|void|auto|at::Tensor|std::unique_ptr<[\w:]+>) \w+\([^;]*\) \{", code,
                     re.MULTILINE)


def unit(found, context):
    """One source of all snippets. Includes of the library are in the context."""
    text = context
    for number, (path, line, code) in enumerate(found):
        code = re.sub(r'^#include [<"]lockstep/.*$', "", code, flags=re.MULTILINE)
        body = f'#line {line} "{path}"\n{code}'
        if not defines_functions(code):
            body = f"[[maybe_unused]] auto snippet() {{\n{body}\n}}\n"
        else:  # a program's main, or two of them, are ordinary functions here
            mains = iter(range(99))
            body = re.sub(r"\bint main\(", lambda _: f"int main_{next(mains)}(", body)
        using = "" if "lockstep::" in code else "using namespace lockstep;\n"
        folder = re.match(r"lockstep/(data|io|optim|train)/", str(path))
        if using and folder:
            using += f"using namespace lockstep::{folder.group(1)};\n"
        text += f"namespace snippets::s{number} {{\n{using}{body}\n}}\n"
    return text


def compiler(root):
    """The borrowed command without its input and output; None: no build tree to borrow from."""
    commands = pathlib.Path(os.environ["LOCKSTEP_BIN"]).parent / "compile_commands.json"
    if not commands.exists():
        return None
    for entry in json.loads(commands.read_text()):
        if entry["file"] == str(pathlib.Path(root, BORROWED)):
            words = shlex.split(entry["command"])
            output = words.index("-o")
            del words[output:output + 2]
            return [w for w in words if w not in ("-c", entry["file"])], entry["directory"]
    return None


def compile_all(root, found, context):
    borrowed = compiler(root)
    if borrowed is None:
        return None
    words, directory = borrowed
    if context == FEW_WORDS:
        precompiled = words.index("-include")
        del words[precompiled:precompiled + 2]
    with tempfile.TemporaryDirectory(prefix="lockstep-snippets-") as folder:
        source = pathlib.Path(folder, "snippets.cpp")
        source.write_text(unit(found, context))
        return subprocess.run([*words, "-fsyntax-only", "-Wno-unused", f"-I{root}", str(source)],
                              cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S,
                              check=False)


def main():
    root = pathlib.Path(os.environ["LOCKSTEP_SOURCE"])
    if "--self-test" in sys.argv:
        # The first would compile; the others are the two kinds of scope.
        found = [("good.md", 3, "const int rank = world.rank();\n"),
                 ("bad.md", 5, "world.rnak();\n"),
                 ("worse.md", 7, "\nint main() {\n  return nothing;\n}\n")]
    else:
        found = list(snippets(root))
    done = compile_all(root, found, FEW_WORDS if "--self-test" in sys.argv else CONTEXT)
    if done is None:
        print(f"SKIP: no compile_commands.json with {BORROWED}")
        return 77
    if "--self-test" not in sys.argv:
        print(f"{done.stderr}snippets: {len(found)} compiled, exit code {done.returncode}")
        return done.returncode
    named = sorted(set(re.findall(r"^(\S+?:\d+):\d+: error:", done.stderr, re.MULTILINE)))
    print(f"{done.stderr}snippets: errors at {named}")
    return 0 if named == ["bad.md:5", "worse.md:9"] else 1


if __name__ == "__main__":
    sys.exit(main())
