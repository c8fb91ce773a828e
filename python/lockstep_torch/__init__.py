"""Registers the backend `lockstep` with torch.distributed: one host, shared memory, CPU tensors.

    import lockstep_torch
    torch.distributed.init_process_group("lockstep")

Nothing else has to change in a script. An installed package is even loaded by `import torch`.
"""

from datetime import timedelta


# Before torch is imported: where this package is imported first, torch calls it in the middle of
# that import.
def autoload():
    """Called by `import torch` for an installed package; importing it does everything."""


# pylint: disable=wrong-import-position
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import Backend as _Backend  # noqa: E402

_Options = _Backend.Options
__all__ = ["autoload", "cache_cpu_memory", "cpu_cache_stats", "create", "empty_cpu_cache"]


def _extension():
    # Imported on first use: if torch was replaced after the package was built, `import torch` must
    # not fail, and code compiled for the old version must not run.
    try:
        from . import _C  # pylint: disable=import-outside-toplevel
    except ImportError as error:
        raise ImportError(
            f"[lockstep_torch] the compiled part cannot be loaded ({error}). Was torch exchanged "
            "since? Install the package again: pip install --force-reinstall ./python") from error
    built, running = _C.torch_version, torch.__version__.split("+")[0]
    if built != running:
        raise ImportError(
            f"[lockstep_torch] built for torch {built}, but this is torch {running}. Install the "
            "package again: pip install --force-reinstall ./python")
    return _C


def cache_cpu_memory():
    """Caches the memory of CPU tensors of 1 MiB and more in this process, from now on.

    malloc returns large tensors to the kernel, which clears their pages again in every step. Call
    it once, before other threads make tensors. Returns False where the process has an allocator of
    its own or LOCKSTEP_CPU_CACHE_MAX_BYTES is 0. Blocks that were idle for 30 s are unmapped.
    """
    return _extension().cache_cpu_memory()


def empty_cpu_cache():
    """Unmaps idle blocks now, as torch.cuda.empty_cache() does."""
    _extension().empty_cpu_cache()


def cpu_cache_stats():
    """Bytes used, idle and at the peak, and how many blocks were mapped so far, as a dict."""
    return _extension().cpu_cache_stats()


def create(options, backend_options=None):
    """What torch.distributed calls to make a group. Collective over its ranks."""
    timeout = options.timeout
    if backend_options is not None:
        if not isinstance(backend_options, _Options):
            raise TypeError("[lockstep_torch] pg_options is a "
                            f"{type(backend_options).__name__}. Pass a "
                            "torch._C._distributed_c10d.Backend.Options, or nothing.")
        timeout = backend_options._timeout  # pylint: disable=protected-access
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    return _extension().create(options.store, options.group_rank, options.group_size, timeout,
                               str(options.group_id), list(options.global_ranks_in_group))


if dist.is_available() and not hasattr(dist.Backend, "LOCKSTEP"):
    dist.Backend.register_backend("lockstep", create, extended_api=True, devices=["cpu"])
