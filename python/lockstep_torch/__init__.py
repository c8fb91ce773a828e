"""Registers the backend `lockstep` with torch.distributed: one host, shared memory, CPU tensors.

    import lockstep_torch
    torch.distributed.init_process_group("lockstep")

Nothing else has to change in a script. An installed package is even loaded by `import torch`.
"""

import os


# Before torch is imported: where this package is imported first, torch calls it in the middle of
# that import.
def autoload():
    """Called by `import torch` for an installed package; importing it does everything."""


# pylint: disable=wrong-import-position
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import Backend as _Backend  # noqa: E402

from . import engine  # noqa: E402
from .gloo import replace_gloo, take_finished  # noqa: E402

_Options = _Backend.Options
__all__ = ["autoload", "cache_cpu_memory", "cpu_cache_stats", "create", "empty_cpu_cache",
           "replace_gloo"]


def cache_cpu_memory():
    """Caches the memory of CPU tensors of 1 MiB and more in this process, from now on.

    malloc returns large tensors to the kernel, which clears their pages again in every step. Call
    it once, before other threads make tensors. Returns False where the process has an allocator of
    its own or LOCKSTEP_CPU_CACHE_MAX_BYTES is 0. Blocks that were idle for 30 s are unmapped.
    """
    return engine.extension().cache_cpu_memory()


def empty_cpu_cache():
    """Unmaps idle blocks now, as torch.cuda.empty_cache() does."""
    engine.extension().empty_cpu_cache()


def cpu_cache_stats():
    """Bytes used, idle and at the peak, and how many blocks were mapped so far, as a dict."""
    return engine.extension().cpu_cache_stats()


def create(options, backend_options=None):
    """What torch.distributed calls to make a group. Collective over its ranks."""
    finished = take_finished()
    if finished is not None:
        return finished
    timeout = options.timeout
    if backend_options is not None:
        if not isinstance(backend_options, _Options):
            raise TypeError("[lockstep_torch] pg_options is a "
                            f"{type(backend_options).__name__}. Pass a "
                            "torch._C._distributed_c10d.Backend.Options, or nothing.")
        timeout = backend_options._timeout  # pylint: disable=protected-access
    backend, reason = engine.make(options.store, options.group_rank, options.group_size, timeout,
                                   options.group_id, options.global_ranks_in_group)
    if backend is None:
        raise dist.DistBackendError(
            f"[lockstep_torch] these ranks cannot share memory: {reason}. The backend 'lockstep' "
            'is for the ranks of one host; use backend="gloo" here.')
    return backend


def _is_on(name):
    text = os.environ.get(name, "").lower()
    if text not in ("", "1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(f"[lockstep_torch] {name}='{os.environ[name]}' is neither true nor false. "
                         "Use 1 or 0.")
    return text in ("1", "true", "yes", "on")


if dist.is_available():
    if not hasattr(dist.Backend, "LOCKSTEP"):
        dist.Backend.register_backend("lockstep", create, extended_api=True, devices=["cpu"])
    if _is_on("LOCKSTEP_REPLACE_GLOO"):
        replace_gloo()
