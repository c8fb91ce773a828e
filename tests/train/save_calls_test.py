"""A training process that is killed before each mutating call of its save leaves a checkpoint from
which the next process continues. tests/io does the same with bare files under strace; here the
saver's thread is killed from inside in the middle of training (strike.c)."""

import os
import re
import shutil
import sys
import unittest

from train_case import BIN, SOAK, TrainCase, checkpoints, command, finished

STRIKE = BIN / "tests" / "lockstep_strike.so"
# The recorder writes by the clock, into the same folder.
SAVING = ("--save_steps", "1", "--save_total_limit", "2", "--warmup_steps", "1", "--record_run",
          "false")


class KillAtEveryCall(TrainCase):
    def run_struck(self, work, **strike):
        return finished(command(0, self.config, work, "--resume", "auto", "--max_steps", "3",
                                *SAVING), LD_PRELOAD=str(STRIKE), STRIKE_PLACE=str(work), **strike)

    def test_killed_at_every_call(self):
        template, work = self.place / "template", self.place / "work"
        self.train(0, template, "--max_steps", 2, *SAVING)
        shutil.copytree(template, work)
        log = self.place / "calls"
        outcome = self.run_struck(work, STRIKE_LOG=str(log))
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        calls = log.read_text().splitlines()
        commit = [i for i, call in enumerate(calls, 1)
                  if re.search(r"rename .*checkpoint-3\.tmp-", call)]
        self.assertEqual(len(commit), 1, calls)
        self.assertGreater(len(calls), 25, calls)
        # Each is a whole start of the program: without LOCKSTEP_SOAK=1 a few, around the commit.
        chosen = range(1, len(calls) + 1) if SOAK else sorted(
            {1, 6, commit[0] - 1, commit[0], commit[0] + 1, len(calls)})
        for at in chosen:
            with self.subTest(call=calls[at - 1]):
                shutil.rmtree(work)
                shutil.copytree(template, work)
                outcome = self.run_struck(work, STRIKE_AT=str(at))
                self.assertEqual(outcome.returncode, -9, outcome.stderr)
                newest = checkpoints(work)[-1]
                self.assertEqual(newest, 2 if at <= commit[0] else 3)
                self.verify(work)
                done = self.train(0, work, "--resume", "auto", "--max_steps", 4, *SAVING)
                self.assertIn(f"checkpoint-{newest} at step {newest}", done.stderr)
                self.assertNotIn("passed over", done.stderr)
                self.assertEqual(checkpoints(work), [3, 4])
                self.assertFalse([name for name in os.listdir(work) if ".tmp-" in name])


if __name__ == "__main__":
    if "asan" in str(BIN):
        print("SKIP 1: a sanitizer's own library must be loaded first")
        sys.exit(77)
    unittest.main()
