"""Our language models beside transformers, tiny random ones of every family and option; and our
residual networks beside a plain definition in torch.nn.

Transformers writes each model; one C++ process (models_peer.cpp) loads all of them, computes,
saves them again and generates. Logits must agree within 1e-5 and gradients within 1e-4, weights
that went there and back to the bit.
"""

import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print(f"SKIP 1: {missing}")
    sys.exit(77)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

PEER = pathlib.Path(os.environ["LOCKSTEP_BIN"]) / "tests" / "models_peer"
TIME = 14
LOGITS = 1e-5
GRADIENTS = 1e-4
RATE, LOSSES = 0.05, 1e-4  # of a few steps of training

GPT = dict(n_layer=2, n_head=2, n_embd=24, vocab_size=53, n_positions=40, initializer_range=0.2,
           bos_token_id=None, eos_token_id=None)
LLAMA = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=44, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=53, max_position_embeddings=64,
             initializer_range=0.2, bos_token_id=None, eos_token_id=None)
QWEN_WINDOW = dict(use_sliding_window=True, sliding_window=5)
# Small caps, which change the logits of a small model, and a window that cuts.
GEMMA = {**LLAMA, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, "pad_token_id": 3}
PHI = {**LLAMA, "pad_token_id": 7, "original_max_position_embeddings": 64}
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8)


def longrope(pairs):
    return dict(rope_type="longrope", short_factor=[1.0 + 0.1 * i for i in range(pairs)],
                long_factor=[2.0 + 0.3 * i for i in range(pairs)])


# Frequencies of which some are kept, some divided, and some between.
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, beta_fast=4.0,
            original_max_position_embeddings=64)
WIDE = {**LLAMA, "head_dim": 16}
# Widths of 16 bytes, which transformers' grouped products need in bfloat16.
MIXTRAL = {**LLAMA, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT),
    "gpt2-untied": lambda: transformers.GPT2Config(**GPT, tie_word_embeddings=False),
    "gpt2-inner": lambda: transformers.GPT2Config(**GPT, n_inner=40, activation_function="gelu",
                                                  layer_norm_epsilon=1e-3),
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama-tied": lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama-bias": lambda: transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True,
                                                   head_dim=12, pad_token_id=3),
    "llama-llama3": lambda: transformers.LlamaConfig(
        **LLAMA, rope_parameters={**LLAMA3, "rope_theta": 50000.0}),
    "llama-linear": lambda: transformers.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}),
    "llama-longrope": lambda: transformers.LlamaConfig(
        **LLAMA, rope_parameters={**longrope(4), "original_max_position_embeddings": 10}),
    # transformers rotates the whole head of a Llama with it.
    "llama-partial": lambda: transformers.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                  "partial_rotary_factor": 0.5}),
    "llama-eos": lambda: transformers.LlamaConfig(
        **{**LLAMA, "eos_token_id": list(range(0, 53, 2))}),
    "llama-yarn": lambda: transformers.LlamaConfig(**WIDE, rope_parameters=YARN),
    "llama-yarn-defaults": lambda: transformers.LlamaConfig(
        **{**WIDE, "max_position_embeddings": 96},
        rope_parameters={"rope_type": "yarn", "factor": None, "rope_theta": 100.0,
                         "beta_fast": 0, "original_max_position_embeddings": 48}),
    "qwen2-yarn": lambda: transformers.Qwen2Config(
        **WIDE, rope_parameters={**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}),
    "qwen3-yarn": lambda: transformers.Qwen3Config(
        **WIDE, rope_parameters={**YARN, "truncate": False, "attention_factor": 1.3}),
    "mistral-yarn": lambda: transformers.MistralConfig(
        **WIDE, sliding_window=None, rope_parameters={**YARN, "truncate": False, "beta_slow": 2.0}),
    "mixtral-yarn": lambda: transformers.MixtralConfig(
        **{**MIXTRAL, "head_dim": 16, "num_experts_per_tok": 4}, rope_parameters=YARN),
    "gemma2-yarn": lambda: transformers.Gemma2Config(
        **{**GEMMA, "head_dim": 16}, rope_parameters={**YARN, "mscale": 2.0}),
    "phi3": lambda: transformers.Phi3Config(**PHI),
    "phi3-window": lambda: transformers.Phi3Config(**PHI, sliding_window=5),
    "phi3-partial": lambda: transformers.Phi3Config(
        **PHI, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                "partial_rotary_factor": 0.5}),
    "phi3-longrope-short": lambda: transformers.Phi3Config(**PHI, rope_parameters=longrope(4)),
    "phi3-longrope-long": lambda: transformers.Phi3Config(
        **{**PHI, "original_max_position_embeddings": 10}, rope_parameters=longrope(4)),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA),
    "qwen2-tied": lambda: transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True,
                                                   rope_parameters={"rope_type": "default",
                                                                    "rope_theta": 1e6}),
    "qwen2-window": lambda: transformers.Qwen2Config(**LLAMA, **QWEN_WINDOW, max_window_layers=1),
    "qwen2-types": lambda: transformers.Qwen2Config(
        **LLAMA, **QWEN_WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**LLAMA, sliding_window=5, head_dim=12),
    # What transformers makes of a Mistral's file with layer_types; see write_good().
    "mistral-types": lambda: transformers.MinistralConfig(
        **LLAMA, sliding_window=5, head_dim=12,
        layer_types=["full_attention", "sliding_attention"]),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=12),
    "qwen3-bias": lambda: transformers.Qwen3Config(**LLAMA, head_dim=8, attention_bias=True,
                                                   tie_word_embeddings=True, rms_norm_eps=1e-3),
    "qwen3-window": lambda: transformers.Qwen3Config(**LLAMA, **QWEN_WINDOW, head_dim=12,
                                                     max_window_layers=1),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA),
    "gemma2-plain": lambda: transformers.Gemma2Config(
        **{**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        tie_word_embeddings=False),
    "gemma2-bias": lambda: transformers.Gemma2Config(
        **GEMMA, attention_bias=True, layer_types=["full_attention", "sliding_attention"]),
    "starcoder2": lambda: transformers.Starcoder2Config(**LLAMA),
    "starcoder2-window": lambda: transformers.Starcoder2Config(
        **LLAMA, sliding_window=5, head_dim=12, pad_token_id=3, tie_word_embeddings=False),
    "starcoder2-no-bias": lambda: transformers.Starcoder2Config(
        **LLAMA, use_bias=False, hidden_act="gelu", norm_epsilon=1e-3),
    "starcoder2-dropout": lambda: transformers.Starcoder2Config(
        **LLAMA, sliding_window=5, embedding_dropout=0.1, residual_dropout=0.2,
        attention_dropout=0.3),
    "starcoder2-yarn": lambda: transformers.Starcoder2Config(**WIDE, rope_parameters=YARN),
    "mixtral": lambda: transformers.MixtralConfig(**MIXTRAL),
    "mixtral-window": lambda: transformers.MixtralConfig(
        **MIXTRAL, sliding_window=5, head_dim=12, tie_word_embeddings=True, pad_token_id=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}),
    "mixtral-router": lambda: transformers.MixtralConfig(
        **{**MIXTRAL, "num_local_experts": 5, "num_experts_per_tok": 3},
        output_router_logits=True, router_aux_loss_coef=0.5, router_jitter_noise=0.2),
    "mixtral-all": lambda: transformers.MixtralConfig(
        **{**MIXTRAL, "num_local_experts": 3, "num_experts_per_tok": 3}),
}
# Files as earlier versions and other programs write them.
VARIANTS = {"gpt2-old-names": "gpt2", "gpt2-other-names": "gpt2",
            "llama-old-config": "llama-llama3",
            # transformers does not read the field of these.
            "mixtral-types": "mixtral-window", "phi3-types": "phi3-window",
            "starcoder2-types": "starcoder2-window"}


def make_model(name):
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[VARIANTS.get(name, name)]())
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that are neither one nor zero
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def as_in_files(tensors):
    """transformers has the experts of a Mixtral in one tensor, and one tensor each in files."""
    if not any(".experts." in name for name in tensors):
        return tensors
    named = {}
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        experts, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for i, both in enumerate(tensor):
                named[f"{experts}.{i}.w1.weight"], named[f"{experts}.{i}.w3.weight"] = both.chunk(2)
        elif kind == "down_proj":
            named |= {f"{experts}.{i}.w2.weight": one for i, one in enumerate(tensor)}
        else:
            named[name] = tensor
    return named


def loss_of(model, inputs):
    """With what transformers adds to it for labels; ours are not shifted by the model."""
    out = model(inputs["ids"])
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), inputs["targets"].flatten())
    if getattr(out, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss
    return loss, out.logits


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def to_old_names(folder):
    """As GPT2Model of transformers 4 wrote them: without the prefix, with the causal masks."""
    file = folder / "model.safetensors"
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    for layer in range(GPT["n_layer"]):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 40, 40).tril()
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, file, metadata={"format": "pt"})


def to_old_config(config):
    """As transformers 4 wrote it."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    del config["architectures"], config["head_dim"]


def to_other_names(config):
    """The sizes by the names that other models have for them. n_head is there too and not used."""
    for name, other in transformers.GPT2Config.attribute_map.items():
        config[name] = config.pop(other)
    config["n_head"] = 4


def write_good(folder, name, model):
    model.save_pretrained(folder)
    if name == "gpt2-old-names":
        to_old_names(folder)
    if name == "llama-old-config":
        edit_json(folder / "config.json", to_old_config)
    if name == "mistral-types":
        change_field(model_type="mistral", architectures=["MistralForCausalLM"])(folder)
    elif name.endswith("-types") and name in VARIANTS:
        change_field(layer_types=["full_attention", "sliding_attention"])(folder)
    if name == "gpt2-other-names":
        edit_json(folder / "config.json", to_other_names)
    generator = torch.Generator().manual_seed(len(name))
    ids = torch.randint(0, 53, (3, TIME), generator=generator)
    ids[0, 2] = model.config.pad_token_id or 0
    save_file({"ids": ids, "targets": torch.randint(0, 53, (3, TIME), generator=generator),
               "prompt": ids[1, :5].clone()}, folder / "inputs.safetensors")


def change_field(**fields):
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(fields))


def change_tensors(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return edit




NORM = "model.norm.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
# What is changed in a folder that can be loaded, and what the refusal says.
BAD = {
    "gpt2-upcast": (change_field(reorder_and_upcast_attn=True),
                    "reorder_and_upcast_attn is true, which is not supported. It must be false."),
    "gpt2-inverse": (change_field(scale_attn_by_inverse_layer_idx=True),
                     "scale_attn_by_inverse_layer_idx is true"),
    "gpt2-unscaled": (change_field(scale_attn_weights=False), "scale_attn_weights is false"),
    "gpt2-cross": (change_field(add_cross_attention=True), "add_cross_attention is true"),
    "gpt2-causal": (change_field(is_causal=False), "is_causal is false, which is not supported. It "
                    "must be true: a model that sees the next token cannot learn to predict it."),
    "llama-causal": (change_field(is_causal=None), "is_causal is null"),
    "llama-partial-scaled": (change_field(rope_parameters={
        "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor 0.5 with rope_type linear is not supported for model_type llama"),
    "phi3-window-of-one": (change_field(sliding_window=1), "sliding_window is 1, which is not "
                           "supported. A token that sees itself alone has no context."),
    "gpt2-activation": (change_field(activation_function="mish"), 'activation_function is "mish"'),
    "gpt2-heads": (change_field(n_head=5), "n_embd 24 does not divide into 5 heads"),
    "gpt2-text": (change_field(n_layer="two"), "config.n_layer must be"),
    "llama-dynamic": (change_field(rope_parameters={"rope_type": "dynamic", "factor": 4.0}),
                      'rope_parameters.rope_type is "dynamic", which is not supported. Known are'),
    "llama-no-factor": (change_field(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
                        "rope_parameters.factor is missing, and rope_type linear needs it."),
    "llama-null-factor": (change_field(rope_scaling={"type": "linear", "factor": None}),
                          "rope_scaling.factor is missing, and rope_type linear needs it."),
    "llama-no-low": (change_field(rope_parameters={**LLAMA3, "low_freq_factor": None}),
                     "rope_parameters.low_freq_factor is missing, and rope_type llama3 needs it."),
    "llama-yarn-factor": (change_field(rope_parameters={"rope_type": "yarn"}),
                          "rope_parameters.factor is missing, and rope_type yarn needs it."),
    "llama-no-long": (change_field(rope_parameters={"rope_type": "longrope",
                                                    "short_factor": [1.0] * 4}),
                      "rope_parameters.long_factor is missing, and rope_type longrope needs it."),
    "llama-text-factor": (change_field(rope_parameters={"rope_type": "linear", "factor": "8"}),
                          "rope_parameters.factor must be a number"),
    "llama-mistyped": (change_field(rope_parameters={**YARN, "attention_facter": 2.0}),
                       "rope_parameters has no key 'attention_facter'. Did you mean "
                       "attention_factor?"),
    "llama-no-type": (change_field(rope_parameters={"factor": 8.0, "rope_theta": 1e4}),
                      "rope_parameters has no key 'factor'."),
    "llama-class": (change_field(architectures=["LlamaForSequenceClassification"]),
                    'architectures is ["LlamaForSequenceClassification"]'),
    "llama-type": (change_field(model_type="mistral"), 'model_type is "mistral"'),
    "llama-unknown": (change_field(model_type="ministral", architectures=["MinistralForCausalLM"]),
                      'architectures is ["MinistralForCausalLM"], which is not supported. The '
                      "nearest known one is MistralForCausalLM. Known are GPT2LMHeadModel"),
    "llama-unknown-type": (change_field(model_type="qwen3_moe", architectures=None),
                           'model_type is "qwen3_moe", which is not supported. The nearest known '
                           "one is qwen3. Known are GPT2LMHeadModel"),
    "qwen2-chunked": (change_field(layer_types=["chunked_attention", "full_attention"]),
                      'layer_types is "chunked_attention", which is not supported.'),
    "qwen2-few-types": (change_field(layer_types=["full_attention"]),
                        "layer_types has 1 names, and the model 2 layers."),
    "gemma2-bidirectional": (change_field(use_bidirectional_attention=True),
                             "use_bidirectional_attention is true, which is not supported."),
    "starcoder2-groups": (change_field(num_key_value_heads=3),
                          "4 attention heads cannot share 3 heads of keys and values equally"),
    "starcoder2-no-biases": (change_field(use_bias=False),
                             "'model.layers.0.mlp.c_fc.bias' is not the model's"),
    "starcoder2-residual": (change_field(residual_dropout=1.5),
                            "config.residual_dropout must be from 0 to 1"),
    "mixtral-too-many": (change_field(num_experts_per_tok=5),
                         "num_experts_per_tok 5 with num_local_experts 4."),
    "mixtral-missing": (change_tensors(lambda t: t.pop(EXPERT)), f"'{EXPERT}' is missing"),
    "mixtral-more": (change_field(num_local_experts=3), "is not the model's"),
    "llama-quantized": (change_field(quantization_config={"bits": 4}), "quantization_config is"),
    "llama-groups": (change_field(num_key_value_heads=3),
                     "4 attention heads cannot share 3 heads of keys and values equally"),
    "llama-missing": (change_tensors(lambda t: t.pop(NORM)), f"'{NORM}' is missing"),
    "llama-extra": (change_tensors(lambda t: t.update({"more": torch.ones(2)})),
                    "'more' is not the model's"),
    "llama-shape": (change_tensors(lambda t: t.update({NORM: torch.ones(31)})),
                    f"'{NORM}' is [31] instead of [32]"),
    "llama-integers": (change_tensors(lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)})),
                       f"'{NORM}' is of type I8"),
    "llama-no-config": (lambda folder: (folder / "config.json").unlink(), "there is no"),
    "llama-no-weights": (lambda folder: (folder / "model.safetensors").unlink(),
                         "has neither model.safetensors nor"),
    "phi3-factors": (change_field(rope_parameters=longrope(3)),
                     "rope_parameters.short_factor has 3 numbers, and half of the rotated width"),
}


class ModelsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="lockstep-models-")
        cls.addClassCleanup(directory.cleanup)
        cls.place = pathlib.Path(directory.name)
        cls.models = {name: make_model(name) for name in [*CONFIGS, *VARIANTS]}
        for name, model in cls.models.items():
            write_good(cls.place / "good" / name, name, model)
        for name, (change, _) in BAD.items():
            folder = cls.place / "bad" / name
            shutil.copytree(cls.place / "good" / name.split("-")[0], folder)
            change(folder)
        done = subprocess.run([PEER, cls.place], capture_output=True, text=True, timeout=900,
                              check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def each(self):
        for name, model in self.models.items():
            folder = self.place / "good" / name
            inputs, out = (load_file(folder / f"{kind}.safetensors") for kind in ("inputs", "out"))
            yield name, model, folder, inputs, out

    def assert_near(self, ours, theirs, limit, what):
        self.assertEqual(ours.shape, theirs.shape, what)
        apart = (ours.double() - theirs.double()).abs().max().item()
        self.assertLessEqual(apart, limit, f"{what}: {apart}")

    def test_logits_and_gradients(self):
        for name, model, _, inputs, out in self.each():
            model.zero_grad()
            loss, logits = loss_of(model, inputs)
            self.assertGreater(logits.abs().max().item(), 0.5)  # something to differ in
            loss.backward()
            self.assert_near(out["logits"], logits, LOGITS, name)
            self.assert_near(out["loss"], loss, LOGITS, name)
            worst = {"logits": (out["logits"] - logits).abs().max().item(), "gradients": 0.0}
            names = {key.removeprefix("grad.") for key in out if key.startswith("grad.")}
            theirs = as_in_files({key: p.grad for key, p in model.named_parameters()})
            self.assertEqual(names, set(theirs))
            for key, gradient in theirs.items():
                self.assert_near(out[f"grad.{key}"], gradient, GRADIENTS, f"{name} {key}")
                worst["gradients"] = max(
                    worst["gradients"], (out[f"grad.{key}"] - gradient).abs().max().item())
            print(f"{name}: " + ", ".join(f"{what} {far:.1e} apart" for what, far in
                                          worst.items()), flush=True)

    def test_a_few_steps_of_training(self):
        for name, model, _, inputs, out in self.each():
            own = copy.deepcopy(model)
            optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
            losses = []
            for _ in range(len(out["losses"])):
                optimizer.zero_grad()
                loss, _ = loss_of(own, inputs)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            self.assertLess(losses[-1], losses[0] - 0.01, name)
            self.assert_near(out["losses"], torch.tensor(losses), LOSSES, name)

    def test_dropout_and_noise_in_training(self):
        """Both sides draw from the same generator, in the same order."""
        noisy = set()
        for name, model, _, inputs, out in self.each():
            torch.manual_seed(5)
            with torch.no_grad():
                logits = copy.deepcopy(model).train()(inputs["ids"]).logits
            self.assert_near(out["training"], logits, LOGITS, name)
            if (logits - out["logits"]).abs().max().item() > 0.01:
                noisy.add(name)
        self.assertEqual(noisy, {name for name in self.models if name.startswith("gpt2")}
                         | {"mixtral-router", "starcoder2-dropout"})

    def test_a_cache_gives_the_same_logits(self):
        for name, model, _, inputs, out in self.each():
            # Frequencies change on the way, there too.
            if name in ("llama-longrope", "phi3-longrope-long"):
                with torch.no_grad():
                    cache = transformers.DynamicCache(config=model.config)
                    cuts = [0, 4, 5, *range(8, TIME + 1)]
                    theirs = torch.cat([model(inputs["ids"][:, a:b], past_key_values=cache).logits
                                        for a, b in zip(cuts, cuts[1:])], 1)
                self.assert_near(out["pieces"], theirs, LOGITS, name)
            else:
                self.assert_near(out["pieces"], out["logits"], LOGITS, name)

    def test_weights_there_and_back(self):
        for name, model, folder, inputs, out in self.each():
            for kind in ("saved", "sharded"):
                back, said = transformers.AutoModelForCausalLM.from_pretrained(
                    folder / kind, output_loading_info=True, dtype=torch.float32)
                self.assertFalse(any(said.values()), (name, kind, said))
                self.assertIs(type(back), type(model))
                ours, theirs = back.state_dict(), model.state_dict()
                self.assertEqual(set(ours), set(theirs))
                for key, tensor in theirs.items():
                    self.assertTrue(torch.equal(ours[key], tensor), (name, kind, key))
                with torch.no_grad():
                    self.assertTrue(torch.equal(back(inputs["ids"]).logits,
                                                model(inputs["ids"]).logits), (name, kind))
            self.assertTrue(list((folder / "sharded").glob("model-00002-of-*.safetensors")))
            self.assertTrue(torch.equal(out["reloaded"], out["logits"]))

    def test_half_precision(self):
        for name, _, folder, inputs, out in self.each():
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16)
            self.assertEqual(out["half"].dtype, torch.bfloat16)
            with torch.no_grad():
                logits = theirs(inputs["ids"]).logits
            # A rounding of bfloat16 is 2^-9 of a number; there are two dozen of them in a row.
            limit = 24 * 2.0 ** -9 * logits.abs().max().item()
            # Rounding may send a token to other experts, unless it goes to all.
            if "mixtral" not in name or name in ("mixtral-all", "mixtral-yarn"):
                self.assert_near(out["half"], logits, limit, name)
            saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "half", dtype="auto")
            for key, tensor in theirs.state_dict().items():
                self.assertTrue(torch.equal(saved.state_dict()[key], tensor), (name, key))

    def test_generation(self):
        ended = 0
        for name, model, folder, inputs, _ in self.each():
            ours = [int(word) for word in (folder / "generated.txt").read_text().split()]
            prompt = inputs["prompt"].unsqueeze(0)
            theirs = model.generate(prompt, max_new_tokens=16, do_sample=False,
                                    attention_mask=torch.ones_like(prompt))[0, 5:].tolist()
            self.assertEqual(ours, theirs, name)
            ended += len(ours) < 16
        self.assertEqual(ended, 1)  # the one that has tokens to end with

    def test_what_is_refused(self):
        for name, (_, text) in BAD.items():
            with self.subTest(name):
                said = (self.place / "bad" / name / "error.txt").read_text()
                self.assertIn(text, said)
                self.assertIn(str(self.place / "bad" / name) if "heads" not in name
                              and "groups" not in name and "too-many" not in name else "[", said)


class Residual(torch.nn.Module):
    """A block of the paper's networks, strided in the 3 by 3 convolution, with torchvision's
    names."""

    def __init__(self, inputs, sizes, stride):
        super().__init__()
        strided = next(i for i, (_, size) in enumerate(sizes) if size == 3)
        self.count = len(sizes)
        before = inputs
        for i, (width, size) in enumerate(sizes):
            setattr(self, f"conv{i + 1}", torch.nn.Conv2d(
                before, width, size, stride if i == strided else 1, size // 2, bias=False))
            setattr(self, f"bn{i + 1}", torch.nn.BatchNorm2d(width))
            before = width
        self.downsample = None
        if stride != 1 or before != inputs:
            self.downsample = torch.nn.Sequential(
                torch.nn.Conv2d(inputs, before, 1, stride, bias=False),
                torch.nn.BatchNorm2d(before))

    def forward(self, x):
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = torch.relu(y) if i < self.count else y
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


def residual_network(depth, classes):
    deep = depth >= 50
    net = torch.nn.Sequential()
    net.add_module("conv1", torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False))
    net.add_module("bn1", torch.nn.BatchNorm2d(64))
    net.append(torch.nn.ReLU())
    net.append(torch.nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, count in enumerate({18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]):
        width = 64 << stage
        sizes = [(width, 1), (width, 3), (4 * width, 1)] if deep else [(width, 3), (width, 3)]
        blocks = []
        for i in range(count):
            blocks.append(Residual(inputs, sizes, 2 if stage > 0 and i == 0 else 1))
            inputs = sizes[-1][0]
        net.add_module(f"layer{stage + 1}", torch.nn.Sequential(*blocks))
    net.append(torch.nn.AdaptiveAvgPool2d(1))
    net.append(torch.nn.Flatten())
    net.add_module("fc", torch.nn.Linear(inputs, classes))
    return net


class ResNetTest(unittest.TestCase):
    def test_as_in_torch(self):
        for depth, parameters in ((18, 11_180_103), (50, 23_522_375)):
            torch.manual_seed(depth)
            # In double: in float a rounding of one convolution kernel or another may open or close
            # a ReLU, and a gradient of a deep network in training then differs by percents.
            net = residual_network(depth, 7).double()
            self.assertEqual(sum(p.numel() for p in net.parameters()), parameters)
            images = torch.randn(4, 3, 64, 64, dtype=torch.float64)
            labels = torch.tensor([0, 3, 6, 1])
            with tempfile.TemporaryDirectory(prefix="lockstep-resnet-") as name:
                folder = pathlib.Path(name)
                save_file(net.state_dict(), folder / "model.safetensors")
                save_file({"images": images, "labels": labels}, folder / "inputs.safetensors")
                subprocess.run([PEER, "resnet", str(depth), folder], timeout=900, check=True)
                out = load_file(folder / "out.safetensors")
            evaluated = net.eval()(images)
            logits = net.train()(images)
            loss = torch.nn.functional.cross_entropy(logits, labels)
            loss.backward()
            expected = {"evaluated": evaluated, "trained": logits, "loss": loss,
                        **{f"grad.{name}": p.grad for name, p in net.named_parameters()},
                        **{f"state.{name}": b for name, b in net.named_buffers()}}
            self.assertEqual(set(out), set(expected))
            for name, tensor in expected.items():
                apart = (out[name].double() - tensor.double()).abs().max().item()
                scale = max(1.0, tensor.abs().max().item())
                self.assertLessEqual(apart / scale, 1e-9, (depth, name))


if __name__ == "__main__":
    unittest.main()
