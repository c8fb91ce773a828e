"""`--tune bucket_cap_mb` measures in the first steps of a real run, and advice on the learning rate
is given where the number of ranks has changed the batch."""

import re
import unittest

from train_case import TrainCase

# 4.1 MiB of gradients: unset, 1 and 5 are measured, in 3 + 3 * 3 * 4 steps.
CONFIG = """
model: {name: mlp, hidden: 1024, layers: 2}
data: {name: random, samples: 400, features: 12, classes: 5}
per_device_train_batch_size: 2
max_steps: 45
logging_steps: 15
save_steps: 45
shard_optimizer: false
disable_tqdm: true
use_cpu: true
"""


class Tune(TrainCase):
    def setUp(self):
        super().setUp()
        self.config.write_text(CONFIG)

    def test_the_fastest_size_is_chosen_and_the_bits_stay(self):
        self.train(2, self.place / "plain")
        # The file may follow the flag.
        done = self.lockstep("train", "--nproc-per-node=2", "--tune", "bucket_cap_mb", self.config,
                             "--output_dir", self.place / "tuned")
        said = done.stdout + done.stderr
        self.assertEqual(said.count("tune: bucket_cap_mb, medians of 9 steps each on 2 ranks"), 1)
        rows = re.findall(r"^(?:\[0\] )? +(unset|[\d.]+) +(\d+) +([\d.]+) +([\d.]+)(  as set)?"
                          r"(  chosen)?$", said, re.M)
        self.assertEqual([row[0] for row in rows], ["unset", "1", "5"], said)
        self.assertEqual([bool(row[4]) for row in rows], [True, False, False])
        self.assertEqual(rows[2][1], "1", "5 MiB hold all gradients")
        self.assertGreater(int(rows[1][1]), 1)
        times = [float(row[2]) for row in rows]
        chosen = [i for i, row in enumerate(rows) if row[5]]
        best = min(range(3), key=times.__getitem__)
        gain, spread = times[0] - times[best], max(float(rows[0][3]), float(rows[best][3]))
        self.assertEqual(chosen, [best if gain > 0.0101 * times[0] and gain > spread else 0], said)
        advice = (f"write ddp_bucket_cap_mb: {rows[chosen[0]][0]}" if chosen[0] else
                  "No other size is faster by 1 % and by more than the spread")
        self.assertIn(advice, said)
        self.assert_same(self.place / "plain/checkpoint-45", self.place / "tuned/checkpoint-45")

    def test_where_nothing_can_be_measured_it_says_so(self):
        done = self.train(2, self.place / "short", "--tune", "bucket_cap_mb", "--max_steps", "14")
        self.assertIn("bucket_cap_mb is not tuned: 3 sizes need 15 steps and 14 are left",
                      done.stderr + done.stdout)
        done = self.train(1, self.place / "one", "--tune", "bucket_cap_mb")
        self.assertIn("not tuned: one rank averages nothing", done.stderr + done.stdout)
        done = self.train(2, self.place / "sharded", "--tune", "bucket_cap_mb",
                          "--shard_optimizer", "true", code=2)
        self.assertIn("reduced by a ShardedOptimizer, in one pass of its step()", done.stderr)
        done = self.train(2, self.place / "auto", "--tune", "bucket_cap_mb",
                          "--shard_optimizer", "auto")
        self.assertIn("bucket_cap_mb is not tuned: [reducer] the bucket size cannot be changed",
                      done.stderr + done.stdout)
        self.assertNotIn("medians of", done.stderr + done.stdout)
        self.assertIn("sharded over 2 ranks", done.stderr + done.stdout)
        done = self.train(2, self.place / "gloo", "--tune", "bucket_cap_mb",
                          "--shard_optimizer", "auto", "--ddp_backend", "gloo")
        self.assertIn("tune: bucket_cap_mb, medians of 9 steps", done.stderr + done.stdout)
        done = self.train(2, self.place / "fixed", "--tune", "bucket_cap_mb",
                          "--full_determinism", "true", code=2)
        self.assertIn("tune chooses the buckets by measured times", done.stderr)
        done = self.train(2, self.place / "other", "--tune", "workers", code=2)
        self.assertIn("tune must be bucket_cap_mb", done.stderr)

    def test_a_size_that_the_sharded_step_does_not_use_gets_one_line(self):
        line = "ddp_bucket_cap_mb 10 has no effect: the sharded optimizer averages gradients"
        flags = ("--max_steps", "2", "--ddp_bucket_cap_mb", "10", "--shard_optimizer")
        for shard, times in (("auto", 1), ("true", 1), ("false", 0)):
            done = self.train(2, self.place / shard, *flags, shard)
            self.assertEqual((done.stderr + done.stdout).count(line), times, done.stderr)


class LearningRate(TrainCase):
    def said(self, ranks, output, *flags):
        done = self.train(ranks, self.place / output, *flags)
        lines = [line for line in (done.stdout + done.stderr).splitlines()
                 if "learning_rate 0." in line]
        self.assertLessEqual(len(lines), 1, lines)
        return lines[0] if lines else ""

    def test_a_changed_batch_gets_one_line(self):
        short = ("--max_steps", "2", "--save_steps", "2", "--warmup_steps", "0")
        self.assertEqual(self.said(1, "one", *short), "")
        line = self.said(2, "two", *short)
        self.assertIn("learning_rate 0.01: a step has 24 samples on 2 ranks, 12 on one", line)
        self.assertIn("the square-root rule for adamw suggests 0.0141", line)
        self.assertEqual(self.said(2, "fixed", *short, "--gradient_accumulation_steps", "1",
                                   "--global_batch_size", "24"), "")
        self.assertEqual(self.said(2, "named", *short, "--learning_rate_batch_size", "24"), "")

    def test_a_run_that_continues_compares_with_its_checkpoint(self):
        both = ("--save_steps", "2", "--optim", "sgd", "--warmup_steps", "0")
        first = ("--max_steps", "2", *both)
        more = ("--max_steps", "4", *both, "--resume", "auto")
        self.said(1, "run", *first)
        line = self.said(2, "run", *more)
        self.assertIn("learning_rate 0.01 was set for 12 samples per step; 24 now: the linear rule "
                      "for sgd suggests 0.02.", line)
        # A run that follows it, or continues a continued run, gets no line.
        self.said(1, "followed", *first)
        self.assertEqual(self.said(2, "followed", *more, "--learning_rate", "0.02"), "")
        self.assertEqual(self.said(2, "run", *more, "--max_steps", "6"), "")


if __name__ == "__main__":
    unittest.main()
