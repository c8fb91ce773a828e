"""Hugging Face's models in `lockstep train`: model.path and model.config."""

import json
import os
import signal
import sys
import unittest

from train_case import (BOUND_S, LOCKSTEP, TrainCase, checkpoints, copy_until, finished, losses,
                        ranks_of)

os.environ["CUDA_VISIBLE_DEVICES"] = ""
try:
    import torch
    import transformers
except ImportError as missing:
    print(f"SKIP 1: {missing}")
    sys.exit(77)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

TEXT = "the cat sat on the mat and the dog sat on the log. " * 80
FILE = """
model: {{{model}}}
data: {{name: bytes, path: {text}, max_bytes: 4000}}
max_seq_len: 24
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-2
max_steps: 300
save_steps: 50
logging_steps: 1
disable_tqdm: true
use_cpu: true
"""
LLAMA = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=260, max_position_embeddings=24,
             attention_dropout=0.1, bos_token_id=None, eos_token_id=256)


class Pretrained(TrainCase):
    def setUp(self):
        super().setUp()
        self.text = self.place / "text.txt"
        self.text.write_text(TEXT)
        self.folder = self.place / "model"

    def write(self, model, more=""):
        self.config.write_text(FILE.format(model=model, text=self.text) + more)

    def make(self, config):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(self.folder)
        return model

    def loaded(self, folder):
        model, said = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True)
        self.assertFalse(any(said.values()), said)
        return model.eval()

    def loss_of(self, model):
        ids = torch.tensor(list(TEXT.encode()[:192])).view(8, 24)
        with torch.no_grad():
            logits = model(ids).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1),
                                                 ids[:, 1:].flatten()).item()

    def check(self):
        done = finished([LOCKSTEP, "config", "check", self.config])
        return done.returncode, done.stderr

    def test_two_ranks_are_killed_and_resume_to_the_same_bits(self):
        before = self.loss_of(self.make(transformers.LlamaConfig(**LLAMA)).eval())
        self.write(f"path: {self.folder}")
        self.assertEqual(self.check()[0], 0)
        whole, again = self.place / "whole", self.place / "again"
        self.train(2, whole)
        last = f"checkpoint-{checkpoints(whole)[-1]}"
        # The first loss is that of the folder's weights, not of random ones in its shape.
        self.assertAlmostEqual(losses(whole)[1], before, delta=0.2)
        process = self.start(2, again)
        self.wait_while_training(process, again, 25)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        self.assertNotEqual(process.wait(timeout=BOUND_S), 0)
        self.assertNotIn(last, [f"checkpoint-{step}" for step in checkpoints(again)])
        self.train(2, again, "--resume", "auto")
        self.assert_same(whole / last, again / last)

        trained = self.loaded(again / last)
        self.assertIs(type(trained), transformers.LlamaForCausalLM)
        self.assertLess(self.loss_of(trained), before - 1)
        # Everything that the folder said is in the checkpoint.
        said = [json.loads((folder / "config.json").read_text())
                for folder in (self.folder, again / last)]
        self.assertEqual(said[0], said[1])
        # A checkpoint is such a folder too.
        self.write(f"path: {again / last}")
        self.train(0, self.place / "more", "--max_steps", 1)
        self.assertAlmostEqual(losses(self.place / "more")[1], self.loss_of(trained), delta=0.5)

    def test_random_weights_in_the_shape_of_a_config(self):
        self.make(transformers.Phi3Config(**LLAMA, pad_token_id=None))
        (self.folder / "model.safetensors").unlink()
        for place in (self.folder, self.folder / "config.json"):
            self.write(f"config: {place}", "gradient_checkpointing: true\n")
            self.assertEqual(self.check()[0], 0)
        output = self.place / "out"
        self.train(2, output, "--max_steps", 100)
        trained = self.loaded(output / "checkpoint-100")
        self.assertIs(type(trained), transformers.Phi3ForCausalLM)
        self.assertLess(self.loss_of(trained), losses(output)[1] - 1)
        config = self.folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 100}))
        self.assertIn("the model's vocabulary ends at 99. It was probably made for another one. "
                      "Make the data with the tokenizer of this model.",
                      self.train(0, self.place / "small", code=2).stderr)

    def test_what_is_refused(self):
        """By `config check`, which has no torch, as by `train`."""
        self.make(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=260,
                                          n_positions=16))
        config = self.folder / "config.json"
        path = f"path: {self.folder}"

        def refused(model, text, train=True):
            self.write(model)
            code, said = self.check()
            self.assertEqual(code, 2, said)
            self.assertIn(text, said)
            if train:
                self.assertIn(text, self.train(0, self.place / "out", code=2).stderr)

        refused(path, "model.n_positions 16 is shorter than a sample, max_seq_len 24")
        values = json.loads(config.read_text()) | {"n_positions": 24}
        config.write_text(json.dumps(values))
        refused(path, "'transformer.wpe.weight' is [16, 16] instead of [24, 16]")
        config.write_text(json.dumps(values | {"reorder_and_upcast_attn": True}))
        refused(path, "reorder_and_upcast_attn is true, which is not supported", train=False)
        config.write_text(json.dumps(values))
        refused(f"name: gpt, {path}", "model.name has no meaning beside model.path", train=False)
        refused(f"{path}, config: {config}", "model.path takes the config.json of its own folder",
                train=False)
        refused(f"{path}, n_layer: 2", "n_layer", train=False)
        refused("path: nowhere", "there is no nowhere", train=False)
        (self.folder / "model.safetensors").unlink()
        refused(path, "is not a folder with a model.safetensors", train=False)

    def test_images(self):
        self.config.write_text("""
model: resnet18
data: {name: images, samples: 64, eval_samples: 16, image_size: 32, classes: 4}
per_device_train_batch_size: 4
learning_rate: 1.0e-3
max_steps: 8
save_steps: 4
eval_strategy: steps
eval_steps: 4
logging_steps: 1
disable_tqdm: true
use_cpu: true
""")
        self.assertEqual(self.check()[0], 0)
        whole, again = self.place / "whole", self.place / "again"
        self.train(2, whole)
        copy_until(whole, again, 4)
        self.train(2, again, "--resume", "auto")
        self.assert_same(whole / "checkpoint-8", again / "checkpoint-8")
        self.assertLess(losses(whole)[8], losses(whole)[1])
        self.config.write_text("model: resnet50\ndata: bytes\n")
        self.assertIn("the model resnet50 does not take this data", self.check()[1])


if __name__ == "__main__":
    unittest.main(verbosity=1)
