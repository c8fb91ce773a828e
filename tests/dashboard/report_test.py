"""`lockstep report` of real runs on two ranks: what the page has of one run and of two."""

import json
import shutil
import subprocess
import sys
import unittest

from dashboard_case import LOCKSTEP, Report, ReportCase, environment

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
        return Report(self.place / path)

    def test_a_run_of_two_ranks(self):
        self.train("out", "--seed", "7")
        page = self.report("out")
        self.assertLessEqual({"Figures", "Where the time went", "Checkpoints", "Events",
                              "Configuration"}, page.tables.keys())
        self.assertEqual(list(page.charts), ["CPU: cores that each rank uses",
                                             "Rank 0: where its time went",
                                             "Rank 1: where its time went"])
        series = page.state["series"]
        self.assertLessEqual({"loss", "eval_loss", "samples_per_second", "learning_rate",
                              "grad_norm"}, series.keys())
        lines = [json.loads(line) for line in
                 (self.place / "out/metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        self.assertEqual([value for _, value in series["loss"]], losses)
        self.assertEqual(page.row("Figures", "steps"), ["60"])
        self.assertAlmostEqual(float(page.row("Figures", "last loss")[0]), losses[-1], delta=1e-3)
        self.assertEqual(page.row("Figures", "ranks"), ["2"])
        self.assertIn("Time per step has evaluations and saves in it.", page.text)
        for rank in page.state["ranks"]:
            self.assertAlmostEqual(sum(rank["budget"].values()), 1, delta=0.05)
        # Where a value comes from, and what it overrides.
        self.assertEqual(page.row("Configuration", "seed")[:2], ["7", "--seed"])
        self.assertEqual(page.row("Configuration", "max_steps")[0], "60")
        self.assertRegex(page.row("Configuration", "max_steps")[1], r"train\.yaml:\d+:\d+")
        for step in 20, 40, 60:
            row = page.row("Checkpoints", f"checkpoint-{step}")
            self.assertEqual(row[0], str(step))
            self.assertTrue(row[3].startswith("whole"), row)
        self.assertIn("The run ended", page.text)
        self.assertNotIn("cannot be read", page.text)

    def test_a_resumed_run_says_so(self):
        self.train("out")
        for step in 40, 60:
            shutil.rmtree(self.place / f"out/checkpoint-{step}")
        self.train("out", "--resume", "auto")
        page = self.report("out", "-o", "here.html")
        self.assertIn("from step 20: steps 22 to 60 were measured again", page.text)
        self.assertIn("Rank 0 was started again after", page.text)
        self.assertEqual(page.state["marks"], [[22, "resumed"]])

    def test_two_runs(self):
        self.train("out")
        self.train("other", "--seed", "7", "--learning_rate", "1e-3")
        page = self.report("out", "other", "--output", "both.html")
        differs = "Configuration: what differs"
        self.assertEqual(page.row(differs, "seed"), ["42", "default", "7", "--seed"])
        self.assertEqual(page.row(differs, "learning_rate")[2:], ["0.001", "--learning_rate"])
        self.assertNotIn("max_steps", [row[0] for row in page.tables[differs]["rows"]])
        first, second, ratio = page.row("Figures", "samples per second (median)")
        self.assertAlmostEqual(float(ratio), number(second) / number(first), delta=0.01)
        names = ["out", "other"]
        self.assertEqual([run["name"] for run in page.state["curves"]], names)
        self.assertTrue(all(run["series"]["loss"] for run in page.state["curves"]))
        self.assertEqual([row["name"] for row in page.state["budgets"]], names)
        self.assertIn("Samples per second (median)", [tile[0] for tile in page.state["tiles"]])

    def test_an_older_run_has_less(self):
        self.train("out")
        shutil.rmtree(self.place / "out/monitor")
        (self.place / "out/effective_config.json").unlink()
        with open(self.place / "out/metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"step": 60, "epoch": 1, "<img src=x onerror=alert(1)>": 3}\n{"ste')
        page = self.report("out")
        self.assertIn("There is no folder monitor/", page.text)
        self.assertIn("Where each value comes from is not recorded.", page.text)
        self.assertEqual(page.row("Configuration", "max_steps"), ["60"])  # of the newest checkpoint
        self.assertIn("<img src=x onerror=alert(1)>", page.state["series"])
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
