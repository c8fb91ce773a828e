"""A run that is resumed in the middle of an epoch is bit-identical to an uninterrupted one."""

import json
import shutil
import struct
import unittest

from train_case import (CONFIG, LOCKSTEP, SOURCE, TrainCase, checkpoints, copy_until, environment,
                        finished, losses)

# 5121 tokens are 160 windows: 20 steps of two ranks an epoch.
TOKENS = """
model: {name: gpt, n_layer: 1, n_head: 2, n_embd: 16, vocab_size: 257}
data: tokens
max_seq_len: 32
num_train_epochs: 1.2
per_device_train_batch_size: 4
learning_rate: 1.0e-2
logging_steps: 1
save_steps: 6
disable_tqdm: true
use_cpu: true
"""


class Resume(TrainCase):
    def check_exact(self, ranks):
        whole = self.place / f"whole{ranks}"
        self.train(ranks, whole)
        steps = checkpoints(whole)
        self.assertGreater(len(steps), 3, steps)
        last = f"checkpoint-{steps[-1]}"
        for step in (steps[0], steps[-2]):
            again = self.place / "again"
            copy_until(whole, again, step)
            done = self.train(ranks, again, "--resume", "auto")
            self.assertIn(f"resumed from {again}/checkpoint-{step} at step {step}", done.stderr)
            self.assert_same(whole / last, again / last)
            # Every step's loss, in full, and each step once.
            self.assertEqual(losses(whole), losses(again))
        return whole, steps

    def test_one_rank(self):
        self.check_exact(0)

    def test_two_ranks_and_the_contents_of_the_files(self):
        whole, steps = self.check_exact(2)
        newest = whole / f"checkpoint-{steps[-1]}"
        state = json.loads((newest / "trainer_state.json").read_text())
        self.assertEqual(state["global_step"], steps[-1])
        self.assertEqual(state["max_steps"], steps[-1])
        self.assertEqual(state["epoch"], 4.0)
        self.assertEqual([e["step"] for e in state["log_history"] if "loss" in e],
                         list(range(1, steps[-1] + 1)))
        names = sorted(p.name for p in newest.iterdir())
        self.assertEqual(names, ["SHA256SUMS", "model.safetensors", "optimizer.safetensors",
                                 "rng_state.safetensors", "sampler.json", "scheduler.json",
                                 "trainer_state.json", "training_args.json"])
        shown = self.lockstep("checkpoint", "show", newest, "--tensors").stdout
        self.assertIn(f"step        {steps[-1]} of {steps[-1]}, epoch 4.0000", shown)
        self.assertRegex(shown, r"net\.1\.running_mean +F32 +\[32\]")
        self.assertIn("2 data parallel ranks x batch 4 x accumulation 3", shown)

    def test_diff_sees_what_is_not_a_tensor(self):
        """The tests of exactness rest on it."""
        self.train(0, self.place / "out", "--max_steps", 5)
        one, other = self.place / "out" / "checkpoint-5", self.place / "other"

        def diff(name, **changed):
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(one, other)
            members = json.loads((other / name).read_text())
            (other / name).write_text(json.dumps({**members, **changed}))
            done = finished([LOCKSTEP, "checkpoint", "diff", one, other])
            return done.returncode, done.stdout

        self.assertEqual(diff("sampler.json")[0], 0)
        code, text = diff("sampler.json", cursor=8)
        self.assertEqual(code, 1)
        self.assertRegex(text, r"sampler: cursor \d+ and 8\n")
        code, text = diff("scheduler.json", last_lr=0.5, more=1)
        self.assertEqual(code, 1)
        self.assertRegex(text, r"scheduler: last_lr \S+ and 0\.5\n")
        self.assertIn(f"scheduler: more only in {other}\n", text)
        code, text = diff("trainer_state.json", epoch=0.125, log_history=[])
        self.assertEqual(code, 1)
        self.assertRegex(text, r"trainer_state: epoch \S+ and 0\.125\n")
        self.assertNotIn("log_history", text)
        # The same folder under another output_dir, and a file that one has alone.
        state = json.loads((one / "trainer_state.json").read_text())
        (one / "trainer_state.json").write_text(
            json.dumps({**state, "best_model_checkpoint": "a/checkpoint-5"}))
        code, text = diff("trainer_state.json", best_model_checkpoint="b/checkpoint-5")
        self.assertEqual(code, 0, text)
        (one / "scaler.json").write_text("{}")
        (other / "scaler.json").unlink(missing_ok=True)
        done = self.lockstep("checkpoint", "diff", one, other, code=1)
        self.assertIn(f"scaler: only in {one}\n", done.stdout)

    def test_diff_counts_the_tensors_of_both(self):
        folders = self.place / "one", self.place / "other"
        for folder, tensors in zip(folders, ({"mine": 1, "same": 2, "moved": 3},
                                             {"same": 2, "moved": 3.5, "theirs": 4, "too": 5})):
            header, data = {}, b""
            for name, value in tensors.items():
                header[name] = {"dtype": "F32", "shape": [1],
                                "data_offsets": [len(data), len(data) + 4]}
                data += struct.pack("<f", value)
            text = json.dumps(header).encode()
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        for one, other in (folders, folders[::-1]):
            done = self.lockstep("checkpoint", "diff", one, other, code=1)
            self.assertEqual(set(done.stdout.splitlines()), {
                f"model: mine only in {folders[0]}", "model: moved differs by at most 0.5",
                f"model: theirs only in {folders[1]}", f"model: too only in {folders[1]}",
                "model: 4 of 5 tensors differ"})

    def test_three_ranks(self):
        self.check_exact(3)

    def test_another_number_of_ranks_is_reported(self):
        output = self.place / "out"
        done = self.train(2, output, "--max_steps", 5)
        self.assertRegex(done.stdout, r"trained 5 steps, mean loss \d+\.\d{4}; ")
        done = self.train(1, output, "--resume", "auto", "--max_steps", 8)
        self.assertRegex(done.stdout, r"trained 8 steps, mean loss since step 5 \d+\.\d{4}; ")
        self.assertIn("the checkpoint was made with 2 data parallel ranks x batch 4 x "
                      "accumulation 3, now 1 x 4 "
                      "x 3: the samples come in the same order", done.stderr)
        self.assertIn("the effective batch is 12 instead of 24", done.stderr)

    def test_token_shards_have_their_own_sampler(self):
        text, shards = self.place / "text.txt", self.place / "shards"
        text.write_bytes(bytes(range(256)) * 20)
        self.lockstep("data", "tokenize", "--output", shards, text)
        self.config.write_text(TOKENS + f"dataset_dir: {shards}\n")
        self.check_exact(2)

    def test_a_new_run_is_refused_where_another_has_left_checkpoints(self):
        output = self.place / "out"
        self.train(0, output, "--max_steps", 10)
        before = {p: p.read_bytes() for p in output.rglob("*")
                  if p.is_file() and p.name != ".lockstep.lock"}
        again = ("--max_steps", 5, "--run_name", "again", "--report_to", "tensorboard",
                 "--compile_model")
        refused = self.train(0, output, *again, code=2)
        self.assertRegex(refused.stderr, r"\[checkpoint\] output_dir \S+ has 2 checkpoints .*"
                         r"\(checkpoint-5 to checkpoint-10\).*--resume auto.*"
                         r"overwrite_output_dir: true")
        self.assertEqual(before, {p: p.read_bytes() for p in output.rglob("*")
                                  if p.is_file() and p.name != ".lockstep.lock"})
        done = self.train(0, output, *again, "--overwrite_output_dir")
        self.assertIn("[trainer] again: 5 steps of effective batch 12", done.stderr)
        self.assertIn("steps run without a CUDA graph: the model is on cpu", done.stderr)
        lines = (output / "metrics.jsonl").read_text().splitlines()
        self.assertEqual({json.loads(line)["run_name"] for line in lines}, {"again"})
        self.assertTrue(list((output / "runs" / "again").glob("events.out.tfevents.*")))
        self.assertEqual(checkpoints(output), [5])
        self.assertEqual(sorted(losses(output)), list(range(1, 6)))
        # With both, it resumes.
        done = self.train(0, output, "--resume", "auto", "--max_steps", 6, "--overwrite_output_dir")
        self.assertIn(f"resumed from {output}/checkpoint-5 at step 5", done.stderr)
        self.assertIn("max_steps is 6 and was 5 when the checkpoint was made", done.stderr)
        self.assertEqual(checkpoints(output), [5, 6])
        done = self.train(0, output, "--resume", "auto", "--max_steps", 6)
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, rf"\[trainer\] nothing to do: the run in {output} is "
                         r"complete at step 6 \(mean loss \d+\.\d{4}\)\. To train longer, raise "
                         r"max_steps \(now 6\); to start again, overwrite_output_dir: true")
        done = self.train(0, output, "--resume", "auto", "--max_steps", 3)
        self.assertIn(f"nothing to do: the run in {output} is past max_steps, at step 6",
                      done.stderr)
        self.assertNotIn("the learning rate is that of", done.stderr)

    def test_a_run_that_continues_from_an_older_checkpoint_does_not_lose_later_ones(self):
        output = self.place / "out"
        self.train(0, output, "--max_steps", 20)
        older = output / "checkpoint-5"
        refused = self.train(0, output, "--resume", older, code=2)
        self.assertIn("(checkpoint-10 to checkpoint-20)", refused.stderr)
        # Another model is refused, and nothing is deleted.
        overwrite = ("--resume", older, "--overwrite_output_dir")
        self.config.write_text(CONFIG.replace("hidden: 32", "hidden: 33"))
        self.train(0, output, *overwrite, code=2)
        self.assertEqual(checkpoints(output), [5, 10, 15, 20])
        self.config.write_text(CONFIG.replace("save_steps: 5", "save_steps: 3"))
        self.train(0, output, *overwrite, "--max_steps", 6)
        self.assertEqual(checkpoints(output), [5, 6])
        done = self.train(0, output, "--resume", "auto", "--max_steps", 7)
        self.assertIn(f"resumed from {output}/checkpoint-6 at step 6", done.stderr)
        self.assertEqual(sorted(losses(output)), list(range(1, 8)))

    def test_a_checkpoint_may_be_a_link_to_another_disk(self):
        whole, output, disk = self.place / "whole", self.place / "out", self.place / "disk"
        # A schedule that does not know where the run ends.
        text = self.config.read_text().replace("cosine", "constant_with_warmup")
        self.config.write_text(text)
        self.train(0, whole, "--max_steps", 20)
        self.train(0, output, "--max_steps", 10)
        disk.mkdir()
        (output / "checkpoint-10").rename(disk / "ten")
        (output / "checkpoint-10").symlink_to(disk / "ten")
        done = self.train(0, output, "--resume", "auto", "--max_steps", 15)
        self.assertIn("checkpoint-10 at step 10", done.stderr)
        self.assertEqual(checkpoints(output), [5, 10, 15])
        # The same folder by another name, and with a limit that deletes the link alone.
        (self.place / "name").symlink_to(output)
        done = self.train(0, output, "--resume", self.place / "name" / "checkpoint-15",
                          "--save_total_limit", 1, "--max_steps", 20)
        self.assertIn("checkpoint-15 at step 15", done.stderr)
        self.assertEqual(checkpoints(output), [20])
        self.assert_same(whole / "checkpoint-20", output / "checkpoint-20")
        self.verify(disk / "ten")  # only the link was deleted
        self.assertEqual(sorted(losses(output)), list(range(1, 21)))

    def test_a_link_that_a_run_would_write_through_is_refused(self):
        for name in (".lockstep.lock", "metrics.jsonl", "monitor", "runs", "effective_config.json"):
            with self.subTest(name):
                output, other = self.place / f"out_{name}", self.place / f"other_{name}"
                output.mkdir()
                folder = name in ("monitor", "runs")
                other.mkdir() if folder else other.write_text("precious")
                (output / name).symlink_to(other)
                refused = self.train(0, output, "--report_to", "tensorboard", code=2)
                self.assertIn(f"{output}/{name} is a symbolic link to {other}", refused.stderr)
                self.assertEqual(list(other.iterdir()) if folder else other.read_text(),
                                 [] if folder else "precious")
                self.assertEqual([p.name for p in output.iterdir()], [name])

    def test_nothing_is_deleted_where_no_checkpoint_verifies(self):
        """Hugging Face's own folders."""
        output = self.place / "out"
        theirs = output / "checkpoint-10"
        theirs.mkdir(parents=True)
        (theirs / "model.safetensors").write_text("weights")
        refused = self.train(0, output, "--resume", "auto", "--max_steps", 15, code=2)
        self.assertIn("checkpoint-10 is passed over: SHA256SUMS", refused.stderr)
        self.assertIn("has a checkpoint of another run", refused.stderr)
        self.assertEqual((theirs / "model.safetensors").read_text(), "weights")

    def test_a_folder_that_is_not_there_is_refused(self):
        output = self.place / "out"
        refused = self.train(0, output, "--resume", output / "nothing", code=2)
        self.assertRegex(refused.stderr, r"\[checkpoint\] .*/nothing cannot be used: there is no "
                         r"such folder\. .*--resume.* is auto \(.*\), never \(")

    def test_retention_and_stale_temporaries(self):
        output = self.place / "out"
        stale = output / "checkpoint-3.tmp-1-0123456789abcdef"
        stale.mkdir(parents=True)
        done = self.train(0, output, "--max_steps", 15, "--save_total_limit", 2)
        self.assertEqual(checkpoints(output), [10, 15])
        self.assertFalse(stale.exists())
        self.assertIn("which a run that died has left", done.stderr)

    def test_tiny_gpt_learns_and_resumes(self):
        self.config = SOURCE / "examples" / "configs" / "tiny_gpt.yaml"
        output = self.place / "gpt"
        self.train(2, output, "--max_steps", 40, "--eval_steps", 20, "--save_steps", 20,
                   "--logging_steps", 5)
        first = losses(output)
        self.assertEqual(sorted(first), list(range(5, 41, 5)))
        self.assertLess(first[40], first[5] - 0.8, first)
        self.assertEqual(checkpoints(output), [20, 40])
        model = json.loads((output / "checkpoint-40" / "config.json").read_text())
        self.assertEqual((model["model_type"], model["vocab_size"], model["eos_token_id"]),
                         ("gpt2", 257, 256))
        lines = (output / "metrics.jsonl").read_text().splitlines()
        evaluated = [json.loads(line) for line in lines if "eval_loss" in line]
        self.assertEqual([e["step"] for e in evaluated], [20, 40])
        self.assertLess(evaluated[1]["eval_loss"], evaluated[0]["eval_loss"])
        self.assertTrue(list((output / "runs").glob("events.out.tfevents.*")))
        self.train(2, output, "--max_steps", 50, "--eval_steps", 50, "--save_steps", 50,
                   "--logging_steps", 5, "--resume", "auto")
        self.assertEqual(checkpoints(output), [40, 50])
        self.assertEqual(sorted(losses(output)), list(range(5, 51, 5)))

    def test_weights_open_in_python(self):
        """transformers' own way to weights: the safetensors package."""
        output = self.place / "out"
        self.train(0, output, "--max_steps", 5)
        script = ("import sys, safetensors.torch as s\n"
                  "w = s.load_file(sys.argv[1])\n"
                  "print(len(w), tuple(w['net.0.weight'].shape))")
        python = environment().get("LOCKSTEP_PYTHON") or shutil.which("python3")
        done = finished([python, "-c", script, output / "checkpoint-5" / "model.safetensors"])
        if "No module named" in done.stderr:
            self.skipTest("the safetensors package is not installed")
        self.assertEqual(done.stdout, "16 (32, 12)\n", done.stderr)


if __name__ == "__main__":
    unittest.main()
