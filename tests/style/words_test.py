"""The vocabulary of the field instead of a private one: words that a reader would have to learn.

    python3 tests/style/words_test.py              the project
    python3 tests/style/words_test.py --self-test  every word is reported, in prose and identifiers

Identifiers count as their parts: `kept_`, `KeptMemory` and "kept" are the same word.
"""

import os
import pathlib
import re
import sys

import tree
from tree import Violation

# What is written in lower case with single spaces, and what to write instead.
WORDS = {
    r"birthplace|come into being|comes into being|born in place": "in-place gradient allocation",
    r"kept|keeping allocator|keeper": "cached, retained, preserved; supervisor guard",
    r"seat|seated|sits?|sitting|vacate": "the thread that drives the engine; drive",
    r"doze[sd]?|dozing|uneasy|worn|part company": "park; backoff: spin, yield, park",
    r"wish|wishes|wished": "request, flag, option",
    r"hello": "handshake",
    r"meet|meets|meeting|meetings": "rendezvous, connect",
    r"declin(?:e|es|ed|ing)": "reject",
    r"boards?": "key-value store",
    r"mail|mails|strays?": "probe, message; orphans",
    r"why not": "unavailable_reason",
    r"its words|last words|the words of|in the words": "its message",
    r"tell|tells|telling|told": "report, notify, say",
    r"verdicts?|fates?": "outcome",
    r"house|housed|homes": "bind_slot, offsets",
    r"votes?": "change flag",
    r"hurry|hurries": "request_progress",
    r"let go": "release; deleter",
    r"crowd|crowds|crowded": "oversubscribed",
    r"put aside|puts aside": "archive",
    r"(?<!there )is no (?:number|size|folder|file|flag|field|key|type|time|window|norm|rank)":
        "is not a ...",
    r"left out": "skipped",
    r"(?:go|goes|going|went|gone) on": "continue",
    r"anew": "again",
    r"alike": "identically, the same",
    r"for ever": "forever",
    r"one hard idea": "say the idea",
    r"all gather varied": "all_gather_v",
    r"accept changes": "sync_from_model",
    r"strangers?": "unknown process, new user",
    r"founding documents?|seed 00[0-9]": "the fact itself (docs/seed_map.md has the rows)",
}
PATTERN = re.compile(r"(?<![a-z0-9])(?:" + "|".join(f"({words})" for words in WORDS) +
                     r")(?![a-z0-9])")
REMEDIES = list(WORDS.values())

# Where a word is somebody else's, or means what it says. Matched against "path: line".
EXCEPTIONS = re.compile("|".join([
    r"^docs/seed_map\.md:", r"^tests/fuzz/(?:corpus|found|dictionary)/", r"^tests/style/words_test",
    r"01_hello_world", r"hello_lines|HELLO\b|[Hh]ello from|[Hh]ello, ?[Ww]orld|\bsays_hello\b",
    r"ClientHello", r"[Tt]ensor[Bb]oard", r"[Dd]ashboard", r"[Kk]eyboard", r"[Oo]nboard",
    r"\btellg\b|\.tell\(\)",
    r"[\"'>] ?hello|echo hello|\"hello",
    r"^CHANGELOG\.md: \| `",  # the table of names before and now
]))
TEXT = {".h", ".cpp", ".cu", ".cuh", ".py", ".md", ".txt", ".cmake", ".yaml", ".yml", ".sh", ".in"}


def plain(line):
    """In lower case, with identifiers taken apart: "runKept_(why_not)" -> "run kept (why not)"."""
    line = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line)
    return re.sub(r"\s+", " ", line.replace("_", " ")).lower()


def check(root):
    found = []
    for path in tree.files(root):
        if pathlib.PurePosixPath(path).suffix not in TEXT and path not in ("dev", ".ci/run"):
            continue
        name = PATTERN.search(plain(path))
        if name and not EXCEPTIONS.search(f"{path}:"):
            found.append(Violation(path, 1, "word", f"'{name.group(0)}' in the file's name"))
        for number, line in enumerate(tree.read(root, path).split("\n"), 1):
            if EXCEPTIONS.search(f"{path}: {line}"):
                continue
            for match in PATTERN.finditer(plain(line)):
                remedy = REMEDIES[match.lastindex - 1]
                found.append(Violation(path, number, "word", f"'{match.group(0)}': {remedy}"))
    return found


def self_test():
    planted = {
        None: [{"docs/a.md": "It meant well; the wordy teller of tales skipped a vote-less page\n"
                             .replace("vote-less ", "")},
               {"examples/01_hello_world/main.cpp": "// 01_hello_world: hello from rank 0\n"}],
        "word": [
            {"docs/a.md": "The ranks me" + "et here.\n"},
            {"lockstep/core/a.cpp": "int ke" + "pt_ = 0;\n"},
            {"lockstep/core/a.cpp": "class Ke" + "ptMemory;\n"},
            {"lockstep/core/a.cpp": "// Who is to" + "ld?\n"},
            {"lockstep/core/ke" + "eper.h": "\n"},
            {"docs/a.md": "as se" + "ed 001 asks\n"},
            {"docs/a.md": "'x' is no num" + "ber\n"},
        ],
    }
    return tree.expect_planted("words", check, planted)


def main():
    root = os.environ.get("LOCKSTEP_SOURCE") or pathlib.Path(__file__).resolve().parents[2]
    if "--self-test" in sys.argv:
        return self_test()
    return tree.report("words", check(root), f"{len(WORDS)} entries")


if __name__ == "__main__":
    sys.exit(main())
