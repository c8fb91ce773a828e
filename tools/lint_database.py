"""Writes BUILD/lint/compile_commands.json, a compilation database that clang-tidy can read.

    python3 tools/lint_database.py build lockstep/core/env.cpp ...

GCC's precompiled header and GCC-only flags are taken out, so a source must include what it uses.
Prints those of the given files that the build compiles, one per line.
"""

import json
import os
import pathlib
import re
import shlex
import sys

GCC_ONLY = {"-fpch-preprocess", "-Winvalid-pch", "-Wshadow=local"}


def cleaned(arguments):
    result = []
    skip = False
    for at, argument in enumerate(arguments):
        if skip:
            skip = False
        elif argument == "-include" and arguments[at + 1].endswith("cmake_pch.hxx"):
            skip = True
        elif argument not in GCC_ONLY:
            result.append(argument)
    return result


def singles(entry):
    """The sources that a file of several (CMake's unity build) includes, each as if by itself."""
    if "/Unity/" not in entry["file"]:
        return [entry]
    included = re.findall(r'^#include "(.*)"$', pathlib.Path(entry["file"]).read_text(), re.M)
    return [{**entry, "file": source, "command": entry["command"].replace(entry["file"], source)}
            for source in included]


def main():
    build = pathlib.Path(sys.argv[1])
    entries = json.loads((build / "compile_commands.json").read_text())
    entries = [single for entry in entries for single in singles(entry)]
    for entry in entries:
        entry["command"] = shlex.join(cleaned(shlex.split(entry["command"])))
    (build / "lint").mkdir(exist_ok=True)
    (build / "lint" / "compile_commands.json").write_text(json.dumps(entries, indent=1))
    known = {os.path.realpath(entry["file"]) for entry in entries}
    for path in sys.argv[2:]:
        if os.path.realpath(path) in known:
            print(path)


if __name__ == "__main__":
    main()
