"""Peer of `lockstep bench train`: PyTorch's DDP over gloo on the model of bench/small_gpt.h.

Started by `lockstep run`, one process per rank. Takes orders from a Unix socket, as bench/train.h
says, and blocks in a read of it while the other contenders run.
"""
import argparse
import socket
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
for name in ("weights", "sequences", "orders", "contender"):
    parser.add_argument(f"--{name}")
for name in ("max-batch", "layers", "heads", "width", "vocab", "tokens"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--lr", type=float)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        width = args.width
        self.norm_1 = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, 2)
        heads = (p.view(batch, tokens, args.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class SmallGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(args.vocab, args.width)
        self.positions = nn.Embedding(args.tokens, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, args.vocab), targets.view(-1))


class Trainee:
    def __init__(self):
        net = SmallGpt()
        flat = torch.from_file(args.weights, size=sum(p.numel() for p in net.parameters()))
        with torch.no_grad():
            for p, values in zip(net.parameters(),
                                 flat.split([p.numel() for p in net.parameters()])):
                p.copy_(values.view_as(p))
        self.model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, fused=True)

    def block(self, ids, targets, steps):
        losses = []
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.model(ids, targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        seconds = time.perf_counter() - start
        return seconds, losses


def serve(orders, rank):
    world = dist.get_world_size()
    sequences = torch.from_file(args.sequences, size=world * 2 * args.max_batch * args.tokens,
                                dtype=torch.int64).view(world, 2, args.max_batch, args.tokens)
    trainee = None
    idle_since, idle_cpu = time.perf_counter(), time.process_time()
    for line in orders:
        idle, cpu = time.perf_counter() - idle_since, time.process_time() - idle_cpu
        what, *rest = line.split()
        answer = "ok"
        if what == "new":
            trainee = None
            trainee = Trainee()
        else:
            batch, steps, whose = int(rest[0]), int(rest[1]), rest[2]
            ids, targets = sequences[rank if whose == "own" else 0, :, :batch]
            seconds, losses = trainee.block(ids, targets, steps)
            answer = f"{seconds:.6f} {cpu:.6f} {idle:.6f} "
            answer += " ".join(f"{loss.item():.9g}" for loss in losses)
        orders.write(answer + "\n")
        orders.flush()
        idle_since, idle_cpu = time.perf_counter(), time.process_time()


torch.set_num_threads(1)
dist.init_process_group("gloo")
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(args.orders)
    with connection.makefile("rw", encoding="ascii") as stream:
        stream.write(f"rank {dist.get_rank()}\n")
        stream.flush()
        serve(stream, dist.get_rank())
dist.destroy_process_group()
