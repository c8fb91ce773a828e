"""Captured training beside the same training without graphs, for minutes: the same bits.

    gpu_soak_test.py              under a minute; with LOCKSTEP_SOAK=1 ten minutes of each run
    gpu_soak_test.py STEPS        so many optimizer steps of each run

Two types (bf16, and fp16 with its loss scale) at once, each as two runs at once: one that is never
stopped and records no graph, and one that replays graphs and is killed and stopped again and again.
Evaluations, moving averages that are swapped in, and checkpoints come between the steps of both.
"""
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "train"))
import train_case  # noqa: E402: stands in the folder beside
from gpu_case import end_without_gpu  # noqa: E402
from train_case import checkpoints, losses  # noqa: E402

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 25000 if train_case.SOAK else 1000
LOGGING_STEPS = 20  # captured_soak.cpp
# A checkpoint comes every 200 steps: each piece of a run gets past several.
PIECE_S = (40, 70) if train_case.SOAK or STEPS > 3000 else (15, 20)


def start(folder, half, compiled):
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "a", encoding="utf-8") as log:
        return subprocess.Popen(
            [str(train_case.BIN / "tests" / "captured_soak"), str(folder), str(STEPS), half,
             compiled], env=train_case.environment(LOCKSTEP_DEVICE="cuda:0"), stdout=log,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def uninterrupted(folder, half, said):
    began = time.monotonic()
    code = start(folder, half, "false").wait()
    said[folder] = code, [], time.monotonic() - began


def interrupted(folder, half, said):
    began, stops, ends, generator = time.monotonic(), [], 0, random.Random(half)
    while True:
        process = start(folder, half, "true")
        number = (signal.SIGKILL, signal.SIGTERM)[ends % 2]
        try:
            code = process.wait(timeout=generator.uniform(*PIECE_S))
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            code = process.wait()
        if code not in (-signal.SIGKILL, -signal.SIGTERM, 143):
            break
        ends += 1
        stops.append(checkpoints(folder / "out")[-1])
    said[folder] = code, stops, time.monotonic() - began


def averages(folder):
    lines = (folder / "averages.txt").read_text().splitlines()
    by_step = {}
    for line in lines:
        step, value = line.split()
        by_step.setdefault(int(step), set()).add(value)
    return by_step


def compare(plain, graph, stops):
    """What differs, as sentences. A step that was taken again must have had the same result."""
    wrong = []
    newest = [folder / "out" / f"checkpoint-{checkpoints(folder / 'out')[-1]}"
              for folder in (plain, graph)]
    done = subprocess.run([train_case.LOCKSTEP, "checkpoint", "diff", *map(str, newest)],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        wrong.append(done.stdout + done.stderr)
    # A logged loss is the mean over the steps since the last one. Where a run continues between
    # two, the first has fewer steps.
    partial = {-(-step // LOGGING_STEPS) * LOGGING_STEPS for step in stops if step % LOGGING_STEPS}
    one, other = losses(plain / "out"), losses(graph / "out")
    steps = [step for step in sorted(one) if one[step] != other.get(step) and step not in partial]
    if steps or sorted(one) != sorted(other):
        wrong.append(f"the logged losses differ at steps {steps[:5]}")
    one, other = averages(plain), averages(graph)
    if one != other:
        steps = [step for step in sorted(one) if one[step] != other.get(step)]
        wrong.append(f"the losses of the averages differ from step {steps[:1]} on")
    name = f"averages-{STEPS}.safetensors"
    if (plain / name).read_bytes() != (graph / name).read_bytes():
        wrong.append("the averages differ")
    if "replayed as one CUDA graph" not in (graph / "log").read_text():
        wrong.append("steps were not captured")
    return wrong


def main():
    end_without_gpu()
    failed = False
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as place:
        place, said, threads = pathlib.Path(place), {}, []
        for half in ("bf16", "fp16"):
            for name, run in (("plain", uninterrupted), ("graph", interrupted)):
                threads.append(threading.Thread(
                    target=run, args=(place / f"{half}-{name}", half, said)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for half in ("bf16", "fp16"):
            plain, graph = place / f"{half}-plain", place / f"{half}-graph"
            wrong = [f"{folder.name}: exit code {said[folder][0]}\n"
                     f"{(folder / 'log').read_text()[-3000:]}"
                     for folder in (plain, graph) if said[folder][0] != 0]
            wrong = wrong or compare(plain, graph, said[graph][1])
            failed |= bool(wrong)
            print(f"{'FAILED' if wrong else 'ok    '} {half}: {STEPS} steps without graphs in "
                  f"{said[plain][2]:.0f} s; captured in {said[graph][2]:.0f} s, ended and resumed "
                  f"{len(said[graph][1])} times", *wrong, sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
