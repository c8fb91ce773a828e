"""Peer of `lockstep bench train` and `recipes`: a GPT-2 in PyTorch's own modules."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

import peer_loop


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, epsilon = config["n_embd"], config["layer_norm_epsilon"]
        self.heads = config["n_head"]
        self.ln_1, self.ln_2 = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, 2)
        heads = (p.view(batch, time, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.classes = config["vocab_size"]
        self.wte = nn.Embedding(config["vocab_size"], config["n_embd"])
        self.wpe = nn.Embedding(config["n_positions"], config["n_embd"])
        self.h = nn.ModuleList(Block(config) for _ in range(config["n_layer"]))
        self.ln_f = nn.LayerNorm(config["n_embd"], config["layer_norm_epsilon"])
        self.lm_head = None
        if not config.get("tie_word_embeddings", True):
            self.lm_head = nn.Linear(config["n_embd"], config["vocab_size"], bias=False)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), (self.lm_head or self.wte).weight)
        return F.cross_entropy(logits.view(-1, self.classes), targets.view(-1))


def build(settings, dtype, device):
    folder = os.path.join(settings["start"], "model")
    with torch.device("meta"):
        net = Gpt(peer_loop.read_config(folder))
    weights = {}
    for name, weight in peer_loop.read_safetensors(folder).items():
        name = name.removeprefix("transformer.").replace("mlp.c_proj", "c_out")
        name = name.replace("attn.c_", "c_").replace("mlp.", "")
        # GPT-2 stores the weights of its projections transposed.
        projection = ".c_" in name and name.endswith("weight")
        weights[name] = weight.t().contiguous() if projection else weight
    net.load_state_dict(weights, assign=True)
    return net.to(device)


if __name__ == "__main__":
    peer_loop.main(build)
