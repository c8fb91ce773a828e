"""The Python side of the parity proof: the same models, data and steps under PyTorch's own
DistributedDataParallel over gloo.

Tensors are exchanged as raw little-endian files, one per tensor, beside an index.txt whose lines
read `name dtype size size ...`; nothing is pickled. Everything runs on one thread and uses fused
optimizers, so that two correct implementations do the same arithmetic in the same order.
"""

import contextlib
import dataclasses
import functools
import pathlib

import forks
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 10
OPTIMIZER_STEPS = 20
MAX_WORLD = 4
MAX_ACCUMULATE = 2
BATCH = 4

GPT = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=16)


@dataclasses.dataclass(frozen=True)
class Case:
    """One training run. merge > 0 means: one rank on the batches of that many ranks."""
    name: str
    model: str
    optimizer: str
    accumulate: int = 1
    find_unused: int = 0
    join: str = "none"  # or the rank that has fewest steps: first, last
    checkpoint: int = 0
    static_graph: int = 0
    bucket_cap_mb: float = 0.0  # 0: the default
    bucket_view: int = 1
    merge: int = 0

    def line(self):
        return " ".join(f"{k}={v}" for k, v in dataclasses.asdict(self).items())

    def steps(self, rank, world):
        """Uneven inputs: two steps fewer for each rank along the line."""
        if self.join == "first":
            return STEPS - 2 * (world - 1 - rank)
        if self.join == "last":
            return STEPS - 2 * rank
        return STEPS


# ---------------------------------------------------------------- files

def write_tensors(directory, tensors):
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "index.txt", "w", encoding="ascii") as index:
        for name, tensor in tensors.items():
            array = tensor.detach().cpu().contiguous().numpy()
            array.tofile(directory / f"{name}.bin")
            print(name, array.dtype, *array.shape, file=index)


def read_tensors(directory):
    directory = pathlib.Path(directory)
    tensors = {}
    for line in (directory / "index.txt").read_text(encoding="ascii").splitlines():
        name, dtype, *shape = line.split()
        array = np.fromfile(directory / f"{name}.bin", dtype=dtype)
        # A copy into torch's own memory, which is aligned as a fresh tensor's is: the matrix
        # library may choose its kernel by alignment.
        tensors[name] = torch.from_numpy(array.reshape([int(n) for n in shape])).clone()
    return tensors


# ---------------------------------------------------------------- models

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.net(x)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 2)
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Branches(nn.Module):
    """Uses one head or both; which is the caller's choice."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(20, 64)
        self.head_a = nn.Linear(64, 10)
        self.head_b = nn.Linear(64, 10)

    def forward(self, x, heads):
        x = torch.relu(self.trunk(x))
        if heads == "a":
            return self.head_a(x)
        if heads == "b":
            return self.head_b(x)
        return self.head_a(x) + self.head_b(x)


def heads_of(micro_step, rank):
    """Both; a on even ranks and b on odd ones; b; the other way round; a. The first step uses both,
    because Python's fused SGD cannot start the momentum of some parameters later."""
    kind = micro_step % 5
    if kind == 0:
        return "ab"
    if kind in (1, 3):
        return "a" if (rank + kind // 2) % 2 == 0 else "b"
    return "b" if kind == 2 else "a"


class Conv1D(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_in, fan_out))
        self.bias = nn.Parameter(torch.empty(fan_out))

    def forward(self, x):
        shape = x.size()[:-1] + (self.weight.size(1),)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class Attention(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(width, 3 * width)
        self.c_proj = Conv1D(width, width)

    def forward(self, x):
        batch, time, width = x.size()
        by_head = [part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.c_attn(x).split(width, dim=2)]
        y = F.scaled_dot_product_attention(*by_head, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, time, width))


class Perceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = Conv1D(width, 4 * width)
        self.c_proj = Conv1D(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-5)
        self.attn = Attention(heads, width)
        self.ln_2 = nn.LayerNorm(width, eps=1e-5)
        self.mlp = Perceptron(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        width = GPT["n_embd"]
        self.checkpointed = checkpointed
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(GPT["vocab_size"], width),
            wpe=nn.Embedding(GPT["n_positions"], width),
            h=nn.ModuleList(Block(GPT["n_head"], width) for _ in range(GPT["n_layer"])),
            ln_f=nn.LayerNorm(width, eps=1e-5)))
        for name, parameter in self.named_parameters():
            if ".ln_" not in name:
                nn.init.normal_(parameter, 0, 0.02)

    def forward(self, ids):
        parts = self.transformer
        x = parts.wte(ids) + parts.wpe(torch.arange(ids.size(1)))
        for block in parts.h:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpointed else block(x)
        return F.linear(parts.ln_f(x), parts.wte.weight)


MODELS = dict(mlp=Mlp, conv=ConvNet, branches=Branches, gpt=Gpt)


def loss_of(model_name, output, target):
    if model_name == "gpt":
        return F.cross_entropy(output.view(-1, output.size(-1)), target.view(-1))
    return F.cross_entropy(output, target)


# ---------------------------------------------------------------- what both sides start from

def make_inputs(directory):
    """Initial weights and data, read by both sides. Data is [micro step, rank, batch, ...]."""
    torch.manual_seed(20)
    lead = (STEPS * MAX_ACCUMULATE, MAX_WORLD, BATCH)
    tensors = {}
    for name, model in MODELS.items():
        for key, value in model().state_dict().items():
            tensors[f"{name}/{key}"] = value
        if name == "gpt":
            text = torch.randint(0, GPT["vocab_size"], (*lead, GPT["n_positions"] + 1))
            tensors["gpt/x"], tensors["gpt/y"] = text[..., :-1], text[..., 1:]
        else:
            tensors[f"{name}/x"] = torch.randn(*lead, *((3, 8, 8) if name == "conv" else (20,)))
            tensors[f"{name}/y"] = torch.randint(0, 10, lead)
    (pathlib.Path(directory)).mkdir(parents=True, exist_ok=True)
    write_tensors(directory, {key.replace("/", "-"): value for key, value in tensors.items()})


def make_optimizer(case, parameters):
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, fused=True)
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-2, fused=True)


# ---------------------------------------------------------------- training

def watch_gradients(model):
    """A list that grows by the largest entry of every gradient before it is averaged."""
    peak = []

    def note(gradient):  # returns nothing, which leaves the gradient as it is
        peak.append(gradient.abs().max())

    for parameter in model.parameters():
        parameter.register_hook(note)
    return peak


def train(case, rank, world, inputs):
    model = Gpt(bool(case.checkpoint)) if case.model == "gpt" else MODELS[case.model]()
    model.load_state_dict({key.split("-", 1)[1]: value for key, value in inputs.items()
                           if key.startswith(case.model + "-") and key[-2:] not in ("-x", "-y")})
    options = dict(find_unused_parameters=bool(case.find_unused),
                   static_graph=bool(case.static_graph),
                   gradient_as_bucket_view=bool(case.bucket_view))
    if case.bucket_cap_mb:
        options["bucket_cap_mb"] = case.bucket_cap_mb
    ddp = DistributedDataParallel(model, **options)
    optimizer = make_optimizer(case, ddp.parameters())
    peak = watch_gradients(model) if rank == 0 else []
    losses = []
    with ddp.join() if case.join != "none" else contextlib.nullcontext():
        for step in range(case.steps(rank, world)):
            for micro in range(case.accumulate):
                at = step * case.accumulate + micro
                arguments = [inputs[f"{case.model}-x"][at, rank].clone()]
                if case.model == "branches":
                    arguments.append(heads_of(at, rank))
                last = micro == case.accumulate - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    loss = loss_of(case.model, ddp(*arguments),
                                   inputs[f"{case.model}-y"][at, rank].clone())
                    if case.accumulate > 1:
                        loss = loss / case.accumulate
                    loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    result = {"losses": torch.stack(losses), **model.state_dict()}
    if rank == 0:
        result["peak_gradient"] = torch.stack(peak).max()
    return result


def run_rank(rank, world, cases, directory, out, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    inputs = read_tensors(directory)
    for case in cases:
        result = train(case, rank, world, inputs)
        if rank > 0:  # replicas are equal, which the other side verifies
            result = {"losses": result["losses"]}
        write_tensors(pathlib.Path(out) / case.name / f"rank{rank}", result)
        dist.barrier()
    dist.destroy_process_group()


def run_world(world, cases, directory, out):
    """Forks the ranks, so that torch is imported once. Returns how many failed."""
    import torch._dynamo  # pylint: disable=import-outside-toplevel,unused-import
    # DDP and the optimizers would import it in every fork, for seconds.
    rendezvous = pathlib.Path(out).with_suffix(".rendezvous")
    codes = forks.run([functools.partial(run_rank, rank, world, cases, directory, out, rendezvous)
                       for rank in range(world)])
    return sum(code != 0 for code in codes)


# ---------------------------------------------------------------- one process: optimizers and GPT

SHAPES = [(7,), (3, 5), (64, 33), (1,), (2, 3, 4, 5), (1000,), (16, 16)]
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, dict(lr=0.01)),
    "adamw-betas": (torch.optim.AdamW,
                    dict(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)),
    "adamw-no-decay": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.0)),
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "sgd-decay": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.1)),
    "sgd-momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)),
    "sgd-dampening": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3)),
    "sgd-nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
}


def make_optimizer_inputs(directory):
    torch.manual_seed(21)
    tensors = {}
    for i, shape in enumerate(SHAPES):
        tensors[f"optim-param-{i}"] = torch.randn(shape)
        # Over several orders of magnitude, with exact zeros.
        sizes = torch.logspace(-6, 2, OPTIMIZER_STEPS).view(-1, *[1] * len(shape))
        grad = torch.randn(OPTIMIZER_STEPS, *shape) * sizes
        tensors[f"optim-grad-{i}"] = torch.where(torch.rand(grad.shape) < 0.1, 0.0, grad)
    write_tensors(directory, tensors)


def has_gradient(parameter, step):
    """The last but one parameter is skipped now and then, after all have started."""
    return parameter != len(SHAPES) - 2 or step % 3 != 2


def run_optimizers(directory, out, device):
    inputs = {name: tensor.to(device) for name, tensor in read_tensors(directory).items()}
    for name, (kind, options) in OPTIMIZERS.items():
        parameters = [nn.Parameter(inputs[f"optim-param-{i}"].clone()) for i in range(len(SHAPES))]
        optimizer = kind(parameters, fused=True, **options)
        for step in range(OPTIMIZER_STEPS):
            if step == OPTIMIZER_STEPS // 2:
                optimizer.param_groups[0]["lr"] *= 0.25
            for i, parameter in enumerate(parameters):
                parameter.grad = None
                if has_gradient(i, step):
                    parameter.grad = inputs[f"optim-grad-{i}"][step].clone()
            optimizer.step()
        result = {}
        for i, parameter in enumerate(parameters):
            result[f"param-{i}"] = parameter
            for key, value in optimizer.state[parameter].items():
                if value is not None:
                    result[f"{key}-{i}"] = value
        write_tensors(pathlib.Path(out) / name, result)


def run_gpt(directory, out):
    inputs = read_tensors(directory)
    model = Gpt()
    model.load_state_dict({key[4:]: value for key, value in inputs.items()
                           if key.startswith("gpt-transformer")})
    logits = model(inputs["gpt-x"][0, 0].clone())
    loss = loss_of("gpt", logits, inputs["gpt-y"][0, 0].clone())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    write_tensors(pathlib.Path(out) / "gpt", {"logits": logits, "loss": loss, **gradients})
