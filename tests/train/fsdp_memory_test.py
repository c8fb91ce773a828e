"""A model whose training needs twice the memory that a rank may use: fsdp and tensor parallelism
train it, evaluate it, save it and resume from that; data parallelism ends with an error that says
why.

Every rank has a control group of its own with that limit, as a host or a container has. Skipped
where none can be made."""

import os
import pathlib
import re
import shutil
import subprocess
import unittest

from train_case import BOUND_S, LOCKSTEP, TrainCase, checkpoints, finished, losses

LAYERS, WIDTH = 32, 384
PARAMETERS = 4 * 12 * LAYERS * WIDTH * WIDTH  # bytes of the blocks' weights, in float
# Weights, gradients and two states of AdamW are four times that.
LIMIT = 4 * PARAMETERS // 2
RANKS = 4

CONFIG = f"""
model: {{name: gpt, n_layer: {LAYERS}, n_head: 8, n_embd: {WIDTH}, n_positions: 16,
  vocab_size: 257}}
data: {{name: bytes, path: TEXT, eval_bytes: 200}}
max_seq_len: 16
per_device_train_batch_size: 1
per_device_eval_batch_size: 1
learning_rate: 1.0e-3
max_steps: 2
save_steps: 1
eval_strategy: steps
eval_steps: 1
logging_steps: 1
disable_tqdm: true
use_cpu: true
"""


def memory_groups():
    """Folders in which a control group that limits memory might be made, with its two files."""
    own = pathlib.Path("/proc/self/cgroup").read_text(encoding="utf-8")
    root = pathlib.Path("/sys/fs/cgroup")
    one = re.search(r"^\d+:[^:]*\bmemory\b[^:]*:/(.*)$", own, re.M)
    if one:
        for place in (root / "memory" / one[1], root / "memory"):
            yield place, "memory.limit_in_bytes"
    two = re.search(r"^0::/(.*)$", own, re.M)
    if two:
        for place in (root / two[1], root):
            yield place, "memory.max"


class Limits:
    """A shell command that limits the memory of the rank that it becomes."""

    def __init__(self):
        self.groups, self.script = [], ""
        for place, file in memory_groups():
            if self.make(place, file):
                return

    def make(self, place, file):
        try:
            for rank in range(RANKS):
                group = place / f"lockstep-fsdp-{os.getpid()}-{rank}"
                group.mkdir()
                self.groups.append(group)
                (group / file).write_text(str(LIMIT), encoding="utf-8")
                for swap, most in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", LIMIT)):
                    if (group / swap).exists():
                        (group / swap).write_text(str(most), encoding="utf-8")
                # Not every group takes processes.
                subprocess.run(["sh", "-c", f"echo $$ > {group}/cgroup.procs"], check=True,
                               stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            self.remove()
            return False
        prefix = self.groups[0].as_posix()[:-1]
        self.script = f'echo $$ > {prefix}$LOCAL_RANK/cgroup.procs || exit 97; exec "$@"'
        self.text = f"control groups in {place}"
        return True

    def remove(self):
        for group in self.groups:
            group.rmdir()
        self.groups = []


@unittest.skipIf("SANITIZED" in os.environ, "a sanitizer needs memory of its own")
class FsdpMemory(TrainCase):
    def setUp(self):
        super().setUp()
        self.limits = Limits()
        self.addCleanup(self.limits.remove)
        if not self.limits.script:
            self.skipTest("SKIPPED: no control group can be made here, so the memory of a rank "
                          "cannot be limited")
        print(f"memory of a rank: {LIMIT >> 20} MiB by {self.limits.text}")
        text = self.place / "text"
        text.mkdir()
        (text / "a.txt").write_text("to be or not to be, that is the question. " * 200)
        self.config.write_text(CONFIG.replace("TEXT", str(text)))

    def run_limited(self, output, *flags):
        return finished([LOCKSTEP, "run", "--standalone", f"--nproc-per-node={RANKS}", "sh", "-c",
                         self.limits.script, "rank", LOCKSTEP, "train", self.config,
                         "--output_dir", output, *flags], limit_s=3 * BOUND_S)

    def test_a_model_of_twice_the_limit(self):
        for name, flags in (("shards", ("--fsdp", "full_shard")),
                            ("slices", ("--tensor_parallel_degree", str(RANKS)))):
            with self.subTest(name):
                self.trains_and_resumes(self.place / name, flags)

    def trains_and_resumes(self, whole, flags):
        done = self.run_limited(whole, *flags)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(checkpoints(whole), [1, 2])
        model = whole / "checkpoint-2" / "model.safetensors"
        self.assertGreaterEqual(4 * model.stat().st_size, 2 * LIMIT)
        self.verify(whole / "checkpoint-2")
        rest = whole.with_name(f"rest-{whole.name}")
        rest.mkdir()
        shutil.copytree(whole / "checkpoint-1", rest / "checkpoint-1")
        done = self.run_limited(rest, *flags, "--resume", "auto")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual({s: loss for s, loss in losses(whole).items() if s > 1}, losses(rest))
        self.assert_same(whole / "checkpoint-2", rest / "checkpoint-2")

    def test_data_parallelism_says_what_is_missing(self):
        done = self.run_limited(self.place / "ddp", "--shard_optimizer", "false")
        self.assertNotEqual(done.returncode, 0, done.stdout + done.stderr)
        said = done.stdout + done.stderr
        self.assertRegex(said, "out of memory|out-of-memory killer")
        # The kernel ends it, after what found the limit has named it.
        self.assertIn("the control group's limit of", said)
        self.assertIn("killed by SIGKILL", said)


if __name__ == "__main__":
    unittest.main()
