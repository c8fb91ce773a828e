"""Enforces the style of CONTRIBUTING.md on every file of the project.

    python3 tests/style/style_test.py              the rules
    python3 tests/style/style_test.py --format     the pinned clang-format (77: it is not here)
    python3 tests/style/style_test.py --self-test  every rule reports what breaks it
"""

import os
import pathlib
import re
import subprocess
import sys

import tree
from tree import CPP, HEADERS, Violation

HEADER_LINES = 200
SOURCE_LINES = 800
FUNCTION_LINES = 70
LINE_COLUMNS = 100
CONSTRUCTOR_PARAMETERS = 4

# Marks of unfinished work, spelled apart so that this file does not accuse itself.
MARKS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"]) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:home|root|Users|work)/\w")

# Only code that a program links counts as the library: tests and programs may print and exit.
LIBRARY_BANS = [
    ("exit", re.compile(r"(?<![\w.>])(?:std::|::)?(?:exit|quick_exit)\s*\("),
     "exit() in the library; throw, or return a code to main()"),
    ("assert", re.compile(r"(?<!\w)assert\s*\("),
     "assert() vanishes in release; use LOCKSTEP_ASSERT or throw UsageError"),
    ("assert", re.compile(r"#\s*include\s*<(?:cassert|assert\.h)>"),
     "<cassert> in the library; use LOCKSTEP_ASSERT"),
    ("cout", re.compile(r"\bstd::cout\b(?!\.flush\(\))"),
     "std::cout in the library; use lockstep/core/log.h"),
]

# Where a rule gives way, and why. Keep it short.
EXCEPTIONS = {
}


def is_library(path):
    if path.startswith("python/csrc/"):
        return True
    if not path.startswith(tree.WINGS) or path.startswith("lockstep/testing/"):
        return False
    return not re.search(r"_(test|bench|peer|test_main)\.(cpp|cu)$|_for_test\.h$", path)


def is_code(path):
    name = pathlib.PurePosixPath(path).name
    suffix = pathlib.PurePosixPath(path).suffix
    return suffix in CPP | {".py", ".cmake", ".sh"} or name in ("dev", "CMakeLists.txt", "run")


def check_text(path, text):
    """Rules that hold for every text file."""
    for number, line in enumerate(text.split("\n"), 1):
        if MARKS.search(line):
            yield Violation(path, number, "mark", "unfinished work is an issue, not a comment")
        if MACHINE_PATH.search(line):
            yield Violation(path, number, "machine-path", "a path of somebody's machine")
        if line.rstrip() != line:
            yield Violation(path, number, "whitespace", "trailing white space")
        if is_code(path):
            if "\t" in line:
                yield Violation(path, number, "whitespace", "a tab")
            if len(line) > LINE_COLUMNS:
                yield Violation(path, number, "line", f"{len(line)} columns (limit {LINE_COLUMNS})")
    if text and not text.endswith("\n"):
        yield Violation(path, text.count("\n") + 1, "whitespace", "no newline at the end")


def check_file_name(path):
    name = pathlib.PurePosixPath(path).name
    if pathlib.PurePosixPath(path).suffix not in CPP | {".py"}:
        return
    if name != "__init__.py" and not re.fullmatch(r"[a-z0-9][a-z0-9_]*\.[a-z]+", name):
        yield Violation(path, 1, "file-name", "file names are snake_case")
    if path.startswith(tree.WINGS) and path.endswith((".cc", ".cxx", ".hpp")):
        yield Violation(path, 1, "file-name", "headers end in .h, sources in .cpp")


def check_size(path, text):
    lines = text.count("\n")
    suffix = pathlib.PurePosixPath(path).suffix
    limit = HEADER_LINES if suffix in HEADERS else SOURCE_LINES
    if suffix in CPP | {".py"} and lines > limit:
        yield Violation(path, lines, "size", f"{lines} lines (limit {limit})")


def check_header(path, text):
    code = tree.code_only(text)
    if not text.startswith("//"):
        yield Violation(path, 1, "opening", "a header opens by saying what it is for")
    directive = re.search(r"^[ \t]*#[^\n]*", code, re.MULTILINE)
    if not directive or directive.group(0).strip() != "#pragma once":
        yield Violation(path, 1, "pragma-once", "#pragma once is the first directive")
    for match in re.finditer(r"\busing\s+namespace\b", code):
        yield Violation(path, tree.line_of(text, match.start()), "using-namespace",
                        "using namespace in a header")


def check_library(path, text):
    code = tree.code_only(text)
    for rule, pattern, message in LIBRARY_BANS:
        if (path, rule) in EXCEPTIONS:
            continue
        for match in pattern.finditer(code):
            yield Violation(path, tree.line_of(text, match.start()), rule, message)


# ---------------------------------------------------------------- functions and constructors

CLASS_HEAD = re.compile(r"(?:^|[\s>;])(?:class|struct|union)\s+(?:\[\[[^\]]*\]\]\s*)?"
                        r"(?:alignas\s*\([^)]*\)\s*)?([\w:]+)(?:\s+final)?(?:\s*<[^{;]*>)?"
                        r"\s*(?::[^:{;][^{;]*)?$")
SCOPE_HEAD = re.compile(r'(?:^|\s)(?:inline\s+)?namespace\b[^()=]*$|extern\s+"[^"]*"\s*$')
ENUM_HEAD = re.compile(r"(?:^|\s)enum\b[^()]*$")
MEMBER_INIT = re.compile(r"\)\s*(?:noexcept\s*(?:\([^()]*\))?\s*)?:\s*[^:]")


def blocks(code):
    """(kind, head, start, end) of each outermost function and each class, from its first token.

    Counts braces. A block is what its head, the text since the last `;` or brace, says it is.
    """
    found = []
    stack = []  # (kind, head, start of head)
    head_start = 0
    parens = 0
    for match in re.finditer(r"[{}();]", code):
        symbol, at = match.group(0), match.start()
        if symbol in "()":
            parens += 1 if symbol == "(" else -1
            continue
        if symbol == ";":
            if parens == 0:
                head_start = at + 1
            continue
        if symbol == "}":
            if not stack:
                continue
            kind, head, start, saved = stack.pop()
            parens = saved
            if kind in ("function", "class"):
                found.append((kind, head, start, at))
            if kind != "initialiser":
                head_start = at + 1
            continue
        inside = [entry[0] for entry in stack]
        head = code[head_start:at]
        kind = kind_of(head, parens)
        if "function" in inside or "initialiser" in inside:
            kind = "initialiser" if kind == "initialiser" else "block"
        start = head_start + len(head) - len(head.lstrip())
        stack.append((kind, head.strip(), start, parens))
        parens = 0
        if kind != "initialiser":
            head_start = at + 1
    return found


def kind_of(head, parens):
    head = re.sub(r"^[ \t]*#.*(?:\\\n.*)*$", "", head, flags=re.MULTILINE).strip()
    head = re.sub(r"^(?:public|private|protected)\s*:\s*", "", head)
    if parens:
        return "initialiser"  # a braced argument, or a lambda that is one
    if SCOPE_HEAD.search(head):
        return "scope"
    if ENUM_HEAD.search(head):
        return "block"
    if CLASS_HEAD.search(head):
        return "class"
    if MEMBER_INIT.search(head) and re.search(r"[\w>]$", head):
        return "initialiser"  # Foo() : member_{...}
    if ")" in head:
        return "function"
    return "initialiser"


def check_functions(path, text):
    code = tree.code_only(text)
    # A macro's definition is not a function of this file; its lines stay, empty.
    code = re.sub(r"^[ \t]*#[^\n]*(?:\\\n[^\n]*)*", lambda m: re.sub(r"[^\n]", " ", m.group(0)),
                  code, flags=re.MULTILINE)
    for kind, head, start, end in blocks(code):
        first = tree.line_of(code, start)
        lines = tree.line_of(code, end) - first + 1
        if kind == "function" and lines > FUNCTION_LINES:
            name = re.search(r"([~\w:]+)\s*\(", head)
            yield Violation(path, first, "function",
                            f"{name.group(1) if name else 'function'} has {lines} lines "
                            f"(limit {FUNCTION_LINES})")
        if kind == "class":
            name = CLASS_HEAD.search(head).group(1).split("::")[-1]
            yield from check_constructors(path, code, name, start, end)


def check_constructors(path, code, name, start, end):
    pattern = re.compile(rf"(?<![\w:~.>])(?:explicit\s+)?{re.escape(name)}\s*\(")
    # A call inside a member function's body is not a declaration: look at the class's own level.
    level = level_one(code[start:end])
    for match in pattern.finditer(level):
        before = level[:match.start()].rstrip()
        if before and not re.search(r"[;{}:>]$|\b(?:explicit|constexpr|inline)$", before):
            continue
        count = parameter_count(code[start + match.end():end])
        if count > CONSTRUCTOR_PARAMETERS:
            yield Violation(path, tree.line_of(code, start + match.start()), "constructor",
                            f"{name} takes {count} parameters (limit {CONSTRUCTOR_PARAMETERS}); "
                            "use an options struct")


def level_one(code):
    """The code with everything nested deeper than the first brace blanked."""
    result = []
    depth = 0
    for character in code:
        depth -= character == "}"
        keep = depth <= 1 or character == "\n"
        result.append(character if keep else " ")
        depth += character == "{"
    return "".join(result)


def parameter_count(rest):
    """How many parameters stand before the parenthesis that closes `rest`."""
    depth = 0
    commas = 0
    for at, character in enumerate(rest):
        if character in "([{<":
            depth += 1
        elif character in ")]}>":
            if depth == 0:
                return commas + 1 if rest[:at].strip() not in ("", "void") else 0
            depth -= character != ">" or rest[at - 1] != "-"
        elif character == "," and depth == 0:
            commas += 1
    return 0


# ---------------------------------------------------------------- the whole

def check(root):
    found = []
    for path in tree.files(root):
        raw = (pathlib.Path(root) / path).read_bytes()
        # Inputs of fuzzers are bytes, whatever they look like.
        if b"\0" in raw or path.startswith(("tests/fuzz/corpus/", "tests/fuzz/found/")):
            continue
        text = tree.read(root, path)
        suffix = pathlib.PurePosixPath(path).suffix
        found += check_text(path, text)
        found += check_file_name(path)
        found += check_size(path, text)
        if suffix in HEADERS:
            found += check_header(path, text)
        if suffix in CPP:
            found += check_functions(path, text)
            if is_library(path):
                found += check_library(path, text)
    return found


def check_format(root):
    """The pinned clang-format changes nothing. It comes with requirements.txt."""
    pinned = re.search(r"^clang-format==(\S+)", tree.read(root, "requirements.txt"), re.MULTILINE)
    python = os.environ.get("LOCKSTEP_PYTHON") or sys.executable
    tool = pathlib.Path(python).parent / "clang-format"
    if not tool.exists():
        print(f"SKIP 1: clang-format {pinned.group(1)} is not beside {python}; "
              "a LibTorch from elsewhere does not bring it")
        return 77
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True)
    if pinned.group(1) not in version.stdout:
        print(f"clang-format is {version.stdout.strip()}, requirements.txt pins {pinned.group(1)}")
        return 1
    sources = [p for p in tree.files(root) if pathlib.PurePosixPath(p).suffix in CPP]
    outcome = subprocess.run([tool, "--dry-run", "--Werror", *sources], cwd=root,
                             capture_output=True, text=True, check=False)
    wrong = sorted(set(re.findall(r"^([^\s:]+):\d+:\d+: error:", outcome.stderr, re.MULTILINE)))
    found = [Violation(p, 1, "format", "run ./dev format") for p in wrong]
    if outcome.returncode and not found:
        print(outcome.stderr)
        return 1
    return tree.report("format", found, f"{len(sources)} files, clang-format {pinned.group(1)}")


def self_test():
    head = "// What it is for.\n#pragma once\n"
    long_body = "  x();\n" * 69
    good = (head + "namespace a {\nclass Box {\n public:\n  Box(int a, int b = f(1, 2, 3), "
            "std::map<int, int> c = {}, int d = 0);\n  explicit Box(int a) : a_{a}, b_(2) {\n"
            "    Box(1, 2, 3, 4, 5);\n  }\n  int a_{0};\n  int b_;\n};\n"
            "void f() {\n" + "  x();\n" * 68 + "}\nint kSize{1'000};\n}  // namespace a\n")
    planted = {
        None: [
            {"lockstep/core/a.h": good},
            {"lockstep/core/a.cpp": "// exit(1) and assert(x), said in a comment\n"
                                    'const char* a = "assert(x) // std::cout";\n'
                                    "static_assert(true);\n"
                                    "void f() { on_exit(1); task.exit(2); std::cout.flush(); }\n"},
            {"cli/main.cpp": "#include <cassert>\nint main() { exit(0); }\n"},
            {"lockstep/core/a_test.cpp": "void f() { exit(0); }\n"},
            {"python/a/__init__.py": "\n"},
            {"build/a.h": "", "build-asan/b.h": "", "docs/a.md": "x" * 200 + "\n"},
            {"lockstep/core/a.cpp": 'const char* a = R"(\n{{{ assert(x)\n)";\nvoid f() {}\n'},
        ],
        "size": [
            {"lockstep/core/a.h": head + "// x\n" * 199},
            {"lockstep/core/a.cpp": "// x\n" * 801},
        ],
        "line": [{"lockstep/core/a.cpp": "// " + "x" * 98 + "\n"},
                 {"cmake/a.cmake": "# " + "x" * 99 + "\n"}],
        "function": [
            {"lockstep/core/a.cpp": "void f(int a) {\n" + long_body + "}\n"},
            {"lockstep/core/a.cpp": "namespace {\nstruct A {\n  A(int a)\n      : a_{a}, b_(2) {\n"
                                    + long_body + "  }\n};\n}\n"},
            {"lockstep/core/a.cpp": "TEST(A, b) {\n" + long_body + "}\n"},
            {"lockstep/core/a.cpp": "template <typename T>\nauto f(T t) -> int {\n" + long_body
                                    + "}\n"},
            {"lockstep/core/a.cpp": "const auto f = [](int a) {\n" + long_body + "};\n"},
            {"lockstep/core/a.cpp": "int a[] = {1, 2};\nvoid f(A a = {1}) {\n  if (x) {\n"
                                    + long_body + "  }\n}\n"},
        ],
        "constructor": [
            {"lockstep/core/a.h": head + "class A {\n  A(int a, int b, int c, int d,\n"
                                         "    int e);\n};\n"},
            {"lockstep/core/a.cpp": "struct A : B<int, 2> {\n  int x = 0;\n  explicit A(int a, "
                                    "std::map<int, int> b,\n    int c, int d, int e) {}\n};\n"},
        ],
        "pragma-once": [
            {"lockstep/core/a.h": "// What.\n#include <x>\n#pragma once\n"},
            {"examples/a/a.h": "// What.\nint a;\n"},
        ],
        "opening": [{"lockstep/core/a.h": "#pragma once\n"}],
        "using-namespace": [{"lockstep/core/a.h": head + "using namespace std;\n"}],
        "mark": [{"lockstep/core/a.cpp": "// TO" + "DO: later\n"}, {"docs/a.md": "FIX" + "ME\n"},
                 {"dev": "# HA" + "CK\n"}],
        "machine-path": [{"docs/a.md": "see /ho" + "me/me/x\n"},
                         {"tests/a/a.py": "x = '/wo" + "rk/main'\n"}],
        "exit": [{"lockstep/core/a.cpp": "void f() { exit(1); }\n"},
                 {"lockstep/core/a.cpp": "void f() { std::exit(1); }\n"},
                 {"python/csrc/a.cpp": "void f() { exit(1); }\n"}],
        "assert": [{"lockstep/core/a.cpp": "void f() { assert(x); }\n"},
                   {"lockstep/core/a.cpp": "#include <cassert>\n"}],
        "cout": [{"lockstep/core/a.cpp": "void f() { std::cout << 1; }\n"}],
        "file-name": [{"lockstep/core/MyFile.cpp": "\n"}, {"tests/a/my-test.py": "\n"}],
        "whitespace": [{"lockstep/core/a.cpp": "int a; \n"}, {"lockstep/core/a.cpp": "\tint a;\n"},
                       {"docs/a.md": "no newline"}],
    }
    return tree.expect_planted("style", check, planted)


def main():
    root = os.environ.get("LOCKSTEP_SOURCE") or pathlib.Path(__file__).resolve().parents[2]
    if "--self-test" in sys.argv:
        return self_test()
    if "--format" in sys.argv:
        return check_format(root)
    return tree.report("style", check(root), f"{len(tree.files(root))} files")


if __name__ == "__main__":
    sys.exit(main())
