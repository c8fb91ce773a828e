"""A decoder of Llama's kind in PyTorch's own modules, for llama_peer.py and lora_peer.py."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def loss_of(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def plain(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


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
    """`linear(inputs, outputs)` makes a projection. Packed, as Phi-3 has them: queries, keys and
    values of one matrix, gate and up of another one."""

    def __init__(self, config, linear, packed):
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.shared = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_width, self.packed = width // self.heads, packed
        self.narrow = self.shared * self.head_width
        self.input_layernorm = RmsNorm(width, config["rms_norm_eps"])
        self.post_attention_layernorm = RmsNorm(width, config["rms_norm_eps"])
        outputs = {"q_proj": width, "k_proj": self.narrow, "v_proj": self.narrow,
                   "gate_proj": inner, "up_proj": inner}
        if packed:
            outputs = {"qkv_proj": width + 2 * self.narrow, "gate_up_proj": 2 * inner}
        for name, count in outputs.items():
            setattr(self, name, linear(width, count))
        self.o_proj, self.down_proj = linear(width, width), linear(inner, width)

    def attend(self, x, cos, sin):
        batch, time, width = x.shape
        if self.packed:
            parts = self.qkv_proj(x).split((width, self.narrow, self.narrow), -1)
        else:
            parts = [layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (part.view(batch, time, -1, self.head_width).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v,
                                               is_causal=True,
                                               enable_gqa=self.heads != self.shared)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x, cos, sin):
        x = x + self.attend(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        gate, up = (self.gate_up_proj(y).chunk(2, -1) if self.packed
                    else (self.gate_proj(y), self.up_proj(y)))
        return x + self.down_proj(F.silu(gate) * up)


class Decoder(nn.Module):
    """The stream between blocks is in `dtype`, as ours is."""

    def __init__(self, config, dtype, linear=plain, packed=False):
        super().__init__()
        width, self.dtype, self.classes = config["hidden_size"], dtype, config["vocab_size"]
        self.head_width = width // config["num_attention_heads"]
        self.theta = (config.get("rope_parameters") or config)["rope_theta"]
        self.embed_tokens = nn.Embedding(self.classes, width)
        self.layers = nn.ModuleList(Block(config, linear, packed)
                                    for _ in range(config["num_hidden_layers"]))
        self.norm = RmsNorm(width, config["rms_norm_eps"])
        self.lm_head = None if config["tie_word_embeddings"] else plain(width, self.classes)

    def forward(self, ids, targets):
        x = self.embed_tokens(ids).to(self.dtype)
        pairs = torch.arange(0, self.head_width, 2, device=ids.device).float() / self.head_width
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(),
                             self.theta**-pairs)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return loss_of(F.linear(self.norm(x), (self.lm_head or self.embed_tokens).weight), targets)


def own_name(name):
    """Of a weight in Hugging Face's files."""
    for part in ("base_model.model.", "model.", "self_attn.", "mlp."):
        name = name.replace(part, "")
    return name
