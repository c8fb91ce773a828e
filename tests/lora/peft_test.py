"""LoRA beside PEFT, on tiny models with random weights.

Both sides begin with the same base and the same adapter, take 20 steps of AdamW on the same
batches, and must see the same losses within 1e-4; each loads the adapter that the other wrote, and
computes the same logits with it within 1e-5. The tolerances are those of float32 sums in another
order: a loss differs by about 1e-7, and twenty steps enlarge that less than a hundred times.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

MISSING = [name for name in ("torch", "transformers", "peft", "safetensors")
           if importlib.util.find_spec(name) is None]
if MISSING:
    print(f"SKIP 1: the interpreter has no {', '.join(MISSING)}; set LOCKSTEP_PYTHON")
    sys.exit(77)

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

torch.set_num_threads(1)
PEER = pathlib.Path(os.environ["LOCKSTEP_BIN"], "tests", "lora_peer")
LIMIT_S = 600
STEPS, BATCH, TIME, VOCABULARY, RATE = 20, 4, 16, 61, 0.01
LOSS_TOLERANCE, LOGIT_TOLERANCE = 1e-4, 1e-5
# Rounded to 8 bits at other places, and trained on.
BF16_LOSS_TOLERANCE = 0.02

QUIET = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, pad_token_id=None)
GPT2 = transformers.GPT2Config(
    n_layer=2, n_head=2, n_embd=32, n_positions=TIME, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, **QUIET)

LLAMA = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=TIME, **QUIET)
PHI3 = transformers.Phi3Config(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=TIME,
    original_max_position_embeddings=TIME, resid_pdrop=0.0, embd_pdrop=0.0, **QUIET)
SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=TIME, **QUIET)
QWEN2 = transformers.Qwen2Config(**SMALL)
MISTRAL = transformers.MistralConfig(**SMALL, sliding_window=6)
QWEN3 = transformers.Qwen3Config(**SMALL, head_dim=12)
GEMMA2 = transformers.Gemma2Config(**SMALL, head_dim=12, query_pre_attn_scalar=12,
                                   sliding_window=6)
STARCODER2 = transformers.Starcoder2Config(**SMALL, sliding_window=6)
MIXTRAL = transformers.MixtralConfig(**SMALL, num_local_experts=4)


@dataclasses.dataclass
class Case:
    family: object
    lora: dict
    dtype: str = "float32"
    nf4: bool = False


GPT2_TARGETS = ["c_attn", "mlp.c_proj"]
CASES = {
    "gpt2": Case(GPT2, dict(r=4, lora_alpha=8, target_modules=GPT2_TARGETS)),
    "gpt2_all_linear": Case(GPT2, dict(r=4, target_modules="all-linear", use_rslora=True)),
    "gpt2_regex": Case(GPT2, dict(
        r=2, target_modules=r".*\.h\.\d+\.(attn\.c_(attn|proj)|mlp\.c_fc)",
        exclude_modules=r".*\.1\.attn\.c_proj")),
    "gpt2_patterns": Case(GPT2, dict(
        r=4, lora_alpha=6, target_modules=["c_attn", "c_proj", "c_fc"],
        rank_pattern={"mlp.c_proj": 2, r".*\.0\.attn.*": 3, "^transformer.h.1.mlp.c_fc": 1},
        alpha_pattern={"c_fc": 2})),
    "gpt2_bias_all": Case(GPT2, dict(r=4, target_modules=GPT2_TARGETS, bias="all")),
    "gpt2_bias_lora_only": Case(GPT2, dict(
        r=4, target_modules=GPT2_TARGETS, bias="lora_only", modules_to_save=["ln_f", "wpe"])),
    "gpt2_layers": Case(GPT2, dict(
        r=4, target_modules=["c_attn"], layers_to_transform=[1], layers_pattern="h")),
    "gpt2_bf16": Case(GPT2, dict(r=4, target_modules=GPT2_TARGETS), dtype="bfloat16"),
    "llama": Case(LLAMA, dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])),
    "llama_all_linear": Case(LLAMA, dict(
        r=4, lora_alpha=2, target_modules="all-linear", use_rslora=True,
        rank_pattern={"down_proj": 2})),
    "llama_head": Case(LLAMA, dict(
        r=2, target_modules=["lm_head", "o_proj"], modules_to_save=["norm"])),
    "llama_bf16": Case(LLAMA, dict(r=4, target_modules="all-linear"), dtype="bfloat16"),
    "phi3": Case(PHI3, dict(
        r=4, lora_alpha=8, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])),
    "phi3_regex": Case(PHI3, dict(
        r=3, target_modules=r"model\.layers\.[01]\.self_attn\.(qkv|o)_proj",
        alpha_pattern={"o_proj": 4})),
    "qwen2": Case(QWEN2, dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
                              bias="lora_only")),
    "qwen2_all_linear": Case(QWEN2, dict(r=4, target_modules="all-linear")),
    "mistral": Case(MISTRAL, dict(r=4, target_modules="all-linear")),
    "qwen3": Case(QWEN3, dict(r=4, lora_alpha=8, target_modules="all-linear",
                              modules_to_save=["q_norm"])),
    # Adapters of routers and experts, which PEFT has too, are refused.
    "mixtral": Case(MIXTRAL, dict(r=4, lora_alpha=8,
                                  target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                                  modules_to_save=["norm"])),
    "starcoder2": Case(STARCODER2, dict(
        r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "c_fc", "mlp.c_proj"],
        bias="lora_only", modules_to_save=["post_attention_layernorm"])),
    "starcoder2_all_linear": Case(STARCODER2, dict(r=4, target_modules="all-linear")),
    "gemma2": Case(GEMMA2, dict(r=4, lora_alpha=8, target_modules="all-linear")),
}
# On a base in 4 bits, which bitsandbytes encodes. Widths are multiples of 64: for others its
# library for CPUs decodes with the magnitudes of other blocks.
WIDE = {**SMALL, "hidden_size": 64, "intermediate_size": 128}
ALL_LINEAR = dict(r=4, lora_alpha=8, target_modules="all-linear")
CASES |= {
    "gpt2_nf4": Case(transformers.GPT2Config(**{**GPT2.to_dict(), "n_embd": 64}),
                     dict(r=4, lora_alpha=8, target_modules=GPT2_TARGETS), nf4=True),
    "llama_nf4": Case(transformers.LlamaConfig(**WIDE), ALL_LINEAR, nf4=True),
    "llama_bf16_nf4": Case(transformers.LlamaConfig(**WIDE),
                           dict(r=4, target_modules=["q_proj", "v_proj"]), "bfloat16", nf4=True),
    "phi3_nf4": Case(transformers.Phi3Config(**WIDE, original_max_position_embeddings=TIME),
                     dict(r=4, target_modules=["qkv_proj", "down_proj"]), nf4=True),
    "qwen2_nf4": Case(transformers.Qwen2Config(**WIDE),
                      dict(r=4, target_modules=["q_proj", "v_proj"], bias="lora_only"), nf4=True),
}


def random_ids():
    generator = torch.Generator().manual_seed(5)
    # Something to learn: seven tokens alone appear, each a small step after its predecessor.
    steps = torch.randint(1, 4, (STEPS, BATCH, TIME), generator=generator)
    return steps.cumsum(-1) % 7


def nearest_of_dynamic_map(values, blocksize, **_):
    """bitsandbytes' definition (its backend `default`) in place of its library for CPUs, whose
    search for the nearest number is approximate: about one of 1000 magnitudes gets a neighbour."""
    functional = importlib.import_module("bitsandbytes.functional")
    code = functional.create_dynamic_map()
    groups = torch.nn.functional.pad(values, (0, -values.numel() % blocksize)).view(-1, blocksize)
    scales = groups.abs().amax(1)
    found = torch.bucketize(groups * (1 / scales)[:, None], (code[:-1] + code[1:]) / 2)
    return (found.flatten()[:values.numel()].to(torch.uint8),
            functional.QuantState(scales, code=code, blocksize=blocksize, dtype=torch.float32))


def base_model(case, folder):
    dtype = getattr(torch, case.dtype)
    more = {}
    if case.nf4:
        importlib.import_module("bitsandbytes.functional").quantize_blockwise = (
            nearest_of_dynamic_map)
        more = dict(device_map={"": "cpu"}, quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more)


def logits_of(model, ids):
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def train(model, ids):
    """PEFT's side of the training."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01, fused=True)
    losses = []
    for batch in ids:
        logits = model(input_ids=batch[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


class PeftTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="lockstep-lora-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.ids = random_ids()
        save_file({"ids": self.ids.contiguous()}, self.folder / "ids.safetensors")
        self.runs = 0

    def ask(self, case, *jobs):
        """Our side, of all jobs, each with its adapter, in one process. Returns the losses and
        logits of each."""
        files, outs = [], []
        for job in jobs:
            self.runs += 1
            outs.append(self.folder / f"out{self.runs}.safetensors")
            files.append(self.folder / f"job{self.runs}.json")
            files[-1].write_text(json.dumps({
                **job, "model": str(self.folder / "base"), "nf4": case.nf4,
                "adapter": str(self.folder / job["adapter"]), "out": str(outs[-1]),
                "ids": str(self.folder / "ids.safetensors"), "dtype": case.dtype, "lr": RATE}))
        done = subprocess.run([PEER, *files], capture_output=True, text=True, timeout=LIMIT_S,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [load_file(out) for out in outs]

    def near(self, ours, theirs, tolerance, what):
        apart = (ours - theirs).abs().max().item()
        print(f"{what}: {apart:.1e} apart", flush=True)
        self.assertLess(apart, tolerance, what)

    def check(self, case):
        if case.nf4 and importlib.util.find_spec("bitsandbytes") is None:
            self.skipTest("the interpreter has no bitsandbytes")
        folder, ids = self.folder, self.ids
        torch.manual_seed(3)
        base = transformers.AutoModelForCausalLM.from_config(case.family)
        base.save_pretrained(folder / "base")
        # Random from the start, so that a step of B reaches A and the first logits show both.
        config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **case.lora)
        theirs = peft.get_peft_model(base_model(case, folder / "base"), config)
        theirs.save_pretrained(folder / "start")
        first = logits_of(theirs, ids[0])
        exact = case.dtype == "float32"
        logit_tolerance = LOGIT_TOLERANCE if exact else BF16_LOSS_TOLERANCE

        losses = train(theirs, ids)
        theirs.save_pretrained(folder / "theirs")
        at_start, merged, ours, again = self.ask(
            case, {"adapter": "start", "steps": 0},
            {"adapter": "start", "steps": 0, "merge": not case.nf4},
            {"adapter": "start", "steps": STEPS, "save": str(folder / "ours")},
            {"adapter": "theirs", "steps": 0})
        self.near(at_start["logits"], first, logit_tolerance, "logits of PEFT's adapter")
        self.near(merged["logits"], first, logit_tolerance, "merged logits")
        self.assertLess(losses[-1], losses[0] - 0.05, "nothing was learned")
        self.near(ours["losses"], losses, LOSS_TOLERANCE if exact else BF16_LOSS_TOLERANCE,
                  "losses")

        loaded = peft.PeftModel.from_pretrained(base_model(case, folder / "base"), folder / "ours")
        self.near(ours["logits"], logits_of(loaded, ids[0]), logit_tolerance,
                  "logits of our adapter in PEFT")
        self.near(again["logits"], logits_of(theirs, ids[0]), logit_tolerance,
                  "logits of PEFT's trained adapter")
        # With an adapter on the head PEFT writes the head's own weight, too.
        names = [name for name in load_file(folder / "theirs" / "adapter_model.safetensors")
                 if not name.endswith("base_layer.weight")]
        self.assertEqual(sorted(load_file(folder / "ours" / "adapter_model.safetensors")),
                         sorted(names))

    def test_what_is_not_supported(self):
        case = CASES["gpt2"]
        base = transformers.AutoModelForCausalLM.from_config(case.family)
        base.save_pretrained(self.folder / "base")
        for field in (dict(use_dora=True), dict(lora_bias=True), dict(init_lora_weights="olora")):
            name = next(iter(field))
            model = peft.get_peft_model(base_model(case, self.folder / "base"),
                                        peft.LoraConfig(**{**case.lora, **field}))
            model.save_pretrained(self.folder / name)
            with self.assertRaisesRegex(AssertionError, f"adapter_config.{name}"):
                self.ask(case, {"adapter": name, "steps": 0})


for case_name, one in CASES.items():
    setattr(PeftTest, f"test_{case_name}", lambda self, one=one: self.check(one))

if __name__ == "__main__":
    unittest.main(verbosity=2)
