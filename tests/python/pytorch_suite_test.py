"""PyTorch's own suite of torch.distributed, two ranks, with gloo replaced by shared memory.

    pytorch_suite_test.py          every case that gloo passes must pass with gloo replaced
    pytorch_suite_test.py --gloo   gloo itself, for comparison
    pytorch_suite_test.py NAME...  those cases alone, with what they print

Ranks are forks of this process, which has imported torch once. Cases that PyTorch skips with gloo
on a CPU (GPUs, more ranks, other backends) are skipped here too. 77: torch's suite is not here.
"""

import logging
import os
import pathlib
import signal
import sys
import tempfile
import time
import unittest

SOURCE = pathlib.Path(os.environ.get("LOCKSTEP_SOURCE")
                      or pathlib.Path(__file__).resolve().parents[2])
BIN = pathlib.Path(os.environ.get("LOCKSTEP_BIN") or SOURCE / "build/bin")
PACKAGE = pathlib.Path(os.environ.get("LOCKSTEP_TORCH_PACKAGE") or BIN.parent / "python")
CASE_LIMIT_S = 60


def load(folder, replaced):
    """PyTorch's test class, with ranks that are forked."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": folder,
                   "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                   "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(CASE_LIMIT_S)}
    sys.argv = sys.argv[:1]  # torch's test utilities read the arguments
    import torch.multiprocessing
    if replaced:
        sys.path.insert(0, str(PACKAGE))
        import lockstep_torch
        lockstep_torch.replace_gloo()
    from torch.testing._internal.distributed import distributed_test as suite

    logging.disable(logging.INFO)

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Case


def run(case, name):
    """("ok", "skip" or "FAIL", reason) of one case."""
    result = unittest.TestResult()
    test = case(name)
    test.run(result)
    for process in getattr(test, "processes", []):
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    if result.errors or result.failures:
        return "FAIL", (result.errors + result.failures)[0][1]
    return ("skip", result.skipped[0][1]) if result.skipped else ("ok", "")


def main():
    chosen = [name for name in sys.argv[1:] if not name.startswith("--")]
    replaced = "--gloo" not in sys.argv
    if replaced and not list(PACKAGE.glob("lockstep_torch/_C*.so")):
        print("SKIP 1: lockstep_torch is not built")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        try:
            case = load(folder, replaced)
        except ImportError as error:
            print(f"SKIP 1: PyTorch's suite cannot be imported: {error}")
            return 77
        names = chosen or unittest.TestLoader().getTestCaseNames(case)
        case.setUpClass()
        counts = {"ok": 0, "skip": 0, "FAIL": 0}
        for name in names:
            begin = time.monotonic()
            how, reason = run(case, name)
            counts[how] += 1
            last = reason.strip().split("\n")[-1] if reason else ""
            print(f"{how:4} {time.monotonic() - begin:5.1f} s  {name}  {last[:150]}", flush=True)
            if chosen and how == "FAIL":
                print(reason)
    print(f"pytorch suite ({'gloo replaced' if replaced else 'gloo'}): {counts['ok']} passed, "
          f"{counts['FAIL']} failed, {counts['skip']} skipped")
    return 1 if counts["FAIL"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
