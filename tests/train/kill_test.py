"""A run that is killed at any moment and resumed is bit-identical to an uninterrupted one."""

import os
import random
import signal
import time
import unittest

from train_case import BOUND_S, SOAK, TrainCase, checkpoints, ranks_of, steps_done, wait_for_step

RUNS = 30 if SOAK else 2
# Far more steps than three kills wait for: a busy machine sees a step late.
FLAGS = ("--num_train_epochs", "60", "--save_steps", "3", "--save_total_limit", "3")


class Kill(TrainCase):
    def until_saving(self, process, output):
        """Returns while a save is being written, or a little later."""
        end = time.monotonic() + BOUND_S
        while process.poll() is None and time.monotonic() < end:
            if any(".tmp-" in name for name in os.listdir(output)):
                return
            time.sleep(0.0005)

    def broken(self, output, random_one, during_save):
        process = self.start(2, output, *FLAGS, "--resume", "auto")
        try:
            wait_for_step(process, output, steps_done(output) + random.randrange(1, 12))
            if during_save:
                self.until_saving(process, output)
            ranks = ranks_of(process)
            for pid in [random.choice(ranks)] if random_one and ranks else ranks:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it was just done
            process.wait(timeout=BOUND_S)
        finally:
            if process.poll() is None:
                process.kill()
        return process.returncode

    def test_killed_and_resumed(self):
        random.seed(3)
        whole = self.place / "whole"
        self.train(2, whole, *FLAGS)
        last = f"checkpoint-{checkpoints(whole)[-1]}"
        killed = 0
        for run in range(RUNS):
            with self.subTest(run=run):
                output = self.place / f"run{run}"
                output.mkdir()
                for _ in range(3):
                    killed += self.broken(output, random_one=bool(run % 2),
                                          during_save=bool(run // 2 % 2)) != 0
                self.train(2, output, *FLAGS, "--resume", "auto")
                self.verify(output)
                self.assert_same(whole / last, output / last)
        self.assertGreater(killed, RUNS, "most runs were done before they were killed")


if __name__ == "__main__":
    unittest.main()
