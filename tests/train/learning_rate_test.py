"""Advice of real runs: on the learning rate, where the number of ranks has changed the batch, and
on a bucket size that has no effect."""

import unittest

from train_case import TrainCase


class BucketSize(TrainCase):
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
