"""What the tests of `lockstep run` share: a run with a marker in its environment.

Every test starts `lockstep run` and reads what a user would see. At the end of each test no process
with its marker may be alive.
"""

import os
import random
import select
import signal
import socket
import subprocess
import tempfile
import time
import unittest
import uuid

LAUNCHER = (os.environ.get("LOCKSTEP_LAUNCHER") or
            os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep"))
SOAK = os.environ.get("LOCKSTEP_SOAK") == "1"
# `./dev test --other-arch` names what it skips as GoogleTest reads it.
SKIPPED = os.environ.get("GTEST_FILTER", "").lstrip("-").split(":")
# For what should take well under a second. It only says that nothing hangs: a busy machine may
# hold up any process for seconds.
BOUND_S = 60

# A rank in plain Python: behaviour by its first argument, rank in the second.
WORKER = r'''
import os, signal, sys, time
rank = int(os.environ["RANK"])
mode, who = sys.argv[1], int(sys.argv[2])
def note(name):
    path = os.path.join(os.environ["NOTES"], f"{name}.{rank}")
    with open(path + ".tmp", "w") as f:
        f.write(str(os.getpid()))
    os.rename(path + ".tmp", path)
def wait_for(name, count):
    end = time.monotonic() + 60
    while sum(n.startswith(name + ".") and not n.endswith(".tmp")
              for n in os.listdir(os.environ["NOTES"])) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
note("up")
wait_for("up", int(os.environ["WORLD_SIZE"]))
if rank == who:
    print("last output of", rank, file=sys.stderr, flush=True)
    if mode == "exception":
        raise RuntimeError("boom")
    if mode == "exit3":
        sys.exit(3)
    if mode == "abort":
        os.abort()
    if mode == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "trap":
        os.kill(os.getpid(), signal.SIGTRAP)
    if mode == "sys":
        os.kill(os.getpid(), signal.SIGSYS)
    if mode == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
if mode == "stop" and "SHORT" in os.environ:
    time.sleep(float(os.environ["SHORT"]))
    sys.exit(0)
time.sleep(300)
'''

# For the scripts of ranks: `until_notes NAME...` waits until all of them are there, `until_gone
# NAME` until the process of that note is: it has been waited for, so its launcher knows its end.
WAITS = (
    'until_notes() { for n in "$@"; do while [ ! -s $NOTES/$n ]; do sleep 0.02; done; done; }; '
    'until_gone() { until_notes $1; while [ -e /proc/$(cat $NOTES/$1) ]; do sleep 0.02; done; }; ')


def free_port():
    """Not one that the kernel gives to whoever asks for any: nobody is given it before its use."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
        low = int(f.read().split()[0])
    while True:
        with socket.socket() as s:
            try:
                s.bind(("", random.randrange(10_000, low) if low > 11_000 else 0))
                return s.getsockname()[1]
            except OSError:
                pass


def marked(marker):
    """Pids of living processes that carry the marker."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as f:
                if marker.encode() in f.read():
                    with open(f"/proc/{name}/stat") as g:
                        if g.read().rsplit(")", 1)[1].split()[0] != "Z":
                            found.append(int(name))
        except OSError:
            pass
    return found


class Case(unittest.TestCase):
    def setUp(self):
        if ".".join(self.id().split(".")[-2:]) in SKIPPED:
            self.skipTest("tests/other_arch_skipped.txt")
        self.marker = "LOCKSTEP_TEST_MARK_" + uuid.uuid4().hex
        self.dir = tempfile.TemporaryDirectory(prefix="supervisor_test_")
        self.notes = os.path.join(self.dir.name, "notes")
        self.tmp = os.path.join(self.dir.name, "tmp")
        os.mkdir(self.notes)
        os.mkdir(self.tmp)
        self.worker = os.path.join(self.dir.name, "worker.py")
        with open(self.worker, "w") as f:
            f.write(WORKER)
        self.started = []
        self.heard = {}  # what wait_line has read of a stream

    def tearDown(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()
        left = self.wait_gone()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.dir.cleanup()
        self.assertEqual(left, [], "processes were left behind")

    @staticmethod
    def launcher():
        return LAUNCHER

    @staticmethod
    def log(logs, local_rank, name, attempt=0):
        (run,) = os.listdir(logs)
        return os.path.join(logs, run, f"attempt_{attempt}", str(local_rank), name)

    def forget_notes(self):
        for name in os.listdir(self.notes):
            os.unlink(os.path.join(self.notes, name))

    def wait_gone(self, bound_s=BOUND_S):
        end = time.monotonic() + bound_s
        while True:
            left = marked(self.marker)
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.02)

    def environment(self, **more):
        env = dict(os.environ)
        for name in ("LOCKSTEP_LOG", "TORCHELASTIC_ERROR_FILE", "RANK", "WORLD_SIZE"):
            env.pop(name, None)
        env.update(MARK=self.marker, NOTES=self.notes, TMPDIR=self.tmp, OMP_NUM_THREADS="1")
        env.update({k: str(v) for k, v in more.items()})
        return env

    def start(self, *args, env=None, prefix=(), **options):
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        process = subprocess.Popen(
            [*prefix, LAUNCHER, "run", *args], stdin=subprocess.DEVNULL, text=True,
            env=self.environment(**(env or {})), **options)
        self.started.append(process)
        return process

    def finish(self, process, bound_s=BOUND_S):
        """(exit code, stdout, stderr), with what wait_line has read before."""
        out, err = process.communicate(timeout=bound_s)
        return (process.returncode, self.heard.pop(process.stdout, "") + (out or ""),
                self.heard.pop(process.stderr, "") + (err or ""))

    def wait_line(self, stream, *texts):
        """Reads the stream until all texts were in it."""
        end = time.monotonic() + BOUND_S
        while not all(text in self.heard.setdefault(stream, "") for text in texts):
            ready = select.select([stream], [], [], max(0, end - time.monotonic()))[0]
            data = os.read(stream.fileno(), 65536).decode() if ready else ""
            self.assertTrue(data, f"no {texts} in {self.heard[stream]!r}")
            self.heard[stream] += data

    def run_ranks(self, n, *args, flags=(), env=None, bound_s=BOUND_S):
        process = self.start("--standalone", f"--nproc-per-node={n}", *flags, *args, env=env)
        return self.finish(process, bound_s)

    def start_bash(self, n, script, *flags, **options):
        return self.start("--standalone", f"--nproc-per-node={n}", *flags, "--no-python",
                          "bash", "-c", script, **options)

    def bash(self, n, script, flags=(), bound_s=BOUND_S, **options):
        return self.finish(self.start_bash(n, script, *flags, **options), bound_s)

    def wait_notes(self, name, count, bound_s=BOUND_S):
        end = time.monotonic() + bound_s
        while True:
            found = {n.split(".")[1]: n for n in os.listdir(self.notes)
                     if n.startswith(name + ".") and not n.endswith(".tmp")}
            if len(found) >= count:
                pids = {}
                for rank, file in found.items():
                    with open(os.path.join(self.notes, file)) as f:
                        pids[int(rank)] = int(f.read() or 0)
                if all(pids.values()):
                    return pids
            self.assertLess(time.monotonic(), end, f"only {sorted(found)} of {count} {name}")
            time.sleep(0.01)
