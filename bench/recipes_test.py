"""`lockstep bench recipes` on tiny files on the CPU, beside PyTorch and beside a step alone."""

import io
import json
import os
import sys
import unittest

from bench_case_for_test import Case

sys.path.insert(0, os.path.join(os.environ["LOCKSTEP_SOURCE"], "bench", "peers"))
import model_peer  # noqa: E402

GPT = """model: {name: gpt, n_layer: 2, n_head: 4, n_embd: 32, vocab_size: 257}
max_seq_len: 32
"""
LM = """model: {config: %s}
data: {name: instructions, path: there/is/none.json}
max_seq_len: 256
"""
RESNET = """model: resnet18
data: {name: images, samples: 64, image_size: 32, classes: 10}
"""
ALL = "per_device_train_batch_size: 4\nlearning_rate: 1.0e-3\nuse_cpu: true\n"
LORA = "lora: {r: 4, lora_alpha: 8, target_modules: [qkv_proj, o_proj]}\n"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 257,
         "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
         "tie_word_embeddings": True}
PHI = LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"],
               "tie_word_embeddings": False, "sliding_window": None, "bos_token_id": 1,
               "eos_token_id": 2, "pad_token_id": 0}
SHORT = ["--rounds", "1", "--updates", "8"]


class Recipes(Case):
    def write(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def lm(self, name, config, more=""):
        return self.write(name, LM % self.write("config.json", json.dumps(config)) + ALL + more)

    def beside_pytorch(self, file, *arguments):
        result, rows, document = self.passes("recipes", file, *SHORT, *arguments)
        self.assertRegex(result.stderr,
                         r"verified: lockstep and pytorch train \w+ the same in fp32")
        self.assertEqual([row["side"] for row in rows][0], "lockstep train")
        self.assertEqual([row["side"] for row in rows][-1], "PyTorch, DDP, eager")
        for row in document["rows"]:
            rate = 4 * float(rows[0]["batches"]) / row["p50_ms"] * 1e3
            self.assertAlmostEqual(row["samples_per_s"], rate, delta=1e-6 * rate)
        return rows, document

    def test_a_gpt_on_bytes(self):
        file = self.write("gpt.yaml", GPT + ALL + "gradient_accumulation_steps: 2\n")
        rows, document = self.beside_pytorch(file)
        self.assertEqual([row["batches"] for row in rows], ["2", "2"])
        for row in document["rows"]:
            self.assertAlmostEqual(row["tokens_per_s"], 32 * row["samples_per_s"])

    def test_a_gpt_on_token_shards_that_are_not_there(self):
        file = self.write("tokens.yaml", GPT + ALL + "dataset_dir: there/is/none\n"
                          "tokens_per_update: 256\n")
        result, rows, _ = self.passes("recipes", file, *SHORT, "--peer-modes", "")
        self.assertEqual([(row["side"], row["batches"]) for row in rows], [("lockstep train", "2")])

    def test_a_llama_and_adapters_beside_transformers_and_peft(self):
        try:
            import peft  # noqa: F401
        except ImportError as missing:
            self.skipTest(str(missing))
        self.beside_pytorch(self.lm("llama.yaml", LLAMA))
        self.beside_pytorch(self.lm("lora.yaml", PHI, LORA + "bf16: true\n"))

    def test_fp8_through_the_trainer_and_alone(self):
        file = self.write("fp8.yaml", GPT + ALL + "mixed_precision: fp8\n")
        rows, _ = self.beside_pytorch(file, "--step")
        self.assertEqual(rows[1]["side"], "our step alone")

    def test_a_resnet_on_images(self):
        rows, _ = self.beside_pytorch(self.write("resnet.yaml", RESNET + ALL))
        self.assertNotIn("tokens/s", rows[0])

    def test_refuses_a_side_that_trains_differently(self):
        result = self.fails(1, "lockstep and eager do not train the same: the loss of step ",
                            "recipes", self.write("gpt.yaml", GPT + ALL), "--corrupt", "eager")
        self.assertNotIn("round", result.stderr)

    def test_refuses_nonsense(self):
        file = self.write("gpt.yaml", GPT + ALL)
        mlp = self.write("mlp.yaml", "model: mlp\ndata: random\n" + ALL)
        for arguments, part in (((), "file is required"),
                                ((file, "--peer-modes", "fast"), "--peer-modes"),
                                ((file, "--step", "--accumulation", "2"), "Drop one of them"),
                                ((file, "--flag=--bf61=true"), "Did you mean bf16?"),
                                ((file, "--flag=--fp16=true", "--flag=--use_cpu=false"),
                                 "loss scaling"),
                                ((file, "--flag=--model={name: gpt, n_embd: 31, n_head: 4}"),
                                 "model.n_embd 31 does not divide into 4 heads"),
                                ((mlp,), "trains an mlp")):
            with self.subTest(arguments):
                self.fails(2, part, "recipes", *arguments)


class Peer(unittest.TestCase):
    def test_answers_with_the_error_of_an_order_and_continues(self):
        class Trainee:
            def time(self, order):
                raise MemoryError("no room")

            def train(self, order):
                return {"losses": []}

        answers = io.StringIO()
        model_peer.serve(Trainee(), ['{"do": "time"}', '{"do": "train"}'], answers)
        found = [json.loads(line) for line in answers.getvalue().splitlines()]
        for answer in found:
            self.assertGreaterEqual(answer.pop("idle_s"), 0)
            self.assertGreaterEqual(answer.pop("idle_cpu_s"), 0)
        self.assertEqual(found, [{"error": "MemoryError: no room"}, {"losses": []}])


if __name__ == "__main__":
    unittest.main()
