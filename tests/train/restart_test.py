"""`lockstep run --max-restarts`: a restarted attempt continues where the one before it was."""

import os
import signal
import subprocess
import unittest

from train_case import (BOUND_S, LOCKSTEP, TrainCase, checkpoints, end, environment, ranks_of,
                        wait_for_step)

LONG = ("--num_train_epochs", "30", "--save_steps", "5")


class Restart(TrainCase):
    def launch(self, output, *flags, script='exec "$@"'):
        """Two ranks, each of them started by the script."""
        command = [LOCKSTEP, "run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
                   "--no-python", "bash", "-c", script, "bash", LOCKSTEP, "train", self.config,
                   "--output_dir", output, *LONG, *flags]
        with open(self.place / "log", "w", encoding="utf-8") as log:
            process = subprocess.Popen([str(arg) for arg in command], env=environment(),
                                       stdout=log, stderr=subprocess.STDOUT,
                                       stdin=subprocess.DEVNULL, start_new_session=True)
        self.addCleanup(end, process)
        return process

    def killed_at(self, output, step, *flags):
        process = self.launch(output, *flags)
        wait_for_step(process, output, step)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        self.assertEqual(process.wait(timeout=BOUND_S), 0, self.log())
        self.assertIn("restarting all ranks (1 of 1)", self.log())

    def test_it_resumes_and_gives_the_same_bits(self):
        whole, output = self.place / "whole", self.place / "out"
        self.train(2, whole, *LONG)
        self.killed_at(output, 12)
        self.assertRegex(self.log(), rf"resumed from {output}/checkpoint-\d+ at step")
        self.assertEqual(checkpoints(output), checkpoints(whole))
        last = f"checkpoint-{checkpoints(whole)[-1]}"
        self.assert_same(whole / last, output / last)

    def test_it_starts_over_with_resume_never(self):
        output = self.place / "out"
        self.killed_at(output, 12, "--resume", "never")
        self.assertNotIn("resumed from", self.log())
        self.assertIn(f"removed {output}/checkpoint-10,", self.log())

    def test_a_run_that_began_from_a_folder_continues_from_its_own_checkpoints(self):
        first, output = self.place / "first", self.place / "out"
        self.train(2, first, "--max_steps", "5", "--save_steps", "5")
        self.killed_at(output, 17, "--resume", first / "checkpoint-5")
        self.assertIn(f"resumed from {first}/checkpoint-5 at step 5", self.log())
        self.assertRegex(self.log(), rf"resumed from {output}/checkpoint-\d+ at step")
        self.assertIn(10, checkpoints(output))

    def test_checkpoints_of_an_earlier_run_are_not_taken_for_its_own(self):
        # The first attempt dies before it has begun, so nothing was deleted.
        output = self.place / "out"
        self.train(2, output, "--max_steps", "5", "--save_steps", "5")
        dies_first = '[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 1; exec "$@"'
        process = self.launch(output, script=dies_first)
        self.assertEqual(process.wait(timeout=BOUND_S), 2, self.log())
        self.assertIn("has a checkpoint of another run", self.log())
        self.assertEqual(checkpoints(output), [5])
        process = self.launch(output, "--overwrite_output_dir", script=dies_first)
        self.assertEqual(process.wait(timeout=BOUND_S), 0, self.log())
        self.assertNotIn("resumed from", self.log())
        self.assertIn(f"removed {output}/checkpoint-5,", self.log())


if __name__ == "__main__":
    unittest.main()
