"""`pipeline_parallel_degree` under `lockstep train`: the bits of one process, checkpoints that
continue with any number of stages or without, and copies of the stages."""

import unittest

from train_case import TrainCase, copy_until, losses

STEP = 4  # of a checkpoint in the middle
# Every sum has the order of one process, unless stages share a weight or a norm is clipped by.
EXACT = ("--max_grad_norm", "0")
TIED = "{name: gpt, n_layer: 4, n_head: 2, n_embd: 32, n_positions: 16, vocab_size: 257}"
UNTIED = {"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
          "max_position_embeddings": 16, "tie_word_embeddings": False}
PLAIN = ("--shard_optimizer", "false")


def stages(degree, schedule="1F1B"):
    return ("--pipeline_parallel_degree", degree, "--pipeline_parallel_schedule", schedule)


class Pipeline(TrainCase):
    keys = {"max_steps": 8, "gradient_accumulation_steps": 3, "eval_steps": STEP,
            "save_steps": STEP}

    def setUp(self):
        super().setUp()
        self.use_config(UNTIED)

    def assert_same_training(self, one, other):
        """Weights and optimizer, to the byte: other numbers of stages have other generators."""
        names = ("model.safetensors", "adapter_model.safetensors", "optimizer.safetensors")
        found = [name for name in names if (one / name).exists()]
        self.assertEqual(len(found), 2)
        for name in found:
            self.assertEqual((one / name).read_bytes(), (other / name).read_bytes(), name)

    def assert_equal_runs(self, one, other):
        for name in ("loss", "eval_loss"):
            self.assertEqual(losses(one, name), losses(other, name))
        self.assert_same_training(self.newest(one), self.newest(other))

    def test_has_the_bits_of_one_process(self):
        plain, _ = self.run_with(1, "one", *EXACT)
        for ranks, schedule in ((2, "GPipe"), (2, "1F1B"), (3, "1F1B"), (2, "Interleaved1F1B")):
            split, said = self.run_with(ranks, f"{schedule}-{ranks}", *stages(ranks, schedule),
                                        *EXACT)
            self.assertIn(f"a pipeline of {ranks} ranks and 3 micro-batches a step", said)
            self.assertIn(f"pipeline stages ({schedule})", said)
            self.assert_equal_runs(plain, split)

    def test_copies_of_the_stages_have_the_bits_of_data_parallelism(self):
        plain, _ = self.run_with(2, "ddp", *PLAIN, *EXACT)
        split, said = self.run_with(4, "split", *stages(2), *EXACT)
        self.assertIn("replicas identical on 2 ranks", said)
        self.assert_equal_runs(plain, split)

    def test_tied_embeddings_clipping_and_bf16(self):
        self.use_model(TIED)
        for name, flags in (("float", ()), ("bf16", ("--bf16", "true"))):
            plain, _ = self.run_with(1, f"one-{name}", *flags)
            split, _ = self.run_with(2, f"split-{name}", *stages(2), *flags)
            self.assert_close(plain, split, 1e-3)

    def test_every_checkpoint_continues_everywhere(self):
        whole, _ = self.run_with(1, "whole", *EXACT)
        split, _ = self.run_with(2, "split", *stages(2), *EXACT)
        for first, ranks, flags in ((split, 1, ()), (whole, 2, stages(2)), (split, 3, stages(3))):
            rest = self.place / f"rest-{first.name}-{ranks}"
            copy_until(first, rest, STEP)
            self.run_with(ranks, rest.name, "--resume", "auto", *flags, *EXACT)
            self.assert_same_training(self.newest(whole), self.newest(rest))

    # The base is frozen: the first stage's adapters are trained all the same.
    def test_adapters_and_the_best_model(self):
        base, _ = self.run_with(1, "base", *EXACT)
        self.use_model(f"{{path: {self.newest(base)}}}")
        flags = ("--lora", "{r: 4, target_modules: [q_proj]}", "--load_best_model_at_end", "true",
                 *EXACT)
        plain, _ = self.run_with(1, "one", *flags)
        split, _ = self.run_with(2, "split", *stages(2), *flags)
        self.assert_equal_runs(plain, split)

    # Stages draw their own masks, and go on with their own generators.
    def test_dropout_is_resumed(self):
        config = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_layer": 3, "n_head": 2,
                  "n_positions": 16, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.0}
        self.use_config(config)
        whole, _ = self.run_with(2, "whole", *stages(2))
        rest = self.place / "rest"
        copy_until(whole, rest, STEP)
        self.run_with(2, "rest", "--resume", "auto", *stages(2))
        self.assert_same(self.newest(whole), self.newest(rest))

    def test_refuses_what_it_cannot_do(self):
        for ranks, flags, text in (
                (3, stages(2), "pipeline_parallel_degree is 2, and there are 3 ranks"),
                (4, (*stages(2), "--fsdp", "full_shard", "--data_parallel_shard_degree", 3),
                 "data_parallel_shard_degree is 3, and 2 ranks hold the same part"),
                (2, (*stages(2), "--shard_optimizer", "true"), "Delete shard_optimizer"),
                (2, (*stages(2), "--auto_find_batch_size", "true"), "tried on the whole model"),
                (2, stages(2, "ZeroBubble"), "Interleaved1F1B"),
                (2, ("--fsdp", "full_shard", "--data_parallel_shard_degree", 3),
                 "data_parallel_shard_degree is 3, and the run has 2 ranks. Start a multiple of 3, "
                 "or write 2."),
                (5, stages(5), "5 stages (5 ranks x 1), and the model has 4 blocks")):
            done = self.train(ranks, self.place / "refused", *flags, code=2)
            self.assertIn(text, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
