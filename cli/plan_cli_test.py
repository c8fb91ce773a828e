"""`lockstep plan` as a user sees it: tables, JSON, exit codes and refusals. No GPU is needed."""
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

BIN = os.environ["LOCKSTEP_BIN"]
LOCKSTEP = os.path.join(BIN, "lockstep")
SOURCE = os.environ["LOCKSTEP_SOURCE"]
FAKE_CUDA = os.path.join(os.path.dirname(BIN), "lib", "fake_cuda")

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_head": 12,
        "n_embd": 768, "vocab_size": 50257, "n_positions": 1024, "n_ctx": 1024,
        "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 32064,
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "sliding_window": 2047, "pad_token_id": 32000,
        "bos_token_id": 1, "eos_token_id": 32000, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attention_dropout": 0.0, "initializer_range": 0.02}


class Plan(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="lockstep_plan_")
        self.addCleanup(shutil.rmtree, self.root)

    def write(self, name, text):
        path = os.path.join(self.root, name)
        with open(path, "w") as f:
            f.write(text if isinstance(text, str) else json.dumps(text))
        return path

    def gpt2(self, more=""):
        """Neither the tokens nor weights are there: a plan needs neither."""
        config = self.write("gpt2.json", GPT2)
        self.files = getattr(self, "files", 0) + 1
        return self.write(f"gpt2_{self.files}.yaml",
                          f"model: {{config: {config}}}\ndataset_dir: /no/such\n"
                          f"max_seq_len: 1024\nbf16: true\nper_device_train_batch_size: 8\n{more}")

    def plan(self, *args, code=0, **variables):
        # Paths in the examples begin at the project's folder.
        result = subprocess.run([LOCKSTEP, "plan", *args], capture_output=True, text=True,
                                timeout=60, env={**os.environ, **variables}, cwd=SOURCE)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result

    def json(self, *args, code=0, **variables):
        return json.loads(self.plan(*args, "--json", code=code, **variables).stdout)

    def test_gpt2_on_four_gpus(self):
        plan = self.json(self.gpt2("global_batch_size: 64\n"), "--gpus", "4xH100-80GB",
                         "--tokens", "50e9")
        self.assertEqual(plan["parameters"], 124439808)
        self.assertEqual(plan["trainable_parameters"], 124439808)
        self.assertEqual(plan["flops_per_token"], 854438400)
        self.assertEqual([row["gpus"] for row in plan["rows"]], [1, 2, 3, 4])
        self.assertEqual([row["strategy"] for row in plan["rows"]],
                         ["single GPU", "DDP", "DDP", "DDP"])
        for row in plan["rows"]:
            product = row["gpus"] * row["per_device_train_batch_size"] * \
                row["gradient_accumulation_steps"]
            self.assertEqual(product, row["global_batch"])
            self.assertEqual(row["global_batch"], 63 if row["gpus"] == 3 else 64)
            parts = row["memory_bytes"]
            self.assertEqual(parts["total"] - parts["workspace"] - parts["context"],
                             parts["allocated"])
            self.assertAlmostEqual(row["training_s"], 50e9 / row["tokens_per_second"], places=3)
        self.assertEqual(plan["rows"][0]["speedup"], 1)
        self.assertGreater(plan["rows"][3]["speedup"], 3.5)
        self.assertLess(plan["rows"][3]["speedup"], 4.0)
        self.assertEqual(len(plan["notes"]), 1)
        self.assertIn("3 GPUs cannot share a global batch of 64: 63 is the nearest below",
                      plan["notes"][0])

    def test_the_text_has_a_row_for_each_count(self):
        out = self.plan(self.gpt2(), "--gpus", "8xH100", "--tokens=50e9").stdout
        self.assertIn("model     124.4 M parameters, all trained; 0.854 GFLOP a token\n", out)
        self.assertIn("assumed   40 % of 989 TFLOP/s; nvlink 352 GB/s a GPU, ib400 360 GB/s a "
                      "node of 8\n", out)
        for count in (1, 2, 3, 4, 8):
            self.assertRegex(out, rf"(?m)^ +{count}  (single GPU|DDP) .* yes .*x +[\d.]+ (h|days)$")
        self.assertIn("memory of a GPU at its peak, 8 GPUs, GiB:", out)
        self.assertNotIn("What to change", out)

    def test_what_does_not_fit_ends_with_one_and_says_what_to_change(self):
        config = self.write("phi3.json", PHI3)
        file = self.write("phi3.yaml", f"model: {{config: {config}}}\n"
                          "data: {name: instructions, path: /no/such.json}\nmax_seq_len: 512\n"
                          "per_device_train_batch_size: 16\n")
        plan = self.json(file, "--gpus", "2xRTX4090", code=1)
        self.assertEqual(plan["parameters"], 3821079552)
        self.assertFalse(plan["fits"])
        self.assertEqual([c["change"] for c in plan["changes"]][:2],
                         ["gradient_checkpointing: true",
                          "per_device_train_batch_size: 1 with accumulation 16"])
        self.assertTrue(plan["changes"][-1]["together_fits"])
        out = self.plan(file, "--gpus", "2xRTX4090", code=1).stdout
        self.assertIn("It does not fit (23.27 GiB are usable). What to change, cheapest first, "
                      "GiB:", out)
        self.assertIn("  * fits\n", out)
        # As it says: with adapters in bf16 it fits, and data parallel is the strategy.
        tuned = self.write("tuned.yaml", f"model: {{config: {config}}}\n"
                           "data: {name: instructions, path: /no/such.json}\nmax_seq_len: 512\n"
                           "per_device_train_batch_size: 2\nbf16: true\n"
                           "gradient_checkpointing: true\n"
                           "lora: {r: 16, target_modules: [qkv_proj, o_proj]}\n")
        plan = self.json(tuned, "--gpus", "2xRTX4090")
        self.assertEqual(plan["trainable_parameters"], 9437184)
        self.assertEqual(plan["rows"][1]["strategy"], "DDP")

    def test_what_no_change_makes_fit_says_so(self):
        file = self.write("mlp.yaml", "model: {name: mlp, hidden: 100000, layers: 20}\n")
        plan = self.json(file, "--gpus", "V100-16GB", "--data", "random", code=1)
        self.assertEqual([c for c in plan["changes"] if c["together_fits"]], [])
        out = self.plan(file, "--gpus", "V100-16GB", "--data", "random", code=1).stdout
        self.assertIn("Use a card with more memory, more GPUs, or a smaller model.\n", out)

    def test_scaling(self):
        plan = self.json(self.gpt2(), "--gpus", "8xH100", "--scale", "8,64,512", "--link",
                         "nvlink+ib400")
        self.assertEqual([p["gpus"] for p in plan["scale"]], [8, 64, 512])
        efficiencies = [p["efficiency"] for p in plan["scale"]]
        self.assertEqual(efficiencies, sorted(efficiencies, reverse=True))
        for point in plan["scale"]:
            self.assertAlmostEqual(point["step_s"], point["compute_s"] + point["optimizer_s"] +
                                   point["exposed_s"])
        slow = self.json(self.gpt2(), "--gpus", "8xL40S", "--scale=8,64", "--link=pcie+eth10/node")
        self.assertGreater(slow["stops_scaling_at"], 1)
        out = self.plan(self.gpt2(), "--gpus", "8xL40S", "--scale=8,64",
                        "--link=pcie+eth10/node").stdout
        self.assertIn(f"efficiency falls below 80 % at {slow['stops_scaling_at']} GPUs", out)

    def test_a_measurement_takes_the_place_of_the_assumption(self):
        plan = self.json(self.gpt2(), "--gpus", "cpu", "--tokens-per-second", "1000")
        self.assertAlmostEqual(plan["rows"][0]["tokens_per_second"], 1000)
        self.assertNotIn("step_s", self.json(self.gpt2(), "--gpus", "cpu")["rows"][0])

    @unittest.skipUnless(os.path.isdir(FAKE_CUDA), "no fake driver in this build")
    def test_detected_gpus_have_their_own_memory(self):
        plan = self.json(self.gpt2(), "--gpus", "detected", LD_LIBRARY_PATH=FAKE_CUDA)
        self.assertEqual(plan["card"]["name"], "H100-80GB")
        self.assertEqual(plan["card"]["count"], 2)
        self.assertEqual(plan["card"]["memory_bytes"], 79 << 30)
        plan = self.json(self.gpt2(), LD_LIBRARY_PATH=FAKE_CUDA, LOCKSTEP_DEVICE="",
                         FAKE_CUDA="unknown card")
        self.assertEqual(plan["card"]["name"], "NVIDIA B300 Test")
        self.assertIn("step_s", plan["rows"][0])
        result = self.plan(self.gpt2(), "--gpus", "detected", code=2, LD_LIBRARY_PATH=FAKE_CUDA,
                           FAKE_CUDA="none")
        self.assertIn("there is no GPU to plan for (the driver shows no device)", result.stderr)

    def test_every_example_can_be_planned(self):
        configs = os.path.join(SOURCE, "examples", "configs")
        for name in sorted(f for f in os.listdir(configs) if f.endswith(".yaml")):
            plan = self.json(os.path.join(configs, name), "--gpus", "2xA100-40GB")
            self.assertTrue(plan["fits"], name)

    def test_keys_of_the_command_line_count(self):
        small = self.json(self.gpt2(), "--gpus", "H100", "--per_device_train_batch_size", "1")
        self.assertEqual(small["rows"][0]["per_device_train_batch_size"], 1)
        chunked = self.json(self.gpt2(), "--gpus", "H100")
        whole = self.json(self.gpt2(), "--gpus", "H100", "--unfused")
        self.assertLess(chunked["rows"][0]["memory_bytes"]["logits"],
                        whole["rows"][0]["memory_bytes"]["logits"])

    def test_refusals(self):
        for args, text in [
                ((), "which training file?"),
                ((self.gpt2(), "--gpus"), "--gpus needs a value."),
                ((self.gpt2(), "--gpus", "4xB900"), "the card 'B900' is not known."),
                ((self.gpt2(), "--gpus", "A100"), "A100 comes with several sizes of memory."),
                ((self.gpt2(), "--gpus", "H100", "--link", "ib400"), "'ib400' is not a link."),
                ((self.gpt2(), "--gpus", "H100", "--tokens", "many"), "--tokens needs a number"),
                ((self.gpt2(), "--gpus", "H100", "--mfu", "40"), "--mfu needs a number"),
                ((self.gpt2(), "--gpus", "H100", "--scale", "8,x"), "--scale"),
                ((self.gpt2(), "--gpus", "cpu", "--scale", "8"), "how fast cpu computes"),
                (("/no/such/file.yaml", "--gpus", "H100"), "/no/such/file.yaml"),
                ((self.gpt2("no_such_key: 1\n"), "--gpus", "H100"), "no_such_key")]:
            if not args:
                args = ("--json",)
            result = self.plan(*args, code=2)
            self.assertIn(text, result.stderr)
            self.assertEqual(result.stdout, "")

    def test_help(self):
        self.assertIn("usage: lockstep plan FILE", self.plan("--help").stdout)
        self.assertIn("usage: lockstep plan FILE", self.plan(code=2).stderr)
        top = subprocess.run([LOCKSTEP, "help"], capture_output=True, text=True, timeout=60)
        self.assertRegex(top.stdout, r"\n  plan +memory, strategy")
        with open(os.path.join(SOURCE, "docs", "plan.md")) as f:
            page = f.read()
        for flag in re.findall(r"(?m)^(--[a-z-]+)", self.plan("--help").stdout):
            self.assertIn(f"`{flag}", page, "a flag that docs/plan.md does not describe")


if __name__ == "__main__":
    unittest.main()
