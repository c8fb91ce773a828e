"""Peer of `lockstep bench lora`: Phi-3 with LoRA adapters, by transformers and PEFT where they are
installed, otherwise in PyTorch's own modules. The frozen base is in the type it is computed in."""
import json
import os
import pathlib
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

import peer_loop


def loss_of(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


# ---------------------------------------------------------------- transformers and PEFT

class Pretrained(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.classes = model, model.config.vocab_size

    def forward(self, ids, targets):
        return loss_of(self.model(input_ids=ids, use_cache=False).logits, targets)


def with_peft(settings, dtype, device):
    import peft
    import transformers
    transformers.logging.disable_progress_bar()
    print(f"lora_peer: transformers {transformers.__version__} with PEFT {peft.__version__}",
          file=sys.stderr)
    start = settings["start"]
    base = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.join(start, "model"), dtype=dtype, attn_implementation="sdpa")
    return Pretrained(peft.PeftModel.from_pretrained(base, os.path.join(start, "adapter"),
                                                     is_trainable=True).to(device))


# ---------------------------------------------------------------- own modules

class LoraLinear(nn.Module):
    def __init__(self, inputs, outputs, lora):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.lora_A = nn.Linear(inputs, lora["r"], bias=False)
        self.lora_B = nn.Linear(lora["r"], outputs, bias=False)
        self.dropout = nn.Dropout(lora["lora_dropout"])
        self.scaling = lora["lora_alpha"] / lora["r"]

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(self.dropout(x))) * self.scaling


class RmsNorm(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    def __init__(self, config, lora):
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.shared = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_width = width // self.heads
        self.input_layernorm = RmsNorm(width, config["rms_norm_eps"])
        self.qkv_proj = LoraLinear(width, (self.heads + 2 * self.shared) * self.head_width, lora)
        self.o_proj = LoraLinear(width, width, lora)
        self.post_attention_layernorm = RmsNorm(width, config["rms_norm_eps"])
        self.gate_up_proj = LoraLinear(width, 2 * inner, lora)
        self.down_proj = LoraLinear(inner, width, lora)

    def attend(self, x, cos, sin):
        batch, time, width = x.shape
        parts = self.qkv_proj(x).view(batch, time, -1, self.head_width).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.shared, self.shared), 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                               enable_gqa=self.heads != self.shared)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x, cos, sin):
        x = x + self.attend(self.input_layernorm(x), cos, sin)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class Phi3(nn.Module):
    def __init__(self, config, lora):
        super().__init__()
        width, self.classes = config["hidden_size"], config["vocab_size"]
        self.head_width = width // config["num_attention_heads"]
        self.theta = config["rope_parameters"]["rope_theta"]
        self.embed_tokens = nn.Embedding(self.classes, width)
        self.layers = nn.ModuleList(Block(config, lora)
                                    for _ in range(config["num_hidden_layers"]))
        self.norm = RmsNorm(width, config["rms_norm_eps"])
        self.lm_head = nn.Linear(width, self.classes, bias=False)

    def forward(self, ids, targets):
        x = self.embed_tokens(ids)
        pairs = torch.arange(0, self.head_width, 2, device=ids.device).float() / self.head_width
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(),
                             self.theta**-pairs)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return loss_of(self.lm_head(self.norm(x)), targets)


def own_name(name):
    for part in ("base_model.model.", "model.", "self_attn.", "mlp."):
        name = name.replace(part, "")
    projected = name.endswith("_proj.weight")
    return name.replace(".weight", ".base.weight") if projected else name


def own_modules(settings, dtype, device):
    folder, adapter = (os.path.join(settings["start"], part) for part in ("model", "adapter"))
    lora = json.loads(pathlib.Path(adapter, "adapter_config.json").read_text())
    with torch.device("meta"):
        net = Phi3(peer_loop.read_config(folder), lora).requires_grad_(False)
    weights = {own_name(name): weight.to(device, dtype)
               for name, weight in peer_loop.read_safetensors(folder).items()}
    trained = {own_name(name): weight.to(device, torch.float32)
               for name, weight in peer_loop.read_safetensors(adapter).items()}
    net.load_state_dict(weights | trained, assign=True)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in trained)
    return net


def build(settings, dtype, device):
    if settings["peft"]:
        try:
            return with_peft(settings, dtype, device)
        except ImportError as error:
            print(f"lora_peer: {error}; its own modules instead", file=sys.stderr)
    return own_modules(settings, dtype, device)


if __name__ == "__main__":
    peer_loop.main(build)
