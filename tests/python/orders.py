"""Two groups in every order that a program may wait for them, and how long tensors are held.

A rank that has started an operation in one group may wait in another first: the operation must
still end on the ranks that wait for it. `odd` is a rank whose share is small where others' are
large.
"""

import gc
import time
import weakref

import torch
import torch.distributed as dist

FEW, MANY = 100, 550_000  # floats; the second is two chunks of shared memory and a bit
LIMIT_S = 60


class RankInfo:
    """Where an operation runs, and which sizes it has."""

    def __init__(self, group, odd, count):
        self.group, self.odd, self.count = group, odd, count
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.root = (odd + 1) % self.size

    def between(self, sender, receiver):
        return FEW if self.odd in (sender, receiver) else MANY

    def mine(self, count=None, dtype=torch.float32):
        return torch.full((count or self.count,), self.rank + 1, dtype=dtype)

    def options(self):
        return {"group": self.group, "async_op": True}


def holds(tensors, values):
    return all(bool((t == v).all()) for t, v in zip(tensors, values))


def all_reduce(at):
    x = at.mine()
    return [dist.all_reduce(x, **at.options())], lambda: holds([x], [at.size * (at.size + 1) / 2])


def average(at):
    x = at.mine(dtype=torch.int64)
    work = dist.all_reduce(x, op=dist.ReduceOp.AVG, **at.options())
    return [work], lambda: holds([x], [(at.size + 1) // 2])


def sparse(at):
    count = at.between(at.rank, at.rank)
    x = torch.sparse_coo_tensor(torch.arange(count)[None], torch.ones(count), (MANY,))
    return [dist.all_reduce(x, **at.options())], lambda: x.to_dense()[0] == at.size


def reduce(at):
    x = at.mine()
    work = dist.reduce(x, at.root, **at.options())
    total = at.size * (at.size + 1) / 2
    return [work], lambda: at.rank != at.root or holds([x], [total])


def broadcast(at):
    x = at.mine()
    return [dist.broadcast(x, at.root, **at.options())], lambda: holds([x], [at.root + 1])


def all_gather(at):
    x = [torch.zeros(at.count) for _ in range(at.size)]
    return [dist.all_gather(x, at.mine(), **at.options())], lambda: holds(x, range(1, at.size + 1))


def all_gather_into(at):
    x = torch.zeros(at.size, at.count)
    work = dist.all_gather_into_tensor(x.view(-1), at.mine(), **at.options())
    return [work], lambda: holds(x, range(1, at.size + 1))


def reduce_scatter(at):
    x = torch.zeros(at.count)
    work = dist.reduce_scatter_tensor(x, torch.ones(at.size * at.count), **at.options())
    return [work], lambda: holds([x], [at.size])


def gather(at):
    lists = [torch.zeros(at.count) for _ in range(at.size)] if at.rank == at.root else None
    work = dist.gather(at.mine(), lists, at.root, **at.options())
    return [work], lambda: lists is None or holds(lists, range(1, at.size + 1))


def scatter(at):
    x = torch.zeros(at.count)
    inputs = [torch.full((at.count,), float(r)) for r in range(at.size)]
    work = dist.scatter(x, inputs if at.rank == at.root else None, at.root, **at.options())
    return [work], lambda: holds([x], [at.rank])


def all_to_all_even(at):
    x = torch.zeros(at.size, at.count)
    work = dist.all_to_all_single(x.view(-1), at.mine(at.size * at.count), **at.options())
    return [work], lambda: holds(x, range(1, at.size + 1))


def all_to_all_uneven(at):
    sent = [at.between(at.rank, r) for r in range(at.size)]
    got = [at.between(r, at.rank) for r in range(at.size)]
    x = torch.zeros(sum(got))
    work = dist.all_to_all_single(x, at.mine(sum(sent)), got, sent, **at.options())
    return [work], lambda: holds(x.split(got), range(1, at.size + 1))


def all_to_all_lists(at):
    x = [torch.zeros(at.between(r, at.rank)) for r in range(at.size)]
    inputs = [at.mine(at.between(at.rank, r)) for r in range(at.size)]
    return [dist.all_to_all(x, inputs, **at.options())], lambda: holds(x, range(1, at.size + 1))


def messages(at):
    others = [r for r in range(at.size) if r != at.rank]
    x = [torch.zeros(at.between(r, at.rank)) for r in others]
    works = [dist.irecv(t, r, group=at.group) for t, r in zip(x, others)]
    works += [dist.isend(at.mine(at.between(at.rank, r)), r, group=at.group) for r in others]
    return works, lambda: holds(x, [r + 1 for r in others])


def batch(at):
    others = [r for r in range(at.size) if r != at.rank]
    x = [torch.zeros(at.between(r, at.rank)) for r in others]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, t, r, group=at.group) for t, r in zip(x, others)] +
        [dist.P2POp(dist.isend, at.mine(at.between(at.rank, r)), r, group=at.group)
         for r in others])
    return works, lambda: holds(x, [r + 1 for r in others])


def barrier(at):
    return [dist.barrier(**at.options())], lambda: True


OPERATIONS = (all_reduce, average, sparse, reduce, broadcast, all_gather, all_gather_into,
              reduce_scatter, gather, scatter, all_to_all_even, all_to_all_uneven,
              all_to_all_lists, messages, batch, barrier)


def wait_all(works):
    for work in works:
        work.wait()


def run_orders(groups):
    """The others finish while the odd rank waits elsewhere; and all orders of two groups."""
    first, second = groups.lockstep, dist.new_group(backend="lockstep")
    rank, size = groups.rank, groups.size
    for operation in OPERATIONS:
        for count in (FEW, MANY):
            for odd in range(size):
                works, right = operation(RankInfo(first, odd, count))
                if rank != odd:
                    wait_all(works)
                dist.barrier(group=second)
                wait_all(works)
                assert right(), f"{operation.__name__} of {count}, rank {odd} elsewhere"
            for orders in range(2 ** size):
                one, one_right = operation(RankInfo(first, 0, count))
                two, two_right = operation(RankInfo(second, 1, count))
                pair = (two, one) if orders >> rank & 1 else (one, two)
                for works in pair:
                    wait_all(works)
                assert one_right() and two_right(), f"{operation.__name__} of {count}, {orders}"


def becomes(condition):
    end = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
        gc.collect()
    return condition()


def tensors_of(function):
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        for each in held if isinstance(held, list) else [held]:
            if isinstance(each, torch.Tensor):
                yield each


def run_lifetimes(groups):
    """An operation releases its tensors when it ends, whether it is waited for or dropped."""
    for dropped in (False, True):
        for operation in OPERATIONS:
            if operation in (messages, batch) and dropped:
                continue  # a receive that nobody holds is not what c10d calls an operation
            dist.barrier()
            works, right = operation(RankInfo(groups.lockstep, 0, MANY))
            tensors = [weakref.ref(tensor) for tensor in tensors_of(right)]
            if not dropped:
                wait_all(works)
            del works
            assert becomes(right) or not dropped, f"{operation.__name__} did not end"
            del right
            name = f"{operation.__name__}, {'dropped' if dropped else 'waited for'}"
            assert becomes(lambda: all(t() is None for t in tensors)), f"{name}: still held"


def run_dropped(groups):
    """The result of a dropped operation is stored, also where it is staged."""
    rows = torch.ones(50, 2)
    dist.all_reduce(rows[:, 0], async_op=True)
    assert becomes(lambda: bool((rows[:, 0] == groups.size).all())), rows
    assert bool((rows[:, 1] == 1).all())
    parts = [torch.zeros(4, 2)[:, 1] for _ in range(groups.size)]
    dist.all_gather(parts, torch.full((4,), groups.rank + 1.0), async_op=True)
    assert becomes(lambda: holds(parts, range(1, groups.size + 1))), parts
