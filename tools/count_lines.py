#!/usr/bin/env python3
"""Prints the lines of the product by folder: files that git tracks, without tests.

    python3 tools/count_lines.py [REVISION]      today's tree, or that of a commit
"""
import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRODUCT = re.compile(r"\.(h|cpp|cu|cuh|py|js|css|html)$")
TESTS = re.compile(r"^tests/|_test[._]|for_test")


def git(*arguments):
    return subprocess.check_output(["git", "-C", ROOT, *arguments]).decode(errors="replace")


def folder_of(path):
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "lockstep" and len(parts) > 2 else parts[0]


def main():
    revision = sys.argv[1] if len(sys.argv) > 1 else ""
    listed = git("ls-tree", "-r", "--name-only", revision) if revision else git("ls-files")
    lines = collections.Counter()
    for path in listed.splitlines():
        if not PRODUCT.search(path) or TESTS.search(path):
            continue
        text = git("show", f"{revision}:{path}") if revision else (ROOT / path).read_text()
        lines[folder_of(path)] += text.count("\n")
    for folder, count in lines.most_common():
        print(f"{count:7}  {folder}")
    print(f"{sum(lines.values()):7}  all")


main()
