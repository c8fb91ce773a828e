"""Peer of `lockstep bench llama`: a Llama in PyTorch's own modules, all of it trained."""
import os

import torch

import decoder
import peer_loop


def build(settings, dtype, device):
    folder = os.path.join(settings["start"], "model")
    with torch.device("meta"):
        net = decoder.Decoder(peer_loop.read_config(folder), dtype)
    weights = {decoder.own_name(name): weight.float()
               for name, weight in peer_loop.read_safetensors(folder).items()}
    net.load_state_dict(weights, assign=True)
    return net.to(device)


if __name__ == "__main__":
    peer_loop.main(build)
