"""What the style, layer and docs tests share: the project's files, and C++ text without its noise.

A violation is one printed line, `path:line: rule: what is wrong`, so that an editor can jump to it.
"""

import dataclasses
import pathlib
import re
import tempfile

CPP = {".h", ".cpp", ".cu", ".cuh"}
HEADERS = {".h", ".cuh"}
# The library, what starts its programs, and what only looks at runs.
WINGS = ("lockstep/", "launcher/", "observe/")


@dataclasses.dataclass(frozen=True)
class Violation:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def files(root):
    """Every file of the project, without build trees, caches and version control."""
    root = pathlib.Path(root)
    found = []
    pending = [root]
    while pending:
        for entry in sorted(pending.pop().iterdir()):
            name = entry.name
            if entry.is_symlink():
                continue
            if entry.is_dir():
                top_level = entry.parent == root
                if name in (".git", ".cache", "__pycache__"):
                    continue
                if top_level and (name in ("build", "out") or name.startswith("build-")):
                    continue
                pending.append(entry)
            elif not name.endswith(".pyc"):
                found.append(entry.relative_to(root).as_posix())
    return sorted(found)


def read(root, path):
    return (pathlib.Path(root) / path).read_text(encoding="utf-8", errors="replace")


TOKEN = re.compile(
    r"""//[^\n]*                                         # comment to the end of the line
      | /\*.*?\*/                                        # block comment
      | \bR"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)"     # raw string
      | "(?:\\.|[^"\\\n])*"                              # string
      | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'              # character (not a digit separator)
    """,
    re.DOTALL | re.VERBOSE,
)


def code_only(text, keep_strings=False):
    """The same lines and columns, with comments and the contents of strings blanked."""

    def blank(match):
        token = match.group(0)
        if token.startswith("/"):
            return re.sub(r"[^\n]", " ", token)
        if keep_strings:
            return token
        return token[0] + re.sub(r"[^\n]", " ", token[1:-1]) + token[-1]

    return TOKEN.sub(blank, text)


def includes(text):
    """(line number, delimiter, path) of every #include."""
    pattern = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
    for match in pattern.finditer(code_only(text, keep_strings=True)):
        yield line_of(text, match.start()), match.group(1), match.group(2)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


class TemporaryTree:
    """A small project to plant violations in: `with TemporaryTree({"a/b.h": "..."}) as root`."""

    def __init__(self, contents):
        self.contents = contents

    def __enter__(self):
        self.directory = tempfile.TemporaryDirectory(prefix="lockstep-style-")
        for path, text in self.contents.items():
            full = pathlib.Path(self.directory.name) / path
            full.parent.mkdir(parents=True, exist_ok=True)
            full.write_text(text, encoding="utf-8")
        return self.directory.name

    def __exit__(self, *_):
        self.directory.cleanup()


def report(name, violations, summary):
    """Prints the outcome and returns the exit code."""
    for violation in violations:
        print(violation)
    if violations:
        print(f"{name}: {len(violations)} violations ({summary})")
        return 1
    print(f"{name}: clean ({summary})")
    return 0


def expect_planted(name, check, planted):
    """Self-test: `check` must report exactly the named rules, and nothing on the clean trees.

    `planted` maps a rule to a list of trees that break it once; the rule None lists clean trees.
    """
    problems = 0
    cases = 0
    for rule, trees in planted.items():
        for tree in trees:
            cases += 1
            with TemporaryTree(tree) as root:
                found = {v.rule for v in check(root)}
            wanted = {rule} if rule else set()
            if found != wanted:
                problems += 1
                print(f"{name}: planted {rule} in {sorted(tree)}: found {sorted(found)}")
    print(f"{name} self-test: {cases} planted trees, {problems} wrong")
    return 1 if problems else 0
