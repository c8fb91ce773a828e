"""Two hosts as two network namespaces, two gloo ranks each: training works, and a rank that is
killed ends both launchers within 5 s, both naming it. Two ranks and three train together, under a
secret, and a flood of connections does not slow their steps."""
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid

sys.path.insert(0, os.path.join(os.environ["LOCKSTEP_SOURCE"], "tests", "launch"))
from cable import Cable  # noqa: E402

BIN = os.environ["LOCKSTEP_BIN"]
TAG = uuid.uuid4().hex[:6]
started = []


def start(*program, nproc=(2, 2)):
    runs = [subprocess.Popen(
        [*hosts.inside(node), f"{BIN}/lockstep", "run", "--nnodes=2",
         f"--node-rank={node}", f"--nproc-per-node={nproc[node]}", "--master-addr=10.99.8.1",
         "--master-port=29555", *program],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=dict(os.environ, LOCKSTEP_TEST_TAG=TAG)) for node in (0, 1)]
    started.extend(runs)
    return runs


def require(ok, what):
    if not ok:
        raise SystemExit(f"FAILED: {what}")


def training_works():
    runs = start(f"{BIN}/examples/03_mlp", "--epochs", "2")
    outputs = [run.communicate(timeout=480)[0] for run in runs]
    for run, output in zip(runs, outputs):
        require(run.returncode == 0, output)
    require("replicas identical" in outputs[0] and "WORLD_SIZE=4 " in outputs[0], outputs[0])
    require(re.search("backend=gloo .*; not shm, because rank 2 has another network namespace",
                      outputs[0]), outputs[0])
    for link, output in zip(hosts.links, outputs):
        require(link in output, f"the interface {link} is not named:\n{output}")
    print("training over two hosts: replicas identical")


def uneven_training_works():
    with tempfile.NamedTemporaryFile("w") as secret:  # mode 0600
        secret.write(uuid.uuid4().hex)
        secret.flush()
        runs = start(f"--secret-file={secret.name}", f"{BIN}/examples/03_mlp", "--epochs", "2",
                     nproc=(2, 3))
        outputs = [run.communicate(timeout=480)[0] for run in runs]
    for run, output in zip(runs, outputs):
        require(run.returncode == 0, output)
        require("can join this run" not in output, output)
    require("replicas identical" in outputs[0] and "WORLD_SIZE=5 " in outputs[0], outputs[0])
    print("training with two ranks and three: replicas identical")


# Tries to connect; 500 times a second, so that what is measured is not the load of the attacker
# itself. While ranks run, nobody listens on the port.
FLOOD = r"""
import socket, sys, time
began = time.monotonic()
for number in range(int(sys.argv[1])):
    try:
        socket.create_connection(("10.99.8.1", 29555), timeout=30).close()
        sys.exit("connected")
    except ConnectionRefusedError:
        pass
    time.sleep(max(0, began + number / 500 - time.monotonic()))
"""


def a_flood_leaves_the_steps_alone():
    """10 000 connections to the port of a run that trains. Epochs of 79 steps are timed in turn:
    some without a flood, then some during a tenth of it, and so on."""
    runs = start(f"{BIN}/examples/03_mlp", "--epochs", "1000000")
    times = {False: [], True: []}
    last = None
    flood = None
    rounds = 10
    log = []
    deadline = threading.Timer(1500, runs[0].kill)
    deadline.start()
    for line in runs[0].stdout:
        log.append(line)
        if "completed" not in line:
            continue
        now = time.monotonic()
        if last is not None:
            times[flood is not None].append(now - last)
        last = now
        if flood is not None and flood.poll() is not None:
            require(flood.returncode == 0, f"the flood failed: {flood.returncode}")
            flood = last = None
            rounds -= 1
        elif flood is None and len(times[False]) >= len(times[True]) + 3:
            if rounds == 0:
                break
            last = None  # this epoch is half and half
            flood = subprocess.Popen([*hosts.inside(1), sys.executable, "-c", FLOOD,
                                      "1000"])
            started.append(flood)
    deadline.cancel()
    require(rounds == 0, "the run ended: " + "".join(log[-20:]))
    runs[0].send_signal(signal.SIGTERM)
    for run in runs:
        output = run.communicate(timeout=480)[0]
        require(run.returncode == 143, f"exit code {run.returncode}:\n{output[-2000:]}")
    quiet, busy = (statistics.median(times[kind]) for kind in (False, True))
    print(f"10 000 connections: an epoch takes {busy * 1000:.0f} ms, without them "
          f"{quiet * 1000:.0f} ms ({len(times[True])} and {len(times[False])} epochs)")
    require(busy < 1.5 * quiet + 0.05, "the connections slow the steps")


def rank_of(pid):
    """The rank of a process that this test started; None for any other process."""
    with open(f"/proc/{pid}/environ", "rb") as f:
        environment = f.read()
    found = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
    ours = f"LOCKSTEP_TEST_TAG={TAG}".encode() in environment
    return int(found.group(1)) if found and ours else None


def find_victim():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                argv = f.read().split(b"\0")
            if argv[0].endswith(b"/tests/faults") and rank_of(pid) == 3:
                return int(pid)
        except OSError:
            pass
    return None


def kill_a_rank():
    """Seconds until both launchers have ended."""
    runs = start(f"{BIN}/tests/faults", "silent", "0", "step")  # rank 0 sleeps, all others wait
    deadline = time.monotonic() + 60
    while (victim := find_victim()) is None:
        require(time.monotonic() < deadline, "rank 3 did not start")
        time.sleep(0.5)
    time.sleep(2)  # into the step where all wait
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    outputs = [run.communicate(timeout=480)[0] for run in runs]
    seconds = time.monotonic() - began
    for run, output in zip(runs, outputs):
        require(run.returncode == 137, f"exit code {run.returncode}:\n{output}")
        require("rank 3 on" in output and "SIGKILL" in output, f"rank 3 is not named:\n{output}")
    return seconds


def a_killed_rank_ends_both():
    # One of some is in time: other work on the machine slows them down, never speeds one up.
    seconds = []
    while not seconds or (min(seconds) >= 5 and len(seconds) < 3):
        seconds.append(kill_a_rank())
    require(min(seconds) < 5, f"both launchers took {min(seconds):.1f} s to end")
    print(f"kill -9 of rank 3: both launchers ended in {min(seconds):.1f} s, both naming it")


if os.geteuid() != 0 or subprocess.run(["which", "ip"], capture_output=True).returncode != 0:
    print("SKIPPED: needs root and ip netns")
    sys.exit(77)
try:
    hosts = Cable("10.99.8")
except subprocess.CalledProcessError as e:
    print(f"SKIPPED: cannot make network namespaces: {e.stderr}")
    sys.exit(77)
try:
    training_works()
    uneven_training_works()
    a_flood_leaves_the_steps_alone()
    a_killed_rank_ends_both()
finally:
    for run in started:
        if run.poll() is None:
            run.kill()
    hosts.remove()
