"""`lockstep bench gpt`, `llama`, `lora` and `resnet` on tiny models on the CPU, beside PyTorch."""

import csv
import io
import json
import os
import statistics
import sys
import unittest

from bench_case_for_test import Case, bench

sys.path.insert(0, os.path.join(os.environ["LOCKSTEP_SOURCE"], "bench", "peers"))
import peer_loop  # noqa: E402

TINY = ["--model", "tiny", "--device", "cpu", "--warmup", "1"]
SHORT = [*TINY, "--steps", "2", "--rounds", "2"]
PEER = ["--peer", "pytorch", "--peer-modes", "eager"]


class BesidePyTorch(Case):
    def check(self, kind, unit, per_step, *arguments):
        result, rows, document = self.passes(kind, *SHORT, *PEER, *arguments,
                                             "--require", "eager:0.0001")
        self.assertIn("verified: lockstep and pytorch train the same in fp32", result.stderr)
        self.assertIn("ours / eager is ", result.stderr)
        self.assertEqual(document["benchmark"], kind)
        self.assertGreater(document["flops"], 0)
        ours, eager = document["rows"]
        self.assertEqual((ours["contender"], eager["contender"]), ("lockstep", "eager"))
        for row in ours, eager:
            self.assertEqual([len(block) for block in row["ms"]], [2, 2])
            p50 = statistics.median(sum(row["ms"], []))
            self.assertAlmostEqual(row["p50_ms"], p50)
            rate = row[unit.replace("/", "_per_")]
            self.assertAlmostEqual(rate, per_step / p50 * 1e3, delta=1e-6 * rate)
            for part in ("forward_ms", "backward_ms", "optimizer_ms"):
                self.assertGreater(row[part], 0)
            self.assertNotIn("mfu", row)  # a CPU has no such peak
        for a, b in zip(ours["first_losses"], eager["first_losses"], strict=True):
            self.assertAlmostEqual(a, b, delta=5e-3 * a)
        ratios = [statistics.median(b) / statistics.median(a)
                  for a, b in zip(ours["ms"], eager["ms"])]
        self.assertAlmostEqual(eager["ours_times_this"], statistics.median(ratios))
        self.assertEqual(ours["ours_times_this"], 1)
        self.assertEqual([row["ours / this"] for row in rows],
                         ["1.000", f"{eager['ours_times_this']:.3f}"])
        for row in rows:
            self.assertEqual((row["steps"], row["MFU %"], row["peak GiB"]), ("4", "-", "-"))
            self.assertIn(unit, row)
        return document

    def test_gpt(self):
        document = self.check("gpt", "tokens/s", 4 * 32)
        # 6 N + 12 L T C for each of the 4 x 32 tokens; every parameter is trained.
        self.assertEqual(document["parameters"], document["trainable"])
        self.assertEqual(document["flops"],
                         4 * 32 * (6 * document["parameters"] + 12 * 2 * 32 * 32))

    def test_lora(self):
        document = self.check("lora", "tokens/s", 2 * 32, "--batch_size", "2")
        frozen = document["parameters"] - document["trainable"]
        self.assertEqual(document["flops"],
                         2 * 32 * (4 * frozen + 6 * document["trainable"] + 12 * 2 * 32 * 32))

    def test_llama(self):
        self.check("llama", "tokens/s", 4 * 32)

    def test_fp8_beside_bf16_one_at_a_time(self):
        result, _, document = self.passes(
            "llama", *SHORT, "--peer", "pytorch", "--peer-modes", "eager", "--dtype", "fp8",
            "--bf16", "--one-at-a-time")
        self.assertIn("verified: lockstep and pytorch train the same in fp32", result.stderr)
        ours, bf16, eager = document["rows"]
        self.assertEqual([row["contender"] for row in (ours, bf16, eager)],
                         ["lockstep", "bf16", "eager"])
        self.assertNotEqual(ours["first_losses"], bf16["first_losses"])
        for row in bf16, eager:
            for a, b in zip(ours["first_losses"], row["first_losses"], strict=True):
                self.assertAlmostEqual(a, b, delta=2e-2 * a)

    def test_resnet(self):
        document = self.check("resnet", "samples/s", 4, "--dtype", "fp32", "--no-ddp",
                              "--batch_size", "4", "--image_size", "32")
        # ResNet-18 at 224 pixels has 1814 million multiplications; its last layer here 5120.
        per_image = (1_814_073_344 - 512_000) / 49 + 5120
        self.assertAlmostEqual(document["flops"], 4 * 6 * per_image, delta=1)


class Losses(Case):
    def test_of_every_step_and_beside_fp32(self):
        file = self.folder / "losses.csv"
        result = bench("lora", *TINY, *PEER, "--no-peft", "--lora_dropout", "0", "--steps", "12",
                       "--losses", str(file))
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(file, newline="") as rows:
            rows = list(csv.DictReader(rows))
        self.assertEqual(list(rows[0]), ["step", "lockstep", "eager", "eager again", "fp32"])
        self.assertEqual([int(row["step"]) for row in rows], list(range(1, 13)))
        for row in rows:
            for name in ("lockstep", "eager", "eager again"):
                self.assertAlmostEqual(float(row[name]), float(row["fp32"]), delta=0.05)
        self.assertEqual([row["eager"] for row in rows], [row["eager again"] for row in rows])
        self.assertIn("max |this - fp32|", result.stdout)


class Refuses(Case):
    def test_a_side_that_trains_differently(self):
        result = self.fails(1, "lockstep and eager do not train the same: the loss of step 2",
                            "gpt", *SHORT, *PEER, "--corrupt", "eager")
        self.assertNotIn("round", result.stderr)

    def test_a_peer_that_fails_is_reported_and_the_others_are_measured(self):
        result = self.fails(1, "eager is skipped: [bench] the ranks of 'eager' ended", "gpt",
                            *SHORT, *PEER, LOCKSTEP_PYTHON="/bin/false")
        self.assertIn("Lockstep, DDP, eager", result.stdout)
        self.assertNotIn("PyTorch", result.stdout)

    def test_nonsense(self):
        for arguments, part in ((("gpt", "--mode", "fast"), "--mode"),
                                (("gpt", "--model", "7b"), "--model"),
                                (("lora", "--model", "124m"), "--model"),
                                (("resnet", "--dtype", "fp8"), "--dtype"),
                                (("gpt", "--peer", "jax"), "--peer"),
                                (("gpt", "--peer-modes", "eager,fast"), "--peer-modes"),
                                (("gpt", "--device", "tpu"), "--device"),
                                (("gpt", "--batch_size", "-1"), "--batch_size"),
                                (("resnet", "--sequence_length", "8"), "--sequence_length"),
                                (("gpt", "--require", "compile"), "is not MODE:RATIO"),
                                (("gpt", "--require", "compile:1.05"), "required but not measured"),
                                (("gpt", "--no-ddp", "--force-reducer"), "Drop --no-ddp"),
                                (("gpt", "--no-ddp", "--bare"), "Drop --no-ddp")):
            with self.subTest(arguments):
                self.fails(2, part, *arguments)


class Alone(Case):
    def test_stall_of_asynchronous_saves_and_cost_of_the_wrapper(self):
        result, rows, document = self.passes("gpt", *SHORT, "--save-stall", "--bare",
                                             "--force-reducer")
        self.assertEqual([row["gpt tiny, 4 x 32, bf16"] for row in rows],
                         ["Lockstep, DDP, eager", "Lockstep, no DDP, eager"])
        ours, bare = document["rows"]
        self.assertEqual(ours["first_losses"], bare["first_losses"])
        stalls = document["rows"][0]["save_stalls"]
        self.assertEqual(len(stalls), 4)
        for stall in stalls:
            self.assertGreater(stall["blocked_ms"], 0)
            self.assertGreater(stall["write_ms"], 0)
        self.assertIn("lockstep, asynchronous save 1: stall ", result.stdout)


class Peer(unittest.TestCase):
    def test_answers_with_the_error_of_an_order_and_continues(self):
        class Trainee:
            def time(self, order):
                raise MemoryError("no room")

            def train(self, order):
                return {"losses": []}

        answers = io.StringIO()
        peer_loop.serve(Trainee(), ['{"do": "time"}', '{"do": "train"}'], answers)
        found = [json.loads(line) for line in answers.getvalue().splitlines()]
        for answer in found:
            self.assertGreaterEqual(answer.pop("idle_s"), 0)
            self.assertGreaterEqual(answer.pop("idle_cpu_s"), 0)
        self.assertEqual(found, [{"error": "MemoryError: no room"}, {"losses": []}])


class Recipes(Case):
    """A training file through `lockstep train`, beside PyTorch on the same shapes."""

    TINY_GPT = ("model: {name: gpt, n_layer: 2, n_head: 4, n_embd: 32, vocab_size: 128}\n"
                "max_seq_len: 32\nper_device_train_batch_size: 4\nlearning_rate: 1.0e-3\n"
                "use_cpu: true\n")

    def test_a_file_is_measured_as_it_is_trained(self):
        (self.folder / "tiny.yaml").write_text(self.TINY_GPT)
        table = self.folder / "a.csv"
        common = ["recipes", "--recipe", "tiny", "--configs", str(self.folder), "--rounds", "1"]
        result = bench(*common, "--csv", str(table), LOCKSTEP_DEVICE="cpu")
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(table, newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["side"] for row in rows], ["lockstep train", "PyTorch, DDP, eager"])
        for row in rows:
            self.assertEqual((row["recipe"], row["batches"]), ("tiny", "2"))
            self.assertAlmostEqual(float(row["tokens/s"]),
                                   2 * 4 * 32 / float(row["p50 ms"]) * 1e3,
                                   delta=0.02 * float(row["tokens/s"]))
        # One batch for an update: our step benchmark is measured too, and goals are judged.
        self.fails(1, "tiny: ours / step is ", *common, "--accumulation", "1", "--peer-modes", "",
                   "--require", "step:1000", LOCKSTEP_DEVICE="cpu")
        self.fails(1, "model.n_embd 31 does not divide into 4 heads", *common,
                   "--flag=--model={name: gpt, n_embd: 31, n_head: 4}")


if __name__ == "__main__":
    unittest.main()
