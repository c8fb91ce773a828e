"""What `lockstep train` trains: the bundled datasets and models, from a training file."""

import importlib.util
import json
import re
import struct
import subprocess
import sys
import unittest

from train_case import (BIN, BOUND_S, CONFIG, LOCKSTEP, SOURCE, TrainCase, copy_until, finished,
                        losses)

INSTRUCTIONS = """
model: {{name: gpt, n_layer: 1, n_head: 2, n_embd: 32}}
data: {{name: instructions, path: {path}, eval_path: {path}, {more}}}
max_seq_len: 96
max_steps: 40
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-2
eval_strategy: steps
eval_steps: 20
logging_steps: 1
save_steps: 20
disable_tqdm: true
use_cpu: true
"""

# Prints the largest difference of two logits by the size of the largest, and the smoothed loss of
# the rows of a text that the run was evaluated on.
LOGITS = """
import sys, torch, transformers
from transformers.trainer_pt_utils import LabelSmoother
model, info = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1], output_loading_info=True)
for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    assert not info[kind], info
with torch.no_grad():
    theirs = model.eval()(torch.arange(32).unsqueeze(0)).logits
raw = bytearray(open(sys.argv[2], "rb").read())
ours = torch.frombuffer(raw, dtype=torch.float32).view(theirs.shape)
tokens = torch.tensor([*open(sys.argv[3], "rb").read(), 256])
length, evaluated, factor = int(sys.argv[4]), int(sys.argv[5]) // (int(sys.argv[4]) + 1), 0.2
rows = tokens[:tokens.numel() // (length + 1) * (length + 1)].view(-1, length + 1)[-evaluated:]
with torch.no_grad():
    logits = model(rows[:, :-1]).logits
smoothed = LabelSmoother(epsilon=factor)({"logits": logits}, rows[:, 1:])
plain = LabelSmoother(epsilon=0)({"logits": logits}, rows[:, 1:])
print(((theirs - ours).abs().max() / ours.abs().max()).item(), smoothed.item(), plain.item())
"""

TOKENS = """
model: {name: gpt, n_layer: 1, n_head: 2, n_embd: 16, vocab_size: 257}
data: tokens
max_seq_len: 16
num_train_epochs: 1
disable_tqdm: true
use_cpu: true
"""


def message_of(line):
    """Without the prefix: a rank adds its number and the kind of error, the check does not."""
    return re.sub(r"^lockstep: (rank \d+ on \S+: lockstep::UsageError: )?\[\w+\] ", "", line)


def reports(said, text):
    """How often; on a slow machine the launcher also says what it still waits for."""
    return sum(line.count(text) for line in said.splitlines()
               if "waiting for the other ranks" not in line)


class Tasks(TrainCase):
    def evaluations(self, output):
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return [e["eval_loss"] for e in map(json.loads, lines) if "eval_loss" in e]

    def instructions(self, more="padding: longest"):
        path = self.place / "train.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            for i in range(60):
                file.write(json.dumps({"instruction": "say a word " + "again " * (i % 5),
                                       "input": "now" if i % 3 == 0 else "",
                                       "output": "yes", "answer": "true"}) + "\n")
        self.config.write_text(INSTRUCTIONS.format(path=path, more=more))

    def test_instructions_are_learned_and_resumed(self):
        self.instructions("group_by_length: true, pad_to_multiple_of: 8")
        whole, again = self.place / "whole", self.place / "again"
        self.train(2, whole)
        # Four bytes to learn: nearly all of a loss of log(257) goes.
        first, last = self.evaluations(whole)
        self.assertLess(last, first)
        self.assertLess(last, 1.0)
        # What the model computes: rows of 8, 16, ... bytes, of which four are learned.
        lines = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
        lengths = [line["tokens_per_second"] / line["samples_per_second"]
                   for line in lines if "tokens_per_second" in line]
        self.assertEqual(len(lengths), 40)
        self.assertGreater(min(lengths), 32)
        copy_until(whole, again, 20)
        self.train(2, again, "--resume", "auto")
        self.assert_same(whole / "checkpoint-40", again / "checkpoint-40")
        # The order depends on the batch: another one is not continued with in the middle.
        another = self.place / "another"
        copy_until(whole, another, 20)
        refused = self.train(1, another, "--resume", "auto", "--gradient_accumulation_steps", 3,
                             code=2)
        self.assertIn("the state was saved in another order of epoch", refused.stderr)

    def test_length_groups_are_those_of_the_update_whatever_decides_its_size(self):
        """And the same at every number of ranks: a run may be continued with another one."""
        self.instructions("group_by_length: true")
        outputs = []
        for more in ("gradient_accumulation_steps: 4", "tokens_per_update: 1536",
                     "global_batch_size: 16"):
            outputs.append(self.place / more.split(":")[0])
            text = self.config.read_text()
            self.config.write_text(re.sub(r"gradient_accumulation.*|tokens_per.*|global_batch.*",
                                          more, text))
            self.train(0, outputs[-1], "--max_steps", 6, "--save_steps", 3)
        for output in outputs[1:]:  # 16 samples of up to 96 tokens an update, in the same order
            self.assertEqual(losses(output), losses(outputs[0]))
        again = self.place / "again"
        copy_until(outputs[-1], again, 3)  # the first epoch has four steps
        self.train(2, again, "--max_steps", 6, "--save_steps", 3, "--resume", "auto")
        for step in range(4, 7):
            self.assertAlmostEqual(losses(again)[step], losses(outputs[0])[step], delta=1e-4)

    def test_packed_rows_and_a_custom_template(self):
        self.instructions("padding: packed, response: \"{output}: {answer}\"")
        output = self.place / "out"
        self.train(0, output)
        self.assertLess(self.evaluations(output)[-1], 1.5)

    def test_samples_that_are_cut_are_counted(self):
        """In training and evaluation; without max_seq_len, to the model's number of positions."""
        self.instructions()
        for name, count in (("train.jsonl", 40), ("eval.jsonl", 3)):
            line = json.dumps({"instruction": "say a word", "output": "word " * 50}) + "\n"
            (self.place / name).write_text(line * count)
        text = self.config.read_text().replace("max_seq_len: 96\n", "")
        text = re.sub(r"eval_path: \S+,", f"eval_path: {self.place / 'eval.jsonl'},", text)
        for positions, cut in ((200, True), (400, False)):
            self.config.write_text(text.replace("n_embd: 32",
                                                f"n_embd: 32, n_positions: {positions}"))
            said = self.train(0, self.place / f"out{positions}", "--max_steps", 1, "--eval_steps",
                              1).stderr
            for name, count in (("train.jsonl", 40), ("eval.jsonl", 3)):
                note = (f"{self.place / name}: of {count} samples {count} are longer than "
                        f"max_seq_len {positions} and lose their end")
                self.assertEqual(note in said, cut, said)

    def test_what_is_refused(self):
        """And that `lockstep config check` refuses it with the same message."""
        self.instructions()
        text = self.config.read_text()

        def refused():
            stderr = self.train(0, self.place / "out", code=2).stderr
            done = finished([LOCKSTEP, "config", "check", self.config])
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            said = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
            self.assertEqual([line for line in map(message_of, said)
                              if line not in map(message_of, stderr.splitlines())], [])
            self.assertFalse((self.place / "out").exists())
            return stderr

        for wrong, message in (
                ("padding: short", "data.padding must be"),
                ("padding: packed, instruction: x", "data has no key 'instruction'"),
                ("response: \"{outptu}\"", "outptu")):
            self.config.write_text(text.replace("padding: longest", wrong))
            self.assertIn(message, refused())
        self.config.write_text(text + "num_processes: 2\n")
        self.assertIn("num_processes belongs in the launcher's file", refused())
        self.config.write_text(re.sub(r"data: .*", "data: instructions", text))
        self.assertIn("data: instructions needs path", refused())
        nowhere = "data: {name: instructions, path: nope.json}"
        self.config.write_text(re.sub(r"data: .*", nowhere, text))
        self.assertIn("there is no file nope.json", refused())
        self.config.write_text(text.replace("padding: longest", "padding: packed"))
        half = self.train(0, self.place / "out", "--use_cpu", "false", "--fp16", code=2).stderr
        self.assertIn("fp16 needs a GPU, and this rank computes on the CPU. Use bf16", half)
        shards = self.place / "short"
        shards.mkdir()
        header = struct.pack("<256i", 20240520, 1, 9, *[0] * 253)
        (shards / "x_train_000000.bin").write_bytes(header + bytes(18))
        self.config.write_text(TOKENS + f"dataset_dir: {shards}\n")
        self.assertIn("holds a window of 16 tokens and the one after it; the largest has 9",
                      refused())
        self.config.write_text("data: {name: bytes, max_bytes: 1000}\nmax_seq_len: 2000\n")
        self.assertIn("has 1000 bytes, too few for one sample of 2000", refused())
        self.config.write_text(text)
        samples = self.place / "train.jsonl"
        for wrong, message in (('{"instruction": "say", "output": 1}\n{"instruction": "say", "outp',
                                "train.jsonl:2:24: A quote that was opened is not closed"),
                             ('{"instruction": "say", "outptu": "a"}',
                              "train.jsonl:1:38: the object that ends here has no 'output'"),
                             ("[]", "train.jsonl: there are no samples. Give a file")):
            samples.write_text(wrong)
            self.assertIn(message, refused())
        self.config.write_text(CONFIG + "gradient_checkpointing: true\n")
        self.assertIn("gradient_checkpointing is for models of blocks, and mlp has none", refused())

    def check_and_train(self, *flags, code=0):
        """What both say on stderr, of a check without --output_dir and of a run of one rank."""
        said = []
        for args in (["config", "check", str(self.config), *flags],
                      ["train", str(self.config), "--output_dir", str(self.place / "out"), *flags]):
            done = finished([LOCKSTEP, *args])
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
            said.append(done.stderr)
        return said

    def test_tokens_need_only_a_folder_of_shards(self):
        """dataset_dir alone decides the data, and compile_model says once that it needs a GPU."""
        shards = self.place / "shards"
        self.config.write_text(
            f"dataset_dir: {shards}\ncompile_model: true\ntokens_per_update: 128\n"
            "per_device_train_batch_size: 2\nmax_seq_len: 16\nmax_steps: 2\nuse_cpu: true\n"
            "disable_tqdm: true\nmodel: {n_layer: 1, n_head: 2, n_embd: 16, vocab_size: 257}\n")
        for said in self.check_and_train(code=2):
            self.assertIn("shards cannot be listed (No such file or directory)", said)
        shards.mkdir()
        header = struct.pack("<256i", 20240520, 1, 400, *[0] * 253)
        (shards / "x_train_000000.bin").write_bytes(header + bytes(800))
        said = self.check_and_train()[1]
        self.assertEqual(said.count("steps run without a CUDA graph: the model is on cpu"), 1, said)
        # 24 windows of 16 tokens, 8 of them a step: the shards, and not LibTorch's headers.
        state = json.loads((self.place / "out/checkpoint-2/trainer_state.json").read_text())
        self.assertAlmostEqual(state["epoch"], 2 / 3)

    def test_a_mistake_of_all_ranks_is_printed_once(self):
        """By the launcher, which knows it from the ranks."""
        self.config.write_text(CONFIG + "leraning_rate: 1\n")
        said = self.train(2, self.place / "out", code=2).stderr
        self.assertEqual(reports(said, "there is no key 'leraning_rate'"), 1, said)
        self.config.write_text("data: {path: nowhere}\nuse_cpu: true\n")
        said = self.train(2, self.place / "out", code=2).stderr
        self.assertEqual(reports(said, "nowhere does not exist"), 1, said)
        # Found after the rendezvous, in the contents of the files.
        self.instructions()
        (self.place / "train.jsonl").write_text("[]")
        said = self.train(2, self.place / "out", code=2).stderr
        self.assertEqual(reports(said, "there are no samples"), 1, said)

    def test_flags_of_the_launcher_start_ranks(self):
        for args in (["--nproc-per-node=2"], ["--nproc_per_node", "2", "--standalone"]):
            output = self.place / f"out{len(args)}"
            done = self.run_train([*args, str(self.config), f"--output_dir={output}",
                                   "--max_steps=4", "--seed=1"])
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("x 2 ranks", done.stderr)
            self.assertIn("trained 4 steps", done.stdout)
        # One world of two, and the same file and flags as without the short form.
        self.train(2, self.place / "long", "--max_steps=4", "--seed=1")
        weights = [(self.place / name / "checkpoint-4" / "model.safetensors").read_bytes()
                   for name in ("out1", "out3", "long")]
        self.assertEqual(len(set(weights)), 1)

    def test_the_same_update_on_one_rank_and_on_two(self):
        self.config = SOURCE / "examples" / "configs" / "mlp.yaml"
        for ranks, accumulation in ((0, 4), (2, 2)):
            said = self.train(ranks, self.place / str(ranks), "--max_steps=2", "--use_cpu=true")
            self.assertIn(f"effective batch 128 = 32 per device x {accumulation} accumulation",
                          said.stderr)

    def test_a_training_that_ends_in_its_warm_up_says_so(self):
        """As Hugging Face trains it. The steps follow from the data, or are given."""
        rate = r"warmup_steps 1000 is not below the %d steps of the training: the learning rate " \
               r"rises to %s and never reaches 0\.01"
        done = self.train(0, self.place / "out", "--warmup_steps", 1000, "--num_train_epochs", 1)
        self.assertRegex(done.stderr, r"warning \[trainer\] " + rate % (13, "0.00012"))
        done = self.train(0, self.place / "two", "--warmup_steps", 1000, "--max_steps", 6)
        self.assertRegex(done.stderr, r"warning \[config\] \S+ " + rate % (6, "5e-05"))
        lines = (self.place / "two" / "metrics.jsonl").read_text().splitlines()
        rates = [json.loads(line)["learning_rate"] for line in lines if "learning_rate" in line]
        self.assertAlmostEqual(max(rates), 5e-5, delta=2e-5)

    def test_a_rank_does_not_start_ranks(self):
        done = self.run_train(["--nproc-per-node=2", str(self.config)],
                              RANK="0", WORLD_SIZE="1")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("--nproc-per-node starts ranks, but this process is rank 0 of 1 already",
                      done.stderr)

    def test_a_prefix_of_a_launchers_flag_is_that_flag(self):
        """As `lockstep run` reads it, unless a key begins so."""
        for flag in "--np=2", "--nproc_per=2", "--max_r=1":
            done = self.run_train([flag, str(self.config)], RANK="0", WORLD_SIZE="1")
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(f"{flag[:-2]} starts ranks, but this process is rank 0 of 1 already",
                          done.stderr)
        for flag in "--local_rank=0", "--max=1", "--no_p":
            done = self.run_train([flag, str(self.config)], RANK="0", WORLD_SIZE="1")
            self.assertNotIn("starts ranks", done.stderr, flag)

    def test_nothing_to_train_is_refused(self):
        for args in [], ["--nproc-per-node=2"]:
            done = self.lockstep("train", *args, code=2, cwd=self.place)
            self.assertIn("[train] what shall be trained? Give a training file", done.stderr)
            self.assertFalse((self.place / "trainer_output").exists())

    def run_train(self, args, **variables):
        return finished([LOCKSTEP, "train", *args], **variables)

    def test_a_token_beyond_the_vocabulary_names_its_sample(self):
        shards = self.place / "shards"
        shards.mkdir()
        tokens = [1] * (20 * 16 + 1)
        tokens[7 * 16 + 5] = 300
        header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
        (shards / "x_train_000000.bin").write_bytes(
            header + struct.pack(f"<{len(tokens)}H", *tokens))
        self.config.write_text(TOKENS + f"dataset_dir: {shards}\n")
        for workers in (0, 2):
            done = self.train(0, self.place / "out", "--dataloader_num_workers", workers, code=1)
            self.assertIn("sample 7 could not be loaded: [train] the data has the token 300, and "
                          "the model's vocabulary ends at 256.", done.stderr)

    def test_initial_weights(self):
        """An imported archive, another run's weights, and what neither is."""
        archive, imported = self.place / "mlp.pt", self.place / "imported"
        subprocess.run([BIN / "tests" / "train_peer", "archive", archive], check=True,
                       timeout=BOUND_S)
        self.lockstep("checkpoint", "import", archive, imported)
        text = self.config.read_text()

        def begin(folder, output, *flags, code=0):
            self.config.write_text(text.replace("batch_norm: true",
                                                f"batch_norm: true, weights: {folder}"))
            # The warm-up's first step has a learning rate of 0: the weights stay as they began.
            return self.train(2, output, "--max_steps", 1, "--warmup_steps", 1,
                              "--save_only_model", *flags, code=code)

        def weights(folder):
            return (folder / "model.safetensors").read_bytes()

        one, two = self.place / "one", self.place / "two"
        begin(imported, one)
        shown = finished([LOCKSTEP, "checkpoint", "diff", imported, one / "checkpoint-1"]).stdout
        changed = re.findall(r"^model: (\S+)", shown, re.MULTILINE)
        # Batch norm's statistics are of the step's samples.
        self.assertTrue(changed and all("running" in name or "batches" in name
                                        for name in changed if not name.isdigit()), shown)
        begin(one / "checkpoint-1", two)
        self.assertIn("is not a folder with a model.safetensors",
                      begin(self.place / "nowhere", two, code=2).stderr)
        self.assertIn("does not fit the model",
                      begin(imported, two, "--model", "{name: mlp, hidden: 32, layers: 3, "
                            f"weights: {imported}}}", code=2).stderr)
        (imported / "model.safetensors").write_bytes(weights(imported)[:-4])
        self.assertRegex(begin(imported, two, code=2).stderr,
                         r"the model's weights in .* are damaged: .*model")

    def test_a_run_writes_its_effective_configuration(self):
        output = self.place / "out"
        self.train(2, output, "--max_steps", 4, "--learning_rate", 1e-4)
        record = json.loads((output / "effective_config.json").read_text())["settings"]
        rate = record["learning_rate"]
        self.assertEqual((rate["value"], rate["from"]), (1e-4, "--learning_rate"))
        self.assertRegex(rate["beats"][0], r"train\.yaml:\d+:1 \(0\.01\)")
        self.assertEqual(record["seed"], {"value": 42, "from": "default"})
        self.assertRegex(record["warmup_steps"]["from"], r"train\.yaml:\d+:1")
        self.train(0, output, "--max_steps", 5, "--resume", "auto")
        record = json.loads((output / "effective_config.json").read_text())["settings"]
        self.assertEqual(record["learning_rate"]["value"], 0.01)

    def test_transformers_loads_a_checkpoint_of_a_gpt(self):
        """from_pretrained(folder), and the same logits and smoothed loss as ours."""
        if importlib.util.find_spec("transformers") is None:
            self.skipTest("transformers is not installed")
        self.config = SOURCE / "examples" / "configs" / "tiny_gpt.yaml"
        text, length, eval_bytes = self.place / "text", 64, 800
        text.write_bytes(bytes(range(32, 127)) * 80)
        folder, ours = self.place / "gpt" / "checkpoint-5", self.place / "ours.f32"
        flags = ("--max_steps", 5, "--eval_steps", 5, "--save_steps", 5, "--warmup_steps", 2,
                 "--logging_steps", 1, "--use_cpu", "--label_smoothing_factor", 0.2,
                 "--max_seq_len", length, "--report_to", "none",
                 "--data", f"{{name: bytes, path: {text}, eval_bytes: {eval_bytes}}}")
        self.train(0, folder.parent, *flags)
        subprocess.run([BIN / "tests" / "train_peer", "logits", folder, ours], check=True,
                       timeout=BOUND_S)
        done = finished([sys.executable, "-c", LOGITS, folder, ours, text, length, eval_bytes],
                        HF_HUB_OFFLINE="1")
        self.assertEqual(done.returncode, 0, done.stderr)
        apart, smoothed, plain = map(float, done.stdout.split()[-3:])
        # Relative to the largest logit: sums of at most 256 float32 products, in other orders.
        self.assertLess(apart, 1e-5)
        # LabelSmoother is what label_smoothing_factor means; without it the loss is another.
        self.assertAlmostEqual(self.evaluations(folder.parent)[-1], smoothed, delta=1e-5 * smoothed)
        self.assertGreater(abs(smoothed - plain), 1e-3)
        # Activations that are computed again are the same, and so is everything after them.
        again = self.place / "again"
        self.train(0, again, *flags, "--gradient_checkpointing")
        self.assertEqual(losses(again), losses(folder.parent))
        self.assert_same(again / "checkpoint-5", folder)


if __name__ == "__main__":
    unittest.main()
