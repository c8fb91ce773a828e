"""The ```diff block in an example's README is the difference of its before.cpp and after.cpp.

    python3 tests/examples/check_diff.py examples/04_single_to_multi [--write]
"""

import pathlib
import re
import subprocess
import sys


def main():
    folder = pathlib.Path(sys.argv[1])
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8")
    block = re.search(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if not block:
        raise SystemExit(f"{readme} has no diff")
    # Without context lines: blank ones would be trailing white space in the README.
    outcome = subprocess.run(["diff", "-U0", "--label", "before.cpp", "--label", "after.cpp",
                              "before.cpp", "after.cpp"], cwd=folder, capture_output=True,
                             text=True, check=False)
    if outcome.returncode != 1:
        raise SystemExit(f"diff: exit code {outcome.returncode} {outcome.stderr}")
    if "--write" in sys.argv:
        readme.write_text(text[:block.start(1)] + outcome.stdout + text[block.end(1):],
                          encoding="utf-8")
    elif block.group(1) != outcome.stdout:
        raise SystemExit(f"{readme}: the diff is out of date; run {__file__} {folder} --write")
    print(f"{readme}: the diff is the files' own")


if __name__ == "__main__":
    main()
