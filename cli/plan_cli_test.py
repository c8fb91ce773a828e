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

    def gpt2(self, more="", comment=""):
        """Neither the tokens nor weights are there: a plan needs neither."""
        config = self.write("gpt2.json", GPT2)
        self.files = getattr(self, "files", 0) + 1
        return self.write(f"gpt2_{self.files}.yaml",
                          f"model: {{config: {config}}}\ndataset_dir: /no/such\n"
                          f"max_seq_len: 1024\nbf16: true\n"
                          f"per_device_train_batch_size: 8{comment}\n{more}")

    def plan(self, *args, code=0, **variables):
        # Paths in the examples begin at the project's folder.
        result = subprocess.run([LOCKSTEP, "plan", *map(str, args)], capture_output=True, text=True,
                                timeout=60, cwd=SOURCE,
                                env={**os.environ, "LOCKSTEP_CACHE": self.root, **variables})
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result

    def json(self, *args, code=0, **variables):
        return json.loads(self.plan(*args, "--json", code=code, **variables).stdout)

    def test_the_number_of_ranks_is_a_part_of_gpus(self):
        for flag in (("--world-size", "2"), ("--world_size=2",)):
            self.assertIn("Write --gpus 2xH100-80GB", self.plan(self.gpt2(), *flag, code=2).stderr)

    def test_gpt2_on_four_gpus(self):
        plan = self.json(self.gpt2("global_batch_size: 64\n"), "--gpus", "4xH100-80GB",
                         "--tokens", "50e9")
        self.assertEqual(plan["parameters"], 124439808)
        self.assertEqual(plan["trainable_parameters"], 124439808)
        self.assertEqual(plan["parameters_used_by_a_token"], 124439808)
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

    def test_strategies_are_ranked_and_the_best_is_written(self):
        """Into a new file, and the plan of what is written agrees."""
        file = self.gpt2("global_batch_size: 256   # samples\n")
        args = (file, "--gpus", "3xH100", "--per_device_train_batch_size", "2")
        plan = self.json(*args, code=1)
        # As lockstep train, which refuses the file with three ranks.
        self.assertFalse(plan["fits"] or plan["rows"][-1]["as_written"])
        self.assertTrue(plan["rows"][-1]["fits"] and plan["rows"][1]["as_written"])
        self.assertEqual((plan["rows"][-1]["global_batch"], plan["changes"]), (255, []))
        self.assertEqual(plan["notes"], [
            "3 GPUs cannot share a global batch of 256: 255 is the nearest below; with a "
            "micro-batch of 2 lockstep train takes 252 or 258"])
        shown = self.plan(*args, code=1).stdout
        self.assertIn("\nstrategy 1 uses 2 of 3 GPUs\n", shown)
        self.assertIn("\nAs the file is written lockstep train refuses it on 3 GPUs: the notes say "
                      "what to change.\n", shown)
        strategies = plan["strategies"]
        self.assertEqual(strategies[1:], sorted(strategies[1:], key=lambda one: one["step_s"]))
        # Among those within a hundredth the one with the fewest changes leads.
        least = min(one["step_s"] for one in strategies)
        self.assertLess(strategies[0]["step_s"], 1.01 * least)
        self.assertEqual(strategies[0]["gpus"], 2)  # 256 is no multiple of 3
        self.assertGreater(strategies[0]["per_device_train_batch_size"], 2)
        out = os.path.join(self.root, "planned.yaml")
        result = self.plan(file, "--gpus", "3xH100", "--write", out)
        self.assertIn("strategies with a global batch of 256, the fastest first", result.stdout)
        self.assertIn("Start it with `lockstep run --nproc-per-node=2 lockstep train",
                      result.stderr)
        size = strategies[0]["per_device_train_batch_size"]
        with open(out) as written:
            self.assertEqual(written.read(), (
                f"# Chosen by `lockstep plan {file}`:\n"
                "# samples of one rank in one forward pass; it was 8\n"
                f"per_device_train_batch_size: {size}\n\n# As in {file}:\n"
                f"model: {{config: {self.root}/gpt2.json}}\ndataset_dir: /no/such\n"
                "max_seq_len: 1024\nbf16: true\nglobal_batch_size: 256\n"))
        again = self.json(out, "--gpus", "2xH100")["strategies"][0]
        self.assertEqual(again["settings"], {})
        self.assertAlmostEqual(again["step_s"], strategies[0]["step_s"])

    def test_a_fully_sharded_strategy_is_written(self):
        config = self.write("phi3.json", PHI3)
        file = self.write("phi3.yaml", f"model: {{config: {config}}}\nmax_seq_len: 512\n"
                          "bf16: true\ndata: {name: instructions, path: /no/such.json}\n"
                          "per_device_train_batch_size: 1\nglobal_batch_size: 32\n")
        strategies = self.json(file, "--gpus", "8xA100-40GB", code=1)["strategies"]
        best = next(one for one in strategies if one["strategy"].startswith("fsdp"))
        self.assertEqual(best["strategy"], "fsdp: " + best["settings"]["fsdp"])
        out = os.path.join(self.root, "sharded.yaml")
        self.plan(file, "--gpus", "8xA100-40GB", "--write", out, "--strategy",
                  strategies.index(best) + 1)
        again = self.json(out, "--gpus", "8xA100-40GB")
        self.assertTrue(again["fits"])
        self.assertEqual(again["rows"][-1]["strategy"], best["strategy"])
        # And back again, for a card that holds the whole model: without what is of fsdp alone.
        with open(out, "a") as more:
            more.write("lora: {target_modules: all-linear}\n"
                       "fsdp_config: {activation_checkpointing: true}\n")
        whole = os.path.join(self.root, "whole.yaml")
        self.plan(out, "--gpus", "8xH200", "--write", whole)
        with open(whole) as text:
            self.assertNotIn("fsdp_config", text.read())
        self.assertTrue(self.json(whole, "--gpus", "8xH200")["rows"][-1]["as_written"])

    def test_a_device_map_is_written_into_the_model(self):
        for model in ("model: {config: %s}\n", "model:\n    config: %s\n"):
            config = self.write("phi3.json", PHI3)
            file = self.write("phi3.yaml", model % config + "max_seq_len: 512\nbf16: true\n"
                              "data: {name: instructions, path: /no/such.json}\n"
                              "per_device_train_batch_size: 1\n")
            strategies = self.json(file, "--gpus", "4xRTX4090", code=1)["strategies"]
            maps = [one["settings"].get("model.device_map") for one in strategies]
            out = os.path.join(self.root, f"split{len(model)}.yaml")
            self.plan(file, "--gpus", "4xRTX4090", "--write", out, "--strategy",
                      maps.index("balanced") + 1)
            self.assertTrue(self.json(out, "--gpus", "4xRTX4090")["fits"])

    def test_two_cards_without_peer_access_are_not_two_times(self):
        """Row C12 of the founding documents: a speed-up of exactly 2 is an assumption."""
        file = self.gpt2("global_batch_size: 32\n")
        speedup = lambda *more: self.json(  # noqa: E731
            file, "--gpus", "2xRTX4090", *more)["rows"][1]["speedup"]
        self.assertLess(speedup(), 1.95)
        self.assertLess(speedup(), speedup("--link", "pcie"))
        self.assertIn("no peer access", self.json(file, "--gpus", "2xRTX4090")["link"])

    def test_the_row_is_the_fastest_strategy_that_computes_as_the_file(self):
        """And the note and the table of strategies name that one."""
        file = self.write("phi3.yaml", f"model: {{config: {self.write('phi3.json', PHI3)}}}\n"
                          "data: {name: instructions, path: /no/such.json}\nmax_seq_len: 512\n"
                          "bf16: true\nper_device_train_batch_size: 8\nglobal_batch_size: 64\n")
        plan = self.json(file, "--gpus", "4xRTX4090", code=1)
        row = plan["rows"][-1]
        alike = [one for one in plan["strategies"] if one["gpus"] == 4 and one["half"] and
                 not one["gradient_checkpointing"] and
                 not one["settings"].get("mixed_precision") == "fp8"]
        one = min(alike, key=lambda one: one["step_s"])
        self.assertEqual(plan["strategies"][row["strategy_number"] - 1], one)
        for key in ("strategy", "step_s", "per_device_train_batch_size", "global_batch"):
            self.assertEqual(row[key], one[key])
        settings = ", ".join(f"{key}: {value}" for key, value in one["settings"].items())
        self.assertIn("4 GPUs do not hold this as it is written. The fastest that computes as the "
                      f"file does is strategy {row['strategy_number']}, {one['strategy']}: "
                      f"set {settings}",
                      plan["notes"])
        shown = self.plan(file, "--gpus", "4xRTX4090", code=1).stdout
        self.assertRegex(shown, rf"(?m)^ +{row['strategy_number']}\* +4  {one['strategy']} ")
        self.assertIn("\n* the row of 4 GPUs above\n", shown)

    def test_mistakes_of_write_are_refused(self):
        file = self.gpt2()
        self.assertIn("--strategy 2 chooses what --write FILE writes",
                      self.plan(file, "--gpus", "H100", "--strategy", "2", code=2).stderr)
        out = os.path.join(self.root, "no.yaml")
        self.assertIn("there are ", self.plan(file, "--gpus", "H100", "--write", out, "--strategy",
                                              "900", code=2).stderr)
        self.assertIn("is not known", self.plan(file, "--gpus", "cpu", "--write", out,
                                                code=2).stderr)
        self.assertIn("does not write keys that are given as flags (--bf16)",
                      self.plan(file, "--gpus", "H100", "--write", out, "--bf16", "false",
                                code=2).stderr)
        self.assertFalse(os.path.exists(out))
        # What is there stays: the file itself, by whatever name, and any other.
        os.symlink("/no/such/file", out)
        for path in (file, os.path.join(self.root, ".", os.path.basename(file)), out):
            self.assertIn(f"--write makes a new file, and {path} is there already. Give another "
                          "path: --write planned.yaml.",
                          self.plan(file, "--gpus", "H100", "--write", path, code=2).stderr)
        self.assertTrue(os.path.islink(out))

    def test_every_spelling_of_a_file_is_written(self):
        """JSON, short names, and texts that YAML would take for something else."""
        text = {"model": "gpt", "dataset_dir": "/no: such", "max_seq_len": 1024, "bf16": True,
                "learning_rate": 1e-4, "run_name": "12", "report_to": ["none"],
                "per_device_train_batch_size": 1, "global_batch_size": 64, "warmup_ratio": 0.1,
                "lora": {"target_modules": ["c_attn"]}}
        for name in ("train.json", "train.yaml"):
            file = self.write(name, text)
            out = os.path.join(self.root, f"{name}_planned.yaml")
            strategies = self.json(file, "--gpus", "2xH100")["strategies"]
            self.plan(file, "--gpus", "2xH100", "--write", out)
            before, after = self.settings(file), self.settings(out)
            self.assertEqual({key for key in before if before[key] != after[key]},
                             set(strategies[0]["settings"]))

    def settings(self, file):
        shown = subprocess.run([LOCKSTEP, "config", "show", file, "--json"], capture_output=True,
                               text=True, timeout=60)
        self.assertEqual(shown.returncode, 0, shown.stderr)
        return {key: setting["value"]
                for key, setting in json.loads(shown.stdout)["settings"].items()}

    def pipeline(self, degree=2, more=""):
        return self.write("stages.yaml", "model: {name: gpt, n_layer: 32, n_head: 16, "
                          "n_embd: 2048, vocab_size: 50257}\ndataset_dir: /no/such\n"
                          "max_seq_len: 2048\nbf16: true\nper_device_train_batch_size: 1\n"
                          f"global_batch_size: 256\npipeline_parallel_degree: {degree}\n{more}")

    def test_stages_and_slices_of_the_file_are_planned_as_they_are_written(self):
        slices = self.gpt2("global_batch_size: 64\ntensor_parallel_degree: 2\n")
        for file, key, text in ((self.pipeline(), "pipeline", "pipeline of 2 stages"),
                                (slices, "tensor", "tensor parallel over 2")):
            plan = self.json(file, "--gpus", "4xH100")
            self.assertEqual([row["as_written"] for row in plan["rows"]],
                             [False, True, False, True])
            row = plan["rows"][-1]
            self.assertEqual((row["strategy"], row["gpus_per_replica"], row["replicas"]),
                             (text, 2, 2))
            # Two do not divide three GPUs, and lockstep train says so, too.
            plan = self.json(file, "--gpus", "3xH100", code=1)
            self.assertIn(f"{key}_parallel_degree 2 trains on multiples of 2 GPUs: use such a "
                          f"number, or set {key}_parallel_degree: 1", plan["notes"])
        plan = self.json(self.pipeline(), "--gpus", "2xRTX4090")
        self.assertEqual((plan["fits"], plan["changes"]), (True, []))
        written = next(one for one in plan["strategies"] if one["settings"] == {})
        self.assertEqual(written["strategy"], plan["rows"][-1]["strategy"])
        self.assertAlmostEqual(written["step_s"], plan["rows"][-1]["step_s"])

    def test_stages_are_not_proposed_where_training_refuses_them(self):
        text = "global_batch_size: 64\n"
        def staged(more):
            strategies = self.json(self.gpt2(text + more), "--gpus", "4xH100")["strategies"]
            return any("pipeline" in one["strategy"] for one in strategies)
        self.assertTrue(staged(""))
        for more in ("elastic_gpu: true\n", "auto_find_batch_size: true\n",
                     "shard_optimizer: true\n"):
            self.assertFalse(staged(more), more)
            config = self.gpt2(text + more + "pipeline_parallel_degree: 2\n")
            self.assertIn("pipeline", self.plan(config, "--gpus", "4xH100", code=2).stderr)

    def test_slices_and_sequence_parallel_are_written_and_ended(self):
        def numbers(file, *flags):
            strategies = self.json(file, "--gpus", "4xH100", *flags)["strategies"]
            return [i + 1 for i, one in enumerate(strategies) if "sequence" in one["strategy"]]
        file = self.gpt2("global_batch_size: 64\n")
        out = os.path.join(self.root, "sequence.yaml")
        self.plan(file, "--gpus", "4xH100", "--write", out, "--strategy", numbers(file)[0])
        with open(out) as text:
            self.assertRegex(text.read(),
                             r"(?s)tensor_parallel_degree: [24]\n.*sequence_parallel: true\n")
        plan = self.json(out, "--gpus", "4xH100")
        self.assertRegex(plan["rows"][-1]["strategy"], "^tensor, sequence parallel over [24]$")
        self.assertTrue(plan["rows"][-1]["as_written"])
        self.assertEqual(plan["strategies"][0]["settings"]["tensor_parallel_degree"], 1)
        # A file that says no is not given it.
        self.assertEqual(numbers(file, "--sequence_parallel", "false"), [])

    def test_as_many_strategies_as_asked_for_are_shown(self):
        file = self.gpt2("global_batch_size: 64\n")
        count = len(self.json(file, "--gpus", "4xH100")["strategies"])
        self.assertGreater(count, 8)
        for flag, shown in (((), 8), (("--strategies", "3"), 3), (("--strategies", "all"), count)):
            out = self.plan(file, "--gpus", "4xH100", *flag).stdout
            table = out.split("strategies with")[1].split("\n\n")[0]
            self.assertEqual(len(re.findall(r"(?m)^ +\d+ +\d  ", table)), shown)
            self.assertEqual(f"({shown} of {count}; --strategies all " in out, shown < count)
        self.assertIn("--strategies", self.plan(file, "--strategies", "0", code=2).stderr)

    def test_offloaded_rows_are_in_the_hosts_memory(self):
        plan = self.json(self.gpt2("fsdp: full_shard offload\n"), "--gpus", "2xH100")
        self.assertEqual([row["memory_bytes"]["optimizer"] for row in plan["rows"]], [0, 0])
        self.assertIn("offload: the host's memory and the time of copies from and to it are not "
                      "planned", plan["notes"])

    def test_stages_slices_and_fsdp_together_are_planned_as_they_are_written(self):
        file = self.gpt2("global_batch_size: 64\ntensor_parallel_degree: 2\n"
                         "pipeline_parallel_degree: 2\nfsdp: full_shard\n")
        row = self.json(file, "--gpus", "8xH100")["rows"][-1]
        self.assertEqual((row["strategy"], row["gpus_per_replica"], row["replicas"]),
                         ("pipeline of 2, tensor over 2, full_shard", 4, 2))
        self.assertTrue(row["as_written"])
        # Columns stand below their names, however long a strategy's is.
        lines = self.plan(file, "--gpus", "8xH100").stdout.splitlines()
        head = next(line for line in lines if " strategy" in line and "fits" in line)
        shown = next(line for line in lines if "full_shard" in line and "yes" in line)
        self.assertEqual(head.index("fits"), shown.index("yes"))

    def test_fp8_on_a_card_without_it(self):
        file = self.gpt2("global_batch_size: 64\nmixed_precision: fp8\n")
        self.assertIn("lockstep train refuses it on 1 GPU:",
                      self.plan(file, "--gpus", "A100-80GB", code=1).stdout)
        shown = self.plan(file, "--gpus", "H100").stdout
        self.assertIn("training  1024 tokens a sample, fp8 and 16-bit autocast, ", shown)

    def test_the_text_has_a_row_for_each_count(self):
        out = self.plan(self.gpt2(), "--gpus", "8xH100", "--tokens=50e9").stdout
        self.assertIn("model     124.4 M parameters, all trained; 0.854 GFLOP a token\n", out)
        self.assertRegex(out, r"(?m)^assumed   4[0-9] % of 989 TFLOP/s; nvlink 352 GB/s a GPU, "
                         r"ib400 360 GB/s a node of 8$")
        for count in (1, 2, 3, 4, 8):
            self.assertRegex(out, rf"(?m)^ +{count}  (single GPU|DDP) .* yes .*x +[\d.]+ (h|days)$")
        self.assertIn("memory of a GPU at its peak (the loss), 8 GPUs:\n", out)
        self.assertRegex(out, r"(?m)^  parameters +474\.70 MiB$")
        self.assertRegex(out, r"(?m)^  CUDA and NCCL +1\.12 GiB$")
        self.assertNotIn("What to change", out)

    def test_what_does_not_fit_ends_with_one_and_says_what_to_change(self):
        config = self.write("phi3.json", PHI3)
        file = self.write("phi3.yaml", f"model: {{config: {config}}}\n"
                          "data: {name: instructions, path: /no/such.json}\nmax_seq_len: 512\n"
                          "per_device_train_batch_size: 16\n")
        plan = self.json(file, "--gpus", "2xRTX4090", code=1)
        self.assertEqual(plan["parameters"], 3821079552)
        self.assertFalse(plan["fits"])
        self.assertEqual([c["change"] for c in plan["changes"]][:3],
                         ["shard_optimizer: true", "gradient_checkpointing: true",
                          "per_device_train_batch_size: 1 with accumulation 16"])
        self.assertTrue(plan["changes"][-1]["together_fits"])
        out = self.plan(file, "--gpus", "2xRTX4090", code=1).stdout
        self.assertIn("It does not fit (23.27 GiB are usable). What to change, cheapest first, "
                      "GiB:", out)
        self.assertIn("  * fits\n", out)
        written = float(re.search(r"(?m)^  as the file is written +([\d.]+) +\1$", out).group(1))
        self.assertGreater(written * 2**30, plan["changes"][0]["alone_bytes"])

    def test_a_batch_that_does_not_fit_as_written_is_said(self):
        file = self.gpt2()
        args = ("--gpus", "RTX4090", "--per_device_train_batch_size", "512")
        plan = self.json(file, *args, code=1)
        self.assertFalse(plan["fits"])
        row = plan["rows"][0]
        self.assertEqual((row["per_device_train_batch_size"], row["gradient_accumulation_steps"]),
                         (64, 8))
        self.assertTrue(row["fits"])
        self.assertFalse(row["as_written"])
        note = ("per_device_train_batch_size 512 does not fit 1 GPU; 64 with "
                "gradient_accumulation_steps 8 keeps the global batch of 512. lockstep train "
                "--elastic_gpu sets it")
        self.assertEqual(plan["notes"], [note])
        self.assertTrue(plan["changes"])
        result = self.plan(file, *args, code=1)
        self.assertIn(f"note: {note}\n", result.stderr)
        self.assertIn("\nAs the file is written it does not fit (23.27 GiB are usable).",
                      result.stdout)
        # The accumulation follows where the file says the global batch.
        plan = self.json(self.gpt2("global_batch_size: 512\n"), *args, code=1)
        self.assertIn("does not fit 1 GPU; 64 keeps the global batch of 512 with accumulation 8.",
                      plan["notes"][0])
        # One note for rows that need the same batch, and one for the GPUs that were asked for.
        plan = self.json(self.gpt2("global_batch_size: 512\n"), "--gpus", "3xRTX4090",
                         "--per_device_train_batch_size", "512", code=1)
        self.assertEqual([note.split(";")[0] for note in plan["notes"]],
                         ["3 GPUs cannot share a global batch of 512: 510 is the nearest below",
                          "per_device_train_batch_size 512 does not fit 3 GPUs",
                          "per_device_train_batch_size 512 does not fit 2 GPUs"])
        # What is written in the note fits, and so does a run that sets it by itself.
        self.assertEqual(self.json(file, "--gpus", "RTX4090", "--per_device_train_batch_size", "64",
                                   "--gradient_accumulation_steps", "8")["notes"], [])
        for key in ("--elastic_gpu", "--auto_find_batch_size"):
            plan = self.json(file, *args, key, "true")
            self.assertTrue(plan["fits"])
            self.assertIn(f"{key[2:]} sets it", plan["notes"][0])

    def test_a_model_of_70b_has_a_speed_only_where_it_fits(self):
        config = self.write("70b.json", {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 80,
            "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192})
        text = (f"model: {{config: {config}%s}}\ndataset_dir: /no/such\nmax_seq_len: 1024\n"
                "bf16: true\nper_device_train_batch_size: 1\n%s")
        file = self.write("70b.yaml", text % ("", ""))
        args = ("--gpus", "8xH100-80GB", "--tokens", "1e9")
        plan = self.json(file, *args, code=1)
        for row in plan["rows"]:
            self.assertFalse(row["fits"])
            for key in ("step_s", "tokens_per_second", "speedup", "training_s"):
                self.assertNotIn(key, row)
        shown = self.plan(file, *args, "--scale", "8,64", code=1).stdout
        self.assertNotIn("days", shown)
        self.assertNotRegex(shown, r"\d+\.\d\dx")
        self.assertNotIn("efficiency stays", shown)
        self.assertIn("does not fit", shown)
        # Adapters of it fit eight GPUs together, by the key that lockstep train has for that.
        lora = "lora: {r: 16, target_modules: all-linear}\ngradient_checkpointing: true\n"
        plan = self.json(self.write("lora.yaml", text % ("", lora)), *args, code=1)
        last = plan["rows"][-1]
        self.assertEqual(last["strategy"], "one rank, device_map over 8")
        self.assertTrue(last["fits"])
        settings = plan["strategies"][last["strategy_number"] - 1]["settings"]
        said = ", ".join(f"{key}: {value}" for key, value in settings.items())
        self.assertEqual(settings["model.device_map"], "balanced")
        self.assertIn("8 GPUs do not hold this as it is written. The fastest that computes as the "
                      f"file does is strategy {last['strategy_number']}, one rank, "
                      f"device_map over 8: set {said} "
                      "and start one rank (lockstep train FILE, without --nproc-per-node)",
                      plan["notes"])
        first = next(row for row in plan["rows"] if row["fits"])
        self.assertEqual(first["speedup"], 1)
        self.assertIn(f"the speed-up is over {first['gpus']} GPUs, the fewest that hold this",
                      plan["notes"])
        # With the base in 4 bits each GPU holds all of it.
        changes = [(change["change"], change["together_fits"]) for change in plan["changes"]]
        self.assertEqual(changes, [("model: {..., load_in_4bit: true}", True)])

    def test_bf16_on_a_card_without_it(self):
        args = (self.gpt2(), "--gpus", "V100-32GB")
        self.assertEqual(self.json(*args)["notes"], [
            "V100-32GB has no tensor cores for bfloat16: planned at its float32 rate of 15.7 "
            "TFLOP/s. fp16: true computes at 125"])
        self.assertEqual(self.json(*args, "--bf16", "false", "--fp16", "true")["notes"], [])
        self.assertRegex(self.plan(*args).stdout, r"(?m)^assumed   7[0-9] % of 16 TFLOP/s;")

    def test_how_a_step_computes_counts(self):
        step = lambda *more: self.json(  # noqa: E731
            self.gpt2(), "--gpus", "H200", "--per_device_train_batch_size", "1",
            *more)["rows"][0]["step_s"]
        as_written = "--compile_model", "false"
        self.assertLess(2 * step(), step(*as_written))  # compile_model: auto is one CUDA graph
        self.assertLess(step(*as_written), step("--unfused", *as_written))
        self.assertLess(step("--mfu", "0.4"), step("--mfu", "0.1"))
        self.assertIn("one CUDA graph", self.plan(self.gpt2("compile_model: true\n"), "--gpus",
                                                  "H200").stdout)

    def test_scaling_holds_the_global_batch(self):
        file = self.gpt2("tokens_per_update: 524288\n")
        args = (file, "--gpus", "8xH100", "--per_device_train_batch_size", "64",
                "--compile_model", "false", "--scale", "8,48,64,512,1024")
        plan = self.json(*args)
        self.assertEqual([p["global_batch"] for p in plan["scale"]], [512, 480, 512, 512, 1024])
        self.assertEqual([p["per_device_train_batch_size"] for p in plan["scale"]],
                         [64, 10, 8, 1, 1])
        self.assertIn("1024 GPUs are more than the global batch of 512 samples: with one sample "
                      "each it is 1024", plan["notes"])
        self.assertIn("48 GPUs cannot share a global batch of 512: 480 is the nearest below; with "
                      "a micro-batch of 64 lockstep train takes 3072", plan["notes"])
        for point in plan["scale"]:
            self.assertAlmostEqual(point["step_s"], point["compute_s"] + point["optimizer_s"] +
                                   point["exposed_s"])
            self.assertAlmostEqual(
                point["efficiency"], point["tokens_per_second"] / point["gpus"] /
                plan["rows"][0]["tokens_per_second"])
        out = self.plan(*args).stdout
        self.assertIn("\nscaling, the global batch is held, ", out)
        self.assertRegex(out, r"(?m)^ +GPUs +batch x accum +global +ms/step ")
        self.assertRegex(out, r"(?m)^ +512 +1 x 1 +512 ")
        self.assertIn(f"efficiency falls below 80 % at {plan['stops_scaling_at']} GPUs", out)
        small = self.plan(self.gpt2("global_batch_size: 16\n"), "--gpus", "H100", "--scale", "8",
                          "--tokens-per-second", "1000").stdout
        self.assertIn("efficiency stays above 80 % up to 16 GPUs, one for each sample of the "
                      "global batch\n", small)
        grows = self.json(self.gpt2(), "--gpus", "H100", "--scale=8,64")
        self.assertIn("the global batch grows with the GPUs", grows["notes"][0])

    def test_ranks_on_cpus_are_not_called_gpus(self):
        file = self.write("mlp.yaml", "model: {name: mlp}\ndata: random\n"
                          "per_device_train_batch_size: 4\n")
        for code, *args in [(0, "--gpus", "1xcpu"), (0, "--gpus", "2xcpu"),
                            (1, "--gpus", "3xcpu", "--global_batch_size", "8"),
                            (0, "--gpus", "2xcpu", "--scale", "2", "--tokens-per-second", "100")]:
            result = self.plan(file, *args, code=code)
            self.assertNotIn("GPU", result.stdout + result.stderr)
            self.assertNotIn("CUDA", result.stdout)
        self.assertIn("\nmemory of a rank at its peak (", result.stdout)
        self.assertIn("), 2 ranks:\n", result.stdout)
        huge = self.write("huge.yaml", "model: {name: mlp, hidden: 1000000, layers: 20}\n"
                          "data: random\n")
        result = self.plan(huge, "--gpus", "2xcpu", code=1)
        self.assertNotIn("GPU", result.stdout + result.stderr)

    def test_the_moment_of_the_peak_is_said(self):
        """Chunks of logits exist in the loss and not in the backward of the last block."""
        for batch, moment in [("64", "the backward of the last block"), ("32", "the loss")]:
            self.assertIn(f"memory of a GPU at its peak ({moment}), 1 GPU:\n", self.plan(
                self.gpt2(), "--gpus", "H200", "--per_device_train_batch_size", batch).stdout)

    def test_what_no_change_makes_fit_says_so(self):
        file = self.write("mlp.yaml", "model: {name: mlp, hidden: 100000, layers: 20}\n")
        plan = self.json(file, "--gpus", "V100-16GB", "--data", "random", code=1)
        self.assertEqual([c for c in plan["changes"] if c["together_fits"]], [])
        out = self.plan(file, "--gpus", "V100-16GB", "--data", "random", code=1).stdout
        self.assertIn("Use a card with more memory, more GPUs, or a smaller model.\n", out)

    def test_a_measurement_takes_the_place_of_the_assumption(self):
        plan = self.json(self.gpt2(), "--gpus", "cpu", "--tokens-per-second", "1000")
        self.assertAlmostEqual(plan["rows"][0]["tokens_per_second"], 1000)
        self.assertNotIn("step_s", self.json(self.gpt2(), "--gpus", "cpu")["rows"][0])
        self.assertIn("speed not known: use --probe, or give --tokens-per-second",
                      self.plan(self.gpt2(), "--gpus", "cpu").stdout)

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
            self.assertTrue(plan["fits"] and plan["rows"][-1]["as_written"], name)

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
                ((self.gpt2(), "--gpus", "H100", "--link", "nvlink+ib99999"),
                 "'ib99999' has 99999 Gbit/s, and a port has 1 to 800."),
                ((self.gpt2(), "--gpus", "H100", "--link", "nvlink+ib6401/node"),
                 "and a node has 1 to 6400."),
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
