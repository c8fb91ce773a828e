"""Shared helpers of the lockstep/io tests: running io_peer, and skipping."""

import os
import subprocess
import sys

PEER = os.environ.get("LOCKSTEP_IO_PEER") or os.path.join(os.environ["LOCKSTEP_BIN"], "tests",
                                                          "io_peer")
BOUND_S = 60  # for what takes milliseconds, on a machine that is busy


def skip(why):
    """Ends the script: ctest shows it as skipped."""
    print(f"SKIP 1: {why}")
    sys.exit(77)


def peer(*args, wrap=(), **options):
    # The leak checker of an address sanitizer build does not work under strace.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"} if wrap else None
    return subprocess.run([*wrap, PEER, *map(str, args)], capture_output=True, text=True,
                          env=environment, timeout=BOUND_S, check=False, **options)
