"""`lockstep report` of real runs on two ranks: what it shows, of one run and of two."""

import json
import shutil
import subprocess
import sys
import unittest

from report_case import LOCKSTEP, ReportCase, environment

CONFIG = """
model: {name: mlp, hidden: 64, layers: 2}
data: {name: random, samples: 4000, eval_samples: 100, features: 12, classes: 5}
max_steps: 60
per_device_train_batch_size: 4
learning_rate: 1.0e-2
lr_scheduler_type: cosine
warmup_steps: 3
logging_steps: 2
eval_strategy: steps
eval_steps: 20
save_steps: 20
disable_tqdm: true
use_cpu: true
"""


class Reports(ReportCase):
    def setUp(self):
        super().setUp()
        (self.place / "train.yaml").write_text(CONFIG)

    def train(self, output, *flags):
        return self.lockstep("run", "--standalone", "--nproc-per-node=2", LOCKSTEP, "train",
                             "train.yaml", "--output_dir", output, *flags)

    def report(self, *arguments):
        done = self.lockstep("report", *arguments)
        path = done.stdout.removeprefix("written to ").strip()
        return self.page(self.place / path)

    def test_a_run_of_two_ranks(self):
        self.train("out", "--seed", "7")
        page = self.report("out")
        self.assertEqual(page.headings, ["Run out", "Figures", "Findings", "Training",
                                         "Step budget", "Utilisation", "Checkpoints", "Events",
                                         "Configuration"])
        for title in ("Loss", "Throughput of all ranks", "Learning rate",
                      "Gradient norm before clipping", "Step budget",
                      "Rank 0: where its time went", "Rank 1: where its time went",
                      "CPU: cores that each rank uses"):
            self.assertIn(title, page.titles())
        lines = [json.loads(line) for line in
                 (self.place / "out/metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        self.assertEqual(page.row("steps"), ["60"])
        self.assertAlmostEqual(float(page.row("last loss")[0]), losses[-1], delta=1e-3)
        self.assertEqual(page.row("ranks"), ["2"])
        self.assertIn("Time per step has evaluations and saves in it.", page.text)
        # Where a value comes from, and what it overrides.
        self.assertEqual(page.row("seed")[:2], ["7", "--seed"])
        self.assertEqual(page.row("max_steps")[0], "60")
        self.assertRegex(page.row("max_steps")[1], r"train\.yaml:\d+:\d+")
        for step in 20, 40, 60:
            row = page.row(f"checkpoint-{step}")
            self.assertEqual(row[0], str(step))
            self.assertTrue(row[3].startswith("whole"), row)
        self.assertIn("The run ended", page.text)
        self.assertNotIn("cannot be read", page.text)
        # Every logged loss is a point of the curve.
        loss = page.drawings[page.titles().index("Loss")]
        curves = loss.findall(".//{http://www.w3.org/2000/svg}polyline")
        self.assertEqual(len(curves[0].get("points").split()), len(losses))

    def test_a_resumed_run_says_so(self):
        self.train("out")
        for step in 40, 60:
            shutil.rmtree(self.place / f"out/checkpoint-{step}")
        self.train("out", "--resume", "auto")
        page = self.report("out", "-o", "here.html")
        self.assertIn("from step 20: steps 22 to 60 were measured again", page.text)
        self.assertIn("Rank 0 was started again after", page.text)
        loss = page.drawings[page.titles().index("Loss")]
        marks = [e.text for e in loss.iter("{http://www.w3.org/2000/svg}text")
                 if e.get("class") == "mark"]
        self.assertEqual(marks, ["resumed"])

    def test_two_runs(self):
        self.train("out")
        self.train("other", "--seed", "7", "--learning_rate", "1e-3")
        page = self.report("out", "other", "--output", "both.html")
        rows = {row[0]: row[1:] for row in page.rows if row}
        self.assertEqual(rows["seed"], ["42", "default", "7", "--seed"])
        self.assertEqual(rows["learning_rate"][2:], ["0.001", "--learning_rate"])
        self.assertNotIn("max_steps", rows)  # the same in both
        first, second, ratio = rows["samples per second (median)"]
        self.assertAlmostEqual(float(ratio), number(second) / number(first), delta=0.01)
        loss = page.drawings[page.titles().index("Training loss")]
        legend = [e.text for e in loss.iter("{http://www.w3.org/2000/svg}text")
                  if e.get("class") == "legend"]
        self.assertEqual(legend, ["out", "other"])
        self.assertIn("Step budget, mean of the ranks", page.titles())

    def test_an_older_run_has_less(self):
        self.train("out")
        shutil.rmtree(self.place / "out/monitor")
        (self.place / "out/effective_config.json").unlink()
        with open(self.place / "out/metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"step": 60, "epoch": 1, "<img src=x onerror=alert(1)>": 3}\n{"ste')
        page = self.report("out")
        self.assertIn("There is no folder monitor/", page.text)
        self.assertIn("Without a record there is nothing to judge.", page.text)
        self.assertIn("Where each value comes from is not recorded.", page.text)
        self.assertEqual(page.row("max_steps"), ["60"])  # of the newest checkpoint
        self.assertIn("<img src=x onerror=alert(1)>", page.titles())
        # When two runs are compared, the other one is still shown.
        self.train("new")
        page = self.report("out", "new")
        self.assertIn("out has no record of its step budget.", page.text)
        self.assertTrue((self.place / "comparison.html").exists())

    def test_mistakes(self):
        for arguments, part in (([], "0 folders"), (["a", "b", "c"], "3 folders"),
                                (["nowhere"], "nowhere is not a directory"),
                                ([self.place], "holds nothing of a run"),
                                (["--outputs=x", "a"], "--outputs"),
                                (["--output"], "needs a file"),
                                (["out", "-o"], "-o needs a file")):
            done = self.lockstep("report", *arguments, code=2)
            self.assertIn(part, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.train("out")
        done = self.lockstep("report", "out", "--output", "/nope/x.html", code=1)
        self.assertIn("cannot write /nope/x.html (No such file or directory). Choose a folder that "
                      "exists and that you may write to.", done.stderr)
        done = subprocess.run([LOCKSTEP, "report", "--help"], capture_output=True, text=True,
                              timeout=60, env=environment(), check=True)
        self.assertIn("--output FILE", done.stdout)


def number(text):
    return float(text.replace(",", ""))


if __name__ == "__main__":
    sys.exit(0 if unittest.main(exit=False, verbosity=1).result.wasSuccessful() else 1)
