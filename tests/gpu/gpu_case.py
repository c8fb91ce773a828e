"""What the scripts for a GPU share: how many there are, and checks of which each prints a line."""
import subprocess
import sys
import time

VERBOSE = "-v" in sys.argv


class Failed(Exception):
    pass


def expect(ok, what):
    if not ok:
        raise Failed(what)


def gpus():
    try:
        out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True,
                             check=False).stdout
    except FileNotFoundError:
        return 0
    return out.count("GPU ")


def end_without_gpu():
    if gpus() == 0:
        print("SKIPPED: no GPU on this machine")
        sys.exit(77)


def attempt(label, check, place, show):
    """Whether the check, which says what it has found, has passed; `show` prints its logs."""
    start = time.monotonic()
    try:
        place.mkdir()
        said, ok = check(), True
    except Exception as error:  # pylint: disable=broad-except  # the others still run
        said, ok = f"{type(error).__name__}: {error}", False
    print(f"{'ok    ' if ok else 'FAILED'} {label}: {said} ({time.monotonic() - start:.1f} s)",
          flush=True)
    if VERBOSE or not ok:
        show()
    return ok
