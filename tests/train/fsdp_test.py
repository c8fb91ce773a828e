"""`fsdp` under `lockstep train`: the bits of data parallelism where sums have one order,
and checkpoints that either continues."""

import json
import unittest

from train_case import CONFIG, TrainCase, copy_until, losses

STEP = 10  # of a checkpoint in the middle
# Two ranks, one pass per step and no clipping: every sum has two terms, in one order. Kernels round
# the elements after the last whole vector otherwise, so every part of a tensor is whole vectors.
WHOLE_VECTORS = CONFIG.replace("hidden: 32", "hidden: 64").replace(
    "features: 12, classes: 5", "features: 64, classes: 64")
NO_CLIPPING = ("--max_grad_norm", "0")
EXACT = (*NO_CLIPPING, "--gradient_accumulation_steps", "1", "--num_train_epochs", "2")
GPT = "{name: gpt, n_layer: 3, n_head: 2, n_embd: 64, n_positions: 16, vocab_size: 257%s}"


class Fsdp(TrainCase):
    keys = {"max_steps": 6, "eval_steps": 3, "save_steps": 3}  # of the language model

    def test_has_the_bits_of_data_parallelism(self):
        self.config.write_text(WHOLE_VECTORS)
        plain, _ = self.run_with(2, "ddp", "--shard_optimizer", "false", *EXACT)
        for words in ("full_shard", "shard_grad_op auto_wrap", "hybrid_shard"):
            whole, said = self.run_with(2, words.split()[0], "--fsdp", words, *EXACT)
            self.assertIn("optimizer adamw: fully sharded over 2 ranks", said)
            self.assertEqual(losses(plain), losses(whole))
            self.assert_same(self.newest(plain), self.newest(whole))

    # Gradients are averaged in every pass, and the norm is summed in another order.
    def test_accumulates_and_clips_as_data_parallelism(self):
        plain, _ = self.run_with(3, "ddp")
        whole, _ = self.run_with(3, "fsdp", "--fsdp", "full_shard")
        self.assert_close(plain, whole, 1e-4)
        own, _ = self.run_with(3, "own", "--fsdp", "full_shard",
                               "--average_tokens_across_devices", "false")
        plain, _ = self.run_with(3, "own_ddp", "--average_tokens_across_devices", "false")
        self.assert_close(plain, own, 1e-4)

    def test_every_checkpoint_continues_everywhere(self):
        self.config.write_text(WHOLE_VECTORS)
        runs = {words: self.run_with(2, words or "ddp", "--fsdp", words, *EXACT)[0]
                for words in ("full_shard", "")}
        for before, after in (("full_shard", ""), ("", "full_shard"), ("full_shard",) * 2):
            rest = self.place / f"{before or 'ddp'}-{after or 'ddp'}"
            copy_until(runs[before], rest, STEP)
            self.run_with(2, rest.name, "--fsdp", after, "--resume", "auto", *EXACT)
            self.assert_same(self.newest(runs["full_shard"]), self.newest(rest))

    def test_resumed_with_another_number_of_ranks(self):
        first, _ = self.run_with(2, "first", "--fsdp", "full_shard")
        for ranks in (3, 1):
            ends = []
            for words in ("full_shard", ""):
                rest = self.place / f"rest-{ranks}-{words}"
                copy_until(first, rest, STEP)
                self.run_with(ranks, rest.name, "--fsdp", words, "--resume", "auto")
                ends.append(rest)
            self.assert_close(*ends, 1e-4)

    # Casts of gathered weights are those of whole ones, also where a block runs again.
    def test_in_8_bits_it_has_the_bits_of_data_parallelism(self):
        self.use_model(GPT % "")
        half, _ = self.run_with(2, "bf16", "--bf16", "true", *NO_CLIPPING)
        for recipe in ("tensorwise", "rowwise"):
            flags = ("--mixed_precision", "fp8", "--fp8", f"{{recipe: {recipe}}}", *NO_CLIPPING)
            plain, _ = self.run_with(2, f"ddp-{recipe}", "--shard_optimizer", "false", *flags)
            self.assertNotEqual(losses(half), losses(plain))  # 8 bits were there
            gloo = ("--ddp_backend", "gloo")  # weights travel: tensorwise in 8 bits
            for more in ((), ("--gradient_checkpointing", "true"), gloo,
                         ("--gradient_checkpointing", "true", *gloo)):
                name = f"fsdp-{recipe}{'-'.join(more)}"
                whole, _ = self.run_with(2, name, "--fsdp", "full_shard", *flags, *more)
                self.assertEqual(losses(plain), losses(whole))
                self.assert_same(self.newest(plain), self.newest(whole))

    def test_a_language_model_with_blocks(self):
        self.use_model(GPT % "")
        plain, _ = self.run_with(2, "ddp", "--shard_optimizer", "false", *NO_CLIPPING)
        whole, _ = self.run_with(2, "fsdp", "--fsdp", "full_shard auto_wrap", *NO_CLIPPING)
        self.assertEqual(losses(plain), losses(whole))
        self.assert_same(self.newest(plain), self.newest(whole))
        again, said = self.run_with(
            2, "again", "--fsdp", "full_shard offload", "--fsdp_config",
            "{version: 2, activation_checkpointing: true, "
            "transformer_layer_cls_to_wrap: [GPT2Block]}", *NO_CLIPPING)
        self.assertEqual(losses(plain), losses(again))
        facts = json.loads((again / "monitor/run.json").read_text())
        self.assertEqual(facts["optimizer"], "fully sharded over 2 ranks, fused adamw")
        self.assertEqual(said.count("offload of fsdp has no effect: the model is on the CPU"), 1)
        _, said = self.run_with(2, "compiled", "--fsdp", "full_shard", "--compile_model", "true",
                                "--max_steps", "1")
        self.assertIn("steps run without a CUDA graph: parameters are gathered and freed", said)
        half, _ = self.run_with(
            2, "half", "--fsdp", "full_shard", "--fsdp_config",
            "{mixed_precision_policy: {param_dtype: bfloat16, reduce_dtype: float32}}")
        # Weights that are rounded to 8 bits: other losses, and nearly the same.
        self.assertNotEqual(losses(plain), losses(half))
        self.assert_close(plain, half, 2e-2)

    # The base is frozen, so the first block has no input with a gradient.
    def test_adapters_and_bf16_and_the_best_model(self):
        self.use_model(GPT % "")
        base, _ = self.run_with(2, "base", *NO_CLIPPING)
        self.use_model(GPT % f", weights: {self.newest(base)}")
        for half in ("true", "false"):  # with float weights the base is divided while it is made
            flags = ("--lora", "{r: 4, target_modules: [c_attn]}", "--bf16", half,
                     "--load_best_model_at_end", "true", *NO_CLIPPING)
            plain, _ = self.run_with(2, f"ddp-{half}", "--shard_optimizer", "false", *flags)
            whole, _ = self.run_with(2, f"fsdp-{half}", "--fsdp", "full_shard", *flags)
            self.assertEqual(losses(plain), losses(whole))
            self.assert_same(self.newest(plain), self.newest(whole))

    def test_hybrid_copies_between_hosts(self):
        said = self.on_two_hosts(2, self.place / "hybrid", "--fsdp", "hybrid_shard",
                                 "--num_train_epochs", "2")
        self.assertIn("fully sharded over 2 ranks", said[0])
        self.assertIn("replicas identical on 2 ranks", said[0])
        plain, _ = self.run_with(4, "plain", "--num_train_epochs", "2")
        self.assert_close(plain, self.place / "hybrid", 1e-4)

    def test_refuses_what_it_cannot_do(self):
        done = self.train(2, self.place / "refused", "--fsdp", "full_shard", "--fsdp_config",
                          "{activation_checkpointing: true}", code=2)
        self.assertIn("fsdp_config.activation_checkpointing is for models of blocks",
                      done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
