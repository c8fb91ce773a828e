"""Runs the commands of an example's README and compares what they print.

    python3 tests/examples/check_readme.py examples/01_hello_world/README.md

A ```console block is a `$ command` (continued by a trailing backslash), run from the root of the
repository, and the standard output it must have. `...` in an expected line stands for any text, a
line that is only `...` for any number of lines. Ranks print when they like: lines are compared
without regard to their order, unless the block says ```console ordered. A `# exit code N` line
after the command says that it fails. Blocks that begin with `$ cmake` or `$ ./dev` are instructions
for a person and are not run.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

LIMIT_S = 480


class Block:
    def __init__(self, options, lines):
        self.ordered = "ordered" in options
        command = lines.pop(0)[2:]
        while command.endswith("\\"):
            command = command[:-1] + lines.pop(0)
        self.command = command
        self.exit_code = 0
        if lines and (match := re.fullmatch(r"# exit code (\d+)", lines[0])):
            self.exit_code = int(match.group(1))
            lines.pop(0)
        self.expected = [line.rstrip() for line in lines if line.strip()]

    def is_run(self):
        return not self.command.startswith(("cmake", "./dev"))


def blocks(text):
    pattern = r"^```console([^\n]*)\n(.*?)^```$"
    for options, body in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
        lines = body.rstrip("\n").split("\n")
        if not lines[0].startswith("$ "):
            raise SystemExit(f"a console block begins with `$ command`, not {lines[0]!r}")
        yield Block(options.split(), lines)


def line_pattern(expected):
    return ".*".join(re.escape(part) for part in expected.split("..."))


def match_ordered(expected, printed):
    """None, or the first expected line that is not there."""
    at = 0
    gap = False
    for line in expected:
        if line == "...":
            gap = True
            continue
        while at < len(printed) and not re.fullmatch(line_pattern(line), printed[at]):
            if not gap:
                return line
            at += 1
        if at == len(printed):
            return line
        at += 1
        gap = False
    return None if gap or at == len(printed) else f"(nothing, but there is {printed[at]!r})"


def match_any_order(expected, printed):
    left = list(printed)
    for line in expected:
        if line == "...":
            continue
        found = next((p for p in left if re.fullmatch(line_pattern(line), p)), None)
        if found is None:
            return line
        left.remove(found)
    return None if "..." in expected or not left else f"(nothing, but there is {left[0]!r})"


def check(block, root):
    # The README says build/bin; the build tree may have another name.
    command = block.command.replace("build/bin/", os.environ["LOCKSTEP_BIN"] + "/")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    # Two ranks and one GPU would be refused; what the READMEs show does not depend on the device.
    environment["LOCKSTEP_DEVICE"] = "cpu"
    environment["PATH"] = (os.path.dirname(os.environ["LOCKSTEP_PYTHON"]) + os.pathsep
                           + environment["PATH"])
    # Other launchers are optional: a LibTorch without Python has no torchrun.
    program = next((word for word in command.split() if "=" not in word), "")
    if program in ("torchrun", "mpirun") and not shutil.which(program, path=environment["PATH"]):
        print(f"SKIP  {block.command}\n  {program} is not installed")
        return True
    done = subprocess.run(["bash", "-c", command], cwd=root, env=environment, timeout=LIMIT_S,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                          text=True)
    printed = [line.rstrip() for line in done.stdout.split("\n") if line.strip()]
    match = match_ordered if block.ordered else match_any_order
    missing = match(block.expected, printed)
    if missing is None and done.returncode == block.exit_code:
        print(f"ok    {block.command}")
        return True
    print(f"FAIL  {block.command}\n  exit code {done.returncode}, expected {block.exit_code}")
    if missing is not None:
        print(f"  not printed: {missing}")
    print("  stdout:\n    " + "\n    ".join(printed))
    print("  stderr:\n    " + "\n    ".join(done.stderr.split("\n")[-40:]))
    return False


def main():
    readme = pathlib.Path(sys.argv[1])
    root = os.environ["LOCKSTEP_SOURCE"]
    found = [block for block in blocks(readme.read_text()) if block.is_run()]
    if not found:
        raise SystemExit(f"{readme} shows no command to run")
    results = [check(block, root) for block in found]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
