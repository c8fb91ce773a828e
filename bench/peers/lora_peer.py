"""Peer of `lockstep bench lora`: Phi-3 with LoRA adapters, by transformers and PEFT where they are
installed, otherwise in PyTorch's own modules. The frozen base is in the type it is computed in."""
import json
import os
import pathlib
import sys

import torch
import torch.nn as nn

import decoder
import peer_loop


# ---------------------------------------------------------------- transformers and PEFT

class Pretrained(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.classes = model, model.config.vocab_size

    def forward(self, ids, targets):
        return decoder.loss_of(self.model(input_ids=ids, use_cache=False).logits, targets)


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


def own_name(name):
    name = decoder.own_name(name)
    projected = name.endswith("_proj.weight")
    return name.replace(".weight", ".base.weight") if projected else name


def own_modules(settings, dtype, device):
    folder, adapter = (os.path.join(settings["start"], part) for part in ("model", "adapter"))
    lora = json.loads(pathlib.Path(adapter, "adapter_config.json").read_text())
    with torch.device("meta"):
        net = decoder.Decoder(
            peer_loop.read_config(folder), dtype, packed=True,
            linear=lambda inputs, outputs: LoraLinear(inputs, outputs, lora)).requires_grad_(False)
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
