"""PyTorch's side of `lockstep bench train` and `recipes`: `model_peer.py SETTINGS [SOCKET]`.

The settings are JSON; their `kind` names one of BUILDERS, each of which returns a module that
computes a loss from a batch. Orders, as bench/models.h lists them, come from a Unix socket or,
without it, from stdin. Answers are JSON objects, one in a line.
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
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

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


# ---------------------------------------------------------------- a GPT-2 in PyTorch's own modules

class GptBlock(nn.Module):
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
        self.h = nn.ModuleList(GptBlock(config) for _ in range(config["n_layer"]))
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


def build_gpt(settings, dtype, device):
    folder = os.path.join(settings["start"], "model")
    with torch.device("meta"):
        net = Gpt(read_config(folder))
    weights = {}
    for name, weight in read_safetensors(folder).items():
        name = name.removeprefix("transformer.").replace("mlp.c_proj", "c_out")
        name = name.replace("attn.c_", "c_").replace("mlp.", "")
        # GPT-2 stores the weights of its projections transposed.
        projection = ".c_" in name and name.endswith("weight")
        weights[name] = weight.t().contiguous() if projection else weight
    net.load_state_dict(weights, assign=True)
    return net.to(device)


# ---------------------------------------------------------------- a ResNet, torchvision's names

def convolution(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class ResNetBlock(nn.Module):
    """With three convolutions it narrows, convolves and widens; with two it convolves."""

    def __init__(self, inputs, width, outputs, stride):
        super().__init__()
        sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if outputs != width:
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.parts = len(sizes)
        for number, size in enumerate(sizes, 1):
            setattr(self, f"conv{number}", convolution(*size))
            setattr(self, f"bn{number}", nn.BatchNorm2d(size[1]))
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride),
                                            nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = x
        for number in range(1, self.parts + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            if number < self.parts:
                y = F.relu(y, inplace=True)
        shortcut = self.downsample(x) if hasattr(self, "downsample") else x
        return F.relu(y + shortcut, inplace=True)


class ResNet(nn.Module):
    def __init__(self, blocks, expansion, classes):
        super().__init__()
        self.classes = classes
        self.conv1, self.bn1 = convolution(3, 64, 7, 2), nn.BatchNorm2d(64)
        inputs, width = 64, 64
        for stage, count in enumerate(blocks, 1):
            layers = []
            for i in range(count):
                stride = 2 if stage > 1 and i == 0 else 1
                layers.append(ResNetBlock(inputs, width, width * expansion, stride))
                inputs = width * expansion
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
            width *= 2
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images, classes):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images)), inplace=True), 3, 2, 1)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return F.cross_entropy(self.fc(x.mean((2, 3))), classes)


def build_resnet(settings, dtype, device):
    weights = read_safetensors(os.path.join(settings["start"], "model"))
    classes = weights["fc.bias"].numel()
    blocks = [1 + max(int(name.split(".")[1]) for name in weights if name.startswith(layer))
              for layer in ("layer1", "layer2", "layer3", "layer4")]
    expansion = weights["fc.weight"].shape[1] // 512
    net = ResNet(blocks, expansion, classes)
    net.load_state_dict(weights)
    net.to(device)
    return net.to(memory_format=torch.channels_last) if device.type == "cuda" else net


# ---------------------------------------------------------------- a language model of transformers

class LanguageModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.classes = model, model.config.vocab_size

    def forward(self, ids, targets):
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def build_pretrained(settings, dtype, device):
    """With PEFT's adapters if there are any; a frozen base is in the type it is computed in."""
    import transformers
    transformers.logging.disable_progress_bar()
    base, adapter = (os.path.join(settings["start"], part) for part in ("model", "adapter"))
    has_adapter = os.path.isdir(adapter)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype if has_adapter else torch.float32, attn_implementation="sdpa")
    said = f"model_peer: transformers {transformers.__version__}"
    if has_adapter:
        import peft
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
        said += f" with PEFT {peft.__version__}"
    print(said, file=sys.stderr)
    return LanguageModel(model.to(device))


BUILDERS = {"gpt": build_gpt, "resnet": build_resnet, "pretrained": build_pretrained}


# ---------------------------------------------------------------- linear layers in fp8

# torch._scaled_mm with one dynamic scale for a tensor, as a user of torch.compile would write it;
# the compiler fuses the casts.

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def cast_to_fp8(x, dtype):
    """The matrix in fp8, and what to multiply it by to get it back."""
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()


def product(a, b, scale_a, scale_b, fast=False):
    """a times the transpose of b; both lie along the dimension that is summed."""
    return torch._scaled_mm(a.contiguous(), b.contiguous().t(), scale_a=scale_a, scale_b=scale_b,
                            out_dtype=torch.bfloat16, use_fast_accum=fast)


class Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        (x8, sx), (w8, sw) = cast_to_fp8(x, E4M3), cast_to_fp8(weight, E4M3)
        ctx.save_for_backward(x8, sx, w8, sw)
        return product(x8, w8, sx, sw, fast=True)

    @staticmethod
    def backward(ctx, grad):
        x8, sx, w8, sw = ctx.saved_tensors
        g8, sg = cast_to_fp8(grad, E5M2)
        dx = product(g8, w8.t(), sg, sw)
        dweight = product(g8.t(), x8.t(), sg, sx) if ctx.needs_input_grad[1] else None
        return dx, dweight


class Fp8Linear(nn.Linear):
    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        y = Fp8Product.apply(rows, self.weight.to(torch.bfloat16))
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def convert_to_fp8(net):
    """All linear layers but the head and adapters, as ours."""
    for name, module in net.named_modules():
        fits = isinstance(module, nn.Linear) and not any(n % 16 for n in module.weight.shape)
        if fits and not any(part in name for part in ("lm_head", "lora_")):
            module.__class__ = Fp8Linear


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

    def __init__(self, settings):
        self.settings = settings
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
        build = BUILDERS[self.settings["kind"]]
        self.net = build(self.settings, self.dtype, self.device).train()
        if order["exact"]:
            make_exact(self.net, self.settings["kind"])
        if order["mode"] == "fp8":
            convert_to_fp8(self.net)
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


def main():
    settings, path = json.loads(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if settings["device"] == "cpu" else "cpu:gloo,cuda:nccl"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    trainee = Trainee(settings)
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


if __name__ == "__main__":
    main()
