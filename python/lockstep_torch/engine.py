"""The compiled part, imported on first use."""

import faulthandler
import os
from datetime import timedelta

import torch

_stacks = None  # where faulthandler writes; open until the end


def open_ledger():
    """Under `lockstep run`: notes collectives where the launcher reads them, and leaves the Python
    stack in a file when a signal of the launcher asks for it."""
    global _stacks  # pylint: disable=global-statement
    number = extension().open_ledger()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not number or not path or _stacks is not None:
        return
    try:
        # pylint: disable-next=consider-using-with
        _stacks = open(path + ".stack", "a", encoding="utf-8")
    except OSError:
        return  # the launcher then prints the stack of the C++ functions
    faulthandler.register(number, _stacks, all_threads=False, chain=True)


def extension():
    # A torch that was exchanged after the package was built must not fail at import, and must not
    # be met by code that was compiled for another one.
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


def make(store, rank, size, timeout, name, global_ranks, asked="lockstep"):
    """(backend, ""), or (None, why these ranks cannot share memory); the same on all of them.
    Profiles name its operations after the backend that was `asked` for."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    open_ledger()
    return extension().create(store, rank, size, timeout, str(name), list(global_ranks),
                              asked)


def is_ours(backend):
    # Not by name(), which the wrapper of debug mode answers for it. Loads nothing.
    return type(backend).__module__ == f"{__package__}._C"
