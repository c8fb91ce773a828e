"""`tensor_parallel_degree` under `lockstep train`: the losses of one process, checkpoints of the
whole model that continue with any degree or without, and copies of the slices."""

import json
import math
import unittest

from train_case import TrainCase, copy_until, losses

STEP = 2  # of a checkpoint in the middle
GPT = "{name: gpt, n_layer: 2, n_head: 4, n_embd: 32, n_positions: 16, vocab_size: 257}"
LLAMA = {"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 46,
         "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
         "max_position_embeddings": 16, "tie_word_embeddings": False}
PLAIN = ("--shard_optimizer", "false")
SHARED = "parameters without slices identical on"
# Sums of 64 terms in another order are wrong by 4e-6 of them; a few steps of AdamW, whose sizes do
# not depend on a gradient's, may make ten times that of it. A wrong slice gives percents.
CLOSE = 1e-4
CLOSE_BF16 = 1e-2  # a rounding to 8 bits is 4e-3, of every activation
CLOSE_FP8 = 1e-1   # to 4 and 3 bits: 6e-2 and 1.2e-1 of every element, of which products are means


SEQUENCE = ("--sequence_parallel", "true")
CHECKPOINTING = ("--gradient_checkpointing", "true")
DROPOUT = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4,
           "n_positions": 16, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}


def tensor(degree):
    return ("--tensor_parallel_degree", degree)


def shapes(folder, name="model.safetensors"):
    with open(folder / name, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {key: value["shape"] for key, value in header.items() if key != "__metadata__"}


class Tensor(TrainCase):
    keys = {"max_steps": 4, "gradient_accumulation_steps": 2, "eval_steps": STEP,
            "save_steps": STEP}

    def setUp(self):
        super().setUp()
        self.use_config(LLAMA)

    def assert_close(self, one, other, relative=CLOSE, names=("loss", "grad_norm", "eval_loss")):
        super().assert_close(one, other, relative, names)

    def test_has_the_losses_of_one_process(self):
        gloo = ("--ddp_backend", "gloo")
        for model, variants in (
                ("gpt", ((4, ()), (2, gloo), (2, SEQUENCE), (4, (*SEQUENCE, *CHECKPOINTING)))),
                ("llama", ((2, ()), (4, ()), (2, CHECKPOINTING), (2, (*SEQUENCE, *gloo))))):
            if model == "gpt":
                self.use_model(GPT)
            else:
                self.use_config(LLAMA)
            plain, _ = self.run_with(1, f"one-{model}")
            for ranks, flags in variants:
                name = f"{model}-{ranks}-{'-'.join(flags).strip('-')}"
                run, said = self.run_with(ranks, name, *tensor(ranks), *flags)
                self.assertIn(f"in slices on {ranks} tensor parallel ranks", said)
                self.assertIn(f"{SHARED} {ranks} tensor parallel ranks", said)
                self.assertNotIn("replicas identical", said)
                self.assert_close(plain, run)
                for file in ("model.safetensors", "optimizer.safetensors"):
                    self.assertEqual(shapes(self.newest(plain), file),
                                     shapes(self.newest(run), file))

    def test_a_mixture_of_experts(self):
        """Every expert is cut, every rank routes all tokens, and the load is balanced once."""
        self.use_config({**LLAMA, "model_type": "mixtral", "num_local_experts": 3,
                         "output_router_logits": True, "router_aux_loss_coef": 0.1})
        plain, _ = self.run_with(1, "one")
        for name, flags in (("gloo", ("--ddp_backend", "gloo")),
                            ("sequence", (*SEQUENCE, *CHECKPOINTING))):
            run, _ = self.run_with(2, name, *tensor(2), *flags)
            self.assert_close(plain, run)
            self.assertEqual(shapes(self.newest(plain)), shapes(self.newest(run)))

    def test_an_evaluation_has_the_load_balancing_loss(self):
        """Weights of zero leave ln(vocabulary), and an even router 2: the experts of a token."""
        self.use_config({**LLAMA, "model_type": "mixtral", "num_local_experts": 4,
                         "output_router_logits": True, "router_aux_loss_coef": 0.25,
                         "initializer_range": 0})
        run, _ = self.run_with(2, "run", *tensor(2), "--eval_on_start", "true", "--max_steps", "1",
                               "--eval_strategy", "no")
        self.assertAlmostEqual(losses(run, "eval_loss")[0], math.log(257) + 0.5, places=4)

    def test_bf16(self):
        plain, _ = self.run_with(1, "one", "--bf16", "true")
        for name, flags in (("run", ()), ("sequence", SEQUENCE)):
            run, _ = self.run_with(2, name, *tensor(2), "--bf16", "true", *flags)
            self.assert_close(plain, run, CLOSE_BF16)

    def test_fp8(self):
        """A slice has a scale of its own: not the bits of one process, but its losses."""
        plain, _ = self.run_with(1, "one", "--mixed_precision", "fp8")
        for name, flags in (("run", ()), ("sequence", SEQUENCE)):
            run, _ = self.run_with(2, name, *tensor(2), "--mixed_precision", "fp8", *flags)
            self.assert_close(plain, run, CLOSE_FP8)

    def test_shards_and_stages_of_slices(self):
        best = ("--load_best_model_at_end", "true")
        wholes = {}
        for samples, name, flags in (
                (1, "parts", (*tensor(2), *SEQUENCE, "--pipeline_parallel_degree", 2)),
                (2, "parts of shards", (*tensor(2), *SEQUENCE, "--fsdp", "full_shard")),
                (1, "gloo", (*tensor(2), "--pipeline_parallel_degree", 2, "--ddp_backend", "gloo")),
                (2, "kept", (*tensor(2), "--fsdp", "shard_grad_op", "--bf16", "true"))):
            half = flags[-2:] if name == "kept" else ()
            if (samples, half) not in wholes:
                wholes[samples, half], _ = self.run_with(samples, f"plain-{name}", *PLAIN, *half)
            plain = wholes[samples, half]
            run, said = self.run_with(4, name, *flags, *best)
            self.assertIn("in slices on 2 tensor parallel ranks", said)
            self.assertIn(f"{SHARED} 2 tensor parallel ranks", said)
            self.assert_close(plain, run, CLOSE_BF16 if half else CLOSE)
            for file in ("model.safetensors", "optimizer.safetensors"):
                self.assertEqual(shapes(self.newest(plain), file), shapes(self.newest(run), file))
            rest = self.place / f"rest-{name}"
            copy_until(run, rest, STEP)
            self.run_with(4, rest.name, "--resume", "auto", *flags, *best)
            self.assert_same(self.newest(run), self.newest(rest))

    def test_hybrid_shard_divides_slices_inside_a_host(self):
        output = self.place / "hybrid"
        said = self.on_two_hosts(4, output, "--fsdp", "hybrid_shard", *tensor(2))
        self.assertIn("fully sharded over 2 ranks, in slices on 2 tensor parallel ranks", said[0])
        plain, _ = self.run_with(4, "plain", *PLAIN)
        self.assert_close(plain, output)
        rest = self.place / "rest-hybrid"
        copy_until(output, rest, STEP)
        self.run_with(4, rest.name, "--resume", "auto", *PLAIN)
        self.assert_close(plain, rest)
        # With as many ranks as slices a host has one copy, and nothing is divided there.
        said = self.on_two_hosts(2, self.place / "copy", "--fsdp", "hybrid_shard", *tensor(2))
        self.assertIn("fully sharded over 1 rank, in slices on 2 tensor parallel ranks", said[0])
        plain, _ = self.run_with(2, "plain-2", *PLAIN)
        self.assert_close(plain, self.place / "copy")

    def test_every_checkpoint_continues_everywhere(self):
        whole, _ = self.run_with(1, "whole")
        run, _ = self.run_with(2, "run", *tensor(2))
        for first, ranks, flags in ((run, 1, ()), (run, 4, tensor(4)), (whole, 2, tensor(2))):
            rest = self.place / f"rest-{first.name}-{ranks}"
            copy_until(first, rest, STEP)
            self.run_with(ranks, rest.name, "--resume", "auto", *flags)
            self.assert_close(whole, rest)
        # Ranks that see other samples divide the rest of the epoch among them.
        for ranks, flags in ((2, PLAIN), (2, ("--fsdp", "full_shard")), (4, tensor(2))):
            rests = []
            for first in (whole, run):
                rest = self.place / f"rest-{first.name}-{ranks}-{len(flags)}-{flags[0][2:6]}"
                copy_until(first, rest, STEP)
                self.run_with(ranks, rest.name, "--resume", "auto", *flags)
                rests.append(rest)
            self.assert_close(*rests)

    def test_resumed_with_the_same_degree_it_has_the_same_bits(self):
        # Dropout: masks of what every rank has are the same, or norms would differ.
        self.use_config(DROPOUT)
        runs = []
        for name, more in (("whole", ()), ("sequence", SEQUENCE)):
            flags = (*tensor(2), "--load_best_model_at_end", "true", *more)
            whole, said = self.run_with(2, name, *flags)
            self.assertIn(f"{SHARED} 2 tensor parallel ranks", said)
            rest = self.place / f"rest-{name}"
            copy_until(whole, rest, STEP)
            self.run_with(2, rest.name, "--resume", "auto", *flags)
            self.assert_same(self.newest(whole), self.newest(rest))
            runs.append(whole)
        # Parts of the sequence have the parts of the masks, also where ranks have unequal parts.
        self.assert_close(*runs)
        odd = [self.run_with(2, f"odd{len(more)}", *tensor(2), "--max_seq_len", 15, *more)[0]
               for more in ((), SEQUENCE)]
        self.assert_close(*odd)

    # Adapters of layers that are cut by outputs and by inputs; four ranks have unequal hidden
    # units. Masks are those of one process, because each rank draws the whole.
    def test_adapters(self):
        base, _ = self.run_with(1, "base")
        self.use_model(f"{{path: {self.newest(base)}}}")
        lora = ("--lora", "{r: 4, lora_dropout: 0.1, target_modules: all-linear, bias: all}",
                "--learning_rate", "1.0e-2", "--max_steps", 8)
        plain, _ = self.run_with(1, "one", *lora)
        self.assertLess(losses(plain)[8], 0.99 * losses(plain)[1])
        run = None
        for ranks, name, flags in (
                (2, "two sequence", (*tensor(2), *SEQUENCE)), (4, "four", tensor(4)),
                (4, "shards", (*tensor(2), "--fsdp", "full_shard"))):
            expected = plain
            if name == "shards":
                expected, _ = self.run_with(2, "ddp", *PLAIN, *lora)
            run, said = self.run_with(ranks, name, *flags, *lora)
            self.assertIn(SHARED, said)
            self.assert_close(expected, run)
            for file in ("adapter_model.safetensors", "optimizer.safetensors"):
                self.assertEqual(shapes(self.newest(expected), file),
                                 shapes(self.newest(run), file))
            self.assertEqual((self.newest(expected) / "adapter_config.json").read_bytes(),
                             (self.newest(run) / "adapter_config.json").read_bytes())
            if expected is not plain:
                continue
            rest = self.place / f"rest-{name}"
            copy_until(run, rest, STEP)
            self.run_with(1, rest.name, "--resume", "auto", *lora)
            self.assert_close(plain, rest)
        rest = self.place / "rest-one"
        copy_until(plain, rest, STEP)
        self.run_with(2, rest.name, "--resume", "auto", *tensor(2), *lora)
        self.assert_close(plain, rest)
        # The base is converted. Without dropout: AdamW's first steps have a gradient's sign, which
        # rounding to 8 bits can turn around; with one seed of five it moved a norm by 4 %.
        half = ("--bf16", "true", "--lora", lora[1].replace("0.1", "0"), *lora[2:])
        plain, _ = self.run_with(1, "one-bf16", *half)
        run, said = self.run_with(2, "two-bf16", *tensor(2), *SEQUENCE, *half)
        self.assertIn(SHARED, said)
        self.assert_close(plain, run, CLOSE_BF16)

    def test_refuses_what_it_cannot_do(self):
        device_map = f"{{config: {self.place / 'config.json'}, device_map: {{'': cpu}}}}"
        for config, ranks, flags, text in (
                (LLAMA, 3, tensor(2), "tensor_parallel_degree is 2, and there are 3 ranks"),
                (LLAMA, 4, (*tensor(4), "--pipeline_parallel_degree", 2),
                 "pipeline_parallel_degree x tensor_parallel_degree is 8, and there are 4 ranks"),
                (None, 2, tensor(2), "model.device_map splits the model over the devices")):
            if config is None:
                self.use_model(device_map)
            else:
                self.use_config(config)
            done = self.train(ranks, self.place / "refused", *flags, code=2)
            self.assertIn(text, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
