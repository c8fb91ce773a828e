"""Example 05, stopped by signals and killed, and resumed: it ends with the bits of a run that was
never interrupted; on another number of ranks it ends as well. What the launcher records of a
resumed run counts its steps from there."""

import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
LOCKSTEP = str(BIN / "lockstep")
EPOCHS = 20
LIMIT_S = 200


def command(ranks, output, epochs=EPOCHS, flags=()):
    return [LOCKSTEP, "run", "--standalone", f"--nproc-per-node={ranks}", *flags,
            str(BIN / "examples" / "05_own_loop"), str(output), str(epochs)]


def environment():
    return {**os.environ, "LOCKSTEP_DEVICE": "cpu"}


def finish(ranks, output, epochs=EPOCHS):
    """Also looks at what the launcher has recorded of it."""
    record = pathlib.Path(f"{output}.record")
    done = subprocess.run(command(ranks, output, epochs, ["--record", str(record)]),
                          capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          env=environment(), stdin=subprocess.DEVNULL)
    text = done.stdout + done.stderr
    assert done.returncode == 0 and "replicas identical" in done.stdout, text
    began = int((re.search(r"resumed at step (\d+)", text) or [0, 0])[1])
    last = steps(output)[-1]
    for rank in range(ranks):
        lines = (record / "monitor" / f"rank_{rank}.jsonl").read_text(encoding="utf-8")
        intervals = [json.loads(line) for line in lines.splitlines()]
        assert intervals[-1]["step"] == last, (began, last, lines)
        assert sum(i["steps"] for i in intervals) <= last - began, (began, last, lines)
        known = [i["step"] for i in intervals if i["step"] >= 0]
        assert began <= known[0] and known == sorted(known), (began, known)
    return text


def steps(output):
    found = [re.fullmatch(r"checkpoint-(\d+)", p.name) for p in pathlib.Path(output).iterdir()]
    return sorted(int(m.group(1)) for m in found if m)


def ranks_of(output):
    """Pids of the ranks that train there."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[0].endswith(b"05_own_loop") and str(output).encode() in words:
            found.append(int(entry.name))
    return sorted(found)


def interrupted(ranks, output, interrupt, epochs=EPOCHS):
    """Starts a run, interrupts it after its first checkpoint, and returns exit code and output."""
    with open(f"{output}.log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(command(ranks, output, epochs), stdout=log,
                                   stderr=subprocess.STDOUT, env=environment(),
                                   stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + LIMIT_S
            while not (output / "checkpoint-50").exists():
                assert process.poll() is None and time.monotonic() < end, log.name
                time.sleep(0.02)
            interrupt(process, output)
            code = process.wait(timeout=LIMIT_S)
        finally:
            process.kill()
        log.seek(0)
        return code, log.read()


def check(*arguments):
    done = subprocess.run([LOCKSTEP, "checkpoint", *map(str, arguments)], capture_output=True,
                          text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def one_rank(number, sent):
    def interrupt(_, output):
        pids = ranks_of(output)
        assert len(pids) == 2, pids
        os.kill(pids[number], sent)
    return interrupt


def refused_beside(ranks, output):
    """A second run in the directory of one that trains ends at once, and says who is there."""
    def interrupt(process, _):
        done = subprocess.run(command(ranks, output), capture_output=True, text=True,
                              timeout=LIMIT_S, check=False, env=environment(),
                              stdin=subprocess.DEVNULL)
        text = done.stdout + done.stderr
        assert done.returncode not in (0, 143), text
        assert f"another run trains in output_dir {output}: pid " in text, text
        assert process.poll() is None, "the first run was over by then"
        process.send_signal(signal.SIGTERM)
    return interrupt


def last_factor(output):
    """The schedule's factor after the last step."""
    newest = output / f"checkpoint-{steps(output)[-1]}" / "scheduler.json"
    return json.loads(newest.read_text(encoding="utf-8"))["factor"]


def main():
    with tempfile.TemporaryDirectory(prefix="lockstep-own-loop-") as name:
        place = pathlib.Path(name)
        whole = place / "whole"
        finish(2, whole)
        last = steps(whole)[-1]
        assert last == EPOCHS * 32, last
        check("verify", whole)
        shown = check("show", whole / f"checkpoint-{last}")
        assert re.search(rf"step +{last}, epoch {EPOCHS}\.0000", shown), shown
        assert "2 data parallel ranks x batch 16 x accumulation 2" in shown, shown
        assert last_factor(whole) < 1e-9, last_factor(whole)

        ways = {"launcher": (143, lambda process, _: process.send_signal(signal.SIGTERM)),
                "rank": (143, one_rank(1, signal.SIGUSR1)),
                "kill": (None, one_rank(1, signal.SIGKILL))}
        for way, (expected, interrupt) in ways.items():
            output = place / way
            code, text = interrupted(2, output, interrupt)
            assert code == expected if expected else code not in (0, 143), text
            stopped = steps(output)[-1]
            assert stopped < last, "the run ended before it was interrupted"
            if expected:
                assert stopped % 50 != 0 or f"step {stopped}:" in text, text
            text = finish(2, output)
            assert f"resumed at step {stopped}" in text, text
            check("diff", whole / f"checkpoint-{last}", output / f"checkpoint-{last}")
            print(f"{way}: stopped at step {stopped}, the same bits at step {last}")

        # Other numbers of ranks take other numbers of steps per epoch: the schedule ends with them.
        output = place / "other"
        interrupted(2, output, ways["launcher"][1])
        for ranks in (3, 1):
            text = finish(ranks, output, epochs=EPOCHS)
            assert "resumed at step" in text, text
            assert last_factor(output) < 1e-9, (ranks, last_factor(output))
        check("verify", output)
        print("resumed on three ranks and on one")

        output = place / "beside"
        code, text = interrupted(2, output, refused_beside(2, output), epochs=100 * EPOCHS)
        assert code == 143, text
        print("a second run was refused")


if __name__ == "__main__":
    main()
