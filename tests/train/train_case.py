"""Shared helpers of the training tests: a small run that is hard to repeat, and its parts."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
SOURCE = pathlib.Path(os.environ["LOCKSTEP_SOURCE"])
LOCKSTEP = str(BIN / "lockstep")
SOAK = os.environ.get("LOCKSTEP_SOAK") == "1"
BOUND_S = 600  # for what takes seconds, on a machine that is busy

# Batch norm and dropout, accumulation with short windows, clipping, a schedule: whatever a resumed
# run could get wrong shows in its bits. 150 samples do not divide by ranks, batches or windows.
CONFIG = """
model: {name: mlp, hidden: 32, layers: 2, dropout: 0.2, batch_norm: true}
data: {name: random, samples: 150, features: 12, classes: 5}
num_train_epochs: 4
per_device_train_batch_size: 4
gradient_accumulation_steps: 3
learning_rate: 1.0e-2
lr_scheduler_type: cosine
warmup_steps: 3
weight_decay: 0.05
logging_steps: 1
save_steps: 5
dataloader_num_workers: 1
disable_tqdm: true
use_cpu: true
"""
# Of a language model of bytes.
TEXT_KEYS = {"max_seq_len": 16, "per_device_train_batch_size": 4, "learning_rate": "1.0e-3",
             "logging_steps": 1, "eval_strategy": "steps", "disable_tqdm": "true",
             "use_cpu": "true"}


def environment(**more):
    ours = r"RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC|LOCKSTEP_(?!BIN|SOURCE|PYTHON)"
    env = {k: v for k, v in os.environ.items() if not re.match(ours, k)}
    return {**env, "LOCKSTEP_DEVICE": "cpu", "OMP_NUM_THREADS": "1", **more}


def command(ranks, config, output, *flags):
    train = [LOCKSTEP, "train", str(config), "--output_dir", str(output), *map(str, flags)]
    if ranks == 0:  # without a launcher
        return train
    return [LOCKSTEP, "run", "--standalone", f"--nproc-per-node={ranks}", *train]


def finished(args, limit_s=BOUND_S, cwd=None, **variables):
    """A command that has ended: its exit code and what it said."""
    return subprocess.run([str(arg) for arg in args], capture_output=True, text=True,
                          timeout=limit_s, env=environment(**variables), cwd=cwd, check=False,
                          stdin=subprocess.DEVNULL)


class TrainCase(unittest.TestCase):
    keys = {}  # of use_model()'s training file, beside TEXT_KEYS

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="lockstep-train-")
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)
        self.config = self.place / "train.yaml"
        self.config.write_text(CONFIG)

    def use_model(self, model):
        """The training file is for a language model of a short text's bytes."""
        text = self.place / "text"
        text.mkdir(exist_ok=True)
        (text / "a.txt").write_text("to be or not to be, that is the question. " * 200)
        keys = {"model": model, "data": f"{{name: bytes, path: {text}, eval_bytes: 400}}",
                **TEXT_KEYS, **self.keys}
        self.config.write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))

    def use_config(self, config):
        (self.place / "config.json").write_text(json.dumps(config))
        self.use_model(f"{{config: {self.place / 'config.json'}}}")

    def train(self, ranks, output, *flags, code=0, **variables):
        done = finished(command(ranks, self.config, output, *flags), **variables)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def run_with(self, ranks, name, *flags):
        """Trains and returns the folder, with what was said."""
        output = self.place / name
        done = self.train(ranks, output, *flags)
        return output, done.stdout + done.stderr

    def lockstep(self, *args, code=0, **options):
        done = finished([LOCKSTEP, *args], **options)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def with_mounts(self, script):
        """Runs it where it may mount file systems; 99 is its exit code when it cannot."""
        done = finished(["unshare", "-m", "sh", "-c", script])
        if done.returncode == 99 or "unshare" in done.stderr:
            self.skipTest("no file system can be mounted here")
        return done

    def start(self, ranks, output, *flags):
        log = open(self.place / "log", "w", encoding="utf-8")  # pylint: disable=consider-using-with
        self.addCleanup(log.close)
        # A session of its own: what is left of it can be found, and Ctrl-C reaches it alone.
        process = subprocess.Popen(command(ranks, self.config, output, *flags), env=environment(),
                                   stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   start_new_session=True)
        self.addCleanup(end, process)
        return process

    def wait_while_training(self, process, output, step):
        """Returns with the step done and the run under way."""
        wait_for_step(process, output, step)
        self.assertIsNone(process.poll(), self.log())

    def held_port(self):
        """A port that nobody else is given while the test runs. Bound and never listening, it does
        not keep those from listening there who allow addresses to be used again, as stores do."""
        holder = socket.socket()
        self.addCleanup(holder.close)
        holder.bind(("127.0.0.1", 0))  # without that permission yet: a port of nobody else's
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return holder.getsockname()[1]

    def on_two_hosts(self, ranks, output, *flags):
        """Two launchers on this machine with `ranks` each: what they have said."""
        port, processes = self.held_port(), []
        for node in range(2):
            launcher = [LOCKSTEP, "run", "--nnodes=2", f"--node-rank={node}",
                        f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1",
                        f"--master-port={port}"]
            # pylint: disable-next=consider-using-with
            processes.append(subprocess.Popen(
                launcher + command(0, self.config, output, *flags), env=environment(), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
            self.addCleanup(end, processes[-1])
        said = [process.communicate(timeout=BOUND_S)[0] for process in processes]
        self.assertEqual([process.returncode for process in processes], [0, 0], said)
        return said

    def log(self):
        return (self.place / "log").read_text(encoding="utf-8", errors="replace")

    def verify(self, folder, code=0):
        return self.lockstep("checkpoint", "verify", folder, code=code).stdout

    def newest(self, output):
        return output / f"checkpoint-{checkpoints(output)[-1]}"

    def assert_close(self, one, other, relative, names=("loss",)):
        """The losses, or other figures, of two runs."""
        for name in names:
            expected, found = losses(one, name), losses(other, name)
            self.assertTrue(expected, name)
            self.assertEqual(expected.keys(), found.keys(), name)
            for step, value in expected.items():
                self.assertAlmostEqual(value, found[step], delta=relative * value,
                                       msg=f"{name} of step {step}")

    def assert_same(self, one, other):
        """Weights, buffers, optimizer and generators of two checkpoints, to the bit, and how far
        they are: step, position in the data, schedule."""
        self.lockstep("checkpoint", "diff", one, other)


def checkpoints(output):
    """Steps that have a folder, in order."""
    found = [int(p.name.split("-")[1]) for p in pathlib.Path(output).glob("checkpoint-*")
             if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found)


def losses(output, name="loss"):
    """Loss, or another figure, by step, of the lines of metrics.jsonl that have one."""
    lines = (pathlib.Path(output) / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["step"]: entry[name] for entry in entries if name in entry}


def steps_done(output):
    try:
        return max(losses(output), default=0)
    except (FileNotFoundError, ValueError):
        return 0


def wait_for_step(process, output, step):
    end = time.monotonic() + BOUND_S
    while steps_done(output) < step and process.poll() is None:
        if time.monotonic() > end:
            raise AssertionError(f"step {step} did not come within {BOUND_S} s")
        time.sleep(0.01)


def ranks_of(process):
    """Pids of the ranks, in their order: those whose command is `lockstep train` below the
    launcher. Pids themselves have no order, for they begin again after the largest."""
    children = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                argv = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            children[int(entry.name)] = (int(fields[1]), argv)
    below, found = {process.pid}, []
    for _ in range(4):
        below |= {pid for pid, (parent, _) in children.items() if parent in below}
    for pid in below:
        argv = children.get(pid, (0, []))[1]
        if len(argv) > 1 and argv[1] == b"train":
            try:
                variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            found += [(int(v[5:]), pid) for v in variables if v.startswith(b"RANK=")]
    return [pid for _, pid in sorted(found)]


def left_of(process):
    """Processes of the session that the launcher began."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == process.pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def end(process):
    """What a test that failed has left: a run may have hours to go."""
    if process.poll() is None:
        for pid in left_of(process):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait(BOUND_S)


def copy_until(output, target, step):
    """The run as it was when checkpoint-<step> was its newest."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(output, target)
    for later in checkpoints(target):
        if later > step:
            shutil.rmtree(pathlib.Path(target) / f"checkpoint-{later}")
