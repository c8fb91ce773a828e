"""Adapters trained by `lockstep train`: stopped and resumed to the same bits, and read by PEFT."""

import importlib.util
import json
import subprocess
import sys
import unittest

from train_case import (BOUND_S, LOCKSTEP, TrainCase, checkpoints, copy_until, environment, losses)

GPT = "model: {name: gpt, n_layer: 2, n_head: 2, n_embd: 32%s}\n"
REST = """
data: {name: bytes, path: %s, eval_bytes: 400}
max_seq_len: 32
max_steps: 12
per_device_train_batch_size: 2
learning_rate: 1.0e-2
logging_steps: 1
save_steps: 4
disable_tqdm: true
use_cpu: true
"""
LORA = "lora: {r: 4, lora_alpha: 8, lora_dropout: 0.1, target_modules: [c_attn, mlp.c_proj]}\n"
EVALUATE = "eval_strategy: steps\neval_steps: 4\n"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
         "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 32,
         "tie_word_embeddings": False}
FILES = ["MANIFEST.json", "adapter_config.json", "adapter_model.safetensors",
         "optimizer.safetensors", "rng_state.safetensors", "sampler.json", "scheduler.json",
         "trainer_state.json", "training_args.json"]


class Lora(TrainCase):
    def setUp(self):
        super().setUp()
        text = self.place / "text"
        text.write_text("".join(f"line {i} of a text that can be learned\n" for i in range(200)))
        self.rest = REST % text

    def make_base(self, model=GPT % ""):
        """A whole model, which transformers loads too."""
        self.config.write_text(model + self.rest)
        self.train(0, self.place / "base")
        return self.place / "base" / "checkpoint-12"

    def use_lora(self, base, more=""):
        self.config.write_text(GPT % f", weights: {base}" + LORA + self.rest + more)

    def test_two_ranks_stop_and_resume_to_the_same_bits(self):
        base = self.make_base()
        for more in ("", "bf16: true\ngradient_checkpointing: true\n"):
            self.use_lora(base, more)
            whole, again = self.place / f"whole{len(more)}", self.place / f"again{len(more)}"
            self.train(2, whole)
            self.assertEqual(checkpoints(whole), [4, 8, 12])
            newest = whole / "checkpoint-12"
            self.assertEqual(sorted(p.name for p in newest.iterdir()), FILES)
            copy_until(whole, again, 8)
            done = self.train(2, again, "--resume", "auto")
            self.assertIn("checkpoint-8 at step 8", done.stderr)
            self.assert_same(newest, again / "checkpoint-12")
            self.assertEqual(losses(whole), losses(again))
            adapters = [(whole / f"checkpoint-{step}" / "adapter_model.safetensors").read_bytes()
                        for step in (4, 12)]
            self.assertNotEqual(*adapters)
        # 4 adapters of rank 4: [32 -> 96] and [128 -> 32], twice.
        shown = subprocess.run([LOCKSTEP, "checkpoint", "show", str(newest)], check=True,
                               capture_output=True, text=True, timeout=BOUND_S).stdout
        self.assertRegex(shown, r"adapter +8 tensors, 2304 elements")
        self.assertRegex(shown, r"optimizer +24 tensors, 46")

    def test_peft_loads_the_checkpoint(self):
        base = self.make_base()
        self.use_lora(base, EVALUATE)
        self.check_peft(base)

    def test_peft_loads_the_checkpoint_of_a_hugging_face_model(self):
        (self.place / "config.json").write_text(json.dumps(LLAMA))
        base = self.make_base(f"model: {{config: {self.place / 'config.json'}}}\n")
        self.config.write_text(f"model: {{path: {base}}}\n" + self.rest + EVALUATE +
                               "lora: {r: 4, target_modules: all-linear, use_rslora: true}\n")
        self.check_peft(base)

    def check_peft(self, base):
        missing = [name for name in ("torch", "transformers", "peft")
                   if importlib.util.find_spec(name) is None]
        if missing:
            self.skipTest(f"the interpreter has no {', '.join(missing)}")
        self.train(2, self.place / "out")
        newest = self.place / "out" / "checkpoint-12"
        config = json.loads((newest / "adapter_config.json").read_text())
        self.assertEqual(config["base_model_name_or_path"], str(base))
        state = json.loads((newest / "trainer_state.json").read_text())
        wanted = next(e["eval_loss"] for e in state["log_history"]
                      if e["step"] == 12 and "eval_loss" in e)
        # In a process of its own: the launcher's environment is not for torch.
        program = """
import sys, torch, peft, transformers
model = peft.AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]).eval()
# The rows that were held out: the last 12 of 33 tokens each.
text = list(open(sys.argv[2], "rb").read()) + [256]
rows = len(text) // 33
held = torch.tensor(text[: rows * 33]).view(rows, 33)[rows - 400 // 33:]
with torch.no_grad():
    logits = model(input_ids=held[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)),
                                             held[:, 1:].reshape(-1))
print(f"loss {loss.item()!r}")
"""
        done = subprocess.run([sys.executable, "-c", program, str(newest),
                               str(self.place / "text")], capture_output=True, text=True,
                              timeout=BOUND_S, env=environment(HF_HUB_OFFLINE="1"), check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        loss = float(done.stdout.split("loss ")[-1])
        self.assertAlmostEqual(loss, wanted, delta=1e-5)

    def test_what_is_refused(self):
        base = self.make_base()

        def refused(text):
            self.config.write_text(text + self.rest)
            return self.train(0, self.place / "out", code=2).stderr

        gpt = GPT % f", weights: {base}"
        said = refused(gpt + "lora: {target_modules: [q_proj]}\n")
        self.assertIn('target_modules ["q_proj"] matches no linear layer', said)
        self.assertIn("transformer.h.*.attn.c_attn", said)
        self.assertIn("lora.use_dora is not supported",
                      refused(gpt + "lora: {target_modules: [c_attn], use_dora: true}\n"))
        self.assertIn("Write {r: 16, lora_alpha: 32, target_modules: [c_attn]}",
                      refused(gpt + "lora: true\n"))
        self.assertIn("lora_alpha is a key of the lora, not of the top level",
                      refused(gpt + "lora_alpha: 3\n"))
        self.use_lora(base)
        self.assertIn("holds model.safetensors, and adapter_model.safetensors is wanted",
                      self.train(0, self.place / "out", "--resume", base, code=2).stderr)


if __name__ == "__main__":
    unittest.main()
