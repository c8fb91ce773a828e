"""dp-vs-ddp, presets and ablation on tiny sizes: what they write and what they refuse."""

import unittest

from bench_case_for_test import Case

DP = ["dp-vs-ddp", "--device", "cpu", "--image_size", "4", "--batch_size", "8", "--steps", "12"]
TINY = """model: {name: gpt, n_layer: 1, n_head: 2, n_embd: 16}
data: {name: bytes, path: %s}
max_seq_len: 16
learning_rate: 1.0e-3
"""


class Tiny(Case):
    def refused(self, code, message, *arguments):
        result = self.fails(code, message, *arguments)
        self.assertEqual(result.stdout, "")
        return result

    def training_file(self, more=""):
        text = self.folder / "text"
        text.write_text("".join(f"line {i} of a text that can be learned\n" for i in range(200)))
        file = self.folder / "train.yaml"
        file.write_text(TINY % text + more)
        return file


class DpVsDdp(Tiny):
    def test_measures_what_it_verified(self):
        result, rows, document = self.passes(*DP)
        # Dividing by two is exact, and both sides call the same kernels.
        self.assertIn("verified: after 2 steps the weights of both are 0 apart", result.stderr)
        self.assertEqual([r["contender"] for r in document["rows"]], ["dp", "ddp"])
        dp, ddp = document["rows"]
        self.assertEqual(len(dp["ms"]), 2)  # blocks of 10 and of 2 steps
        self.assertEqual(dp["dp_times_this"], 1)
        self.assertEqual(sorted(dp["parts_ms"]), sorted(
            ["scatter", "replicate", "forward", "gather", "loss", "backward", "gradients",
             "update"]))
        self.assertEqual(sorted(ddp["parts_ms"]),
                         sorted(["forward", "loss", "backward", "gradients", "update"]))
        self.assertAlmostEqual(document["overhead_ms"], sum(
            dp["parts_ms"][part] for part in ("scatter", "replicate", "gather", "gradients")))
        ratios = [a / b for a, b in zip(dp["ms"], ddp["ms"])]
        self.assertAlmostEqual(ddp["dp_times_this"], sum(ratios) / 2)
        self.assertEqual(rows[0]["DP / this"], "1.000")
        self.assertEqual((rows[0]["steps"], rows[0]["blocks"]), ("12", "2"))
        self.assertIn("of blocks of up to 10 steps, a mean of each", result.stdout)
        for line in result.stderr.splitlines():  # none of ranks that begin
            self.assertRegex(line, "^(verified: |block |dp-vs-ddp: |note: other programs)")
        self.assertIn("copies all weights to the replicas", result.stdout)
        self.assertIn("batch 8 of 3x4x4, Adam", result.stdout)

    def test_three_replicas_agree_within_rounding(self):
        result, _, document = self.passes("dp-vs-ddp", "--device", "cpu", "--image_size", "4",
                                          "--batch_size", "24", "--ranks", "3", "--steps", "1")
        self.assertRegex(result.stderr, r"verified: after 2 steps the weights of both are \S+ apart"
                                        r"; they moved by \S+, and rounding explains \S+")
        self.assertEqual(document["settings"]["ranks"], 3)

    def test_refuses_a_side_that_trains_differently(self):
        for side in "dp", "ddp":
            with self.subTest(side):
                result = self.refused(1, "dp and ddp do not train the same", *DP, "--corrupt", side)
                self.assertNotIn("block 1", result.stderr)

    def test_refuses_nonsense(self):
        self.refused(2, "--batch_size 9 is not a multiple of --ranks 2: the sides would weigh "
                        "samples differently. Try --batch_size 10.", "dp-vs-ddp",
                     "--batch_size", "9")
        self.refused(2, "--device cuda with --ranks 64 needs as many GPUs", "dp-vs-ddp",
                     "--device", "cuda", "--ranks", "64")
        self.refused(2, "--model", *DP, "--model", "elephant")


class Presets(Tiny):
    def test_four_rows_with_one_effective_batch(self):
        result, rows, document = self.passes("presets", self.training_file(), "--steps", "4",
                                             "--rounds", "1")
        self.assertIn("verified: mean losses differ by at most", result.stderr)
        found = [(r["preset"], r["ranks"], r["batch"], r["accumulation"], r["logging_steps"],
                  r["effective_batch"]) for r in document["rows"]]
        self.assertEqual(found, [("single", 1, 4, 4, 5, 16), ("old", 2, 2, 4, 1, 16),
                                 ("standard", 2, 4, 2, 5, 16), ("fast", 2, 8, 1, 10, 16)])
        self.assertEqual([row["guide's table"] for row in rows], ["1", "1.06", "1.3", "1.6"])
        self.assertEqual([row["guide's text"] for row in rows], ["1", "1.2", "1.4-1.5", "1.7-2"])
        self.assertEqual(rows[0]["speed-up"], "1.00")

    def test_refuses_what_it_cannot_compare(self):
        self.refused(2, "sets global_batch_size, and the rows set the accumulation themselves",
                     "presets", self.training_file("global_batch_size: 16\n"))
        self.refused(2, "--ranks", "presets", "--ranks", "1")
        self.refused(2, "cannot be read", "presets", self.folder / "none.yaml")
        # Bytes too few for a sample: the message of lockstep train is shown.
        file = self.training_file("per_device_eval_batch_size: 1\n")
        (self.folder / "text").write_text("ab")
        self.refused(1, "lockstep train of 'single' failed", "presets", file, "--steps", "2")


class Ablation(Tiny):
    def test_settings_one_after_the_other(self):
        result, rows, document = self.passes(
            "ablation", self.training_file("per_device_train_batch_size: 4\nsave_steps: 3\n"
                                           "dataloader_num_workers: 1\nwarmup_steps: 100\n"
                                           "max_steps: 1000\ndataloader_prefetch_factor: 3\n"),
            "--steps", "10", "--rounds", "1", "--set", "gradient_accumulation_steps=2")
        names = ["baseline: fp32, 1 rank", "+ memory: caching CPU allocator",
                 "+ loader: 1 workers, 3 batches ahead", "+ fused optimizer", "+ DDP: 2 ranks",
                 "+ sharded optimizer"]
        self.assertEqual([row["setting"] for row in rows], names)
        self.assertEqual([row["ranks"] for row in rows], ["1", "1", "1", "1", "2", "2"])
        self.assertIn("verified: 3 of the settings leave every logged loss as it was",
                      result.stderr)
        total = 1
        for row in document["rows"]:
            total *= row["times_before"]
            self.assertAlmostEqual(row["times_baseline"], total, places=6)
        self.assertEqual([row["computed"] for row in document["rows"]],
                         [name == "+ fused optimizer" for name in names])
        self.assertIn("computed", rows[3]["remark"])
        self.assertGreater(document["optimizer_ms"]["fused"], 0)
        self.assertIn("The optimizer of lockstep train is always fused", result.stdout)

    def test_precision_and_checkpointing_of_the_file(self):
        _, rows, _ = self.passes("ablation", self.training_file(
            "bf16: true\ngradient_checkpointing: true\n"), "--steps", "10", "--rounds", "1",
            "--ranks", "1")
        self.assertEqual([row["setting"] for row in rows][2:4], ["+ bf16",
                                                                 "+ gradient_checkpointing"])
        self.assertEqual(rows[-1]["setting"], "+ fused optimizer")

    def test_refuses_what_is_wrong_before_it_runs(self):
        self.refused(2, "file is required", "ablation")
        self.refused(2, "cannot be read", "ablation", self.folder / "none.yaml")
        file = self.training_file()
        self.refused(2, "Did you mean bf16?", "ablation", file, "--set", "bf61=true")
        self.refused(2, "global_batch_size", "ablation", file, "--set", "global_batch_size=9",
                     "--set", "per_device_train_batch_size=1")
        self.refused(2, "--steps", "ablation", file, "--steps", "3")


if __name__ == "__main__":
    unittest.main()
