"""Every way a rank can fail, with real processes: the right cause, the right exit code, in time,
and nothing left running."""
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid

BIN = os.environ["LOCKSTEP_BIN"]
SOAK = os.environ.get("LOCKSTEP_SOAK") == "1"

# What the report must say, and the launcher's exit code.
EXPECTED = {
    "exception": ("exited with code 1", 1),
    "abort": ("killed by SIGABRT", 128 + 6),
    "segfault": ("killed by SIGSEGV", 128 + 11),
    "kill": ("killed by SIGKILL", 128 + 9),
    "exit": ("exited with code 3", 3),
}
PHASES = ("startup", "step", "exit")


def left_over(mark):
    """Processes whose environment carries the mark of one run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if mark.encode() in f.read():
                    found.append(int(pid))
        except OSError:
            pass
    return found


def run(ranks, kind, guilty, phase, extra_env=None):
    mark = f"LOCKSTEP_FAULT_MARK_{uuid.uuid4().hex}"
    env = dict(os.environ, LOCKSTEP_MARK=mark, **(extra_env or {}))
    command = [f"{BIN}/lockstep", "run", "--standalone", f"--nproc-per-node={ranks}",
               f"{BIN}/tests/faults", kind, str(guilty), phase]
    start = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=480)
    seconds = time.monotonic() - start
    for _ in range(300):  # a killed process leaves /proc a moment after its parent is notified
        rest = left_over(mark)
        if not rest:
            break
        time.sleep(0.1)
    return done.returncode, done.stdout + done.stderr, seconds, rest


failures = []


def check(label, ok, detail):
    if not ok:
        failures.append(label)
        print(f"FAILED {label}: {detail}", flush=True)


def check_soon(label, output, seconds):
    """Nobody waited for a deadline: of a collective (30 minutes), or that of the launcher, which
    sends SIGKILL 30 s after SIGTERM and says so. A busy machine takes long for the start alone."""
    check(label, "sending SIGKILL" not in output and seconds < 240, f"{seconds:.1f} s:\n{output}")


def fault(ranks, kind, guilty, phase, backend="shm"):
    code, output, seconds, rest = run(ranks, kind, guilty, phase, {"LOCKSTEP_BACKEND": backend})
    text, expected = EXPECTED[kind]
    label = f"{kind} on rank {guilty} of {ranks} at {phase}, {backend}"
    print(f"{label}: exit code {code}, {seconds:.1f} s", flush=True)
    # The headline of the report: this rank, this cause.
    headline = re.search(rf"^\[launch\] rank {guilty} on \S+ failed: .*{text}", output, re.M)
    check(label, headline, f"no headline with rank {guilty} and '{text}':\n{output}")
    check(label, code == expected, f"exit code {code}, expected {expected}:\n{output}")
    if kind == "exception":
        check(label, "planted exception" in output, f"no message:\n{output}")
        report = output[headline.start():] if headline else ""
        # With debug information a frame has its line.
        frames = re.findall(r"^    (.+ \((?:faults\+0x[0-9a-f]+|\S+\.cpp:\d+)\))$", report, re.M)
        check(label, len(frames) > 1, f"no stack:\n{output}")
        twice = [f for f in frames if report.count(f) > frames.count(f)]
        check(label, not twice and report.count("planted exception") == 1, f"twice:\n{output}")
    check_soon(label, output, seconds)
    check(label, not rest, f"left running: {rest}")
    if kind == "segfault" and phase == "step":
        check(label, "crash_here" in output, f"no symbolised stack:\n{output}")


def leaving():
    """A rank that ends with code 0 in the middle of training is the cause, not who misses it."""
    for kind, ranks, guilty in (("leave", 2, 1), ("leave", 3, 0), ("_leave", 2, 0),
                                ("_leave", 3, 1)):
        code, output, seconds, rest = run(ranks, kind, guilty, "step")
        label = f"{kind} of rank {guilty} of {ranks}"
        print(f"{label}: exit code {code}, {seconds:.1f} s", flush=True)
        check(label, re.search(rf"^\[launch\] rank {guilty} on \S+ failed: exited with code 0 in "
                               r"the middle of the world\. Its process ended inside the body of "
                               r"lockstep::run\(\)", output, re.M), output)
        others = re.findall(r"lockstep: rank (\d+) on \S+: ", output)
        # They may have been stopped before they said anything.
        check(label, all(int(rank) != guilty for rank in others), output)
        check(label, code == 1 and not rest, f"{code}, {rest}")
        check_soon(label, output, seconds)
    # All together it is their way to end.
    code, output, seconds, rest = run(3, "all_leave", 0, "exit", {"PET_MONITOR_INTERVAL": "60"})
    print(f"all leave: exit code {code}, {seconds:.1f} s", flush=True)
    check("all leave", code == 0 and not rest and "failed" not in output, output)


def uneven_batches():
    """A common mistake, explained on one screen: the cause and the remedy first, one stack with the
    program's own lines, and every frame of every rank in a file that is there afterwards."""
    with open(os.path.join(os.path.dirname(__file__), "epoch.cpp"), encoding="utf-8") as f:
        line = next(i for i, text in enumerate(f, 1) if text.endswith("// LINE\n"))
    for ranks, guilty in ((2, 1), (4, 0)):
        label = f"uneven batches, rank {guilty} of {ranks}"
        with tempfile.TemporaryDirectory() as folder:
            code, output, seconds, rest = run(ranks, "uneven", guilty, "step", {"TMPDIR": folder})
            named = re.search(r"^  every frame: (.+)$", output, re.M)
            stacks = ""
            if named and os.path.exists(named.group(1)):
                with open(named.group(1), encoding="utf-8") as f:
                    stacks = f.read()
        print(f"{label}: exit code {code}, {seconds:.1f} s, {output.count(chr(10))} lines",
              flush=True)
        # On a busy machine the ranks' end is waited for, and the cause said before.
        lines = [line for line in output.splitlines() if "waiting for the other ranks" not in line]
        check(label, code == 1 and not rest, f"{code}, {rest}:\n{output}")
        # How every other rank ended is a line or two more with four.
        most = 25 if ranks == 2 else 28
        check(label, len(lines) <= most, f"{len(lines)} lines:\n{output}")
        began = next((i for i, text in enumerate(lines) if text.startswith("[launch] rank")), 0)
        first = lines[began]
        for text in ("[launch] rank ", f"rank {guilty} has returned from its body", "model.join()",
                     "a rank has fewer batches"):
            check(label, text in first, f"no '{text}' in the first line:\n{output}")
        said = sum("has returned from its body" in line for line in lines)
        check(label, said == 1, f"said {said} times:\n{output}")
        check(label, max(map(len, lines)) < 600, f"a long line:\n{output}")
        # Ranks that the launcher stops first say nothing; the others are named together.
        after = re.search(r"^  failed after it:\n((?:    .*\n)*)", output, re.M)
        check(label, not after or re.fullmatch(r"    ranks? [\d, -]+ with exit code 1, \S+ s "
                                               r"later: the same\n", after.group(1)), output)
        # A sanitized program is too large for addr2line to find a line in time.
        if shutil.which("addr2line") and "SANITIZED" not in os.environ:
            check(label, re.search(rf"^    for_each_batch\(.*epoch\.cpp:{line}\)$", output, re.M),
                  f"no line of the program:\n{output}")
        check(label, re.search(r"^    \.\.\. \d+ frames? of .*Lockstep", output, re.M), output)
        cause = re.search(r"^\[launch\] (rank \d+) on", output, re.M)
        check(label, cause and f"{cause.group(1)} (pid " in stacks and "lockstep::" in stacks
              and "libc.so.6+0x" in stacks, f"not every frame:\n{stacks}\n{output}")
        check_soon(label, output, seconds)


def mismatches():
    """Without LOCKSTEP_DEBUG gloo fails late with its own message; ours adds what to try."""
    for kind in ("other_shape", "other_call"):
        code, output, seconds, rest = run(2, kind, 1, "step", {
            "LOCKSTEP_TIMEOUT_S": "5", "LOCKSTEP_BACKEND": "gloo"})
        print(f"{kind}: exit code {code}, {seconds:.1f} s", flush=True)
        check(kind, code != 0 and "LOCKSTEP_DEBUG=1" in output, output)
        check(kind, not rest, f"left {rest}")
        check_soon(kind, output, seconds)
        code, output, seconds, rest = run(2, kind, 1, "step", {"LOCKSTEP_DEBUG": "1"})
        check(kind, code != 0 and "ranks call different operations" in output, output)


def main():
    code, output, _, rest = run(2, "none", 0, "step")
    check("none", code == 0 and not rest, output)

    if SOAK:
        for kind, phase, ranks in itertools.product(EXPECTED, PHASES, (2, 3, 4)):
            for guilty, backend in itertools.product(range(ranks), ("shm", "gloo")):
                fault(ranks, kind, guilty, phase, backend)
    else:
        for index, (kind, phase) in enumerate(itertools.product(EXPECTED, PHASES)):
            ranks = 2 + index % 3
            fault(ranks, kind, index % ranks, phase)
            if phase == "step":
                fault(ranks, kind, index % ranks, phase, "gloo")

    # A rank that never comes to the collective: the others' deadline ends the run, and says so.
    for backend in ("shm", "gloo"):
        label = f"silent rank, {backend}"
        code, output, seconds, rest = run(3, "silent", 1, "step", {
            "LOCKSTEP_TIMEOUT_S": "5", "LOCKSTEP_BACKEND": backend})
        print(f"{label}: exit code {code}, {seconds:.1f} s", flush=True)
        check(label, code == 1 and "TimeoutError" in output and "all_reduce" in output, output)
        if backend == "shm":
            check(label, "ms: rank 1 did not arrive" in output, output)
        check(label, not rest, f"left {rest}")
        check_soon(label, output, seconds)

    # A rank that calls another operation. Shared memory sees it by itself; with LOCKSTEP_DEBUG=1
    # both backends name the calls that do not match.
    for backend, debug in (("shm", "0"), ("shm", "1"), ("gloo", "1")):
        label = f"another call, {backend}, debug {debug}"
        code, output, seconds, rest = run(3, "other_op", 1, "step", {
            "LOCKSTEP_DEBUG": debug, "LOCKSTEP_BACKEND": backend})
        print(f"{label}: exit code {code}, {seconds:.1f} s", flush=True)
        message = "call different operations" if debug == "1" else "disagree on collective"
        check(label, code == 1 and message in output and "broadcast" in output, output)
        check(label, not rest, f"left {rest}")
        check_soon(label, output, seconds)

    code, output, seconds, rest = run(2, "other_model", 1, "step")
    print(f"different models: exit code {code}, {seconds:.1f} s", flush=True)
    check("different models", code == 2 and "the models differ between ranks" in output
          and "0.weight: shape [7, 4]" in output, output)
    check("different models", not rest, f"left {rest}")
    check_soon("different models", output, seconds)

    leaving()
    uneven_batches()
    mismatches()

    print(f"{'FAILED: ' + str(failures) if failures else 'all faults ended as promised'}")
    return 1 if failures else 0


sys.exit(main())
