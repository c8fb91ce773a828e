"""What the launcher tests share: paths, a clean environment, and commands with a deadline."""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "launch"))
from launch_case import free_port  # noqa: E402,F401  for the tests that import this

BIN = os.environ["LOCKSTEP_BIN"]
PYTHON = os.environ["LOCKSTEP_PYTHON"]
LOCKSTEP = os.path.join(BIN, "lockstep")
HELLO = os.path.join(BIN, "examples", "01_hello_world")
RUN_PEER = os.path.join(BIN, "tests", "run_peer")
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]
HAVE_TORCH = importlib.util.find_spec("torch") is not None

# Whatever started the tests must not look like a launcher of the programs under test.
LAUNCHER = re.compile(r"(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|NODE_RANK|TORCHELASTIC_|PET_"
                      r"|OMPI_|PMIX?_|MPI_|MV2_|SLURM_|KUBERNETES_|LOCKSTEP_(?!CACHE|TORCH))")


def environment(**variables):
    clean = {k: v for k, v in os.environ.items() if not LAUNCHER.match(k)}
    clean["OMP_NUM_THREADS"] = "1"
    clean["LOCKSTEP_DEVICE"] = "cpu"
    clean.update({k: str(v) for k, v in variables.items()})
    return clean


class Started:
    """A command in a session of its own; finish() collects it, or kills all of it at the limit."""

    def __init__(self, command, **variables):
        self.command = command
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, env=environment(**variables), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def finish(self, limit_s=360):
        try:
            self.out, self.err = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.out, self.err = self.process.communicate()
            raise AssertionError(f"no end within {limit_s} s: {self.text()}") from None
        self.seconds = time.monotonic() - self.began
        self.code = self.process.returncode
        return self

    def text(self):
        return f"{' '.join(self.command)}\nstdout:\n{self.out}\nstderr:\n{self.err}"


def run(command, limit_s=360, **variables):
    return Started(command, **variables).finish(limit_s)


def hello_lines(text):
    """(rank, size, local rank, device, backend) of each line that 01_hello_world printed."""
    pattern = r"hello from rank (\d+) of (\d+): local rank (\d+), device (\w+), backend (\w+)"
    return sorted((int(r), int(s), int(l), device, backend)
                  for r, s, l, device, backend in re.findall(pattern, text))


def world_of(size):
    return [(rank, size, rank, "cpu", "shm") for rank in range(size)]


def mpirun():
    """mpirun with what it needs to run as root in a container, or None."""
    path = shutil.which("mpirun")
    if path is None:
        return None
    version = subprocess.run([path, "--version"], stdout=subprocess.PIPE, text=True).stdout
    if "Open MPI" not in version:
        return [path]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # One host needs no remote shell, but where none is installed mpirun refuses to start without.
    shell = [] if shutil.which("ssh") or shutil.which("rsh") else ["--mca", "plm", "isolated"]
    return [path, *root, "--oversubscribe", *shell]
