"""Groups that are asked for as gloo, made by the engine where all their ranks share a host.

torch.distributed makes every group in one function. It is replaced by one that asks for the backend
lockstep instead of gloo, and then writes down gloo as the group's backend, so that what depends on
the name works as before (get_backend, monitored_barrier, frameworks' checks). To torch's C++ code
it is a custom backend: that code reads members of gloo's own class wherever it finds gloo's type.
"""

import functools
import logging
import os
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import engine

_finished = threading.local()  # .backend: already made for the group that this thread is making


def take_finished():
    """The backend that was made before torch.distributed asked for it, if there is one."""
    backend = getattr(_finished, "backend", None)
    _finished.backend = None
    return backend


def _exchange(store, rank, size, answer, timeout):
    """Every rank's answer. Fails at once where a rank makes this group with gloo itself."""
    deadline = time.monotonic() + timeout.total_seconds()
    times = store.add(f"lockstep/replace_gloo/times/{rank}", 1)

    def key(peer):
        return f"lockstep/replace_gloo/{times}/{peer}"

    def wait_for(peer):
        pause = 0.0001
        while not store.check([key(peer)]):
            late = time.monotonic() > deadline
            # Where gloo writes its address. A group that was made before may have left one there.
            if late or (times == 1 and store.check([f"0/{peer}"])):
                raise dist.DistBackendError(
                    f"[lockstep_torch] rank {rank} replaces gloo, rank {peer} "
                    + (f"has not answered in {timeout.total_seconds():g} s" if late else
                       "makes this group with gloo itself")
                    + ". LOCKSTEP_REPLACE_GLOO must be the same for all ranks, and lockstep_torch "
                    "installed for all of them (TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off).")
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
        return store.get(key(peer)).decode()

    store.set(key(rank), answer)
    return [wait_for(peer) for peer in range(size)]


def _other_devices(devices):
    # Gloo serves CUDA tensors too. Asked without initialising CUDA, which must not be forked.
    return any(name != dist.Backend.GLOO or device != "cuda" or torch.cuda.device_count() > 0
               for device, name in devices.items() if device != "cpu")


def _make(size, rank, global_ranks, backend, store, name, timeout):
    """(backend, what to ask torch.distributed for) for a group whose CPU tensors go through gloo;
    nothing where it stays gloo. Collective over the group's ranks."""
    devices = c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    # A group has one backend of each type, and other plug-ins have ours.
    others = [name for device, name in devices.items() if device != "cpu"]
    if devices.get("cpu") != dist.Backend.GLOO or any(
            name.upper() in dist.Backend._plugins for name in others):
        return None, backend
    # Where gloo itself would rendezvous, so that it is noticed.
    store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", store))
    several = "others" in _exchange(store, rank, size, "others" if _other_devices(devices) else "",
                                    timeout)
    ours, reason = engine.make(store, rank, size, timeout, name, global_ranks, dist.Backend.GLOO)
    if ours is None:
        if rank == 0:
            logging.getLogger("lockstep_torch").warning(
                "[lockstep_torch] group '%s' of %d ranks stays gloo: %s.", name, size, reason)
        return None, backend
    if not several:
        return ours, "lockstep"
    devices["cpu"] = "lockstep"
    return ours, ",".join(f"{device}:{name}" for device, name in devices.items())


class _GlooType(type(getattr(c10d, "ProcessGroupGloo", object))):
    """torch.distributed asks in one place whether a group's backend is gloo: to set its timeout."""

    def __call__(cls, *args, **kwargs):
        return dist.ProcessGroupGloo(*args, **kwargs)

    def __instancecheck__(cls, instance):
        return isinstance(instance, dist.ProcessGroupGloo) or engine.is_ours(instance)


def _name_in_logging_data():
    """DDP's logging data has the name of a group's type, which is a custom one for groups of ours.
    What was asked for is gloo: the name and the fields that a group of gloo's has by default."""
    ddp = torch.nn.parallel.DistributedDataParallel
    get_data = ddp._get_ddp_logging_data

    @functools.wraps(get_data)
    def get_data_as_gloo(self):
        data = get_data(self)
        if data.get("backend_name") == "custom" and dist.get_backend(self.process_group) == "gloo":
            data |= {"backend_name": "gloo", "gloo_num_threads": 2}
            for variable in ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"):
                data[variable.lower()] = os.environ.get(variable, "N/A")
        return data

    ddp._get_ddp_logging_data = get_data_as_gloo


def replace_gloo():
    """From now on this process's groups that are asked for as gloo are made by the engine where all
    their ranks share a host, and by gloo elsewhere. To be called on all ranks, before
    init_process_group; LOCKSTEP_REPLACE_GLOO=1 does so when torch is imported.
    """
    if not dist.is_gloo_available() or isinstance(c10d.ProcessGroupGloo, _GlooType):
        return
    c10d.ProcessGroupGloo = _GlooType("ProcessGroupGloo", (dist.ProcessGroupGloo,), {})
    make_group = c10d._new_process_group_helper

    @functools.wraps(make_group)
    def make_group_of_ours(size, rank, global_ranks, backend, store, name, *args, **kwargs):
        tag = kwargs.get("pg_tag")
        if (global_ranks and dist.get_rank() not in global_ranks) or (
                tag and c10d._find_pg_by_ranks_and_tag(tag, global_ranks)):
            return make_group(size, rank, global_ranks, backend, store, name, *args, **kwargs)
        ours, asked = _make(size, rank, global_ranks, backend, store, name, kwargs["timeout"])
        _finished.backend = ours
        try:
            made = make_group(size, rank, global_ranks, asked, store, name, *args, **kwargs)
        finally:
            _finished.backend = None
        if ours is not None:
            group = made[0]
            if "nccl" not in asked:
                group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(backend)))
        return made

    c10d._new_process_group_helper = make_group_of_ours
    _name_in_logging_data()
