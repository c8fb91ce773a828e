"""`lockstep generate` beside transformers: ids, prompts, checkpoints, adapters, and mistakes."""

import json
import os
import subprocess
import sys
import unittest

from train_case import BOUND_S, LOCKSTEP, TrainCase, environment

os.environ["CUDA_VISIBLE_DEVICES"] = ""
try:
    import peft
    import tokenizers
    import torch
    import transformers
except ImportError as missing:
    print(f"SKIP 1: {missing}")
    sys.exit(77)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

PROMPT = "the cat sat"
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
          "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|im_start|>assistant\\n' }}{% endif %}")
LLAMA = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=300, max_position_embeddings=128,
             bos_token_id=None, eos_token_id=None)
TRAINED = """
model: {{name: gpt, n_layer: 2, n_head: 2, n_embd: 64}}
data: {{name: bytes, path: {text}, max_bytes: 4000}}
max_seq_len: 48
per_device_train_batch_size: 8
learning_rate: 5.0e-3
max_steps: 200
save_steps: 100
disable_tqdm: true
use_cpu: true

"""


class Generate(TrainCase):
    def setUp(self):
        super().setUp()
        self.folder = self.place / "model"

    def generate(self, *flags):
        done = subprocess.run([LOCKSTEP, "generate", *map(str, flags)], capture_output=True,
                              text=True, timeout=BOUND_S, env=environment(), check=False)
        return done.returncode, done.stdout, done.stderr

    def made(self, *flags):
        code, out, err = self.generate(*flags)
        self.assertEqual(code, 0, err)
        return out

    def make(self):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**LLAMA)).eval()
        model.save_pretrained(self.folder)
        return model

    def make_tokenizer(self):
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(["the cat sat on the mat and the dog sat on the log"] * 4,
                                vocab_size=290, min_frequency=1,
                                special_tokens=["<|im_start|>", "<|im_end|>"])
        bpe.save(str(self.folder / "tokenizer.json"))
        return bpe

    def continued(self, model, ids, count):
        with torch.no_grad():
            out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=count,
                                 do_sample=False, pad_token_id=0)
        return out[0, len(ids):].tolist()

    def test_ids_are_those_of_transformers(self):
        ids = [5, 17, 200, 8]
        wanted = self.continued(self.make(), ids, 24)
        flags = ("--model", self.folder, "--max_new_tokens", 24)
        self.assertEqual(self.made(*flags, "--ids", "5,17,200,8"),
                         " ".join(map(str, wanted)) + "\n")
        self.assertEqual(self.made(*flags, "--ids=5 17 200 8", "--temperature=0").split(),
                         [str(id) for id in wanted])
        # Drawn tokens are a function of the seed, and another with another one.
        drawn = [self.made(*flags, "--ids", "5,17", "--temperature", 1, "--top-p", 0.9, "--seed", s)
                 for s in (1, 1, 2)]
        self.assertEqual(drawn[0], drawn[1])
        self.assertNotEqual(drawn[0], drawn[2])

    def test_a_prompt_goes_through_the_folders_tokenizer(self):
        model, bpe = self.make(), self.make_tokenizer()
        ids = bpe.encode(PROMPT).ids
        wanted = bpe.decode(ids + self.continued(model, ids, 12))
        self.assertEqual(
            self.made("--model", self.folder, "--prompt", PROMPT, "--max_new_tokens", 12),
            wanted + "\n")

    def test_an_adapter_continues_with_its_base(self):
        model, bpe = self.make(), self.make_tokenizer()
        ids = bpe.encode(PROMPT).ids
        base = self.continued(model, ids, 12)
        torch.manual_seed(4)
        adapted = peft.get_peft_model(model, peft.LoraConfig(
            r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"],
            init_lora_weights=False, base_model_name_or_path=str(self.folder))).eval()
        adapter = self.place / "adapter"
        adapted.save_pretrained(adapter)
        wanted = self.continued(adapted, ids, 12)
        self.assertNotEqual(wanted, base)
        flags = ("--model", adapter, "--max_new_tokens", 12)
        text = " ".join(map(str, ids))
        # The base model that adapter_config.json names; its folder has the tokenizer.
        config = adapter / "adapter_config.json"
        settings = {**json.loads(config.read_text()), "base_model_name_or_path": str(self.folder)}
        config.write_text(json.dumps(settings))
        self.assertEqual(self.made(*flags, "--ids", text), " ".join(map(str, wanted)) + "\n")
        self.assertEqual(self.made(*flags, "--prompt", PROMPT), bpe.decode(ids + wanted) + "\n")
        # A name of Hugging Face's hub is not a folder here: --base names it.
        config.write_text(json.dumps({**settings, "base_model_name_or_path": "some/llama"}))
        code, _, err = self.generate(*flags, "--ids", text)
        self.assertEqual(code, 2, err)
        self.assertIn(f"{adapter} holds an adapter of the model 'some/llama', which is not a "
                      "folder here. Name the base model's folder with --base.", err)
        self.assertEqual(self.made(*flags, "--ids", text, "--base", self.folder),
                         " ".join(map(str, wanted)) + "\n")
        self.assertEqual(self.made(*flags, "--prompt", PROMPT, "--base", self.folder),
                         bpe.decode(ids + wanted) + "\n")

    def test_a_chat_goes_through_the_models_template(self):
        model = self.make()
        self.make_tokenizer()
        flags = ("--model", self.folder, "--prompt", PROMPT, "--max_new_tokens", 12, "--chat")
        code, _, err = self.generate(*flags)
        self.assertEqual(code, 2, err)
        self.assertIn("has no chat template", err)
        (self.folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
        oracle = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(self.folder / "tokenizer.json"), chat_template=CHATML)
        chat = oracle.apply_chat_template([{"role": "user", "content": PROMPT}], tokenize=False,
                                          add_generation_prompt=True)
        self.assertEqual(chat, f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n")
        answer = self.continued(model, oracle.encode(chat, add_special_tokens=False), 12)
        # The answer alone, without the chat that it follows.
        self.assertEqual(self.made(*flags), oracle.decode(answer, skip_special_tokens=True) + "\n")

    def test_a_checkpoint_of_bytes_continues_its_text(self):
        text = self.place / "text.txt"
        text.write_text("the cat sat on the mat. " * 200)
        self.config.write_text(TRAINED.format(text=text))
        out = self.place / "out"
        self.train(1, out)
        # An output_dir stands for its newest checkpoint.
        for folder in (out, out / "checkpoint-200"):
            said = self.made("--model", folder, "--prompt", PROMPT, "--max_new_tokens", 24)
            self.assertEqual(said, "the cat sat on the mat. the cat sat\n")
        code, _, err = self.generate("--model", out, "--prompt", PROMPT, "--chat")
        self.assertEqual(code, 2, err)
        self.assertIn("--chat needs a tokenizer with a chat template", err)

    def test_mistakes_are_named(self):
        self.make()
        for flags, text in (
                (("--prompt", "a"), "--model DIR is missing"),
                (("--model", self.folder), "give --prompt TEXT or --ids"),
                (("--model", self.folder, "--ids", "1", "--chat"), "--chat needs --prompt"),
                (("--model", self.folder, "--ids", "1,x"), "--ids=x is not a number"),
                (("--model", self.folder, "--ids", "300"), "outside of the vocabulary of 300"),
                (("--model", self.folder, "--prompt", "a"), "has no tokenizer.json"),
                (("--model", self.place / "none", "--ids", "1"), "is not a folder"),
                (("--model", self.place, "--ids", "1"), "neither a config.json"),
                (("--model", self.folder, "--ids", "1", "--top_k", "3"),
                 "there is no flag --top_k"),
                (("--model", self.folder, "--ids", "1", "--dtype", "int8"), "--dtype=int8")):
            code, _, err = self.generate(*flags)
            self.assertEqual(code, 2, err)
            self.assertIn(text, err)
        self.assertIn("usage: lockstep generate", self.made("--help"))


if __name__ == "__main__":
    unittest.main()
