"""`lockstep config`: output, exit codes, and that docs/configuration.md is up to date."""
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

LOCKSTEP = os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep")


class Config(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_config_")
        self.addCleanup(shutil.rmtree, self.folder)

    def write(self, name, text):
        with open(os.path.join(self.folder, name), "w", encoding="utf-8") as f:
            f.write(text)
        return name

    def run_config(self, *args, **variables):
        env = {k: v for k, v in os.environ.items()
               if not k.startswith(("LOCKSTEP_", "ACCELERATE_"))}
        env["HF_HUB_CACHE"] = os.path.join(self.folder, "hub")
        env.update(variables)
        return subprocess.run([LOCKSTEP, "config", *args], cwd=self.folder, env=env, timeout=60,
                              capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def test_show_names_the_source_of_each_value(self):
        self.write("t.yaml", "preset: standard\nlearning_rate: 1e-4\n")
        done = self.run_config("show", "t.yaml", "--world-size", "2", "--seed=3", LOCKSTEP_SEED="2")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
        self.assertEqual(lines["learning_rate"][1:], ["0.0001", "t.yaml:2:1"])
        self.assertEqual(lines["logging_steps"][1:], ["5", "preset", "standard"])
        self.assertEqual(lines["seed"][1:], ["3", "--seed,", "beats", "LOCKSTEP_SEED", "(2)"])
        self.assertNotIn("weight_decay", lines)
        self.assertIn("effective batch 16 = 4 per device x 2 accumulation x 2 ranks", done.stdout)
        self.assertIn("The effective batch is the same", done.stdout)

    def test_ranks_that_see_the_same_samples_count_once(self):
        flags = ("--pipeline_parallel_degree=2", "--tensor_parallel_degree=2")
        self.write("t.yaml", "preset: standard\n")
        for command in (("show",), ("check", "--own-program")):
            done = self.run_config(*command, "t.yaml", "--world-size", "8", *flags)
            self.assertIn("2 accumulation x 2 data parallel groups of 4 ranks", done.stdout,
                          done.stderr)
        done = self.run_config("show", "t.yaml", "--world-size", "6", *flags)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("pipeline_parallel_degree x tensor_parallel_degree is 4, and there are 6 "
                      "ranks", done.stderr)

    def test_elastic_gpu_is_shown_with_a_batch_that_the_ranks_can_share(self):
        self.write("t.yaml", "per_device_train_batch_size: 4\nelastic_gpu: true\n")
        done = self.run_config("show", "t.yaml", "--world-size", "3", "--global_batch_size=15")
        self.assertIn("effective batch 15 = 1 per device x 5 accumulation x 3 ranks", done.stdout,
                      done.stderr)
        done = self.run_config("show", "t.yaml", "--world-size", "3", "--global_batch_size=16")
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertIn("global_batch_size 16 is not a multiple of 3 (batch 1 x 3 ranks). The "
                      "nearest that are: 15 and 18.", done.stderr)

    def test_check_refuses_stages_that_the_model_does_not_have(self):
        tiny = {"model_type": "mixtral", "vocab_size": 257, "hidden_size": 32,
                "num_local_experts": 2, "intermediate_size": 32, "num_hidden_layers": 4,
                "num_attention_heads": 4, "num_key_value_heads": 4,
                "max_position_embeddings": 128}
        self.write("plain.json", json.dumps(tiny))
        self.write("balanced.json", json.dumps({**tiny, "output_router_logits": True}))
        self.write("a.txt", "to be or not to be, that is the question. " * 100)
        interleaved = "pipeline_parallel_schedule: Interleaved1F1B\n"
        gpt = "name: gpt, n_layer: 4"
        for model, keys, said in (
                (gpt, "pipeline_parallel_degree: 4\n", None),
                (gpt, "pipeline_parallel_degree: 8\n",
                 "8 stages (8 ranks x 1), and the model has 4 blocks. Every stage needs one. Lower "
                 "pipeline_parallel_degree."),
                (gpt, "pipeline_parallel_degree: 2\n" + interleaved, None),
                (gpt, "pipeline_parallel_degree: 4\n" + interleaved,
                 "8 stages (4 ranks x 2), and the model has 4 blocks. Every stage needs one. Lower "
                 "pipeline_parallel_degree, or set pipeline_parallel_schedule to 1F1B."),
                ("config: plain.json", "pipeline_parallel_degree: 2\n", None),
                ("config: balanced.json", "", None),
                ("config: balanced.json", "pipeline_parallel_degree: 2\n",
                 "Set output_router_logits to false in config.json.")):
            self.write("t.yaml", f"model: {{{model}}}\nmax_seq_len: 32\n"
                                 f"data: {{name: bytes, path: a.txt, suffix: .txt}}\n{keys}")
            done = self.run_config("check", "t.yaml")
            self.assertEqual(done.returncode, 2 if said else 0, (keys, done.stderr))
            self.assertIn(said or "", done.stderr)
            self.assertNotIn("note:", done.stderr)
        for model, noted in (("balanced", True), ("plain", False)):
            self.write("t.yaml", f"model: {{config: {model}.json}}\nmax_seq_len: 32\n"
                                 "data: {name: bytes, path: a.txt, suffix: .txt}\n"
                                 "label_smoothing_factor: 0.1\n")
            done = self.run_config("check", "t.yaml")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual("note: label_smoothing_factor leaves the load balancing loss out" in
                             done.stderr, noted, done.stderr)

    def test_sizes_that_no_model_has_are_refused_by_name(self):
        self.write("a.txt", "text\n" * 200)
        self.write("t.yaml", "model: {config: config.json}\nmax_seq_len: 32\n"
                             "data: {name: bytes, path: a.txt, suffix: .txt}\n")
        limit = "config.json:1:%d: config.%s must be from %d to %d, and %d is not"
        for family, field, least, most in (
                ("llama", "num_hidden_layers", 0, 1000), ("gpt2", "n_layer", 0, 1000),
                ("gemma2", "num_hidden_layers", 0, 1000),
                ("starcoder2", "num_hidden_layers", 0, 1000),
                ("llama", "hidden_size", 1, 2 ** 24), ("llama", "vocab_size", 1, 2 ** 24),
                ("mixtral", "num_local_experts", 1, 1000)):
            head = '{"model_type": "%s", "%s": ' % (family, field)
            for wrong in (most + 1, 10 ** 9):
                with self.subTest(family, field=field, wrong=wrong):
                    self.write("config.json", "%s%d}" % (head, wrong))
                    done = self.run_config("check", "t.yaml")
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertIn(limit % (len(head) + 1, field, least, most, wrong), done.stderr)
        self.write("config.json", '{"model_type": "mixtral", "num_local_experts": 1000, '
                                  '"num_hidden_layers": 101}')
        self.assertIn("num_local_experts 1000 in each of num_hidden_layers 101",
                      self.run_config("check", "t.yaml").stderr)
        self.write("config.json", '{"model_type": "llama", "num_hidden_layers": 1000, '
                                  '"hidden_size": 64, "intermediate_size": 64}')
        self.assertEqual(self.run_config("check", "t.yaml").returncode, 0)

    def test_show_json_and_all(self):
        done = self.run_config("show", "--json", LOCKSTEP_BF16="1")
        record = json.loads(done.stdout)["settings"]
        self.assertEqual(record["bf16"], {"value": True, "from": "LOCKSTEP_BF16"})
        self.assertEqual(record["learning_rate"], {"value": 5e-05, "from": "default"})
        everything = self.run_config("show", "--all").stdout.splitlines()
        self.assertEqual(len(everything), len(record))

    def test_check_reports_every_mistake(self):
        self.write("t.yaml", "bf16: yes\nlearning_rat: 1\nnum_processes: 2\n")
        done = self.run_config("check", "t.yaml")
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stdout, "")
        for part in ("3 mistakes", "t.yaml:1:7: bf16", "t.yaml:2:1: there is no key 'learning_rat'",
                     "t.yaml:3:1: num_processes belongs in the launcher's file"):
            self.assertIn(part, done.stderr)
        self.write("t.yaml", "warmup_ratio: 0.1\n")
        done = self.run_config("check", "t.yaml")
        self.assertEqual((done.returncode, done.stdout), (0, "t.yaml can be used\n"))
        self.assertIn("note: t.yaml:1:1: warmup_ratio is an older spelling", done.stderr)

    def test_check_reports_a_mistake_of_fsdp_once(self):
        first = "t.yaml:1:15: fsdp_config has no key 'fsdp_versio'. Did you mean fsdp_version?"
        second = "t.yaml:1:31: fsdp_config has no key 'prefetch'."
        for text, said in (("fsdp_config: {fsdp_versio: 2}\n", (first,)),
                           ("fsdp_config: {fsdp_versio: 2, prefetch: 1}\nfsdp: full_shard\n",
                            (first, second)),
                           ("fsdp: full_shrd\n", ("t.yaml:1:1: fsdp: 'full_shrd' is none of",))):
            self.write("t.yaml", text)
            done = self.run_config("check", "t.yaml")
            self.assertEqual(done.returncode, 2, done.stdout)
            for part in said:
                self.assertEqual(done.stderr.count(part), 1, done.stderr)
            self.assertEqual(done.stderr.count("mistakes:"), len(said) - 1, done.stderr)

    def test_duplicate_keys_do_not_hide_the_rest(self):
        for name, text in (("t.yaml", "seed: 1\nseed: 2\nbf16: maybe\nbf16: true\nsed: 3\n"),
                           ("t.json", '{"seed": 1,\n"seed": 2,\n"bf16": "maybe",\n"bf16": true,'
                                      '\n"sed": 3}')):
            self.write(name, text)
            done = self.run_config("check", name)
            self.assertEqual(done.returncode, 2)
            for part in ("4 mistakes", f"{name}:2:1: the key 'seed' appears twice (first at line 1",
                         f"{name}:4:1: the key 'bf16' appears twice", "bf16 must be",
                         f"{name}:5:1: there is no key 'sed'. Did you mean seed?"):
                self.assertIn(part, done.stderr)
        self.write("acc.yaml", "num_processes: 2\nnum_processes: 3\nnum_machine: 1\n")
        done = self.run_config("check", "--launcher", "acc.yaml")
        self.assertEqual(done.returncode, 2)
        for part in ("2 mistakes", "acc.yaml:2:1: the key 'num_processes' appears twice",
                     "acc.yaml:3:1: there is no key 'num_machine'"):
            self.assertIn(part, done.stderr)

    def test_check_launcher(self):
        self.write("acc.yaml", "num_processes: 2\nmixed_precision: bf16\n")
        done = self.run_config("check", "--launcher", "acc.yaml")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "acc.yaml can be used: lockstep run --nproc-per-node=2\n"
                                      "  ACCELERATE_MIXED_PRECISION=bf16\n")
        self.write("acc.yaml", "learning_rate: 1\n")
        done = self.run_config("check", "--launcher", "acc.yaml")
        started = subprocess.run([LOCKSTEP, "run", "--config-file=acc.yaml", "true"], timeout=60,
                                 cwd=self.folder, capture_output=True, text=True)
        for refused in (done, started):
            self.assertEqual(refused.returncode, 2)
            self.assertIn("acc.yaml:1:1: learning_rate belongs in the training file",
                          refused.stderr)

    def refusal(self, text, *flags):
        self.write("t.yaml", text)
        done = self.run_config("check", "t.yaml", *flags)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        return done.stderr

    def test_check_looks_into_model_and_data(self):
        """What `lockstep train` would refuse when it has begun: it asks the same function."""
        os.mkdir(os.path.join(self.folder, "empty"))
        self.write("few.txt", "few bytes")
        for text, part in (
                ("model: gtp\n", "model.name must be gpt, mlp, resnet18 or resnet50, and 'gtp' is "
                                  "none of them. Did"),
                ("model: {name: gpt, n_lyer: 2}\n", "model has no key 'n_lyer'. Did you mean n_l"),
                ("model: {num_layers: 2}\n", "has no key 'num_layers'. Did you mean n_layer?"),
                ("data: {name: bytes, file: x}\n", "data has no key 'file'. Did you mean path?"),
                ("model: {n_head: 3}\n", "model.n_embd 128 does not divide into 3 heads"),
                ("model: {n_positions: 8}\nmax_seq_len: 16\n",
                 "model.n_positions 8 is shorter than a sample, max_seq_len 16"),
                ("model: mlp\n", "the model mlp does not take this data"),
                ("model: {weights: nope}\n", "model.weights nope is not a folder with a model.saf"),
                ("data: {max_seq_len: 8}\n", "max_seq_len is a key of the top level, not of data"),
                ("data: {path: nope}\n", "data.path nope does not exist. Relative paths begin at "),
                ("data: {path: empty}\n", "the folder empty (data.path) holds no file."),
                ("data: {path: empty, suffix: .h}\n", "the folder empty (data.path) holds no file "
                 "whose name ends in '.h' (data.suffix)."),
                ("data: {path: few.txt}\n", "few.txt has 9 bytes, too few for one sample of 128"),
                ("data: {path: few.txt, eval_bytes: 900}\nmax_seq_len: 4\n", "few.txt has 9 bytes, "
                 "and data.eval_bytes 900 leaves none of them to train on. Lower data.eval_bytes"),
                ("data: {path: few.txt, eval_bytes: 4}\nmax_seq_len: 4\n", "data.eval_bytes 4 is "
                 "too few for one sample of 4 tokens and the one after it. Raise it to 5 or more"),
                ("data: tokens\n", "data: tokens needs dataset_dir"),
                ("data: {name: tokens, path: x}\n", "data: tokens has no path. Name the folder of "
                 "the shards in dataset_dir"),
                ("data: tokens\ndataset_dir: empty\n", "empty has no file whose name ends in .bin"),
                ("data: tokens\ndataset_dir: nope\n", "nope cannot be listed"),
                ("data: {name: instructions, path: few.txt}\nmax_seq_len: 1\n",
                 "max_seq_len is 1, and instructions need 2 or more"),
                ("data: {name: instructions, path: few.txt, pad_to_multiple_of: 200}\n",
                 "data.pad_to_multiple_of must be from 1 to 128"),
                ("data: {name: instructions, path: few.txt, padding: packed, pad_to_multiple_of: "
                 "8}\n", "data.pad_to_multiple_of is for padding: longest, and with padding: pack"),
                ("data: {name: instructions, path: few.txt, response: '{outptu}'}\n", "outptu"),
                ("data: random\nmax_seq_len: 8\n", "max_seq_len is for samples of tokens, and "
                 "data: random has none. Delete it."),
                ("data: random\neval_strategy: epoch\n", "eval_strategy asks for evaluations"),
                ("data: {name: random, eval_samples: 9}\neval_strategy: epoch\n"
                 "early_stopping_patience: 2\nmetric_for_best_model: acuracy\n",
                 "evaluation gives no eval_acuracy. Did you mean eval_accuracy? It gives "
                 "eval_loss, eval_accuracy"),
                ("resume_from_checkpoint: atuo\n", "atuo cannot be used: there is no such folder. "
                 "Did you mean auto?")):
            with self.subTest(text):
                self.assertIn(part, self.refusal(text))
        self.assertIn("--own-program", self.refusal("eval_strategy: steps\neval_steps: 2\n"))
        self.assertEqual(self.run_config("check", "t.yaml", "--own-program").returncode, 0)
        self.write("t.yaml", "model: resnet\ndata: images\n")
        self.assertEqual(self.run_config("check", "t.yaml", "--own-program").returncode, 0)
        self.write("t.yaml", "fp16: true\n")
        done = self.run_config("check", "t.yaml", LOCKSTEP_DEVICE="cpu")
        self.assertEqual(done.returncode, 0)
        self.assertIn("note: on this machine training is refused: [trainer] fp16 needs a GPU",
                      done.stderr)

    def test_all_mistakes_are_reported_in_one_pass(self):
        """In keys, the model, the data, adapters and the checkpoint to resume from."""
        said = self.refusal("learning_rat: 1\nseed: many\n"
                            "model: {n_layer: few, n_head: 0, n_emd: 4}\n"
                            "data: {path: nope, max_bytes: 1, sufix: .h}\n"
                            "resume_from_checkpoint: atuo\n")
        for part in ("learning_rat", "seed", "model.n_layer", "model.n_head must be from 1",
                     "model has no key 'n_emd'", "data.max_bytes must be from 1000",
                     "data has no key 'sufix'", "atuo cannot be used"):
            self.assertIn(part, said)
        said = self.refusal("seed: many\nmodel: {n_head: 3}\ndata: {path: nope}\n"
                            "lora: {target_modules: [q_proj]}\n")
        for part in ("3 mistakes", "seed", "does not divide into 3 heads",
                     "data.path nope does not exist"):
            self.assertIn(part, said)
        said = self.refusal("data: {path: nope}\nlora: {target_modules: [q_proj]}\n")
        self.assertIn("2 mistakes", said)
        self.assertIn('target_modules ["q_proj"] matches no linear layer', said)
        # A kind of data that there is not says nothing about the model.
        self.assertNotIn("mistakes", self.refusal("data: byte\nmodel: mlp\n"))

    def test_a_path_that_is_wrong_hides_no_other_mistake(self):
        said = self.refusal("model: {path: nowhere, nme: 1, hidden_size: 8}\n"
                            "data:\n"
                            "  name: instructions\n"
                            "  path: gone.json\n"
                            "  tokenizer: lost\n"
                            "  paddin: longest\n"
                            "  pad_to_multiple_of: 0\n"
                            "lora: {r: 0}\n"
                            "eval_strategy: epoch\n"
                            "metric_for_best_model: acuracy\n"
                            "load_best_model_at_end: true\n"
                            "save_strategy: epoch\n"
                            "resume_from_checkpoint: atuo\n")
        for part in ("t.yaml:1:9: there is no nowhere",
                     "t.yaml:1:24: model has no key 'nme'",
                     "t.yaml:1:32: model has no key 'hidden_size'. config.json says what the model",
                     "t.yaml:4:3: data.path: there is no file gone.json",
                     "t.yaml:5:3: there is no tokenizer 'lost'",
                     "t.yaml:6:3: data has no key 'paddin'",
                     "t.yaml:7:23: data.pad_to_multiple_of must be from 1",
                     "t.yaml:8:7: r is 0.",
                     "gives no eval_acuracy",
                     "t.yaml:13:1: atuo cannot be used"):
            self.assertIn(part, said)
        for text, part in (
                ("data: {path: nope}\n", "t.yaml:1:8: data.path nope does not exist"),
                ("data: {path: nope}\nmodel: {weights: lost}\n",
                 "t.yaml:2:9: model.weights lost is not a folder"),
                ("model:\n  n_layer: 2\n  n_positions: 8\nmax_seq_len: 9\n",
                 "t.yaml:3:3: model.n_positions 8 is shorter"),
                ("max_seq_len: 8\nmodel: mlp\n", "t.yaml:2:8: the model mlp does not take")):
            with self.subTest(text):
                self.assertIn(part, self.refusal(text))

    def test_the_name_of_a_model_on_the_hub_is_no_folder(self):
        said = self.refusal("model: {path: Qwen/Qwen2-0.5B}\n"
                            "data: {name: instructions, tokenizer: Qwen/Qwen2-0.5B}\n")
        self.assertEqual(said.count("huggingface-cli download Qwen/Qwen2-0.5B --local-dir "
                                    "Qwen2-0.5B) and write Qwen2-0.5B instead."), 2, said)
        for path in ("./Qwen/Qwen2", "/Qwen/Qwen2", "a/b/c", "Qwen2"):
            self.assertNotIn("huggingface-cli", self.refusal(f"model: {{path: {path}}}\n"))
        os.mkdir(os.path.join(self.folder, "models"))
        self.assertNotIn("huggingface-cli", self.refusal("model: {path: models/qwen}\n"))
        place = os.path.join(self.folder, "hub", "models--Qwen--Qwen2-0.5B")
        os.makedirs(os.path.join(place, "snapshots", "a1"))
        os.makedirs(os.path.join(place, "refs"))
        self.write(os.path.join(place, "refs", "main"), "a1\n")
        self.assertIn(f"has stored that model in {place}/snapshots/a1: write that folder.",
                      self.refusal("model: {path: Qwen/Qwen2-0.5B}\n"))

    def test_links_to_nothing_are_named(self):
        link = "is a symbolic link to gone, which is not there."
        os.mkdir(os.path.join(self.folder, "m"))
        for name in ("folder", "a.txt", "a.jsonl", "m/config.json", "m/model.safetensors"):
            os.symlink("gone", os.path.join(self.folder, name))
        for text, name in (("model: {path: folder}\n", "folder"),
                           ("model: {path: m}\n", "m/config.json"),
                           ("model: {weights: m}\n", "m/model.safetensors"),
                           ("data: {path: a.txt}\n", "a.txt"),
                           ("data: {name: instructions, path: a.jsonl}\n", "a.jsonl"),
                           ("data: tokens\ndataset_dir: folder\n", "folder"),
                           ("resume_from_checkpoint: folder/checkpoint-3\n", "folder")):
            with self.subTest(text):
                self.assertIn(f" {name} {link}", self.refusal(text))

    def test_the_folder_of_an_adapter_is_no_model(self):
        os.mkdir(os.path.join(self.folder, "m"))
        self.write("m/adapter_config.json",
                   '{"peft_type": "LORA", "base_model_name_or_path": "base/llama"}')
        for key in ("path", "weights"):
            said = self.refusal("model: {%s: m}\n" % key)
            self.assertIn(f"model.{key} m holds an adapter (adapter_config.json), not a model. "
                          "model.path is the folder of its base model (base/llama)", said)
            self.assertNotIn("mistakes", said)

    def test_the_rank_of_an_adapter_has_a_limit(self):
        text = "model: {n_layer: 1, n_head: 2, n_embd: 16}\nlora: {target_modules: [c_fc], %s}\n"
        self.assertIn("t.yaml:2:32: lora.r is 17, and the weight of transformer.h.0.mlp.c_fc is "
                      "[16, 64]. The rank of its adapter can be 16 at most",
                      self.refusal(text % "r: 17"))
        self.assertIn("lora.rank_pattern is 99", self.refusal(text % "rank_pattern: {c_fc: 99}"))
        self.accepted(text % "r: 16")

    def test_a_base_in_4_bits_is_for_adapters_on_whole_ranks(self):
        self.write("config.json", json.dumps(
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
             "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": 257, "max_position_embeddings": 128}))
        model = "model: {config: config.json, load_in_4bit: true%s}\n"
        lora = "lora: {r: 4, target_modules: all-linear%s}\n"
        self.accepted(model % "" + lora % "" + "bf16: true\ngradient_checkpointing: true\n")
        for text, part in (
                (model % "", "t.yaml:1:30: model.load_in_4bit is for a frozen base"),
                (model % "" + lora % "" + "mixed_precision: fp8\n",
                 "are two ways to store the base. Write mixed_precision: bf16"),
                (model % "" + lora % "" + "fsdp: full_shard\n",
                 "keeps all of the base on every rank, and fsdp divides it"),
                (model % "" + lora % "" + "tensor_parallel_degree: 2\n",
                 "and tensor_parallel_degree divides it"),
                (model % "" + lora % "" + "pipeline_parallel_degree: 2\n",
                 "and pipeline_parallel_degree divides it"),
                (model % "" + lora % ", modules_to_save: [o_proj]",
                 "modules_to_save names model.layers.0.self_attn.o_proj, whose weight is stored in "
                 "4 bits and cannot be trained"),
                (model % ", bnb_4bit_quant_type: nf4" + lora % "",
                 "model.bnb_4bit_quant_type is not read here. model.load_in_4bit: true means nf4"),
                (model % ", quantization_config: {}" + lora % "",
                 "model.quantization_config is not read here"),
                ("model: {n_layer: 1, load_in_4bit: true}\n" + lora % "",
                 "model has no key 'load_in_4bit'")):
            with self.subTest(text):
                self.assertIn(part, self.refusal(text))

    def test_a_folder_of_shards_is_enough(self):
        """The keys of a file for another trainer of token shards, as they are."""
        text = ("dataset_dir: %s\ncompile_model: true\ntokens_per_update: 64\n"
                "per_device_train_batch_size: 2\nmax_seq_len: 16\n")
        self.assertIn("nope cannot be listed (No such file or directory)",
                      self.refusal(text % "nope"))
        os.mkdir(os.path.join(self.folder, "shards"))
        self.assertIn("shards has no file whose name ends in .bin", self.refusal(text % "shards"))
        header = struct.pack("<256i", 20240520, 1, 400, *[0] * 253)
        shard = os.path.join(self.folder, "shards", "x_train_000000.bin")
        with open(shard, "wb") as f:
            f.write(header + bytes(800))
        self.assertEqual(self.accepted(text % "shards"), "")
        # Windows are cut from shards, and not from whatever else `data` would be.
        self.accepted(text % "shards" + "data: {order: windows}\n")
        for data in ("bytes", "{name: bytes, path: t.yaml}", "random"):
            self.assertIn("dataset_dir is a folder of token shards, and data: "
                          + ("random" if data == "random" else "bytes") + " does not read it",
                          self.refusal(text % "shards" + f"data: {data}\n"))
        os.remove(shard)
        os.mkfifo(shard)
        self.assertIn("x_train_000000.bin", self.refusal(text % "shards"))
        os.remove(shard)
        os.symlink("gone", shard)
        self.assertIn("x_train_000000.bin", self.refusal(text % "shards"))

    def test_every_key_is_read_or_noted(self):
        """A member of TrainingArguments is read where runs are made, or a line says that it is
        not."""
        source = os.environ["LOCKSTEP_SOURCE"]
        readers = [os.path.join(source, "cli", name) for name in (
            "config.cpp", "task_config.cpp", "train.cpp", "train_tasks.cpp")]
        train = os.path.join(source, "lockstep", "train")
        readers += [os.path.join(train, name) for name in os.listdir(train)
                    if re.fullmatch(r"(checkpoint_manager|effective_batch|evaluator|loop|"
                                    r"metrics_reporter|rule_options|run_\w+|step_plan|"
                                    r"train_optimizer|trainer)\.(h|cpp)", name)]
        # The checks look at every key, and the table has every name; only these functions of
        # theirs are used by a run.
        text = ""
        for name, functions in (
                ("checks.cpp", ("update_size", "fp8_recipe_name", "check_evaluation",
                                "check_metric", "check_precision", "check_room")),
                ("config_keys.cpp", ("fsdp_plan", "checkpoints_activations"))):
            with open(os.path.join(train, name), encoding="utf-8") as f:
                code = f.read()
            for function in functions:
                found = re.findall(rf"\b{function}\(const .*?\n}}", code, re.DOTALL)
                self.assertTrue(found, function)
                text += "".join(found)
        for path in readers:
            with open(path, encoding="utf-8") as f:
                text += f.read()
        page = self.run_config("keys", "--markdown").stdout.split("older spelling")[0]
        keys = re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
        self.assertGreater(len(keys), 60)
        # `preset` sets other keys.
        silent = [key for key in keys if not re.search(rf"[.>]{key}\b", text) and key != "preset"]
        self.assertEqual(silent, [], "these have no effect")
        for old in re.findall(r"^\| `(\w+)`",
                              self.run_config("keys", "--markdown").stdout.split("older sp")[1],
                              re.MULTILINE):
            self.write("t.yaml", f"{old}: {'0.1' if old == 'warmup_ratio' else 'true'}\n"
                       .replace("evaluation_strategy: true", "evaluation_strategy: no"))
            self.assertIn(f"note: t.yaml:1:1: {old} is an older spelling",
                          self.run_config("check", "t.yaml").stderr)

    def test_the_keys_of_model_and_data_are_listed(self):
        root = pathlib.Path(__file__).resolve().parents[1]
        rows = self.run_config("keys", "--markdown").stdout.split("\n\n")[-1]
        self.assertIn(rows.strip(), (root / "docs/configuration.md").read_text())
        listed = set(re.findall(r"^\| `(\w+\.\w+)`", rows, re.MULTILINE))
        readers = (root / "cli/task_config.cpp").read_text()
        read = set()
        for part in re.split(r"\n(?:void|bool) ", readers):
            of_model = re.search(r"ModelConfig& model|MlpConfig& mlp|TaskConfig& task",
                                 part.split(")")[0])
            map_name = "model" if of_model else "data"
            kinds = "integer|real|text|boolean|choice|node"
            for key in re.findall(rf'keys\.(?:{kinds})\(\s*"(\w+)"', part):
                read.add(f"{map_name}.{key}")
        self.assertEqual(listed, read)
        self.assertIn("model.n_layer", self.run_config("keys", "n_layer").stdout)

    def test_unused_evaluation_data_is_noted(self):
        for data, key in (("{eval_bytes: 4000}", "eval_bytes"),
                          ("{name: random, eval_samples: 9}", "eval_samples")):
            self.assertIn(f"note: data.{key} is set, and nothing is evaluated. Set eval_strategy",
                          self.accepted(f"data: {data}\n"))
            self.assertEqual(self.accepted(f"data: {data}\neval_strategy: epoch\n"), "")

    def test_a_file_without_keys_is_refused(self):
        for text in ("", "# comments\n# alone\n", "---\n"):
            said = self.refusal(text)
            self.assertIn("t.yaml has no keys: it is empty or holds only comments", said)
            done = self.run_config("check", "--launcher", "t.yaml")
            self.assertEqual(done.returncode, 2)
            self.assertIn("t.yaml has no keys", done.stderr)

    def test_what_is_not_a_file_is_refused_at_once(self):
        os.mkfifo(os.path.join(self.folder, "pipe.yaml"))
        for name, part in (("pipe.yaml", "pipe.yaml is a named pipe, not a regular file"),
                           ("/dev/zero", "/dev/zero is a device, not a regular file"),
                           (".", "cannot be read: Is a directory")):
            for args in (("check", name), ("show", name), ("check", "--launcher", name)):
                done = self.run_config(*args)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(part, done.stderr)

    def test_a_home_directory_is_expanded(self):
        self.write("t.yaml", "output_dir: ~/runs/a\ndata: {path: ~/text}\n")
        done = self.run_config("show", "t.yaml", "--resume_from_checkpoint=~/c", HOME="/srv/ada")
        self.assertEqual(done.returncode, 0, done.stderr)
        for part in ("output_dir                     /srv/ada/runs/a ",
                     '{"path":"/srv/ada/text"} ', "resume_from_checkpoint         /srv/ada/c "):
            self.assertIn(part, done.stdout)

    def test_an_output_dir_that_is_a_file_is_refused(self):
        self.write("file", "")
        for name in ("file", "file/runs/a"):
            self.write("t.yaml", f"output_dir: {os.path.join(self.folder, name)}\n")
            done = self.run_config("check", "t.yaml")
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("file is a file, not a folder", done.stderr)

    def without_capabilities(self, *args):
        """Without root's right to read everything."""
        before = (("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
                  if os.geteuid() == 0 else ())
        return subprocess.run([*before, LOCKSTEP, "config", *args], cwd=self.folder, timeout=60,
                              capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)

    def test_text_that_cannot_be_read_is_an_error_with_its_name(self):
        os.makedirs(os.path.join(self.folder, "text", "sub"))
        for name in ("text/a.txt", "text/b.txt", "text/sub/c.txt"):
            self.write(name, "some text " * 100)
        self.write("t.yaml", "data: {path: text, suffix: .txt}\nmax_seq_len: 8\n"
                             "save_strategy: no\nenable_jit_checkpoint: false\n")
        good = self.without_capabilities("check", "t.yaml")
        self.assertEqual(good.returncode, 0, good.stderr)

        def refused(part, *more):
            done = self.without_capabilities("check", "t.yaml", *more)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertIn(part, done.stderr)

        b, sub = (os.path.join(self.folder, "text", name) for name in ("b.txt", "sub"))
        os.chmod(b, 0)
        refused("text/b.txt cannot be read (Permission denied). Give this user permission to read "
                "it, or move it out of the data.")
        refused("text/b.txt cannot be read (Permission denied)", "--data={path: text/b.txt}")
        refused("text/b.txt cannot be read (Permission denied)",
                "--data={name: instructions, path: text/b.txt}")
        os.remove(b)
        os.symlink("gone", b)
        refused("text/b.txt cannot be read (No such file or directory). Check the path, or remove "
                "a link whose file is gone.")
        os.remove(b)
        os.mkfifo(b)
        refused("text/b.txt is a named pipe, not a file.")
        os.remove(b)
        os.chmod(sub, 0)
        self.addCleanup(os.chmod, sub, 0o755)
        refused("the folder text/sub cannot be listed (Permission denied). Give this user")

    def test_padding_beyond_the_models_positions_is_refused(self):
        """It would end the run when the longest sample comes, perhaps after hours."""
        line = '{"instruction": "say", "output": "%s"}\n'
        self.write("a.jsonl", line % "yes" + line % ("y" * 90))
        self.write("b.jsonl", line % "yes")
        text = ("data: {name: instructions, path: %s, eval_path: %s, prompt_without_input: "
                "'{instruction}', pad_to_multiple_of: 64}\nmax_seq_len: 100\n"
                "eval_strategy: epoch\n%s")
        for files in (("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")):
            self.assertIn("a.jsonl: the longest sample has 93 tokens, which "
                          "data.pad_to_multiple_of 64 pads to 128, and model.n_positions is 100. "
                          "Set model.n_positions: 128, or lower max_seq_len.",
                          self.refusal(text % (*files, "")))
        self.accepted(text % ("a.jsonl", "b.jsonl", "model: {n_positions: 128}\n"))
        self.accepted(text % ("b.jsonl", "b.jsonl", ""))
        self.assertIn("the longest sample has 93 tokens, and model.n_positions is 90.",
                      self.refusal((text % ("a.jsonl", "b.jsonl", "model: {n_positions: 90}\n"))
                                   .replace("64}", "1}")))

    def accepted(self, text, *flags):
        self.write("t.yaml", text)
        done = self.run_config("check", "t.yaml", *flags)
        self.assertEqual((done.returncode, done.stdout), (0, "t.yaml can be used\n"), done.stderr)
        return done.stderr

    def test_check_reads_instruction_files(self):
        """With the parser of `lockstep train`; tests/train/tasks_test.py compares the messages."""
        line = '{"instruction": "say", "output": "yes"}\n'
        text = ("data: {name: instructions, path: a.jsonl, eval_path: b.json}\n"
                "eval_strategy: epoch\n")
        self.write("a.jsonl", line * 3)
        self.write("b.json", f"[{line},{line}]")
        self.assertEqual(self.accepted(text), "")
        for name, contents, part in (
                ("a.jsonl", line + '{"instruction": "say", "outp',
                 "a.jsonl:2:24: A quote that was opened is not closed"),
                ("a.jsonl", line + '{"instruction": "say", "output": [1]}\n',
                 "a.jsonl:2:34: expected a text, not a list or an object"),
                ("b.json", f"[{line},\n" + '{"instruction": "say"}]',
                 "b.json:3:23: the object that ends here has no 'output'"),
                ("b.json", "[]", "b.json: there are no samples. Give a file that has some."),
                ("a.jsonl", "", "a.jsonl:1:1: there is nothing in it")):
            with self.subTest(contents):
                self.write("a.jsonl", line * 3)
                self.write("b.json", f"[{line},{line}]")
                self.write(name, contents)
                self.assertIn(part, self.refusal(text))
        self.write("a.jsonl", "")
        self.write("b.json", "[]")
        said = self.refusal(text)  # both at once
        self.assertIn("2 mistakes", said)
        self.write("a.jsonl", line + '{"instruction": "' + "long " * 40 + '", "output": "yes"}\n')
        self.write("b.json", f"[{line}]")
        self.assertIn("note: a.jsonl: of 2 samples 0 are longer than max_seq_len 128 and lose "
                      "their end, 1 are skipped", self.accepted(text))
        self.assertIn("of 1 samples none has anything to learn from: 1 prompts alone fill "
                      "max_seq_len = 8. Raise max_seq_len.", self.refusal(text, "--max_seq_len=8"))

    def test_check_reads_completions_and_chats(self):
        text = "data: {name: instructions, path: a.jsonl}\n"
        self.write("a.jsonl", '{"prompt": "one", "completion": " two"}\n')
        self.assertEqual(self.accepted(text), "")
        self.write("a.jsonl", '{"messages": [{"role": "user", "content": "one"}, '
                   '{"role": "assistant", "content": "two"}]}\n')
        self.assertIn("a.jsonl: the records are chats, whose text a model's chat template makes. "
                      "Name that model's folder as the tokenizer (data.tokenizer",
                      self.refusal(text))
        self.write("a.jsonl", '{"prompt": "one"}\n')
        self.assertIn("a.jsonl:1:18: the object that ends here has no 'completion'. The file must "
                      "be", self.refusal(text))

    def test_without_max_seq_len_samples_are_as_long_as_the_model(self):
        line = '{"instruction": "say", "output": "%s"}\n'
        self.write("a.jsonl", line % ("y" * 300) * 3 + line % ("y" * 900))
        self.write("gpt2.json", '{"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, '
                   '"vocab_size": 257, "n_positions": 600}')
        self.write("llama.json", '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8,'
                   ' "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 257, '
                   '"max_position_embeddings": 512}')
        for padding in ("longest", "max_length", "packed"):
            text = "data: {name: instructions, path: a.jsonl, padding: %s}\nmodel: %s\n"
            for model, length in (("{n_positions: 400}", 400), ("{config: gpt2.json}", 600),
                                  ("{config: llama.json}", 512)):
                with self.subTest(padding=padding, model=model):
                    said = self.accepted(text % (padding, model))
                    self.assertEqual(said, "note: a.jsonl: of 4 samples 1 are longer than "
                                     f"max_seq_len {length} and lose their end, 0 are skipped "
                                     "because their prompt alone fills it.\n")
                    self.assertIn("of 4 samples 4 are longer than max_seq_len 100 and lose",
                                  self.accepted(text % (padding, model), "--max_seq_len=100"))
        # A gpt without either has 128 positions, and a model that cannot be read is one mistake.
        self.assertIn("of 4 samples 4 are longer than max_seq_len 128 and lose",
                      self.accepted(text % ("longest", "gpt")))
        self.assertNotIn("mistakes", self.refusal(text % ("longest", "{config: none.json}")))

    def write_weights(self, shapes):
        """A folder `weights` with zeros of these shapes."""
        os.makedirs(os.path.join(self.folder, "weights"), exist_ok=True)
        header, at = {}, 0
        for name, shape in shapes.items():
            size = 4
            for length in shape:
                size *= length
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        with open(os.path.join(self.folder, "weights", "model.safetensors"), "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text + bytes(at))

    def test_check_compares_weights_with_the_model(self):
        """Names and shapes; a GPT of one block under the names of transformers."""
        shapes = {"transformer.wte.weight": [257, 8], "transformer.wpe.weight": [16, 8],
                  "transformer.ln_f.weight": [8], "transformer.ln_f.bias": [8]}
        for name, inner, outer in (("attn.c_attn", 8, 24), ("attn.c_proj", 8, 8),
                                   ("mlp.c_fc", 8, 32), ("mlp.c_proj", 32, 8)):
            shapes[f"transformer.h.0.{name}.weight"] = [inner, outer]
            shapes[f"transformer.h.0.{name}.bias"] = [outer]
        for name in ("ln_1", "ln_2"):
            shapes[f"transformer.h.0.{name}.weight"] = shapes[f"transformer.h.0.{name}.bias"] = [8]
        text = "max_seq_len: 16\nmodel: {n_layer: 1, n_head: %d, n_embd: %d, weights: weights}\n"
        self.write_weights(shapes)
        self.assertEqual(self.accepted(text % (2, 8)), "")
        self.assertIn("weights: 'transformer.wte.weight' is [257, 8] and the model's is [257, 16]. "
                      "The checkpoint belongs to another model", self.refusal(text % (2, 16)))
        # What the data is like decides what the model is like.
        said = self.refusal(text % (2, 16) + "data: {name: bytes, path: nowhere}\n")
        self.assertIn("nowhere", said)
        self.assertNotIn("another model", said)
        for name in ("n_head", "num_attention_heads"):
            self.write("weights/config.json", '{"model_type": "gpt2", "%s": 4}' % name)
            self.assertIn("model.n_head is 2, and the weights in weights were trained with 4 "
                          "(weights/config.json)", self.refusal(text % (2, 8)))
        self.assertEqual(self.accepted(text % (4, 8)), "")
        shapes["extra"] = shapes.pop("transformer.ln_f.bias")
        self.write_weights(shapes)
        self.assertIn("weights does not fit the model: 1 of its tensors are missing "
                      "(transformer.ln_f.bias), 1 are not the model's (extra)",
                      self.refusal(text % (4, 8)))
        path = os.path.join(self.folder, "weights", "model.safetensors")
        with open(path, "r+b") as f:
            f.truncate(os.path.getsize(path) - 4)
        self.assertIn("weights/model.safetensors", self.refusal(text % (4, 8)))

    def test_a_changed_config_json_names_its_field(self):
        sizes = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8,
                 "num_attention_heads": 1, "intermediate_size": 24, "vocab_size": 257,
                 "max_position_embeddings": 16, "tie_word_embeddings": True}
        shapes = {"embed_tokens": [257, 8], "norm": [8], "layers.0.input_layernorm": [8],
                  "layers.0.post_attention_layernorm": [8], "layers.0.mlp.gate_proj": [24, 8],
                  "layers.0.mlp.up_proj": [24, 8], "layers.0.mlp.down_proj": [8, 24]}
        shapes |= {f"layers.0.self_attn.{name}_proj": [8, 8] for name in "qkvo"}
        self.write_weights({f"model.{name}.weight": shape for name, shape in shapes.items()})
        # What the data is like decides nothing here, and mistakes in both are told.
        text = "model: {path: weights}\nmax_seq_len: 16\ndata: {path: nowhere}\n"
        for field, wrong, tensor, there, expected in (
                ("intermediate_size", 48, "layers.0.mlp.gate_proj", [24, 8], [48, 8]),
                ("vocab_size", 300, "embed_tokens", [257, 8], [300, 8]),
                ("hidden_size", 16, "embed_tokens", [257, 8], [257, 16])):
            with self.subTest(field):
                self.write("weights/config.json", json.dumps(sizes | {field: wrong}))
                said = self.refusal(text)
                self.assertIn(f"'model.{tensor}.weight' is {there} instead of {expected}", said)
                self.assertIn(f" {field} is {wrong} in config.json, and 'model.{tensor}.weight' "
                              f"was written with {sizes[field]}.", said)
                self.assertIn("data.path nowhere does not exist", said)
        self.write("weights/config.json", json.dumps(sizes))
        self.accepted("model: {path: weights}\nmax_seq_len: 16\n")

    def test_check_requires_room_for_a_checkpoint(self):
        # 10^14 parameters: more than any disk.
        text = "model: {n_layer: 1000, n_head: 1, n_embd: 100000}\noutput_dir: deep/in/it\n"
        said = self.refusal(text)
        self.assertRegex(said, r"deep/in/it has room for \S+ \wiB and one checkpoint takes about "
                         r"\S+ [TPE]iB\. Free some space, choose another output_dir, or set "
                         "save_strategy: no")
        self.assertFalse(os.path.exists(os.path.join(self.folder, "deep")))
        self.write("taken", "a file")
        self.assertIn("taken/out", self.refusal("output_dir: taken/out\n"))
        self.assertIn("a stop signal will not be able to save",
                      self.accepted(text, "--save_strategy=no"))
        self.assertEqual(self.accepted(text, "--save_strategy=no", "--no_enable_jit_checkpoint"),
                         "")

    def test_keys_of_model_and_data_at_the_top_level(self):
        """Every key that the reader asks for is known to belong there."""
        with open(os.path.join(os.environ["LOCKSTEP_SOURCE"], "cli", "task_config.cpp"),
                  encoding="utf-8") as f:
            asked = r'keys\.(?:integer|text|choice|boolean|real)\("(\w+)"'
            names = set(re.findall(asked, f.read()))
        self.assertGreater(len(names), 20)
        names.discard("name")
        said = self.refusal("".join(f"{name}: 1\n" for name in names))
        for name in names:
            self.assertRegex(said, fr": {name} is a key of the (model|data), not of the top level"
                             fr"\. Write \1: {{((name|path): .*)?{name}: ")

    def test_wrong_arguments(self):
        for args, part in ((("shwo",), "there is no action 'shwo'. Did you mean show?"),
                            (("check",), "check takes one file"),
                            (("show", "a", "b"), "show takes one file"),
                            (("show", "--world-size"), "--world-size needs a value"),
                            (("show", "--world-size", "0"), "--world-size"),
                            (("show", "--sed=1"), "Did you mean seed?"),
                            (("check", "none.yaml"), "none.yaml cannot be read")):
            done = self.run_config(*args)
            self.assertEqual(done.returncode, 2, args)
            self.assertIn(part, done.stderr)
        self.assertEqual(self.run_config().returncode, 2)

    def test_help_and_keys(self):
        self.assertIn("usage: lockstep config show", self.run_config("--help").stdout)
        self.assertIn("--learning_rate ", self.run_config("keys").stdout)
        some = self.run_config("keys", "warmup", "seed").stdout
        self.assertIn("--warmup_steps ", some)
        self.assertIn("--data_seed ", some)
        self.assertNotIn("--learning_rate ", some)
        done = self.run_config("keys", "learnin_rate")
        self.assertEqual(done.returncode, 2)
        self.assertIn("there is no key with 'learnin_rate' in its name. Did you mean learning_rate",
                      done.stderr)
        self.assertIn("| `learning_rate` |", self.run_config("keys", "--markdown").stdout)


if __name__ == "__main__":
    sys.exit(0 if unittest.main(exit=False, verbosity=1).result.wasSuccessful() else 1)
