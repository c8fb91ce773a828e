"""The sharded optimizer under `lockstep train`: the bits and the checkpoints of the replicated one,
and runs that change from one to the other, also with another number of ranks."""

import json
import unittest

from train_case import TrainCase, checkpoints, copy_until

STEP = 10  # of a checkpoint in the middle


def ways(output):
    """Learning rate and norm by step, as they were logged."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {e["step"]: (e["learning_rate"], e["grad_norm"]) for e in entries if "loss" in e}


class Shard(TrainCase):
    def run_with(self, shard, ranks, name, *flags):
        """Trains and returns the folder, with what was said."""
        output = self.place / name
        done = self.train(ranks, output, "--shard_optimizer", shard, *flags)
        return output, done.stdout + done.stderr

    def test_same_checkpoints_on_shared_memory(self):
        for ranks in (2, 3):
            plain, said = self.run_with("false", ranks, f"false{ranks}")
            self.assertIn("optimizer adamw: replicated", said)
            shard, said = self.run_with("auto", ranks, f"auto{ranks}")
            self.assertIn(f"optimizer adamw: sharded over {ranks} ranks (ranks share memory", said)
            self.assertEqual(checkpoints(plain), checkpoints(shard))
            for step in checkpoints(plain):
                self.assert_same(plain / f"checkpoint-{step}", shard / f"checkpoint-{step}")
            self.assertEqual(ways(plain), ways(shard))

    def test_auto_is_replicated_elsewhere_and_true_has_its_bits(self):
        plain, said = self.run_with("auto", 2, "plain", "--ddp_backend", "gloo")
        self.assertIn("optimizer adamw: replicated", said)
        shard, said = self.run_with("true", 2, "shard", "--ddp_backend", "gloo")
        self.assertIn("sharded over 2 ranks (shard_optimizer: true)", said)
        self.assertIn("replicas identical on 2 ranks", said)
        self.assert_same(self.newest(plain), self.newest(shard))

    def test_a_world_of_one(self):
        plain, said = self.run_with("auto", 1, "plain")
        self.assertIn("optimizer adamw: replicated", said)
        shard, said = self.run_with("true", 1, "shard")
        self.assertIn("optimizer adamw: replicated", said)  # there is nothing to divide
        self.assert_same(self.newest(plain), self.newest(shard))

    def test_resumed_the_other_way(self):
        whole, _ = self.run_with("false", 2, "whole")
        for before, after in (("false", "true"), ("true", "false"), ("true", "true")):
            first, _ = self.run_with(before, 2, f"{before}-then-{after}")
            rest = self.place / "rest"
            copy_until(first, rest, STEP)
            self.run_with(after, 2, "rest", "--resume", "auto")
            self.assert_same(self.newest(whole), self.newest(rest))

    def test_resumed_with_another_number_of_ranks(self):
        first, _ = self.run_with("true", 2, "first")
        for ranks in (3, 1):
            ends = []
            for shard in ("true", "false"):
                rest = self.place / f"rest-{ranks}-{shard}"
                copy_until(first, rest, STEP)
                self.run_with(shard, ranks, rest.name, "--resume", "auto")
                ends.append(self.newest(rest))
            self.assertEqual(ends[0].name, ends[1].name)
            self.assert_same(*ends)


if __name__ == "__main__":
    unittest.main()
