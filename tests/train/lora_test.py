"""Adapters trained by `lockstep train`: stopped and resumed to the same bits, and read by PEFT."""

import hashlib
import json
import os
import unittest

from train_case import LOCKSTEP, TrainCase, checkpoints, copy_until, finished, losses

os.environ["HF_HUB_OFFLINE"] = "1"

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
FILES = ["SHA256SUMS", "adapter_config.json", "adapter_model.safetensors", "model_function.json",
         "optimizer.safetensors", "rng_state.safetensors", "sampler.json", "scheduler.json",
         "trainer_state.json", "training_args.json"]


def imported_peft():
    """torch, peft and transformers, whose import takes seconds: by the first test that needs them,
    for all others, too."""
    try:
        # pylint: disable=import-outside-toplevel
        import peft
        import torch
        import transformers
    except ModuleNotFoundError as missing:
        raise unittest.SkipTest(f"the interpreter has no {missing.name}") from missing
    torch.set_num_threads(1)
    return torch, peft, transformers


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
        shown = self.lockstep("checkpoint", "show", newest).stdout
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

    def test_a_base_in_4_bits(self):
        """Two ranks, stopped and resumed to the same bits; PEFT computes the same loss."""
        # bitsandbytes' library for CPUs needs widths that are multiples of 64.
        wide = {**LLAMA, "hidden_size": 64, "intermediate_size": 128}
        (self.place / "config.json").write_text(json.dumps(wide))
        base = self.make_base(f"model: {{config: {self.place / 'config.json'}}}\n")
        text = (f"model: {{path: {base}, load_in_4bit: %s}}\n" + self.rest + EVALUATE +
                "lora: {r: 4, lora_dropout: 0.1, target_modules: all-linear}\n"
                "gradient_accumulation_steps: 2\ngradient_checkpointing: true\n")
        for more in ("", "bf16: true\n"):
            self.config.write_text(text % "true" + more)
            whole, again = self.place / f"whole{more[:4]}", self.place / f"again{more[:4]}"
            self.train(2, whole)
            self.assertEqual(sorted(p.name for p in (whole / "checkpoint-12").iterdir()), FILES)
            copy_until(whole, again, 8)
            self.train(2, again, "--resume", "auto")
            self.assert_same(whole / "checkpoint-12", again / "checkpoint-12")
            self.assertEqual(losses(whole), losses(again))
        self.config.write_text(text % "false")
        self.assertIn("load_in_4bit is false and was true",
                      self.train(2, whole, "--resume", "auto", code=2).stderr)
        self.config.write_text(text % "true")
        try:
            import bitsandbytes as _  # pylint: disable=import-outside-toplevel
        except ModuleNotFoundError as missing:
            raise unittest.SkipTest("the interpreter has no bitsandbytes") from missing
        _, _, transformers = imported_peft()
        self.check_peft(base, device_map={"": "cpu"},
                        quantization_config=transformers.BitsAndBytesConfig(
                            load_in_4bit=True, bnb_4bit_quant_type="nf4",
                            bnb_4bit_use_double_quant=True))

    def check_peft(self, base, **load):
        torch, peft, _ = imported_peft()
        self.train(2, self.place / "out")
        newest = self.place / "out" / "checkpoint-12"
        config = json.loads((newest / "adapter_config.json").read_text())
        self.assertEqual(config["base_model_name_or_path"], str(base))
        state = json.loads((newest / "trainer_state.json").read_text())
        wanted = next(e["eval_loss"] for e in state["log_history"]
                      if e["step"] == 12 and "eval_loss" in e)
        model = peft.AutoPeftModelForCausalLM.from_pretrained(newest, **load).eval()
        # The rows that were held out: the last 12 of 33 tokens each.
        text = [*(self.place / "text").read_bytes(), 256]
        rows = len(text) // 33
        held = torch.tensor(text[:rows * 33]).view(rows, 33)[rows - 400 // 33:]
        with torch.no_grad():
            logits = model(input_ids=held[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)),
                                                 held[:, 1:].reshape(-1)).item()
        self.assertAlmostEqual(loss, wanted, delta=1e-5)

    def test_peft_finds_the_base_from_anywhere(self):
        """A relative path would be looked for where PEFT runs."""
        base = self.make_base()
        for number, given in enumerate(("base/checkpoint-12", "./base/../base/checkpoint-12")):
            self.use_lora(given)
            out = self.place / f"out{number}"
            self.lockstep("train", self.config, "--output_dir", out, cwd=self.place)
            config = json.loads((out / "checkpoint-12" / "adapter_config.json").read_text())
            self.assertEqual(config["base_model_name_or_path"], str(base))

    def test_an_adapter_is_merged_into_its_base(self):
        """To the model that PEFT's merge_and_unload() makes of the same folder."""
        torch, peft, transformers = imported_peft()

        def make(place, kind, dtype):
            torch.manual_seed(1)
            small = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
            config = (transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16,
                                              **small)
                      if kind == "gpt2" else
                      transformers.LlamaConfig(num_hidden_layers=2, hidden_size=16,
                                               intermediate_size=24, num_attention_heads=2,
                                               max_position_embeddings=16, **small))
            base = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
            base.save_pretrained(place / "base")
            targets, kept = ((["c_attn", "mlp.c_proj"], ["ln_f"]) if kind == "gpt2" else
                             (["q_proj", "down_proj"], ["norm"]))
            model = peft.get_peft_model(base, peft.LoraConfig(
                r=3, lora_alpha=7, target_modules=targets, init_lora_weights=False,
                use_rslora=True, fan_in_fan_out=kind == "gpt2", modules_to_save=kept))
            model.save_pretrained(place / "adapter")
            model.merge_and_unload().save_pretrained(place / "theirs")

        def compare(*folders):
            ours, theirs = (transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
                            for folder in folders)
            self.assertEqual(ours.dtype, theirs.dtype)
            a, b = ours.state_dict(), theirs.state_dict()
            self.assertEqual(a.keys(), b.keys())
            bound = 1e-6 if ours.dtype == torch.float32 else 2e-2
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=bound, atol=bound)

        def merge(*args):
            return finished([LOCKSTEP, "checkpoint", "merge", *args])

        for kind, dtype in (("gpt2", "float32"), ("llama", "float32"), ("llama", "bfloat16")):
            with self.subTest(kind=kind, dtype=dtype):
                place = self.place / f"{kind}-{dtype}"
                make(place, kind, getattr(torch, dtype))
                (place / "base" / "tokenizer.json").write_text("{}")
                # PEFT has not named the base of a model without a name.
                self.assertIn("Name the base model's folder with --base",
                              merge(place / "adapter", place / "ours").stderr)
                done = merge(place / "adapter", place / "ours", "--base", place / "base")
                self.assertEqual(done.returncode, 0, done.stderr)
                compare(place / "ours", place / "theirs")
                self.verify(place / "ours")
                # What else a model's folder has goes with it.
                self.assertEqual((place / "ours" / "tokenizer.json").read_text(), "{}")
                again = merge(place / "adapter", place / "ours", "--base", place / "base")
                self.assertEqual(again.returncode, 2)
                self.assertIn("is there already", again.stderr)
        done = merge(self.place / "gpt2-float32" / "base", self.place / "x")
        self.assertEqual(done.returncode, 2)
        self.assertIn("holds no adapter", done.stderr)

    def resumes(self, output, model, words=()):
        """From its newest checkpoint with another model or adapter: refused with these words."""
        self.config.write_text(model + self.rest)
        said = self.train(0, output, "--resume", "auto", code=2 if words else 0).stderr
        for word in ["was saved by a model that computes something else", *words] if words else []:
            self.assertIn(word, said)

    def test_adapters_go_on_with_the_scale_that_they_were_trained_with(self):
        model, output = GPT % "", self.place / "out"
        self.config.write_text(model + LORA + self.rest)
        self.train(0, output)
        self.resumes(output, model + LORA.replace("alpha: 8", "alpha: 16"),
                     ["lora.lora_alpha is 16.0 and was 8.0"])
        self.resumes(output, model + LORA.replace("{r", "{use_rslora: true, r"),
                     ["lora.use_rslora is true and was false"])
        self.resumes(output, model + LORA.replace("{r", "{alpha_pattern: {c_attn: 2}, r"),
                     ['lora.alpha_pattern is [["c_attn",2.0]] and was []'])
        self.resumes(output, model.replace("n_head: 2", "n_head: 4") + LORA,
                     ["n_head is 4 and was 2", "head_dim is 8 and was 16"])
        self.resumes(output, model + LORA.replace("dropout: 0.1", "dropout: 0.3"))
        self.config.write_text(model + LORA.replace("r: 4", "r: 8") + self.rest)
        said = self.train(0, output, "--resume", "auto", code=2).stderr
        self.assertIn("The checkpoint has adapters of another rank; compare `lora` in its "
                      "training_args.json.", said)

    def test_a_model_goes_on_as_what_it_was(self):
        config, output = self.place / "config.json", self.place / "out"
        model = f"model: {{config: {config}}}\n"
        was = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"],
               "sliding_window": None}
        config.write_text(json.dumps(was))
        self.config.write_text(model + self.rest)
        self.train(0, output)
        for change, words in (
                ({"rope_theta": 2e4}, ["rope_parameters.rope_theta is 20000.0 and was 10000.0"]),
                ({"rope_scaling": {"type": "linear", "factor": 2}},
                 ["rope_parameters.factor is 2.0 and was null",
                  'rope_parameters.rope_type is "linear" and was "default"']),
                ({"sliding_window": 9}, ["sliding_window is 9 and was 0"]),
                ({"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
                 ["sliding_window is [0,9] and was 0"]),
                ({"hidden_act": "gelu"}, ['hidden_act is "gelu" and was "silu"']),
                ({"rms_norm_eps": 1e-3}, ["rms_norm_eps is 0.001 and was 1e-06"]),
                ({"attention_dropout": 0.5, "head_dim": 8, "max_position_embeddings": 64}, [])):
            with self.subTest(**change):
                config.write_text(json.dumps({**was, **change}))
                self.resumes(output, model, words)
        # A checkpoint of a version that did not record it.
        newest = output / "checkpoint-12"
        (newest / "model_function.json").unlink()
        *sums, itself = (newest / "SHA256SUMS").read_text().splitlines(keepends=True)
        at = next(i for i, line in enumerate(sums) if "model_function" in line)
        rest = "".join(sums[:at - 1] + sums[at + 1:])  # without its size and its digest
        digest = hashlib.sha256(rest.encode()).hexdigest()
        (newest / "SHA256SUMS").write_text(f"{rest}{itself[:-65]}{digest}\n")
        config.write_text(json.dumps({**was, "rope_theta": 2e4}))
        self.resumes(output, model)

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
