"""A stop signal, to the launcher or to a rank, ends in a committed checkpoint and code 143."""

import os
import random
import re
import signal
import time
import unittest

from train_case import (BOUND_S, SOAK, TrainCase, checkpoints, left_of, ranks_of, steps_done,
                        wait_for_step)

GRACE_S = 180  # the launcher's 30 and what a busy machine adds
# Hours of steps: however late the signal comes, it finds the run under way.
ENDLESS = ("--num_train_epochs", "100000", "--save_steps", "1000000")


class Stop(TrainCase):
    def stopped(self, output, number, to_launcher, step):
        process = self.start(2, output, *ENDLESS, "--resume", "auto")
        self.wait_while_training(process, output, step)
        # Anywhere between two steps, or in one.
        time.sleep(random.random() * 0.05)
        rank = random.randrange(2)
        os.kill(process.pid if to_launcher else ranks_of(process)[rank], number)
        code = process.wait(timeout=GRACE_S)
        self.assertEqual(code, 143, self.log())
        self.assertEqual(left_of(process), [])
        self.assertRegex(self.log(), fr"stop requested by {number.name}: saving, then leaving")
        newest = checkpoints(output)[-1]
        received = r"( \(received by rank \d\))?" if to_launcher else (
            rf" \(received by rank {rank}\)")
        self.assertRegex(self.log(), rf"\[trainer\] stopped by {number.name}{received}, saved at "
                                     rf"step {newest}\. To continue: ")
        self.verify(output / f"checkpoint-{newest}")
        self.assertGreaterEqual(newest, step)
        if not to_launcher:  # the rank that was signalled is named, though all end with 143
            self.assertRegex(self.log(), rf"\[launch\] rank {rank} on \S+ stopped on request: "
                                         r"exited with code 143: "
                                         rf"stopped by {number.name}, saved at step {newest}\n")
        return newest

    def test_a_signal_ends_in_a_checkpoint(self):
        output = self.place / "out"
        random.seed(1)
        step = 2
        signals = [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGUSR1, False),
                   (signal.SIGUSR2, False), (signal.SIGUSR1, True)]
        for number, to_launcher in signals:
            with self.subTest(signal=number, launcher=to_launcher):
                step = self.stopped(output, number, to_launcher, step) + 2

    @unittest.skipUnless(SOAK, "50 runs: with LOCKSTEP_SOAK=1")
    def test_fifty_times(self):
        random.seed(2)
        for run in range(50):
            with self.subTest(run=run):
                output = self.place / f"run{run}"
                self.stopped(output, signal.SIGTERM, bool(run % 2), random.randrange(1, 60))

    def test_stopping_and_resuming_gives_the_same_bits(self):
        whole, output = self.place / "whole", self.place / "out"
        self.train(2, whole, "--num_train_epochs", "30", "--save_steps", "1000")
        last = f"checkpoint-{checkpoints(whole)[-1]}"
        process = self.start(2, output, "--num_train_epochs", "30", "--save_steps", "1000")
        wait_for_step(process, output, 20)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=GRACE_S)
        if code == 143:  # otherwise it was done before the signal came
            self.train(2, output, "--num_train_epochs", "30", "--save_steps", "1000", "--resume",
                       "auto")
        self.assert_same(whole / last, output / last)

    def test_ctrl_c_is_130(self):
        output = self.place / "out"
        process = self.start(2, output, *ENDLESS)
        self.wait_while_training(process, output, 2)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=GRACE_S), 130, self.log())
        self.assertEqual(left_of(process), [])

    def test_a_rank_that_dies_does_not_trigger_a_save(self):
        output = self.place / "out"
        process = self.start(2, output, *ENDLESS)
        self.wait_while_training(process, output, 2)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        self.assertEqual(process.wait(timeout=GRACE_S), 137, self.log())
        self.assertEqual(checkpoints(output), [])
        self.assertNotIn("saving, then leaving", self.log())

    def test_ddp_timeout_is_the_deadline_of_a_step(self):
        output = self.place / "out"
        process = self.start(2, output, *ENDLESS, "--ddp_timeout", "6")
        self.wait_while_training(process, output, 2)
        os.kill(ranks_of(process)[1], signal.SIGSTOP)
        self.assertEqual(process.wait(timeout=GRACE_S), 1, self.log())
        self.assertRegex(self.log(), r"rank 0: .* was not finished after ([6-9]|\d\d+)\d{3} ms")
        self.assertEqual(left_of(process), [])

    def test_a_stuck_rank_does_not_hold_up_the_stop(self):
        """SIGSTOPped, it cannot agree; the others give up after ten seconds and say so, or after
        two of the longest steps, if the machine has held one up for so long."""
        output = self.place / "out"
        process = self.start(2, output, *ENDLESS)
        self.wait_while_training(process, output, 2)
        stuck, other = ranks_of(process)
        os.kill(stuck, signal.SIGSTOP)
        os.kill(other, signal.SIGUSR1)
        end = time.monotonic() + BOUND_S
        while not re.search(r"was not agreed by all ranks within [1-9]\d+\.\d s", self.log()):
            self.assertLess(time.monotonic(), end, self.log())
            time.sleep(0.1)
        self.assertNotEqual(process.wait(timeout=GRACE_S), 0)
        self.assertEqual(left_of(process), [])
        self.assertGreater(steps_done(output), 1)


if __name__ == "__main__":
    unittest.main()
