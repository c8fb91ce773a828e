"""Peer of `lockstep bench ddp`: the same model and blocks with PyTorch's DDP in a world of one."""
import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
for name, default in (("blocks", 30), ("steps", 10), ("batch", 8), ("time", 128), ("threads", 1)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()
LAYERS, HEADS, WIDTH, VOCAB = 4, 4, 256, 8192


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(self.norm_1(x)).split(d, 2)
        heads = (z.view(b, t, HEADS, d // HEADS).transpose(1, 2) for z in parts)
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def trainee(wrapped):
    torch.manual_seed(0)
    net = Gpt().to(args.device)
    model = net
    if wrapped:
        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)

    def block_seconds():
        start = time.perf_counter()
        for _ in range(args.steps):
            loss = F.cross_entropy(model(ids).view(-1, VOCAB), targets.view(-1))
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
