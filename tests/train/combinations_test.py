"""Every combination of axes up to four ranks under `lockstep train`: each trains to the losses of
one process, is killed after a save, and is resumed by the next combination of the table."""

import os
import signal
import time
import unittest

from train_case import BOUND_S, TrainCase, checkpoints, copy_until, losses, ranks_of, wait_for_step

BATCH = 12  # samples of a step, of which a rank has 12 / (data x shard), one at a time
STEPS, SAVED = 6, 3
YAML = """
model: MODEL
data: {name: bytes, path: TEXT, eval_bytes: 300}
max_seq_len: 16
max_steps: 6
per_device_train_batch_size: 1
per_device_eval_batch_size: 4
learning_rate: 1.0e-3
logging_steps: 1
eval_strategy: steps
eval_steps: 3
save_steps: 3
max_grad_norm: 0
disable_tqdm: true
use_cpu: true
"""
MODEL = "{name: gpt, n_layer: 4, n_head: 12, n_embd: 48, n_positions: 16, vocab_size: 257}"
# The flags of each axis with several ranks. A further axis is a line here, and its rows follow.
AXES = {
    "data": lambda n: (),
    "shard": lambda n: ("--fsdp", "full_shard", "--data_parallel_shard_degree", n),
    "pipeline": lambda n: ("--pipeline_parallel_degree", n),
    "tensor": lambda n: ("--tensor_parallel_degree", n),
}
SAMPLES = ("data", "shard")  # ranks along these see samples of their own
MOST = 4
# What differs is the order of sums. A mean of 12 losses in float, each rounded to 6e-8 of it,
# differs by less than 1e-6 in the first step. AdamW divides by the gradient's own size, so that a
# weight whose gradient is all rounding moves by up to the learning rate, 1e-3, in either direction;
# there are few of them, and what they add to a loss is of second order in that. A sample that is
# lost or counted twice moves the loss by more than 1e-3 of it.
TOLERANCE = 1e-4


def combinations(most=MOST):
    """Sizes of all axes, whose product is `most` at most, in the order of their ranks."""
    found = [{}]
    for axis in AXES:
        found = [{**sizes, axis: n} for sizes in found for n in range(1, most + 1)]
    return sorted((sizes for sizes in found if count(sizes) <= most), key=count)


def count(sizes):
    ranks = 1
    for n in sizes.values():
        ranks *= n
    return ranks


def samples(sizes):
    ranks = 1
    for axis in SAMPLES:
        ranks *= sizes[axis]
    return ranks


def name(sizes):
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one process"


def flags(sizes):
    found = ["--gradient_accumulation_steps", BATCH // samples(sizes)]
    for axis, n in sizes.items():
        if n > 1:
            found += AXES[axis](n)
    return found


class Combinations(TrainCase):
    def setUp(self):
        super().setUp()
        folder = self.place / "text"
        folder.mkdir()
        (folder / "a.txt").write_text("to be or not to be, that is the question. " * 100)
        self.config.write_text(YAML.replace("TEXT", str(folder)).replace("MODEL", MODEL))

    def run_killed(self, sizes, output):
        """Trains, and is killed as soon as the first checkpoint is durable: a rank, by SIGKILL."""
        process = self.start(count(sizes), output, *flags(sizes), "--max_steps", 1000,
                             "--lr_scheduler_type", "constant")
        wait_for_step(process, output, SAVED)
        end = time.monotonic() + BOUND_S
        while SAVED not in checkpoints(output) and process.poll() is None:
            self.assertLess(time.monotonic(), end, self.log())
            time.sleep(0.01)
        self.assertIsNone(process.poll(), self.log())
        os.kill(ranks_of(process)[-1], signal.SIGKILL)
        self.assertNotEqual(process.wait(timeout=BOUND_S), 0)

    def test_each_trains_as_one_process_and_continues_as_the_next(self):
        table = combinations()
        common = ("--lr_scheduler_type", "constant")
        one = self.place / "one"
        self.train(1, one, *flags(table[0]), *common)
        expected = losses(one)
        self.assertEqual(len(expected), STEPS)
        print(f"\n{'ranks':>5}  {'trains as':34}{'difference':>11}  {'continues as':34}"
              f"{'difference':>11}", flush=True)
        worst = 0.0
        for number, (sizes, after) in enumerate(zip(table, table[1:] + table[:1])):
            killed = self.place / f"killed-{number}"
            self.run_killed(sizes, killed)
            first = self.difference(expected, losses(killed), SAVED)
            rest = self.place / f"rest-{number}"
            copy_until(killed, rest, SAVED)
            self.train(count(after), rest, "--resume", "auto", *flags(after), *common)
            then = self.difference(expected, losses(rest), STEPS)
            worst = max(worst, first, then)
            print(f"{count(sizes):>5}  {name(sizes):34}{first:>11.1e}  {name(after):34}"
                  f"{then:>11.1e}", flush=True)
            self.assertLess(first, TOLERANCE, name(sizes))
            self.assertLess(then, TOLERANCE, f"{name(sizes)}, then {name(after)}")
        print(f"{len(table)} combinations; the largest difference is {worst:.1e} of a loss")

    def difference(self, expected, got, steps):
        """The largest, in shares of the loss, of the steps up to `steps`."""
        self.assertLessEqual(set(range(1, steps + 1)), got.keys())
        return max(abs(got[step] - expected[step]) / expected[step]
                   for step in range(1, steps + 1))


if __name__ == "__main__":
    unittest.main()
