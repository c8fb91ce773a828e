"""Two GPUs that are not there: what the made-up driver of fake_nvml.cpp answers."""

import contextlib
import os
import pathlib
import tempfile

LIBRARY = (pathlib.Path(os.environ["LOCKSTEP_BIN"]).parent / "lib" / "fake_nvml_new" /
           "libnvidia-ml.so.1")
TWO_GPUS = (pathlib.Path(__file__).parent / "two_gpus.txt").read_text()


@contextlib.contextmanager
def driver(changes):
    """An environment in which the driver says what two_gpus.txt does, but for these lines."""
    def key(line):
        return line.split(" ")[:2]
    new = changes.strip().splitlines()
    replaced = [key(line) for line in new]
    lines = [line for line in TWO_GPUS.splitlines() if key(line) not in replaced] + new
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as script:
        script.write("\n".join(lines) + "\n")
        script.flush()
        yield os.environ | {"LOCKSTEP_NVML": str(LIBRARY), "FAKE_NVML_SCRIPT": script.name}
