"""What the PyTorch peers of `lockstep bench train` and `recipes` share.

A peer defines `build(settings, dtype, device)`, which returns a module that computes a loss from a
batch, and calls `main(build)`: `peer.py SETTINGS [SOCKET]`. The settings are JSON; orders, as
bench/models.h lists them, come from a Unix socket or, without it, from stdin. Answers are JSON
objects, one in a line.
"""
import contextlib
import gc
import json
import math
import os
import pathlib
import socket
import struct
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fp8_linear

BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.95), 0.1, 1.0
DISTINCT_BATCHES = 4
MASK = 0x7fffffff
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


# ---------------------------------------------------------------- files

def read_safetensors(folder):
    """{name: tensor} of all *.safetensors in a folder; the package may not be installed."""
    tensors = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with open(path, "rb") as file:
            size, = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)[8 + size:]
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            # A copy: what is in the file may not be aligned.
            values = data[begin:end].clone().view(DTYPES[entry["dtype"]])
            tensors[name] = values.view(entry["shape"])
    return tensors


def read_config(folder):
    return json.loads(pathlib.Path(folder, "config.json").read_text())


# ---------------------------------------------------------------- data, as bench/model_rank.cpp

def hashed(position):
    x = position & MASK
    for factor in (0x2c1b3c6d, 0x297a2d39):
        x = x ^ (x >> 15)
        x = (x * factor) & MASK
    return x ^ (x >> 15)


def token_batch(step, shape, vocabulary, device):
    rows, columns = shape[0], shape[1] + 1
    count = rows * columns
    places = torch.arange(step * count, (step + 1) * count, device=device) * 3
    share = (hashed(places) * (hashed(places + 1) >> 16)) >> 15
    drawn = ((share * vocabulary) >> 31).view(rows, columns)
    before = torch.cat([drawn[:, :1], drawn[:, :-1]], 1)
    follows = (hashed(places + 2) & 1).bool().view(rows, columns)
    ids = torch.where(follows, (before * 31 + 7) % vocabulary, drawn)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def image_batch(step, shape, classes, device):
    rows, side = shape
    count = rows * 3 * side * side
    places = torch.arange(step * count, (step + 1) * count, device=device)
    images = (hashed(places).float() * 2.0**-30 - 1).view(rows, 3, side, side)
    if images.is_cuda:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, hashed(torch.arange(step * rows, (step + 1) * rows, device=device)) % classes


# ---------------------------------------------------------------- a model in training

class Marks:
    """Times between points: in the device's stream, or on the clock."""

    def __init__(self, device):
        self.cuda, self.marks = device.type == "cuda", []

    def add(self):
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def between(self):
        pairs = list(zip(self.marks, self.marks[1:]))
        if not self.cuda:
            return [(b - a) * 1e3 for a, b in pairs]
        self.marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


def make_exact(net, kind):
    """No dropout, and adapters that change the model at once: they begin as zero."""
    net.train(kind == "resnet")
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "lora_B" in name:
                numbers = torch.arange(weight.numel(), dtype=weight.dtype, device=weight.device)
                weight.copy_((numbers % 7 - 3).view_as(weight) * 2.0**-6)


class Trainee:
    """The orders are its methods."""

    def __init__(self, settings, build):
        self.settings, self.build = settings, build
        self.device = torch.device(settings["device"])
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)
        self.net = self.model = self.optimizer = None
        self.compiled = self.accumulates = False

    def release(self):
        """Others need the memory while they are timed."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def drop(self, _):
        self.net = self.model = self.optimizer = self.trained = None
        if self.compiled:
            torch._dynamo.reset()
        self.release()
        return {}

    def new(self, order):
        self.drop(order)
        torch.set_float32_matmul_precision("high" if order["tf32"] else "highest")
        torch.backends.cudnn.allow_tf32 = order["tf32"]
        torch.manual_seed(42)
        self.dtype = torch.float32 if order["dtype"] == "fp32" else torch.bfloat16
        self.net = self.build(self.settings, self.dtype, self.device).train()
        if order["exact"]:
            make_exact(self.net, self.settings["kind"])
        if order["mode"] == "fp8":
            fp8_linear.convert(self.net)
        self.model = self.net
        if order["ddp"]:
            self.model = DistributedDataParallel(self.net, gradient_as_bucket_view=True)
        self.compiled = order["mode"] != "eager"
        if self.compiled:
            self.model = torch.compile(
                self.model, mode="reduce-overhead" if order["mode"] == "graphs" else None)
        self.trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=order["lr"], betas=BETAS,
                                           weight_decay=WEIGHT_DECAY, fused=True)
        self.count = 0
        return {"parameters": sum(p.numel() for p in self.net.parameters())}

    def batch(self, step, rows=None, same=False):
        shape = (rows or self.settings["batch_size"], self.settings["sequence_length"])
        make = image_batch if self.settings["kind"] == "resnet" else token_batch
        number = step * dist.get_world_size() + (0 if same else dist.get_rank())
        return make(number, shape, self.net.classes, self.device)

    def backward(self, batch):
        with torch.autocast(self.device.type, torch.bfloat16,
                            enabled=self.dtype == torch.bfloat16):
            loss = self.model(*batch)
        (loss / self.settings["accumulation"] if self.accumulates else loss).backward()
        return loss

    def step(self, batch):
        if self.accumulates:
            with getattr(self.model, "no_sync", contextlib.nullcontext)():
                for _ in range(self.settings["accumulation"] - 1):
                    self.backward(batch)
        loss = self.backward(batch)
        if self.settings["clip"]:
            torch.nn.utils.clip_grad_norm_(self.trained, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.count += 1
        # The next step of a captured graph writes to the same memory.
        return loss.detach().clone()

    def train(self, order):
        losses = [self.step(self.batch(step, order["batch_size"], order.get("same", False)))
                  for step in range(order["steps"])]
        losses = [loss.item() for loss in losses]
        self.release()
        return {"losses": [loss if math.isfinite(loss) else None for loss in losses]}

    def batches(self):
        return [self.batch(step) for step in range(DISTINCT_BATCHES)]

    def time(self, order):
        self.settings["batch_size"] = order.get("batch_size", self.settings["batch_size"])
        batches = self.batches()
        self.accumulates = self.settings["accumulation"] > 1
        marks = Marks(self.device)
        for i in range(order["warmup"] + order["steps"]):
            if i == order["warmup"]:
                marks.add()
            loss = self.step(batches[self.count % len(batches)])
            if i >= order["warmup"]:
                marks.add()
        ms, loss = marks.between(), loss.item()
        del batches
        self.accumulates = False
        self.release()
        return {"ms": ms, "loss": loss if math.isfinite(loss) else None}


# ---------------------------------------------------------------- orders

def serve(trainee, lines, answers):
    """Each answer also says how much of a core was used while waiting for the order."""
    since, cpu = time.perf_counter(), time.process_time()
    for line in lines:
        idle = {"idle_s": time.perf_counter() - since, "idle_cpu_s": time.process_time() - cpu}
        order = json.loads(line)
        try:
            answer = getattr(trainee, order["do"])(order)
        except Exception as error:  # out of memory, or what the compiler could not do
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(answer | idle) + "\n")
        answers.flush()
        since, cpu = time.perf_counter(), time.process_time()


def main(build):
    settings, path = json.loads(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if settings["device"] == "cpu" else "cpu:gloo,cuda:nccl"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    trainee = Trainee(settings, build)
    if path is None:
        serve(trainee, sys.stdin, sys.stdout)
    else:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            with connection.makefile("rw", encoding="utf-8") as stream:
                stream.write(f"rank {dist.get_rank()}\n")
                stream.flush()
                serve(trainee, stream, stream)
    dist.destroy_process_group()
