"""The batch of a step at other numbers of ranks: elastic_gpu keeps it, and a run says what a
changed one means for the learning rate. And advice on a bucket size that has no effect."""

import json
import unittest

from train_case import TrainCase, checkpoints

CONFIG = """
model: {name: mlp, hidden: 16}
data: {name: random, samples: 96, features: 8, classes: 4}
global_batch_size: 24
per_device_train_batch_size: 8
num_train_epochs: 1
logging_steps: 1
save_steps: 100
disable_tqdm: true
use_cpu: true
"""


class Elastic(TrainCase):
    def setUp(self):
        super().setUp()
        self.config.write_text(CONFIG)

    def test_the_global_batch_is_the_same_on_one_two_and_four_ranks(self):
        # A rank of two has 12 samples, of four 6: the largest batch below 8 that divides them.
        for ranks, batch, accumulation in ((1, 8, 3), (2, 6, 2), (4, 6, 1)):
            output = self.place / f"out{ranks}"
            done = self.train(ranks, output, "--elastic_gpu")
            self.assertRegex(done.stderr + done.stdout,
                             rf"elastic_gpu: (\S.* on )?{ranks} CPU ranks?: {batch} per device x "
                             rf"{accumulation} accumulation x {ranks} ranks? = global batch 24")
            step = checkpoints(output)[-1]
            self.assertEqual(step, 4)  # 96 samples, 24 a step
            state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())
            self.assertEqual(state["train_batch_size"], batch)

    def test_the_batch_of_the_file_need_not_divide_the_global_batch(self):
        done = self.train(3, self.place / "out", "--elastic_gpu", "--global_batch_size", 15)
        self.assertIn("5 per device x 1 accumulation x 3 ranks = global batch 15",
                      done.stderr + done.stdout)

    def test_without_a_global_batch_the_window_of_a_rank_stays(self):
        self.config.write_text(CONFIG.replace("global_batch_size: 24\n",
                                              "gradient_accumulation_steps: 2\n"))
        done = self.train(2, self.place / "out", "--elastic_gpu")
        self.assertIn("8 per device x 2 accumulation x 2 ranks = global batch 32",
                      done.stderr + done.stdout)


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
