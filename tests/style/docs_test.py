"""Documents match the code: programs compile, paths exist, variables and seed rows are listed.

    python3 tests/style/docs_test.py              what can be read
    python3 tests/style/docs_test.py --run        commands marked `sh run` are executed, and the
                                                  tests of the README's claims are quick tests
    python3 tests/style/docs_test.py --self-test  every rule reports what breaks it

A fenced block that opens with ```sh run is executed from the project's root; `build/` in it stands
for the build tree under test. One that opens with ```cpp from PATH stands in that file, which tests
compile.
"""

import os
import pathlib
import re
import subprocess
import sys

import tree
from tree import CPP, Violation

SEED_ROWS = {"000-": 23, "001-": 27, "002-": 41, "003-": 35, "004-": 21, "C": 22}
NAMES_A_TEST = re.compile(r"`[^`]*(?:_test\.|tests/|check_readme|check_diff)[^`]*`")
SEED_MAP = "docs/dev/seed_map.md"
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md",
             "python/README.md")
# What a path in a document may begin with. Other text with a slash is ignored.
TOP = r"(?:lockstep|launcher|observe|docs|examples|tests|cmake|cli|bench|tools|python|\.ci)/"
RUN_TIMEOUT_S = 600


def fences(text):
    """(line, info string, body) of each fenced block."""
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield tree.line_of(text, match.start()), match.group(1).strip(), match.group(2)


def documents(root):
    return [p for p in tree.files(root)
            if p in DOCUMENTS or (p.startswith("docs/") and p.endswith(".md"))]


def check_paths(root, path, text):
    """Code spans and links that name files of the project name files that are there."""
    base = pathlib.Path(root)
    for match in re.finditer(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        target = match.group(1)
        if "://" not in target and not (base / path).parent.joinpath(target).exists():
            yield Violation(path, tree.line_of(text, match.start()), "link", f"{target} is missing")
    for match in re.finditer(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", blank, text,
                                                    flags=re.DOTALL | re.MULTILINE)):
        for name in re.findall(rf"(?<![\w/.<-]){TOP}[\w./*{{}},-]*", match.group(1)):
            name = name.rstrip(".,")
            for one in braces(name):
                if not (any(base.glob(one)) if "*" in one else (base / one).exists()):
                    yield Violation(path, tree.line_of(text, match.start()), "path",
                                    f"{one} is missing")


def blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


def braces(name):
    """a.{h,cpp} as a.h and a.cpp."""
    match = re.search(r"\{([^{}]*)\}", name)
    if not match:
        return [name]
    return [one for part in match.group(1).split(",")
            for one in braces(name[:match.start()] + part + name[match.end():])]


def check_program(root, text):
    """The README's C++ block is examples/readme/main.cpp, which tests build and run."""
    blocks = [(line, body) for line, info, body in fences(text) if info == "cpp"]
    wanted = tree.read(root, "examples/readme/main.cpp")
    if len(blocks) != 1 or blocks[0][1] != wanted:
        yield Violation("README.md", blocks[0][0] if blocks else 1, "program",
                        "the program is not the text of examples/readme/main.cpp")


def check_excerpts(root, path, text):
    """A block that names its source file is in that file verbatim."""
    for line, info, body in fences(text):
        source = re.fullmatch(r"cpp from (\S+)", info)
        if source and body not in tree.read(root, source.group(1)):
            yield Violation(path, line, "excerpt", f"this is not in {source.group(1)}")


def check_commands(root, text):
    """Every command of ./dev is in the table of commands."""
    script = tree.read(root, "dev")
    usage = re.search(r"<<'TEXT'\n(.*?)\nTEXT", script, re.DOTALL).group(1)
    for command in sorted(set(re.findall(r"^  ([a-z]+)", usage, re.MULTILINE))):
        if f"./dev {command}" not in text:
            yield Violation("docs/README.md", 1, "command", f"./dev {command} is not mentioned")


def check_architecture(root):
    """Every layer's folder has its line."""
    text = tree.read(root, "ARCHITECTURE.md")
    folders = {p.rsplit("/", 1)[0] for p in tree.files(root)
               if re.match(r"((lockstep|observe)/\w+|launcher)/[^/]+\.(h|cpp|cu)$", p)}
    for folder in sorted(folders):
        if folder not in text:
            yield Violation("ARCHITECTURE.md", 1, "folder", f"{folder} is not described")


# A name handed to whatever reads or sets one, and any string that is a name of a launcher's family:
# those also stand in tables.
CALLED = (r'\b(?:get|get_int|get_bool|getenv|setenv|unsetenv|parse_int|parse_bool|number|variable)'
          r'\(\s*"([A-Z][A-Z0-9_]*[A-Z0-9])"')
FAMILY = (r'"((?:LOCKSTEP|TORCHELASTIC|TORCH_NCCL|TORCH_FR|PET|OMPI|PMI|PMIX|MPI|MV2|SLURM'
          r'|KUBERNETES|ACCELERATE|MASTER|LOCAL|GROUP|ROLE|NODE)_[A-Za-z0-9_]*[A-Za-z0-9]'
          r'|RANK|WORLD_SIZE)["=]')
PYTHON_READS = r'(?:environ(?:\.\w+)?[\[(]|getenv\()\s*"([A-Z][A-Z0-9_]+)"'
OF_THE_SHELL = {"BASH_SOURCE", "PWD", "OLDPWD", "EUID", "UID", "RANDOM", "SECONDS"}


def names_in(root, path):
    """The variables that one file reads or sets."""
    suffix = pathlib.PurePosixPath(path).suffix
    is_test = path.startswith(("tests/", "lockstep/testing/")) or "_test." in path
    if path == "dev":
        return set(re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", tree.read(root, path))) - OF_THE_SHELL
    if suffix in CPP and not is_test:
        code = tree.code_only(tree.read(root, path), keep_strings=True)
        return set(re.findall(CALLED, code)) | set(re.findall(FAMILY, code))
    if suffix == ".py" and not is_test:
        return set(re.findall(PYTHON_READS, tree.read(root, path)))
    if path == "cmake/LockstepLayer.cmake":
        return set(re.findall(r"(LOCKSTEP_[A-Z]+)=", tree.read(root, path)))
    return set()


def variables(root):
    """{name: where} of each environment variable that programs and scripts read or set."""
    found = {}
    defined = set()
    for path in tree.files(root):
        if pathlib.PurePosixPath(path).suffix in CPP:
            defined |= set(re.findall(r"#\s*define\s+(LOCKSTEP_\w+)", tree.read(root, path)))
        for name in names_in(root, path):
            found.setdefault(name, path)
    return {name: path for name, path in found.items() if name not in defined}


def check_variables(root):
    documented = tree.read(root, "docs/environment.md")
    for name, path in sorted(variables(root).items()):
        if not re.search(rf"\b{name}\b", documented):
            yield Violation("docs/environment.md", 1, "variable", f"{name} ({path}) is not there")


def check_case(root, span):
    """What is wrong with `a_test.cpp Case`, if anything; check_paths() has seen to the path."""
    path, _, case = span.partition(" ")
    file = pathlib.Path(root) / path
    if case and not (file.is_file() and re.search(
            rf"\b[A-Z_]+\((?:\w+,\s*)?{case}\s*[,)]|\bdef {case}\(", file.read_text())):
        return f"{path} has no case {case}"
    return None


def check_seed_map(root):
    """One line per row, whose last column names tests, and cases that those have."""
    path = SEED_MAP
    rows = {}
    for number, line in enumerate(tree.read(root, path).split("\n"), 1):
        match = re.match(r"\| ((?:00\d-|C)\d+) \|(?:.*\|)? ([^|]*) \|$", line)
        if match:
            if match.group(1) in rows:
                yield Violation(path, number, "seed-row", f"{match.group(1)} is there twice")
            rows[match.group(1)] = (number, match.group(2))
    for prefix, count in SEED_ROWS.items():
        for row in (f"{prefix}{i}" for i in range(1, count + 1)):
            if row not in rows:
                yield Violation(path, 1, "seed-row", f"{row} is missing")
    for row, (number, tests) in rows.items():
        if not NAMES_A_TEST.search(tests):
            yield Violation(path, number, "seed-row", f"{row} names no test")
        for span in re.findall(r"`([^`]+)`", tests):
            wrong = check_case(root, span)
            if wrong:
                yield Violation(path, number, "seed-row", wrong)


def check(root):
    found = []
    for path in documents(root):
        found += check_paths(root, path, tree.read(root, path))
        found += check_excerpts(root, path, tree.read(root, path))
    readme = tree.read(root, "README.md")
    found += check_program(root, readme)
    found += check_commands(root, tree.read(root, "docs/README.md"))
    found += check_architecture(root)
    found += check_variables(root)
    found += check_seed_map(root)
    if "## Unreleased" not in tree.read(root, "CHANGELOG.md"):
        found.append(Violation("CHANGELOG.md", 1, "changelog", "no section '## Unreleased'"))
    return found


def missing_claims(root, build):
    """The tests that CONTRIBUTING.md names for claims of the README and that are not quick."""
    table = re.search(r"^\| claim of the README .*?\n\n", tree.read(root, "CONTRIBUTING.md"),
                      re.DOTALL | re.MULTILINE).group(0)
    named = [name for row in table.splitlines()[2:-1]
             for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    tests = "".join(path.read_text() for path in build.rglob("CTestTestfile.cmake"))
    quick = set(re.findall(r'^set_tests_properties\(\W*(\w+).*LABELS "[^"]*\bquick\b', tests,
                           re.MULTILINE))
    return [name for name in named if not {name, f"{name}_quick"} & quick]


def run_commands(root):
    build = pathlib.Path(os.environ.get("LOCKSTEP_BIN") or pathlib.Path(root) / "build/bin").parent
    ran, failed = 0, 0
    for path in documents(root):
        for line, info, body in fences(tree.read(root, path)):
            if info != "sh run":
                continue
            for command in (c for c in body.split("\n") if c.strip() and not c.startswith("#")):
                ran += 1
                print(f"{path}:{line}: {command}", flush=True)
                script = re.sub(r"(?<![\w/.-])build/", f"{build}/", command)
                done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=root,
                                      timeout=RUN_TIMEOUT_S, check=False)
                if done.returncode:
                    failed += 1
                    print(f"{path}:{line}: ended with {done.returncode}: {command}")
    for name in missing_claims(root, build):
        failed += 1
        print(f"CONTRIBUTING.md: claim: {name} is not a quick test")
    print(f"docs: {ran} commands run, {failed} failed")
    return 1 if failed or not ran else 0


def good_project():
    seed_map = "".join(f"| {prefix}{i} | x | `lockstep/core/a_test.cpp` |\n"
                       for prefix, count in SEED_ROWS.items() for i in range(1, count + 1))
    return {
        "README.md": "```cpp\nint main() {}\n```\n",
        "docs/README.md": "`./dev test`\n",
        "examples/readme/main.cpp": "int main() {}\n",
        "dev": "cat <<'TEXT'\n  test   run\nTEXT\necho ${LOCKSTEP_JOBS:-}\n",
        "ARCHITECTURE.md": "`lockstep/core/`, `lockstep/core/a.{h,cpp}`, [map](docs/a.md)\n",
        "CHANGELOG.md": "## Unreleased\n",
        "lockstep/core/a.h": "#define LOCKSTEP_X(a) a\n",
        "lockstep/core/a.cpp": 'auto a = env::get("LOCKSTEP_LOG");\n// "LOCKSTEP_NOT"\n',
        "lockstep/core/a_test.cpp": 'TEST(A, Works) { setenv("LOCKSTEP_TEST_X", "1", 1); }\n',
        "lockstep/core/table.cpp": 'const Names kMpi = {"PMI_RANK", "PMI"};  // "PMI_NOT"\n',
        "bench/peer.py": 'where = os.environ.get("TMPDIR") or os.environ["PATH"]\n',
        "tests/a/a_test.py": 'os.environ["NOTES"]\n',
        "docs/environment.md": "LOCKSTEP_LOG LOCKSTEP_JOBS PMI_RANK TMPDIR PATH\n",
        SEED_MAP: seed_map,
        "docs/a.md": "\n",
        "docs/excerpt.md": "```cpp from lockstep/core/a.h\n#define LOCKSTEP_X(a) a\n```\n",
    }


def self_test():
    good = good_project()
    planted = {
        None: [good, good | {SEED_MAP: good[SEED_MAP].replace("test.cpp` |", "test.cpp Works` |")}],
        "path": [good | {"CONTRIBUTING.md": "See `lockstep/core/b.h`.\n"},
                 good | {"docs/a.md": "`tests/style/*_test.py`\n"}],
        "link": [good | {"docs/a.md": "[x](nowhere.md)\n"}],
        "program": [good | {"examples/readme/main.cpp": "int main() { return 0; }\n"}],
        "excerpt": [good | {"docs/excerpt.md": "```cpp from lockstep/core/a.h\nint x;\n```\n"}],
        "command": [good | {"docs/README.md": "nothing\n"}],
        "folder": [good | {"lockstep/comm/world.h": "\n"}],
        "variable": [good | {"lockstep/core/b.cpp": 'get("LOCKSTEP_NEW");\n'},
                     good | {"lockstep/core/b.cpp": 'env::get_int("SOMETHING", 0);\n'},
                     good | {"cli/b.cpp": 'x = {.name = "SLURM_PROCID"};\n'},
                     good | {"bench/b.cpp": 'std::getenv(\n    "COLUMNS");\n'},
                     good | {"bench/b.py": 'os.getenv("COLUMNS")\n'},
                     good | {"dev": good["dev"] + "echo ${XDG_CACHE_HOME:-}\n"},
                     good | {"docs/environment.md":
                             good["docs/environment.md"].replace("LOCKSTEP_LOG", "LOCKSTEP_LOGS")}],
        "seed-row": [good | {SEED_MAP: good[SEED_MAP].replace("002-41", "x")},
                     *(good | {SEED_MAP: good[SEED_MAP].replace(
                         "| C7 | x | `lockstep/core/a_test.cpp` |", f"| C7 | x | {text} |")}
                       for text in ("somehow", "`lockstep/core/a.h`", "a_test.cpp",
                                    "`lockstep/core/a_test.cpp Work`"))],
        "changelog": [good | {"CHANGELOG.md": "# 1.0\n"}],
    }
    return tree.expect_planted("docs", check, planted)


def main():
    root = os.environ.get("LOCKSTEP_SOURCE") or pathlib.Path(__file__).resolve().parents[2]
    if "--self-test" in sys.argv:
        return self_test()
    if "--run" in sys.argv:
        return run_commands(root)
    return tree.report("docs", check(root), f"{len(documents(root))} documents")


if __name__ == "__main__":
    sys.exit(main())
