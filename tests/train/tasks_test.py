"""What `lockstep train` trains: the bundled datasets and models, from a training file."""

import json
import re
import subprocess
import unittest

from train_case import BIN, BOUND_S, LOCKSTEP, TrainCase, copy_until

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
        copy_until(whole, again, 20)
        self.train(2, again, "--resume", "auto")
        self.assert_same(whole / "checkpoint-40", again / "checkpoint-40")
        # The order depends on the batch: another one is not gone on with in the middle.
        refused = self.train(1, again, "--resume", again / "checkpoint-20",
                             "--gradient_accumulation_steps", 3, code=2)
        self.assertIn("the state was saved in another order of epoch", refused.stderr)

    def test_packed_rows_and_a_template_of_ones_own(self):
        self.instructions("padding: packed, response: \"{output}: {answer}\"")
        output = self.place / "out"
        self.train(0, output)
        self.assertLess(self.evaluations(output)[-1], 1.5)

    def test_what_is_refused(self):
        self.instructions()
        text = self.config.read_text()
        for wrong, words in (
                ("padding: short", "data.padding must be"),
                ("padding: packed, instruction: x", "data.instruction"),
                ("response: \"{outptu}\"", "outptu")):
            self.config.write_text(text.replace("padding: longest", wrong))
            self.assertIn(words, self.train(0, self.place / "out", code=2).stderr)
        self.config.write_text(re.sub(r"data: .*", "data: instructions", text))
        refused = self.train(0, self.place / "out", code=2)
        self.assertIn("data: instructions needs path", refused.stderr)

    def test_a_token_beyond_the_vocabulary_names_its_sample(self):
        self.instructions()
        text = self.config.read_text().replace("n_embd: 32", "n_embd: 32, vocab_size: 200")
        self.config.write_text(text)  # bytes end at 256
        done = self.train(0, self.place / "out", code=1)
        self.assertRegex(done.stderr, r"sample \d+ could not be loaded: \[train\] it has the token "
                                      r"256, and the model's vocabulary ends at 199\.")

    def test_weights_to_begin_with(self):
        """An imported archive, another run's weights, and what neither is."""
        archive, imported = self.place / "mlp.pt", self.place / "imported"
        subprocess.run([BIN / "tests" / "train_peer", "archive", archive], check=True,
                       timeout=BOUND_S)
        subprocess.run([LOCKSTEP, "checkpoint", "import", archive, imported], check=True,
                       timeout=BOUND_S, capture_output=True)
        text = self.config.read_text()

        def begin(folder, output, *flags, code=0):
            self.config.write_text(text.replace("batch_norm: true",
                                                f"batch_norm: true, init_from: {folder}"))
            # A step that changes nothing: the weights are those that it began with.
            return self.train(2, output, "--max_steps", 1, "--learning_rate", 1e-30,
                              "--save_only_model", *flags, code=code)

        def weights(folder):
            return (folder / "model.safetensors").read_bytes()

        one, two = self.place / "one", self.place / "two"
        begin(imported, one)
        shown = subprocess.run([LOCKSTEP, "checkpoint", "diff", imported, one / "checkpoint-1"],
                               capture_output=True, text=True, timeout=BOUND_S, check=False).stdout
        changed = re.findall(r"^model: (\S+)", shown, re.MULTILINE)
        # Batch norm's statistics are of the step's samples.
        self.assertTrue(changed and all("running" in name or "batches" in name
                                        for name in changed if not name.isdigit()), shown)
        begin(one / "checkpoint-1", two)
        self.assertIn("is no folder with a model.safetensors",
                      begin(self.place / "nowhere", two, code=2).stderr)
        self.assertIn("does not fit the model",
                      begin(imported, two, "--model", "{name: mlp, hidden: 32, layers: 3, "
                            f"init_from: {imported}}}", code=2).stderr)
        (imported / "model.safetensors").write_bytes(weights(imported)[:-4])
        self.assertRegex(begin(imported, two, code=2).stderr, r"init_from .* is damaged: .*model")


if __name__ == "__main__":
    unittest.main()
