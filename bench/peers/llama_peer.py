"""Peer of `lockstep bench llama`: a Llama in PyTorch's own modules, all of it trained. As ours the
stream between blocks is in the type that is computed in."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

import peer_loop
from lora_peer import RmsNorm, loss_of, rotate


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.shared = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_width = width // self.heads
        self.input_layernorm = RmsNorm(width, config["rms_norm_eps"])
        self.post_attention_layernorm = RmsNorm(width, config["rms_norm_eps"])
        narrow = self.shared * self.head_width
        for name, inputs, outputs in (("q_proj", width, width), ("k_proj", width, narrow),
                                      ("v_proj", width, narrow), ("o_proj", width, width),
                                      ("gate_proj", width, inner), ("up_proj", width, inner),
                                      ("down_proj", inner, width)):
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))

    def attend(self, x, cos, sin):
        batch, time, width = x.shape
        q, k, v = (layer(x).view(batch, time, -1, self.head_width).transpose(1, 2)
                   for layer in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v,
                                               is_causal=True,
                                               enable_gqa=self.heads != self.shared)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x, cos, sin):
        x = x + self.attend(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(self, config, dtype):
        super().__init__()
        self.dtype, self.classes = dtype, config["vocab_size"]
        self.head_width = config["hidden_size"] // config["num_attention_heads"]
        rope = config.get("rope_parameters") or config
        self.theta = rope["rope_theta"]
        self.embed_tokens = nn.Embedding(self.classes, config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, ids, targets):
        x = self.embed_tokens(ids).to(self.dtype)
        pairs = torch.arange(0, self.head_width, 2, device=ids.device).float() / self.head_width
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(),
                             self.theta**-pairs)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return loss_of(F.linear(self.norm(x), self.embed_tokens.weight), targets)


def build(settings, dtype, device):
    folder = os.path.join(settings["start"], "model")
    with torch.device("meta"):
        net = Llama(peer_loop.read_config(folder), dtype)
    weights = {}
    for name, weight in peer_loop.read_safetensors(folder).items():
        for part in ("model.", "self_attn.", "mlp."):
            name = name.replace(part, "")
        weights[name] = weight.float()
    net.load_state_dict(weights, assign=True)
    return net.to(device)


if __name__ == "__main__":
    peer_loop.main(build)
