"""DistributedDataParallel on gloo and on lockstep: the same losses and weights, bit for bit."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    """A net with a part that every second step leaves out, when it is asked to."""

    def __init__(self, skips):
        super().__init__()
        self.first = torch.nn.Linear(20, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.side = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(64, 4)
        self.skips = skips
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = torch.relu(self.norm(self.first(x)))
        if not self.skips or self.calls % 2:
            x = x + self.side(x)
        return self.last(x)


class SparseEmbedding(torch.nn.Module):
    """An embedding whose gradient is sparse, beside parameters whose gradient is not."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8, sparse=True)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.embedding(x.abs().mul(10).long() % 50).mean(1))


def train(group, steps=4, hook=None, uneven=False, no_sync=False, **options):
    torch.manual_seed(dist.get_rank(group))  # DDP brings rank 0's weights to all
    make_net = options.pop("net", None) or (
        lambda: Net(options.get("find_unused_parameters", False)))
    net = make_net()
    model = DistributedDataParallel(net, process_group=group,
                                    **{"bucket_cap_mb": 0.01, **options})
    if hook:
        hook(model, group)
    momentum = 0 if isinstance(net, SparseEmbedding) else 0.9  # which would make the gradient dense
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    data = torch.Generator().manual_seed(100 + dist.get_rank(group))
    losses = []

    def step(index):
        x = torch.randn(16, 20, generator=data)
        if no_sync and index % 2 == 0:
            with model.no_sync():
                model(x).square().mean().backward()
            return
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    if uneven:
        with Join([model]):
            for index in range(steps + 2 * dist.get_rank(group)):
                step(index)
    else:
        for index in range(steps):
            step(index)
    return [*losses, *(t.detach().clone() for t in model.state_dict().values())]


def own_hook(model, group):
    """A hook in Python with a chain of futures."""
    def average(state, bucket):
        tensor = bucket.buffer() / group.size()
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, average)


def half_hook(model, group):
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)


def power_hook(model, group):
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


CASES = {
    "plain": {},
    "sparse gradients": {"net": SparseEmbedding},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "no_sync": {"no_sync": True},
    "join": {"uneven": True},
    "own hook": {"hook": own_hook},
    "fp16 hook": {"hook": half_hook},
    # One bucket: its callbacks start collectives; those of several would do so in any order.
    "PowerSGD hook": {"hook": power_hook, "bucket_cap_mb": 25},
}


def run_training(groups):
    for name, options in CASES.items():
        wanted = train(groups.gloo, **options)
        found = train(groups.lockstep, **options)
        groups.same(found, wanted, f"training, {name}")
        assert all(bool(torch.isfinite(t).all()) for t in found), name
