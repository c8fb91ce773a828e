"""A model that `lockstep train` splits over devices: model.device_map. Two stages of the CPU's
memory stand for two devices, and every bit is that of the model in one piece."""

import json
import unittest

from train_case import TrainCase, copy_until, losses

GPT = "model: {name: gpt, n_layer: 3, n_head: 2, n_embd: 32%s}\n"
GPT_MAP = ", device_map: {'': cpu:0, transformer.h.1-2: cpu:1}"
PHI = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "num_hidden_layers": 3,
       "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
       "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 64,
       "attention_dropout": 0.1, "pad_token_id": None, "tie_word_embeddings": False}
PHI_MAP = (", device_map: {model.embed_tokens: cpu:0, model.layers.0: cpu:0, "
           "model.layers.1-2: cpu:1, model.norm: cpu:1, lm_head: cpu:1}")
LORA = "lora: {r: 4, lora_dropout: 0.1, target_modules: [qkv_proj, down_proj]}\n"
REST = """
data: {name: bytes, path: %s, eval_bytes: 400}
max_seq_len: 32
max_steps: 6
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-2
logging_steps: 1
save_steps: 3
eval_strategy: steps
eval_steps: 3
disable_tqdm: true
use_cpu: true
"""


class DeviceMap(TrainCase):
    def setUp(self):
        super().setUp()
        text = self.place / "text"
        text.write_text("".join(f"line {i} of a text that can be learned\n" for i in range(100)))
        self.rest = REST % text
        self.phi = self.place / "config.json"
        self.phi.write_text(json.dumps(PHI))

    def phi_model(self, more):
        return f"model: {{config: {self.phi}{more}}}\n"

    def run_with(self, name, text):
        self.config.write_text(text + self.rest)
        said = self.train(0, self.place / name).stderr
        return self.place / name, said

    def test_a_split_model_trains_to_the_same_bits(self):
        whole, said = self.run_with("whole", GPT % "")
        self.assertNotIn("is split over", said)
        split, said = self.run_with("split", GPT % GPT_MAP)
        self.assertIn("the model is split over cpu:0, cpu:1, which work one after the other", said)
        balanced, _ = self.run_with("balanced", GPT % ", device_map: balanced")
        for other in (split, balanced):
            self.assert_same(whole / "checkpoint-6", other / "checkpoint-6")
            self.assertEqual(losses(whole), losses(other))
        # Either continues what the other has saved.
        again = self.place / "again"
        copy_until(split, again, 3)
        self.config.write_text(GPT % "" + self.rest)
        self.train(0, again, "--resume", "auto")
        self.assert_same(whole / "checkpoint-6", again / "checkpoint-6")

    def test_checkpointed_blocks_and_adapters(self):
        """gradient_checkpointing changes no bit, with dropout, adapters and a map or without."""
        for lora in ("", LORA):
            whole, _ = self.run_with(f"whole{len(lora)}", self.phi_model("") + lora)
            for more in (self.phi_model(""), self.phi_model(PHI_MAP)):
                name = f"again{len(lora)}-{len(more)}"
                again, _ = self.run_with(name, more + lora + "gradient_checkpointing: true\n")
                self.assert_same(whole / "checkpoint-6", again / "checkpoint-6")
                self.assertEqual(losses(whole), losses(again))

    def test_what_is_refused(self):
        """The names by `config check` too, which has no torch."""
        for model, message in (
                (GPT % ", device_map: {'': cpu, transformer.h.7: cpu}",
                 "the model has no part 'transformer.h.7'"),
                (GPT % ", device_map: {transformer.h: cpu}", "no device for 4 of the model's 7"),
                (GPT % ", device_map: sequential", "device_map must be auto, balanced or a map"),
                ("model: {name: mlp, device_map: auto}\ndata: random\n", "device_map")):
            text = model + self.rest if "mlp" not in model else model
            self.config.write_text(text)
            self.assertIn(message, self.lockstep("config", "check", self.config, code=2).stderr)
            self.assertIn(message, self.train(0, self.place / "out", code=2).stderr)

    def test_ranks_have_one_device_each(self):
        self.config.write_text(GPT % ", device_map: {'': cpu, transformer.h.2: 1}" + self.rest)
        said = self.train(2, self.place / "out", code=2).stderr
        self.assertIn("model.device_map puts transformer.h.2 on cuda:1, and each of the 2 ranks "
                      "has one device, cpu.", said)
        self.assertIn("Start one rank, or delete device_map", said)
        said = self.train(0, self.place / "out", code=2).stderr
        self.assertIn("the device map names cuda:1, and this process sees 0 GPUs", said)
        # Both of these stay on the rank's own device: a CPU has one, whatever its stages.
        for there in (", device_map: auto", GPT_MAP):
            self.config.write_text(GPT % there + self.rest)
            self.train(2, self.place / f"out{len(there)}", "--max_steps", 1)


if __name__ == "__main__":
    unittest.main()
