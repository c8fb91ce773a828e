#!/usr/bin/env python3
"""What Lockstep does, in five short scenes: ./dev demo builds what they need and starts this.

    python3 tools/demo.py build          (the build tree)

One rank against two, a rank that is killed, the run resumed to the same bits, a text by the
model. Everything is run by the commands that it prints; nothing is staged but the kill.
"""

import argparse
import json
import os
import pathlib
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time

CONFIG = "examples/configs/tiny_gpt.yaml"
STEPS = 120
SAVE = 40
DEADLINE_S = 600  # for one run; a machine on which it takes longer should hear so


class Demo:
    def __init__(self, build):
        self.lockstep = build / "bin" / "lockstep"
        self.folder = build / "demo"
        self.color = sys.stdout.isatty()

    def say(self, text=""):
        print(f"\033[1m{text}\033[0m" if self.color and text else text, flush=True)

    def title(self, number, text):
        self.say()
        self.say(f"{number}. {text}")

    def command(self, ranks, name, *more):
        launch = ["run", "--standalone", f"--nproc-per-node={ranks}"]
        return [str(self.lockstep), *launch, str(self.lockstep), "train", CONFIG,
                "--output_dir", str(self.folder / name), "--eval_strategy", "no",
                "--save_steps", str(SAVE), "--max_steps", str(STEPS), *more]

    def show(self, command):
        text = shlex.join(command).replace(str(self.lockstep), "lockstep")
        print("   $ " + text.replace(f"{os.getcwd()}/", ""), flush=True)

    def start(self, command):
        # As many threads for one rank alone as for one of two, or the comparison is not fair.
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def follow(self, process, on_line=None):
        """Shows progress in place; returns (exit code, all lines)."""
        lines, stop_at = [], time.monotonic() + DEADLINE_S
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if "] step " in line or line.startswith("step "):
                shown = line[line.index("step "):].split("eta")[0].strip()
                print(f"\r   {shown[:96]:<96}" if self.color else f"   {shown}",
                      end="" if self.color else "\n", flush=True)
            if on_line:
                on_line(line)
            if time.monotonic() > stop_at:
                process.kill()
                sys.exit(f"demo: this run took more than {DEADLINE_S} s")
        if self.color:
            print("\r" + " " * 100 + "\r", end="")
        return process.wait(timeout=60), lines

    def train(self, ranks, name, *more):
        command = self.command(ranks, name, *more)
        self.show(command)
        code, lines = self.follow(self.start(command))
        if code != 0:
            sys.exit("\n".join(lines[-40:]) + f"\ndemo: that ended with exit code {code}")
        return lines

    def tokens_per_second(self, name):
        rows = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").open()]
        return statistics.median(row["tokens_per_second"] for row in rows
                                 if "tokens_per_second" in row)

    # ------------------------------------------------------------ the scenes

    def speed_up(self):
        self.title(1, "A small GPT on one rank, then on two (a thread and the same batch for each)")
        self.train(1, "one")
        lines = self.train(2, "two")
        one, two = self.tokens_per_second("one"), self.tokens_per_second("two")
        print(f"   1 rank {one:8,.0f} tokens/s\n"
              f"   2 ranks{two:8,.0f} tokens/s     {two / one:.2f} times")
        for line in lines:
            if "replicas identical" in line:
                print("   " + line.split("] ")[-1])

    def kill(self):
        self.title(2, f"The same run; rank 1 is killed after step {SAVE}")
        command = self.command(2, "killed")
        self.show(command)
        process = self.start(command)
        killed = []

        def on_line(line):
            step = line.split("step ")[1].split("/")[0] if "step " in line and "/" in line else ""
            if step.isdigit() and int(step) > SAVE and not killed:
                killed.append(rank_pid(process.pid, 1))
                os.kill(killed[0], signal.SIGKILL)

        code, lines = self.follow(process, on_line)
        report = [line for line in lines if line.startswith("[launch]")]
        print("\n".join("   " + line for line in report[-6:]))
        print(f"   exit code {code}")

    def resume(self):
        self.title(3, "Started again with --resume auto, and compared with the run of scene 1")
        self.train(2, "killed", "--resume", "auto")
        names = [f"{self.folder}/{name}/checkpoint-{STEPS}" for name in ("two", "killed")]
        command = [str(self.lockstep), "checkpoint", "diff", *names]
        self.show(command)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print("\n".join("   " + line for line in (done.stdout + done.stderr).splitlines()[-6:]))
        if done.returncode != 0:
            sys.exit("demo: the resumed run differs from the one that was not killed")
        print("   the killed and resumed run has the bits of the one that never stopped")

    def sample(self):
        self.title(4, f"What the model has learned of C++ in {STEPS} steps")
        command = [str(self.lockstep), "generate", "--model", str(self.folder / "killed"),
                   "--prompt", "#include <", "--max_new_tokens", "54", "--temperature", "0.5"]
        self.show(command)
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S,
                              check=False)
        if done.returncode != 0:
            sys.exit(f"{done.stderr}\ndemo: that ended with exit code {done.returncode}")
        print("\n".join("   " + line for line in done.stdout.splitlines()))

    def end(self):
        self.title(5, "Where things are, and what to try next")
        here = f"{os.getcwd()}/"
        folder, program = (str(path).replace(here, "") for path in (self.folder, self.lockstep))
        rows = [
            (f"{folder}/two/", f"metrics.jsonl, checkpoint-{STEPS}/, runs/ (TensorBoard)"),
            (program, "the launcher and its commands: run, train, generate, config and more"),
            ("README.md", "a complete program, and the ways to start it"),
            ("examples/", "small programs with their output; ./dev build 03_mlp builds one"),
            ("./dev test", "builds the tests and runs them"),
        ]
        for name, text in rows:
            print(f"   {name:<20} {text}")


def rank_pid(launcher, rank):
    """The process below `launcher` that has RANK=rank in its environment."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
            except OSError:
                pass

    def is_below(pid):
        while pid and pid != launcher:
            pid = parents.get(pid)
        return pid == launcher

    for pid in parents:
        try:
            if is_below(pid) and f"\0RANK={rank}\0" in (
                    "\0" + pathlib.Path(f"/proc/{pid}/environ").read_text(errors="replace")):
                return pid
        except OSError:
            pass
    sys.exit(f"demo: rank {rank} is not among the processes of the launcher")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=pathlib.Path)
    demo = Demo(parser.parse_args().build.resolve())
    os.chdir(pathlib.Path(__file__).resolve().parents[1])
    shutil.rmtree(demo.folder, ignore_errors=True)
    demo.speed_up()
    demo.kill()
    demo.resume()
    demo.sample()
    demo.end()


if __name__ == "__main__":
    main()
