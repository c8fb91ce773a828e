"""The ```cpp example blocks of a document are excerpts of an example's source.

    python3 tests/examples/check_excerpts.py docs/own_loop.md examples/05_own_loop/main.cpp

Each block must be a run of whole lines of the source; the order of the blocks is free.
"""

import pathlib
import re
import sys


def main():
    document, source = map(pathlib.Path, sys.argv[1:3])
    program = source.read_text(encoding="utf-8")
    text = document.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```cpp example\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    if not blocks:
        raise SystemExit(f"{document} shows nothing of {source}")
    for block in blocks:
        if "\n" + block.group(1) not in program:
            line = text.count("\n", 0, block.start()) + 1
            raise SystemExit(f"{document}:{line}: this is not in {source}:\n{block.group(1)}")
    print(f"{document}: {len(blocks)} excerpts of {source}")


if __name__ == "__main__":
    main()
