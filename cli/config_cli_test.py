"""`lockstep config` from outside: what it prints, its exit codes, and that the page is current."""
import json
import os
import re
import shutil
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

    def run_config(self, *words, **variables):
        env = {k: v for k, v in os.environ.items()
               if not k.startswith(("LOCKSTEP_", "ACCELERATE_"))}
        env.update(variables)
        return subprocess.run([LOCKSTEP, "config", *words], cwd=self.folder, env=env, timeout=60,
                              capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def test_show_names_the_winners(self):
        self.write("t.yaml", "preset: standard\nlearning_rate: 1e-4\n")
        done = self.run_config("show", "t.yaml", "--world-size", "2", "--seed=3", LOCKSTEP_SEED="2")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
        self.assertEqual(lines["learning_rate"][1:], ["0.0001", "t.yaml:2:1"])
        self.assertEqual(lines["logging_steps"][1:], ["5.0", "preset", "standard"])
        self.assertEqual(lines["seed"][1:], ["3", "--seed,", "beats", "LOCKSTEP_SEED", "(2)"])
        self.assertNotIn("weight_decay", lines)
        self.assertIn("effective batch 16 = 4 per device x 2 accumulation x 2 ranks", done.stdout)
        self.assertIn("The effective batch is the same", done.stdout)

    def test_show_json_and_all(self):
        done = self.run_config("show", "--json", LOCKSTEP_BF16="1")
        record = json.loads(done.stdout)["settings"]
        self.assertEqual(record["bf16"], {"value": True, "from": "LOCKSTEP_BF16"})
        self.assertEqual(record["learning_rate"], {"value": 5e-05, "from": "default"})
        everything = self.run_config("show", "--all").stdout.splitlines()
        self.assertEqual(len(everything), len(record))

    def test_check_tells_every_mistake(self):
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

    def test_keys_that_are_there_twice_do_not_hide_the_rest(self):
        for name, text in (("t.yaml", "seed: 1\nseed: 2\nbf16: maybe\nbf16: true\nsed: 3\n"),
                           ("t.json", '{"seed": 1,\n"seed": 2,\n"bf16": "maybe",\n"bf16": true,'
                                      '\n"sed": 3}')):
            self.write(name, text)
            done = self.run_config("check", name)
            self.assertEqual(done.returncode, 2)
            for part in ("4 mistakes", f"{name}:2:1: the key 'seed' is here twice (first at line 1",
                         f"{name}:4:1: the key 'bf16' is here twice", "bf16 must be",
                         f"{name}:5:1: there is no key 'sed'. Did you mean seed?"):
                self.assertIn(part, done.stderr)
        self.write("acc.yaml", "num_processes: 2\nnum_processes: 3\nnum_machine: 1\n")
        done = self.run_config("check", "--launcher", "acc.yaml")
        self.assertEqual(done.returncode, 2)
        for part in ("2 mistakes", "acc.yaml:2:1: the key 'num_processes' is here twice",
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
        self.assertEqual(done.returncode, 2)
        self.assertIn("acc.yaml:1:1: learning_rate belongs in the training file", done.stderr)

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
                ("model: gtp\n", "model.name must be gpt or mlp, and 'gtp' is neither. Did"),
                ("model: {name: gpt, n_lyer: 2}\n", "model has no key 'n_lyer'. Did you mean n_l"),
                ("model: {n_head: 3}\n", "model.n_embd 128 does not divide into 3 heads"),
                ("model: {n_positions: 8}\n", "model.n_positions 8 is shorter than a sample"),
                ("model: mlp\n", "the model mlp does not take this data"),
                ("model: {weights: nope}\n", "model.weights nope is no folder with a model.safet"),
                ("data: {max_seq_len: 8}\n", "max_seq_len is a key of the top level, not of data"),
                ("data: {path: nope}\n", "data.path nope holds no file that ends in ''"),
                ("data: {path: few.txt}\n", "few.txt has 10 bytes, too few for one sample of 128"),
                ("data: tokens\n", "data: tokens needs dataset_dir"),
                ("data: {name: tokens, path: x}\n", "data: tokens has no path. Name the folder of "
                 "the shards in dataset_dir"),
                ("data: tokens\ndataset_dir: empty\n", "empty has no file whose name ends in .bin"),
                ("data: tokens\ndataset_dir: nope\n", "nope cannot be listed"),
                ("data: {name: instructions, path: few.txt}\nmax_seq_len: 1\n",
                 "max_seq_len is 1, and instructions need 2 or more"),
                ("data: {name: instructions, path: few.txt, pad_to_multiple_of: 200}\n",
                 "data.pad_to_multiple_of must be from 1 to 128"),
                ("data: {name: instructions, path: few.txt, response: '{outptu}'}\n", "outptu"),
                ("data: random\neval_strategy: epoch\n", "eval_strategy asks for evaluations"),
                ("data: {name: random, eval_samples: 9}\neval_strategy: epoch\n"
                 "early_stopping_patience: 2\nmetric_for_best_model: acuracy\n",
                 "evaluation gives no eval_acuracy. Did you mean eval_accuracy? It gives "
                 "eval_loss, eval_accuracy"),
                ("resume_from_checkpoint: atuo\n", "atuo cannot be used: there is no such folder. "
                 "Did you mean auto?"),
                ("max_steps: 5\nwarmup_steps: 6\n", "warmup_steps 6 are more than max_steps 5")):
            with self.subTest(text):
                self.assertIn(part, self.refusal(text))
        self.write("t.yaml", "model: resnet\ndata: images\n")
        self.assertEqual(self.run_config("check", "t.yaml", "--own-program").returncode, 0)
        self.write("t.yaml", "fp16: true\n")
        done = self.run_config("check", "t.yaml", LOCKSTEP_DEVICE="cpu")
        self.assertEqual(done.returncode, 0)
        self.assertIn("note: on this machine training is refused: [trainer] fp16 needs a GPU",
                      done.stderr)

    def accepted(self, text, *flags):
        self.write("t.yaml", text)
        done = self.run_config("check", "t.yaml", *flags)
        self.assertEqual((done.returncode, done.stdout), (0, "t.yaml can be used\n"), done.stderr)
        return done.stderr

    def test_check_reads_instruction_files(self):
        """With the parser of `lockstep train`, whose words tests/train/tasks_test.py compares."""
        line = '{"instruction": "say", "output": "yes"}\n'
        text = "data: {name: instructions, path: a.jsonl, eval_path: b.json}\n"
        self.write("a.jsonl", line * 3)
        self.write("b.json", f"[{line},{line}]")
        self.assertEqual(self.accepted(text), "")
        for name, contents, part in (
                ("a.jsonl", line + '{"instruction": "say", "outp',
                 "a.jsonl:2:29: a string without its end"),
                ("a.jsonl", line + '{"instruction": "say", "output": [1]}\n',
                 "a.jsonl:2:33: expected a text, not a list or an object"),
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
                      "their end, 1 are left out", self.accepted(text))
        self.assertIn("of 1 samples none has anything to learn from: 1 prompts alone fill "
                      "max_seq_len = 8. Raise max_seq_len.", self.refusal(text, "--max_seq_len=8"))

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
        self.write("weights/config.json", '{"model_type": "gpt2", "n_head": 4}')
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

    def test_check_asks_for_room_for_a_checkpoint(self):
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
                             fr"\. Write \1: {{name: .*{name}: ")

    def test_diff(self):
        self.write("a.yaml", "seed: 1\n")
        self.write("b.json", '{"seed": 1}')
        self.assertEqual(self.run_config("diff", "a.yaml", "b.json").returncode, 0)
        done = self.run_config("diff", "standard", "fast", "--world-size=2")
        self.assertEqual(done.returncode, 1)
        self.assertIn("gradient_accumulation_steps    2                     1\n", done.stdout)
        self.assertIn("fast: effective batch 16 = 8 per device", done.stdout)
        self.assertIn("seed ", self.run_config("diff", "a.yaml", "defaults").stdout)
        self.assertEqual(self.run_config("diff", "a.yaml").returncode, 2)

    def test_a_pipe_is_a_file(self):
        done = subprocess.run(["bash", "-c", f"{LOCKSTEP} config check <(echo 'seed: 1')"],
                              timeout=60, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_words_that_are_wrong(self):
        for words, part in ((("shwo",), "there is no action 'shwo'. Did you mean show?"),
                            (("check",), "check takes one file"),
                            (("show", "a", "b"), "show takes one file"),
                            (("show", "--world-size"), "--world-size needs a value"),
                            (("show", "--world-size", "0"), "--world-size"),
                            (("show", "--sed=1"), "Did you mean seed?"),
                            (("check", "none.yaml"), "none.yaml cannot be read")):
            done = self.run_config(*words)
            self.assertEqual(done.returncode, 2, words)
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
