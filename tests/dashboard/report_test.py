"""`lockstep report` of real runs on two ranks: what the page has of one run and of two. And
`lockstep bench scale`: a real training on one and two ranks, and what it writes."""

import csv
import json
import os
import shutil
import subprocess
import sys
import unittest

from dashboard_case import LOCKSTEP, SOURCE, Report, ReportCase, environment

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


TINY = SOURCE / "examples/configs/tiny_gpt.yaml"
PARTS = ["data_wait", "forward", "backward", "communication", "optimizer", "evaluation",
         "logging_saving", "other"]


class Scale(ReportCase):
    def scale(self, *arguments, code=0):
        return self.lockstep("bench", "scale", *arguments, code=code)

    def test_weak_scaling_of_the_tiny_gpt(self):
        done = self.scale("--ranks", "2,1", "--steps", "12", "--rounds", "2", "--output", "out",
                          TINY, "--", "--seed=7")
        out = self.place / "out"
        self.assertEqual(sorted(p.name for p in out.iterdir()),
                         ["report.html", "scale.csv", "scale.json", "scale_runs"])
        self.assertEqual(done.stderr.count("round "), 4)
        with open(out / "scale.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        document = json.loads((out / "scale.json").read_text())
        self.assertEqual((document["scaling"], document["steps"], document["rounds"]),
                         ("weak", 12, 2))
        self.assertEqual([row["ranks"] for row in rows], ["1", "2"])
        self.assertEqual([row["batch_per_rank"] for row in rows], ["8", "8"])
        self.assertEqual([row["global_batch"] for row in rows], ["16", "32"])
        for row, figure in zip(rows, document["rows"]):
            self.assertGreater(figure["samples_per_s"], 0)
            self.assertEqual(len(figure["samples_per_s_of_rounds"]), 2)
            self.assertAlmostEqual(figure["step_s"] * figure["samples_per_s"],
                                   figure["global_batch"], places=6)
            self.assertAlmostEqual(figure["efficiency"], figure["speedup"] / figure["ranks"])
            self.assertAlmostEqual(float(row["speedup"]), figure["speedup"], delta=1e-4)
            self.assertAlmostEqual(float(row["step_ms"]), 1e3 * figure["step_s"], delta=1e-3)
            self.assertAlmostEqual(sum(figure["budget"][part] for part in PARTS), 1, places=6)
            self.assertAlmostEqual(sum(float(row[part]) for part in PARTS), 1, delta=1e-3)
            self.assertGreater(figure["budget"]["backward"], 0.05)
            self.assertGreater(figure["utilisation"], 0.05)
            self.assertLess(figure["utilisation"], 2)
            self.assertGreater(figure["tokens_per_s"], 10 * figure["samples_per_s"])
        self.assertEqual(document["rows"][0]["speedup"], 1)
        page = Report(out / "report.html")
        self.assertEqual(list(page.charts), ["Speed-up, weak scaling",
                                             "Utilisation of the cores given to the ranks"])
        measured, ideal = page.charts["Speed-up, weak scaling"]["lines"]
        self.assertEqual(ideal["points"], [[1, 1], [2, 2]])
        self.assertAlmostEqual(measured["points"][1][1], document["rows"][1]["speedup"], places=6)
        self.assertEqual([row["name"] for row in page.state["budgets"]], ["1 rank", "2 ranks"])
        self.assertIn("each rank has the same batch", page.text)
        settings = json.loads((out / "scale_runs/ranks_2_round_1/effective_config.json")
                              .read_text())["settings"]
        self.assertEqual(settings["seed"]["value"], 7)
        # A second report takes the place of the first.
        self.scale("--steps", "6", "--rounds", "1", "--strong", "--output", "out", "--ranks", "1,2",
                   TINY)
        document = json.loads((out / "scale.json").read_text())
        self.assertEqual([row["batch_per_rank"] for row in document["rows"]], [8, 4])
        self.assertEqual([row["global_batch"] for row in document["rows"]], [16, 16])
        self.assertEqual(len(list((out / "scale_runs").glob("*_round_1"))), 2)

    def test_a_speed_up_can_be_required(self):
        short = ["--ranks", "1,2", "--steps", "6", "--rounds", "1", "--output", "out"]
        done = self.scale(*short, "--require-speedup", "1:1,2:0.01", TINY)
        self.assertIn("scale: the speed-up of 1 rank is 1.000, at least 1 required: reached",
                      done.stderr)
        self.assertNotIn("MISSED", done.stderr)
        done = self.scale(*short, "--require-speedup", "2:1000", TINY, code=1)
        measured = json.loads((self.place / "out/scale.json").read_text())["rows"][1]["speedup"]
        self.assertIn(f"scale: the speed-up of 2 ranks is {measured:.3f}, at least 1000 required: "
                      "MISSED\n", done.stderr)
        self.assertIn("report in out/report.html", done.stdout)

    def test_what_cannot_be_measured_is_refused_before_anything_runs(self):
        done = self.scale("--strong", "--ranks", "1,3", TINY, code=2)
        self.assertIn("8 samples (8 per rank x 1 rank) cannot be shared by 3 ranks", done.stderr)
        self.assertIn("a global batch that 3 divides, such as 6 or 9: "
                      "-- --per_device_train_batch_size=9.", done.stderr)
        done = self.scale("--strong", "--ranks", "2,3", TINY, code=2)
        self.assertIn("such as 12 or 18: -- --per_device_train_batch_size=9.", done.stderr)
        done = self.scale("--strong", "--weak", TINY, code=2)
        self.assertIn("--weak", done.stderr)
        done = self.scale("--ranks", "1,2", TINY, "--", "--global_batch_size=64",
                          "--gradient_accumulation_steps=1", code=2)
        self.assertIn("sets global_batch_size", done.stderr)
        self.assertIn("--strong", done.stderr)
        done = self.scale("nowhere.yaml", code=2)
        self.assertIn("'nowhere.yaml' does not exist. Give one:", done.stderr)
        self.assertIn("is not a training file", self.scale(self.place, code=2).stderr)
        self.assertIn("no training file was given", self.scale(code=2).stderr)
        done = self.scale("--ranks", "0", TINY, code=2)
        self.assertIn("--ranks", done.stderr)
        done = self.scale(TINY, "--", "--leraning_rate=1", code=2)
        self.assertIn("learning_rate", done.stderr)
        done = self.scale("--ranks", "1,2", "--require-speedup", "2:1.9,4:3.8", TINY, code=2)
        self.assertIn("number of ranks 4 is required but not measured. Add it to --ranks.",
                      done.stderr)
        for wrong in ("fast", "2", "2:0", "2:nan", "2:1.9x"):
            done = self.scale("--ranks", "1,2", "--require-speedup", wrong, TINY, code=2)
            self.assertIn(f"'{wrong}' is not RANKS:RATIO", done.stderr)
        os.makedirs(self.place / "mine/runs")  # as an output_dir has it
        done = self.scale("--output", "mine", TINY, code=2)
        self.assertIn("mine is not empty", done.stderr)
        self.assertFalse((self.place / "scale").exists())

    def test_a_run_that_fails_is_shown(self):
        (self.place / "bad.yaml").write_text(
            TINY.read_text().replace("path: torch-headers", "path: nowhere"))
        done = self.scale("--ranks", "1", "bad.yaml", code=1)
        self.assertIn("failed", done.stderr)
        self.assertIn("nowhere", done.stderr)


if __name__ == "__main__":
    sys.exit(0 if unittest.main(exit=False, verbosity=1).result.wasSuccessful() else 1)
