"""`lockstep plan --probe` and `lockstep doctor` measure, the next plan and elastic_gpu use it.

Times are whatever they are; what is compared is where they come from, and memory, which does not
depend on the machine's load."""

import contextlib
import json
import os
import pathlib
import subprocess
import unittest

from train_case import BIN, BOUND_S, TrainCase

CONFIG = """
model: {name: gpt, n_layer: 4, n_head: 4, n_embd: 256}
data: {name: bytes, path: %s}
max_seq_len: 64
global_batch_size: 8
per_device_train_batch_size: 4
logging_steps: 1
save_strategy: no
disable_tqdm: true
use_cpu: true
"""


@contextlib.contextmanager
def busy_machine():
    """A program of somebody else for each core."""
    others = [subprocess.Popen(["sh", "-c", "while :; do :; done"])
              for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


class PlanProbe(TrainCase):
    def setUp(self):
        super().setUp()
        text = self.place / "text.txt"
        text.write_text("Predictions are held against measurements. " * 400)
        self.config.write_text(CONFIG % text)
        self.cache = self.place / "cache"

    def run_here(self, *args, code=0):
        return self.lockstep(*args, code=code, limit_s=3 * BOUND_S, LOCKSTEP_CACHE=str(self.cache))

    def plan(self, *args):
        return json.loads(self.run_here("plan", self.config, "--json", *args).stdout)

    def record(self):
        return json.loads((self.cache / "plan.json").read_text())

    def test_what_was_measured_replaces_estimates_and_is_followed(self):
        before = self.plan("--gpus", "2xcpu")
        self.assertEqual(before["strategies"], [])  # how fast a CPU computes is not known
        plan = self.plan("--gpus", "2xcpu", "--probe", "--probe-strategies", "5")
        measured = [one for one in plan["strategies"] if one["measured"]]
        self.assertGreaterEqual(len(measured), 4, plan["strategies"])
        self.assertEqual(len(self.record()["ways"]), len(measured))
        for one in measured:
            error = one["planned_memory_bytes"] / one["memory_bytes"] - 1
            self.assertLess(abs(error), 0.1, one)
        # The next plan runs nothing and says the same.
        again = self.plan("--gpus", "2xcpu")
        self.assertEqual(again["strategies"], plan["strategies"])
        self.assertIn(" measured  ", self.run_here("plan", self.config, "--gpus", "2xcpu").stdout)
        # A file with another global batch is another training.
        other = self.plan("--gpus", "2xcpu", "--global_batch_size", "16")
        self.assertFalse(any(one["measured"] for one in other["strategies"]))
        # elastic_gpu takes the fastest of those with as many ranks.
        fast = min((one for one in measured if one["gpus"] == 2), key=lambda one: one["step_s"])
        done = self.train(2, self.place / "out", "--elastic_gpu", "--max_steps", "1",
                          LOCKSTEP_CACHE=str(self.cache))
        self.assertIn(f"elastic_gpu: {fast['strategy']} on 2 CPU ranks: "
                      f"{fast['per_device_train_batch_size']} per device x "
                      f"{fast['gradient_accumulation_steps']} accumulation", done.stderr)
        self.assertIn("when `lockstep plan --probe` ran it", done.stderr)
        # Slices of layers, too, where they are the fastest.
        record = self.record()
        one = next(one for one in record["ways"] if one["gpus"] == 2)
        record["ways"].append({**one, "strategy": 0,
                                     "strategy_text": "tensor parallel over 2",
                               "slices": 2, "per_device_train_batch_size": 8,
                               "gradient_accumulation_steps": 1, "step_s": 1e-6})
        (self.cache / "plan.json").write_text(json.dumps(record))
        done = self.train(2, self.place / "slices", "--elastic_gpu", "--max_steps", "1",
                          LOCKSTEP_CACHE=str(self.cache))
        self.assertIn("elastic_gpu: tensor parallel over 2 on 2 CPU ranks: 8 per device x 1 "
                      "accumulation x 1 rank = global batch 8", done.stderr)
        self.assertIn("in slices on 2 tensor parallel ranks", done.stdout + done.stderr)

    def test_files_with_slices_are_planned_as_their_ranks_hold_them(self):
        text = self.config.read_text().replace("n_embd: 256", "n_embd: 640")
        slices = "tensor_parallel_degree: 2\n"
        adapters = "lora: {r: 8, target_modules: all-linear}\n"
        for ranks, keys in ((4, slices + "fsdp: full_shard\n"),
                            (4, slices + "pipeline_parallel_degree: 2\n"), (2, slices + adapters),
                            (2, slices + adapters + "sequence_parallel: true\n")):
            self.config.write_text(text + keys)
            row = self.plan("--gpus", f"{ranks}xcpu")["rows"][-1]
            self.assertTrue(row["as_written"], row)
            out = self.place / f"probe_{len(keys)}"
            out.mkdir()
            self.run_here("run", "--standalone", f"--nproc-per-node={ranks}",
                          BIN.parent / "libexec" / "lockstep-train", "plan-probe", out, self.config,
                          "--max_steps=2", f"--output_dir={out}/run")
            held = max(json.loads((out / f"rank_{rank}.json").read_text())["memory_bytes"]
                       for rank in range(ranks))
            self.assertLess(abs(row["memory_bytes"]["total"] / held - 1), 0.1, (keys, row, held))

    def test_a_strategy_that_fails_is_left_out_and_said(self):
        self.config.write_text(self.config.read_text().replace("text.txt", "missing.txt"))
        done = self.run_here("plan", self.config, "--gpus", "1xcpu", "--probe",
                             "--probe-strategies", "1")
        self.assertIn("probe: 1 x single rank, ", done.stderr)
        self.assertIn("the ranks failed", done.stderr)
        self.assertIn("missing.txt", done.stderr)
        self.assertFalse((self.cache / "plan.json").exists())

    def test_links_that_doctor_has_measured_are_used(self):
        assumed = self.plan("--gpus", "2xcpu", "--tokens-per-second", "1000")
        self.assertIn("loopback 2.6 GB/s", assumed["link"])
        self.run_here("doctor", "--nproc-per-node", "2")
        link, = self.record()["links"]
        self.assertEqual((link["device"], link["backend"], link["ranks"]), ("cpu", "shm", 2))
        args = ("--gpus", "2xcpu", "--tokens-per-second", "1000")
        plan = self.plan(*args)
        busy = f" while {link['disturbance']}" if link["disturbance"] else ""
        self.assertEqual(plan["link"], f"shm {link['bus_bytes_per_s'] / 1e9:.1f} GB/s a rank, "
                         "measured by lockstep doctor with 2 ranks" + busy)
        self.assertIn("loopback 2.6 GB/s", self.plan(*args, "--link", "loopback")["link"])
        # Cards that are named may be elsewhere, and another host measured for itself.
        self.assertIn("nvlink", self.plan("--gpus", "2xH100")["link"])
        record = self.record()
        record["links"][0]["host"] = "elsewhere"
        (self.cache / "plan.json").write_text(json.dumps(record))
        self.assertIn("loopback 2.6 GB/s", self.plan(*args)["link"])
        (self.cache / "plan.json").write_text("{torn")
        self.assertIn("loopback 2.6 GB/s", self.plan(*args)["link"])

    @unittest.skipUnless(os.access("/proc/stat", os.R_OK) and
                         int(pathlib.Path("/proc/stat").read_text(encoding="ascii").split()[1]),
                         "this kernel does not say what other programs use")
    def test_figures_of_a_busy_machine_say_so(self):
        said = r"other programs used \d+\.\d of the \d+ cores"
        with busy_machine():
            done = self.run_here("doctor", "--nproc-per-node", "2")
            self.assertRegex(done.stdout, rf"warn +all_reduce .*; {said} meanwhile\n"
                             r".*Measure again on an idle machine")
            link, = self.record()["links"]
            self.assertRegex(link["disturbance"], said)
            self.assertRegex(self.plan("--gpus", "2xcpu")["link"], f"with 2 ranks while {said}")
            done = self.run_here("plan", self.config, "--gpus", "1xcpu", "--probe",
                                 "--probe-strategies", "1")
            self.assertRegex(done.stderr, f"probe: .* GiB; {said}")
            self.assertRegex(done.stderr, f"note: a strategy was measured while {said}")
            # Kept, with the remark; what was measured on an idle machine is better, and stays.
            record = self.record()
            self.assertRegex(record["ways"][0]["disturbance"], said)
            record["links"][0].update(disturbance="", bus_bytes_per_s=123e9)
            (self.cache / "plan.json").write_text(json.dumps(record))
            self.run_here("doctor", "--nproc-per-node", "2")
        self.assertEqual(self.record()["links"], record["links"])
        self.assertEqual(self.record()["ways"], record["ways"])

    def test_instructions_are_planned_as_long_as_they_are(self):
        """In tokens that are computed: fewer than max_seq_len in each sample."""
        data = self.place / "train.json"
        data.write_text(json.dumps([{"instruction": "say a word", "output": "yes"}] * 64))
        text = self.config.read_text()
        self.config.write_text(text[:text.index("data:")] +
                               f"data: {{name: instructions, path: {data}}}\nmax_seq_len: 512\n" +
                               text[text.index("global_batch_size"):])
        plan = self.plan("--gpus", "1xcpu", "--probe", "--probe-strategies", "1")
        self.assertTrue(any("512 tokens in each sample" in note for note in plan["notes"]), plan)
        one = next(one for one in plan["strategies"] if one["measured"])
        planned = one["global_batch"] * 512 / one["step_s"]
        self.assertLess(one["tokens_per_second"], planned / 2)
        self.train(1, self.place / "out", "--max_steps", "3")
        lines = map(json.loads, (self.place / "out" / "metrics.jsonl").read_text().splitlines())
        length, *others = {round(line["tokens_per_second"] / line["samples_per_second"], 6)
                           for line in lines if "tokens_per_second" in line}
        self.assertAlmostEqual(one["tokens_per_second"] * one["step_s"] / one["global_batch"],
                               length, places=4)
        self.assertEqual(len(others), 0)

    def test_mistakes_are_refused(self):
        self.assertIn("--gpus 2xH100 may be elsewhere",
                      self.run_here("plan", self.config, "--gpus", "2xH100", "--probe",
                                    code=2).stderr)
        self.assertIn("--probe does not run keys that are given as flags (--bf16)",
                      self.run_here("plan", self.config, "--gpus", "cpu", "--probe", "--bf16",
                                    "true", code=2).stderr)


if __name__ == "__main__":
    unittest.main()
