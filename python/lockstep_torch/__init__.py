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
__all__ = ["autoload", "create"]


def _extension():
    # Imported on first use: a torch that was exchanged after the package was built must not fail
    # at import, and must not be met by code that was compiled for another one.
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
