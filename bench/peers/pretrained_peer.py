"""Peer of `lockstep bench recipes`: a language model of transformers, with PEFT's adapters where
the training file has `lora`. A frozen base is in the type it is computed in."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers

import peer_loop


class LanguageModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.classes = model, model.config.vocab_size

    def forward(self, ids, targets):
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def build(settings, dtype, device):
    transformers.logging.disable_progress_bar()
    base, adapter = (os.path.join(settings["start"], part) for part in ("model", "adapter"))
    has_adapter = os.path.isdir(adapter)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype if has_adapter else torch.float32, attn_implementation="sdpa")
    said = f"pretrained_peer: transformers {transformers.__version__}"
    if has_adapter:
        import peft
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
        said += f" with PEFT {peft.__version__}"
    print(said, file=sys.stderr)
    return LanguageModel(model.to(device))


if __name__ == "__main__":
    peer_loop.main(build)
