"""A run that is killed and resumed is bit-identical to an uninterrupted one: at any moment, before
each mutating call of its save (tests/io does the same with bare files under strace; here the
saver's thread is killed from inside in the middle of training, by strike.c), and when `lockstep run
--max-restarts` starts it again."""

import os
import random
import re
import shutil
import signal
import subprocess
import time
import unittest

from train_case import (BIN, BOUND_S, LOCKSTEP, SOAK, TrainCase, checkpoints, command, end,
                        environment, finished, ranks_of, steps_done, wait_for_step)

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


STRIKE = BIN / "tests" / "lockstep_strike.so"
# The recorder writes by the clock, into the same folder.
SAVING = ("--save_steps", "1", "--save_total_limit", "2", "--warmup_steps", "1", "--record_run",
          "false")


class KillAtEveryCall(TrainCase):
    def run_struck(self, work, **strike):
        return finished(command(0, self.config, work, "--resume", "auto", "--max_steps", "3",
                                *SAVING), LD_PRELOAD=str(STRIKE), STRIKE_PLACE=str(work), **strike)

    def test_killed_at_every_call(self):
        if "asan" in str(BIN):
            self.skipTest("a sanitizer's own library must be loaded first")
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
