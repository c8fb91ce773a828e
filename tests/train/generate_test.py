"""`lockstep generate` beside transformers: ids, prompts, checkpoints, adapters, and mistakes."""

import json
import os
import sys
import unittest

from train_case import LOCKSTEP, TrainCase, finished

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

LEARNED = """
model: {{name: gpt, n_layer: 2, n_head: 2, n_embd: 64}}
data: {{name: instructions, path: {path}{data}}}
max_seq_len: 96
per_device_train_batch_size: 4
learning_rate: 5.0e-3
max_steps: 150
save_steps: 150
disable_tqdm: true
use_cpu: true
"""


class Generate(TrainCase):
    def setUp(self):
        super().setUp()
        self.folder = self.place / "model"

    def generate(self, *flags):
        done = finished([LOCKSTEP, "generate", *flags])
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

    def test_what_generation_config_says_is_used(self):
        self.make()
        ids = [5, 17, 200, 8]
        flags = ("--model", self.folder, "--ids", "5,17,200,8")

        def settings(**values):
            (self.folder / "generation_config.json").write_text(json.dumps(values))

        def theirs():
            model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
            with torch.no_grad():
                return model.generate(input_ids=torch.tensor([ids]), pad_token_id=0)[0, 4:].tolist()

        for values in ({"max_new_tokens": 7}, {"max_length": 12},
                       {"max_new_tokens": 30, "repetition_penalty": 1.7},
                       {"max_new_tokens": 30, "max_length": 9, "temperature": 0.3, "top_p": 0.5},
                       {"max_new_tokens": 30, "do_sample": True, "top_k": 1, "temperature": 3.0},
                       {"max_new_tokens": 30, "do_sample": True, "top_p": 1e-6,
                        "repetition_penalty": 1.2}):
            with self.subTest(values):
                settings(**values)
                code, out, err = self.generate(*flags)
                self.assertEqual((code, err), (0, ""))
                self.assertEqual([int(word) for word in out.split()], theirs())
        # Tokens are drawn, of the fifty likeliest where the file does not say how many.
        settings(do_sample=True, max_new_tokens=12)
        warm = self.made(*flags)
        self.assertEqual(warm, self.made(*flags, "--temperature", 1, "--top_k", 50))
        self.assertNotEqual(warm, self.made(*flags, "--temperature", 0))
        self.assertNotEqual(warm, self.made(*flags, "--seed", 1))
        # Flags come first.
        settings(do_sample=True, max_new_tokens=30, repetition_penalty=1.7, top_k=7, top_p=0.7)
        self.assertEqual(self.made(*flags, "--temperature", 0, "--repetition-penalty", 1,
                                   "--max-new-tokens", 9).split(), self.greedy(ids, 9))
        # What is not used is named; values that change nothing are not.
        settings(max_new_tokens=3, num_beams=4, no_repeat_ngram_size=2, length_penalty=1.0,
                 min_length=0, typical_p=1.0, early_stopping=False, bad_words_ids=None)
        _, _, err = self.generate(*flags)
        self.assertEqual(err, f"note: {self.folder}/generation_config.json: num_beams, "
                         "no_repeat_ngram_size are not used\n")
        settings(max_length=4)
        code, _, err = self.generate(*flags)
        self.assertEqual(code, 2, err)
        self.assertIn("generation_config.json: max_length is 4, and the text to continue has 4 "
                      "tokens already. Give --max_new_tokens.", err)
        settings(top_k="many")
        self.assertIn("generation_config.top_k must be", self.generate(*flags)[2])

    def greedy(self, ids, count):
        (self.folder / "generation_config.json").unlink()
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
        return [str(id) for id in self.continued(model, ids, count)]

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

    def train_on(self, records, data="", **tokenizer):
        """A small model that knows the records by heart."""
        self.folder.mkdir(exist_ok=True)
        for name, text in tokenizer.items():
            (self.folder / name.replace("__", ".")).write_text(text)
        (self.place / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        self.config.write_text(LEARNED.format(path=self.place / "train.jsonl", data=data))
        self.train(0, self.place / "out")
        return self.place / "out"

    def test_a_model_of_instructions_is_asked_as_it_was_trained(self):
        out = self.train_on([{"instruction": "sky?", "output": "blue"},
                             {"instruction": "color", "input": "grass", "output": "green"}],
                            data=', prompt_without_input: "Q: {instruction}\\nA: "')
        flags = ("--model", out, "--max_new_tokens", 20)
        # The answer alone, up to the token that ended it in training.
        self.assertEqual(self.made(*flags, "--prompt", "sky?"), "blue\n")
        self.assertEqual(self.made(*flags, "--prompt", "color", "--input", "grass"), "green\n")
        self.assertEqual(self.made(*flags, "--raw", "--prompt", "Q: sky?\nA: "),
                         "Q: sky?\nA: blue\n")
        saved = json.loads((out / "checkpoint-150" / "prompt_format.json").read_text())
        self.assertEqual(saved["prompt_without_input"], "Q: {instruction}\nA: ")
        self.assertNotIn("tokenizer", saved)
        self.verify(out)
        code, _, err = self.generate(*flags, "--raw", "--prompt", "a", "--input", "b")
        self.assertEqual(code, 2, err)
        self.assertIn("--input is for a model that was trained on instructions", err)

    def test_prompts_with_completions_are_continued_as_they_are(self):
        out = self.train_on([{"prompt": "one two", "completion": " three"},
                             {"prompt": "red yellow", "completion": " blue"}])
        for prompt, text in (("one two", "one two three\n"), ("red yellow", "red yellow blue\n")):
            self.assertEqual(self.made("--model", out, "--prompt", prompt, "--max_new_tokens", 20),
                             text)

    def test_a_model_of_chats_is_asked_by_its_template(self):
        self.folder.mkdir()
        self.make_tokenizer()
        out = self.train_on(
            [{"messages": [{"role": "user", "content": "the cat"},
                           {"role": "assistant", "content": "sat on the mat"},
                           {"role": "user", "content": "and"},
                           {"role": "assistant", "content": "the dog sat"}]}],
            data=f", tokenizer: {self.folder}",
            tokenizer_config__json=json.dumps({"chat_template": CHATML,
                                               "eos_token": "<|endoftext|>"}))
        # The tokenizer is found where it was, and <|im_end|> ends the answer.
        self.assertEqual(self.made("--model", out, "--prompt", "the cat", "--max_new_tokens", 30),
                         "sat on the mat\n")

    def test_a_text_ends_at_a_stop_string(self):
        model, bpe = self.make(), self.make_tokenizer()
        oracle = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(self.folder / "tokenizer.json"))
        ids = bpe.encode(PROMPT).ids
        # Random weights also give bytes that are no text; stop strings are of whole characters.
        pieces = [bpe.decode([id]) for id in self.continued(model, ids, 23)]
        words = [piece for piece in pieces if piece and piece.isascii()]
        pairs = [a + b for a, b in zip(pieces, pieces[1:]) if (a + b).isascii()]
        self.assertTrue(words)
        for stops in ([words[-1]], ["never there", words[0]], *([pair] for pair in pairs[-1:])):
            with torch.no_grad():
                theirs = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=24,
                                        do_sample=False, pad_token_id=0, stop_strings=stops,
                                        tokenizer=oracle)[0].tolist()
            flags = [part for stop in stops for part in ("--stop", stop)]
            self.assertEqual(self.made("--model", self.folder, "--prompt", PROMPT,
                                       "--max_new_tokens", 24, *flags), bpe.decode(theirs) + "\n")
            self.assertLess(len(theirs), len(ids) + 24)

    def test_a_limit_that_has_no_effect_is_named(self):
        self.make()
        _, _, err = self.generate("--model", self.folder, "--ids", "5", "--top_k", 3,
                                  "--max_new_tokens", 2)
        self.assertIn("--top_k and --top_p have no effect at temperature 0", err)

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
        # Without a number: as many as the model has positions for.
        said = self.made("--model", out, "--prompt", PROMPT)
        self.assertTrue(said.startswith("the cat sat on the mat. the cat sat"), said)
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
                (("--model", self.folder, "--ids", "1", "--num_beams", "3"),
                 "there is no flag --num_beams"),
                (("--model", self.folder, "--ids", "1", "--dtype", "int8"), "--dtype=int8")):
            code, _, err = self.generate(*flags)
            self.assertEqual(code, 2, err)
            self.assertIn(text, err)
        self.assertIn("usage: lockstep generate", self.made("--help"))


if __name__ == "__main__":
    unittest.main()
