"""Peer of `lockstep bench ddp`: the same model and blocks with PyTorch's DDP in a world of one."""
import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn

from gpt_peer import Gpt

parser = argparse.ArgumentParser()
for name, default in (("blocks", 30), ("steps", 10), ("batch", 8), ("time", 128), ("threads", 1)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()
VOCAB = 8192
CONFIG = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": VOCAB, "n_positions": 128,
          "layer_norm_epsilon": 1e-5}


def trainee(wrapped):
    torch.manual_seed(0)
    net = Gpt(CONFIG).to(args.device)
    model = net
    if wrapped:
        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)

    def block_seconds():
        start = time.perf_counter()
        for _ in range(args.steps):
            loss = model(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
        return time.perf_counter() - start

    return block_seconds


torch.set_num_threads(args.threads)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
backend = "gloo" if args.device == "cpu" else "nccl"
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(1)
ids = torch.randint(VOCAB, (args.batch, args.time)).to(args.device)
targets = torch.randint(VOCAB, (args.batch, args.time)).to(args.device)
bare, wrapped = trainee(False), trainee(True)
bare(), wrapped()
for pair in range(args.blocks // 2):
    times = [0.0, 0.0]
    for which in ((0, 1) if pair % 2 == 0 else (1, 0)):
        times[which] = (bare, wrapped)[which]()
    print(f"ratio {times[1] / times[0]:.6f}", flush=True)
    progress = f"pytorch {pair + 1}/{args.blocks // 2}: ratio {times[1] / times[0]:.4f}"
    print(progress, file=sys.stderr)
dist.destroy_process_group()
