"""How a run ends: what could not be saved is a failure, a slow disk is not; a run that was complete
returns what it recorded; and no run's metrics are deleted."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time
import unittest

from train_case import BIN, CONFIG, LOCKSTEP, TrainCase, checkpoints, command, finished, losses

STRIKE = BIN / "tests" / "lockstep_strike.so"
PEER = BIN / "tests" / "train_peer"


class End(TrainCase):
    def with_strike(self, command, **strike):
        if "asan" in str(BIN):
            self.skipTest("a sanitizer's own library must be loaded first")
        return finished(command, LD_PRELOAD=str(STRIKE), STRIKE_PLACE=str(self.place), **strike)

    def peer(self, ranks, *args):
        return self.lockstep("run", "--standalone", f"--nproc-per-node={ranks}", PEER, *args)

    # ------------------------------------------------------------ the last checkpoint

    def test_a_last_checkpoint_on_a_full_disk_is_a_failure(self):
        """One checkpoint has 600 kB and finds 1 MB: the second one finds no room."""
        self.config.write_text(CONFIG.replace("hidden: 32", "hidden: 200"))
        for ranks in (0, 1, 2):
            with self.subTest(ranks=ranks):
                place = self.place / f"small{ranks}"
                place.mkdir()
                train = subprocess.list2cmdline(command(ranks, self.config, place / "out",
                                                        "--max_steps", "10"))
                script = (f"mount -t tmpfs -o size=2600k none {place} || exit 99\n"
                          f"head -c 1600000 /dev/zero >{place}/filler\n"
                          f"{train} 2>{self.place}/log; echo code $?\n"
                          f"{LOCKSTEP} checkpoint verify {place}/out\n"
                          f"rm {place}/filler; {train} --resume auto; echo again $?")
                done = self.with_mounts(script)
                self.assertIn("code 1\n", done.stdout, done.stderr)
                self.assertIn(f"ok      {place}/out/checkpoint-5", done.stdout)
                self.assertIn("again 0", done.stdout, done.stderr)
                first = self.log()
                said = (r"\[trainer\] trained until step 10, but the last checkpoint \(step 10\) "
                        r"could not be written and is lost\. The newest whole checkpoint is "
                        rf"{place}/out/checkpoint-5\. Free some space, then run again with ")
                # All ranks end with the same code, and the others may end first.
                report = r"\[launch\] rank 0 on \S+ failed: exited with code 1: "
                self.assertRegex(first if ranks else first.splitlines()[-1],
                                 report + said if ranks else said)
                self.assertNotIn("checkpoint-10 was not saved; training continues", first)
                self.assertNotIn("trained 10 steps", done.stdout.split("code 1")[0])

    def test_a_save_may_take_longer_than_an_operation(self):
        """10 s in the last file of the last save; the operations' timeout is 4 s."""
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                output = self.place / f"out{ranks}"
                start = time.monotonic()
                done = self.with_strike(
                    command(ranks, self.config, output, "--max_steps", "4", "--ddp_timeout", "4"),
                    STRIKE_SLOW="SHA256SUMS", STRIKE_SLOW_MS="10000")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertGreater(time.monotonic() - start, 10)
                self.assertEqual(checkpoints(output), [4])
                self.verify(output / "checkpoint-4")

    def test_a_new_output_dir_is_durable_up_to_the_first_parent_that_was_there(self):
        log = self.place / "calls"
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                base = self.place / f"base{ranks}"
                base.mkdir()
                log.unlink(missing_ok=True)
                done = self.with_strike(
                    command(ranks, self.config, base / "a" / "b" / "out", "--max_steps", "3"),
                    STRIKE_LOG=str(log))
                self.assertEqual(done.returncode, 0, done.stderr)
                calls = [line.split(" ", 2)[1:] for line in log.read_text().splitlines()]
                for made in ("a", "a/b", "a/b/out"):
                    parent = str(pathlib.Path(base / made).parent)
                    after = calls[calls.index(["mkdir", str(base / made)]):]
                    self.assertIn(["fsync", parent], after, calls)

    # ------------------------------------------------------------ metrics

    def test_no_run_deletes_the_metrics_of_another(self):
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                output = self.place / f"out{ranks}"
                flags = ("--max_steps", 3, "--save_strategy", "no", "--resume", "auto")
                self.train(ranks, output, *flags)
                first = (output / "metrics.jsonl").read_text()
                self.train(ranks, output, *flags)
                self.assertEqual((output / "metrics.superseded.jsonl").read_text(), first)
                self.assertEqual(sorted(losses(output)), [1, 2, 3])

    def test_steps_that_are_taken_again_are_recorded_twice(self):
        output = self.place / "out"
        self.train(0, output, "--max_steps", 5)
        again = ("--max_steps", 8, "--save_strategy", "no", "--resume", "auto")
        self.train(0, output, *again)
        first = losses(output)
        self.train(0, output, *again)
        self.assertEqual(losses(output), first)
        lines = (output / "metrics.superseded.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        self.assertEqual({e["step"]: e["loss"] for e in entries if "loss" in e},
                         {step: first[step] for step in (6, 7, 8)})

    # ------------------------------------------------------------ the best model

    def test_the_best_checkpoint_survives_a_renamed_output_dir(self):
        """Weights that do not change: every evaluation is the same, and the first is the best."""
        self.config.write_text(CONFIG.replace("batch_norm: true", "batch_norm: false").replace(
            "samples: 150", "samples: 150, eval_samples: 20"))
        flags = ("--learning_rate", "1e-60", "--eval_strategy", "steps", "--eval_steps", 5,
                 "--save_total_limit", 2, "--load_best_model_at_end", "--resume", "auto")
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                before, after = self.place / f"before{ranks}", self.place / f"after{ranks}"
                self.train(ranks, before, "--max_steps", 10, *flags)
                self.assertEqual(checkpoints(before), [5, 10])
                before.rename(after)
                done = self.train(ranks, after, "--max_steps", 20, *flags)
                self.assertEqual(checkpoints(after), [5, 20])
                self.assertIn("the best model is that of step 5", done.stderr)
                state = json.loads((after / "checkpoint-20" / "trainer_state.json").read_text())
                self.assertEqual(state["best_model_checkpoint"], str(after / "checkpoint-5"))

    # ------------------------------------------------------------ a run that is complete

    def test_a_complete_run_returns_what_it_recorded(self):
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                logs, output = self.place / f"logs{ranks}", self.place / f"out{ranks}"
                logs.mkdir()
                args = ("samples", logs, 40, 0, "--output_dir", output, "--use_cpu",
                        "--resume_from_checkpoint", "auto", "--max_steps", 4, "--disable_tqdm",
                        "--logging_steps", 1, "--per_device_train_batch_size", 4)
                results = r"rank \d: step 4, loss \S+, 3 metrics"
                first = re.findall(results, self.peer(ranks, *args).stdout)
                self.assertEqual(len(first), ranks)
                self.assertNotIn("loss 0,", first[0])
                done = self.peer(ranks, *args)
                self.assertEqual(sorted(re.findall(results, done.stdout)), sorted(first))
                self.assertRegex(done.stderr, r"\[trainer\] nothing to do: the run in \S+ is "
                                 r"complete at step 4 \(mean loss \d\.\d{4}\)\. To train longer, "
                                 r"raise max_steps \(now 4\)")
                # Without its file the checkpoint's log has the losses.
                os.unlink(output / "metrics.jsonl")
                done = self.peer(ranks, *args)
                self.assertEqual(len(re.findall(r"step 4, loss \d\.\d+, 1 metrics", done.stdout)),
                                 ranks, done.stdout)

    # ------------------------------------------------------------ a hand-written loop

    def drawn(self, ranks, folder):
        found = re.findall(r"step (\d+) rank (\d+) drew (\S+)",
                           self.peer(ranks, "loop", folder, 2).stdout)
        return {(int(step), int(rank)): number for step, rank, number in found}

    def test_a_custom_loop_resumes_on_more_and_fewer_ranks(self):
        whole, split = self.place / "whole", self.place / "split"
        first = self.drawn(2, whole)
        subprocess.run(["cp", "-r", whole, split], check=True)
        same = self.drawn(2, whole)
        more = self.drawn(4, split)
        self.assertEqual(sorted(more), [(step, rank) for step in (3, 4) for rank in range(4)])
        for step in (3, 4):  # who was there continues
            for rank in (0, 1):
                self.assertEqual(more[step, rank], same[step, rank])
        numbers = list(first.values()) + list(more.values())
        self.assertEqual(len(set(numbers)), len(numbers), "ranks drew the same numbers")
        fewer = self.drawn(1, split)
        self.assertEqual(sorted(fewer), [(5, 0), (6, 0)])
        self.assertEqual(checkpoints(split), [2, 4, 6])
        # A rank that comes back does not repeat what a rank of its number drew before.
        back = self.drawn(3, split)
        self.assertFalse(set(back.values()) & (set(numbers) | set(fewer.values())))
        self.assertEqual(self.drawn(3, split).keys(), {(s, r) for s in (9, 10) for r in range(3)})


if __name__ == "__main__":
    if not pathlib.Path(LOCKSTEP).exists():
        sys.exit(f"{LOCKSTEP} is not built")
    unittest.main()
