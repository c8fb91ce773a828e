"""docs/api.md lists the public headers and their types, and nothing else is installed.

    python3 tests/style/api_test.py              the project
    python3 tests/style/api_test.py --list       the rows as the headers have them, to copy from
    python3 tests/style/api_test.py --self-test  every rule reports what breaks it

A row is | `lockstep/a/b.h` | `Type`, `Other` | what for |. The rows under "Internal headers" are
those that public ones include. cmake/LockstepInstall.cmake installs what the page lists, so a
header that is missing there would break the installed ones. The pages for users (README.md and
docs/*.md) name no other headers.
"""

import os
import pathlib
import re
import sys

import tree
from tree import Violation

PAGE = "docs/api.md"
ENTRY = "lockstep/lockstep.h"
INTERNAL = "Internal headers"
ROW = re.compile(r"^\| `(lockstep/[\w/]+\.h)` \|([^|]*)\|")

NAMED = re.compile(r"\blockstep/[\w/]+\.h\b")
# Named where a page describes a change of this tree.
SOURCE_TREE = {"lockstep/testing/naive_shard.h", "lockstep/train/rule_options.h"}

# The rule of CONTRIBUTING.md; of `train` alone what lockstep.h does not include.
OWN_NAMESPACE = {"data", "io", "models", "monitor", "nn", "optim"}
# What breaks it: the saved state of a run, which observers see.
NAMESPACE_EXCEPTIONS = {"lockstep/train/trainer_state.h"}

DECLARATION = re.compile(
    r"(?:(?P<kind>class|struct|enum class|enum)\s+(?:\[\[\w+\]\]\s+)?(?P<type>\w+)[^;{}()]*$"
    r"|TORCH_MODULE\((?P<module>\w+)\)$|using\s+(?P<alias>\w+)\s*=[^;]*$)")


def types_of(text):
    """(namespace, name) of each type that a header defines for its users, in order."""
    code = re.sub(r"^[ \t]*#.*(?:\\\n.*)*$", "", tree.code_only(text), flags=re.MULTILINE)
    scopes, begin, found = [], 0, []
    for match in re.finditer(r"[{};]", code):
        head = code[begin:match.start()].strip()
        begin = match.end()
        outside = None not in scopes
        namespace = re.search(r"namespace(?:\s+([\w:]+))?$", head)
        declared = DECLARATION.search(head) if outside and not namespace else None
        if match.group() == "}":
            if scopes:
                scopes.pop()
            continue
        if declared and (match.group() == "{" or not declared["kind"]):
            where = "::".join(scopes)
            if "detail" not in where:
                found.append((where, declared["type"] or declared["module"] or declared["alias"]))
        if match.group() == "{":
            scopes.append((namespace.group(1) or "detail") if namespace else None)
    return found


def reached(root, start):
    """{header: who includes it first} of all that `start` includes, itself too."""
    found, pending = {start: start}, [start]
    while pending:
        path = pending.pop()
        for _, _, target in tree.includes(tree.read(root, path)):
            known = target.startswith("lockstep/") and (pathlib.Path(root) / target).exists()
            if known and target not in found:
                found[target] = path
                pending.append(target)
    return found


def rows(root):
    """{header: (line, names of its types, whether it is internal)} of the page."""
    found, internal = {}, False
    for number, line in enumerate(tree.read(root, PAGE).split("\n"), 1):
        if line.startswith("## "):
            internal = line[3:].startswith(INTERNAL)
        match = ROW.match(line)
        if match:
            found[match.group(1)] = (number, re.findall(r"`(\w+)`", match.group(2)), internal)
    return found


def namespaces_of(path, in_entry):
    folder = path.split("/")[1]
    if folder in OWN_NAMESPACE or (folder == "train" and not in_entry):
        return {f"lockstep::{folder}"}
    return {"lockstep", "lockstep::nn"} if folder == "parallel" else {"lockstep"}


def check_row(root, path, line, names, in_entry):
    declared = types_of(tree.read(root, path))
    wanted = list(dict.fromkeys(name for _, name in declared))
    if sorted(names) != sorted(wanted):
        yield Violation(PAGE, line, "types", f"{path} has " + ", ".join(f"`{w}`" for w in wanted))
    allowed = namespaces_of(path, in_entry)
    for namespace, name in declared:
        if path not in NAMESPACE_EXCEPTIONS and namespace not in allowed:
            yield Violation(path, 1, "namespace",
                            f"{name} is in {namespace}, not in {' or '.join(sorted(allowed))}")


def check_pages(root, listed):
    """What a page names can be included by those who have the installed tree."""
    top = pathlib.Path(root)
    for page in [top / "README.md", *sorted((top / "docs").glob("*.md"))]:
        path = page.relative_to(top).as_posix()
        if path == PAGE or not page.exists():
            continue
        for number, line in enumerate(tree.read(root, path).split("\n"), 1):
            for header in NAMED.findall(line):
                if header not in listed and header not in SOURCE_TREE:
                    yield Violation(path, number, "uninstalled", f"{header} is not installed: "
                                    f"add it to {PAGE}, or do not name it")


def check(root):
    listed = rows(root)
    found = list(check_pages(root, listed))
    entry = reached(root, ENTRY)
    needed = dict(entry)
    for path, (line, names, internal) in listed.items():
        if not (pathlib.Path(root) / path).exists():
            found.append(Violation(PAGE, line, "missing", f"{path} does not exist"))
        elif not internal:
            found += check_row(root, path, line, names, path in entry)
            needed = reached(root, path) | needed
    for path, by in sorted(needed.items()):
        if path not in listed:
            found.append(Violation(by, 1, "unlisted", f"it makes {path} public: use a forward "
                                   f"declaration, include it in the .cpp, or add it to {PAGE}"))
    for path, (line, _, internal) in listed.items():
        if internal and path not in needed and (pathlib.Path(root) / path).exists():
            found.append(Violation(PAGE, line, "unneeded", f"no public header includes {path}"))
    return found


def list_rows(root):
    listed = rows(root)
    needed = reached(root, ENTRY)
    for path, (_, _, internal) in listed.items():
        if not internal and (pathlib.Path(root) / path).exists():
            needed = reached(root, path) | needed
    for path in sorted(needed):
        names = dict.fromkeys(name for _, name in types_of(tree.read(root, path)))
        print(f"| `{path}` | " + ", ".join(f"`{name}`" for name in names) + " |",
              "internal" if listed.get(path, (0, 0, False))[2] else "", f"<- {needed[path]}")
    return 0


def self_test():
    good = {
        "lockstep/lockstep.h": '#include "lockstep/comm/world.h"\n',
        "lockstep/comm/world.h": '#include "lockstep/core/fd.h"\nnamespace lockstep {\n'
                                 "class Later;\nnamespace detail {\nstruct Hidden {};\n}\n"
                                 "enum class Op { kSum };\nusing Name = int;\n"
                                 "class World : public Base {\n  struct Inner {};\n"
                                 "  void f() { struct Local {}; }\n};\nvoid g(struct X* x);\n}\n",
        "lockstep/core/fd.h": "namespace lockstep {\nstruct Fd {};\n}\n",
        "lockstep/io/tensors.h": "namespace lockstep::io {\nstruct Bytes {\n};\n}\n",
        "docs/b.md": "`lockstep/io/tensors.h`, and of this tree `lockstep/testing/naive_shard.h`",
        PAGE: "## Included\n| `lockstep/lockstep.h` |  | all |\n"
              "| `lockstep/comm/world.h` | `Op`, `Name`, `World` | ranks |\n"
              "## On request\n| `lockstep/io/tensors.h` | `Bytes` | files |\n"
              "## Internal headers\n| `lockstep/core/fd.h` | | descriptors |\n",
    }
    page = good[PAGE]
    planted = {
        None: [good],
        "types": [good | {PAGE: page.replace("`Op`, ", "")},
                  good | {PAGE: page.replace("`Op`", "`Op`, `Inner`")}],
        "missing": [good | {PAGE: page + "| `lockstep/core/pipe.h` | | pipes |\n"}],
        "unlisted": [good | {PAGE: page.replace("| `lockstep/core/fd.h` | | descriptors |\n", "")},
                     good | {"lockstep/core/pipe.h": "\n", "lockstep/io/tensors.h":
                             '#include "lockstep/core/pipe.h"\n' + good["lockstep/io/tensors.h"]}],
        "unneeded": [good | {"lockstep/core/pipe.h": "\n",
                             PAGE: page + "| `lockstep/core/pipe.h` | | pipes |\n"}],
        "uninstalled": [good | {"docs/a.md": "`lockstep/core/pipe.h` has it\n"},
                        good | {"README.md": "#include <lockstep/core/pipe.h>\n"}],
        "namespace": [
            good | {"lockstep/io/tensors.h": "namespace lockstep { struct Bytes {}; }\n"}],
    }
    return tree.expect_planted("api", check, planted)


def main():
    root = os.environ.get("LOCKSTEP_SOURCE") or pathlib.Path(__file__).resolve().parents[2]
    if "--self-test" in sys.argv:
        return self_test()
    if "--list" in sys.argv:
        return list_rows(root)
    return tree.report("api", check(root), f"{len(rows(root))} headers")


if __name__ == "__main__":
    sys.exit(main())
