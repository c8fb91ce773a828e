"""`lockstep bench scale`: a real training on one and two ranks, and what it writes."""

import csv
import json
import os
import sys
import unittest

from dashboard_case import SOURCE, Report, ReportCase

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
