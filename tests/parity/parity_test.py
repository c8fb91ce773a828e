"""Lockstep computes what Python's PyTorch computes: the comparison.

    parity_test.py            single, worlds of 2, 3 and 4, and merged
    parity_test.py single     the optimizers over 20 steps, and GPT forward and backward: bit-equal
    parity_test.py gpu        the optimizers on a GPU; 77 without one
    parity_test.py world N    every case of training on N ranks, against PyTorch's
                              DistributedDataParallel: losses of all ranks, final weights, buffers;
                              two ranks over shared memory and over gloo
    parity_test.py merged     N ranks with batch B against one rank with batch N*B

One process does it all, because importing what DistributedDataParallel needs takes longer than any
of its parts; PyTorch's ranks are forks of it.

Two ranks must agree in every bit: a + b = b + a, and halving is exact. With three or more the
result of a sum depends on its order, which depends on where a gradient lies in its bucket, so the
weights may differ by rounding; tolerance() derives how much.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError:
    print("SKIP 1: the interpreter has no torch; set LOCKSTEP_PYTHON")
    sys.exit(77)

import oracle
from oracle import Case

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
TIMEOUT_S = 1200

CASES = (
    [Case(f"{model}-{optimizer}" + ("-accumulate" if accumulate > 1 else ""), model, optimizer,
          accumulate=accumulate)
     for model in ("mlp", "conv", "gpt") for optimizer in ("sgd", "adamw") for accumulate in (1, 2)]
    + [Case(f"unused-{optimizer}", "branches", optimizer, find_unused=1)
       for optimizer in ("sgd", "adamw")]
    + [Case("unused-adamw-accumulate", "branches", "adamw", accumulate=2, find_unused=1)]
    + [Case(f"join-{model}-{optimizer}-short-{short}", model, optimizer, join=short)
       for model, optimizer in (("mlp", "sgd"), ("conv", "sgd"), ("gpt", "adamw"))
       for short in ("first", "last")]
    + [Case("checkpoint-sgd", "gpt", "sgd", checkpoint=1),
       Case("checkpoint-adamw-accumulate", "gpt", "adamw", accumulate=2, checkpoint=1),
       Case("checkpoint-adamw-static", "gpt", "adamw", checkpoint=1, static_graph=1),
       Case("buckets-gpt-sgd", "gpt", "sgd", bucket_cap_mb=0.02),
       Case("copied-gpt-adamw-accumulate", "gpt", "adamw", accumulate=2, bucket_view=0)]
)
# Cases of the above, of worlds of these sizes, whose ranks' batches are trained on as one.
MERGED = [case for case in CASES if case.name in ("mlp-sgd", "mlp-adamw", "gpt-sgd", "gpt-adamw")]
assert len(MERGED) == 4
MERGED_WORLDS = (2, 4)
# The ranks of one host share memory; over sockets the bits must be the same.
BACKENDS = {2: ("shm", "gloo")}

# ---------------------------------------------------------------- tolerances

UNIT = 2.0 ** -24      # rounding of float32
GRADIENT = 1.0         # no gradient entry is larger in these cases; checked on rank 0
AMPLIFICATION = 10.0   # how far all steps may carry a first difference; see below
LOSS_ULPS = 16
CANCELLATION = 100.0   # sum of |gradients| over |their sum|, for an entry that matters to AdamW

# Entries whose gradient is zero but for rounding: a bias just before batch normalisation (whose
# running mean follows it), and the bias of attention keys, which shifts all scores of a query
# identically. AdamW divides a gradient by its own size and so turns that noise into full steps.
NOISE = {"conv": ("conv1.bias", "conv2.bias", "bn1.running_mean", "bn2.running_mean"),
         "gpt": ("attn.c_attn.bias",)}


def tolerance(case, name, world):
    """How far weights may be apart after T steps on N ranks.

    Both sides add the same N gradients g_r / N. Two orders of adding N numbers differ by at most
    2 (N - 1) u sum |g_r| / N, so a gradient entry by e = 2 (N - 1) u G at most.

    SGD with momentum m moves the weights by lr (1 + m + m^2 + ...) times a gradient over the
    following steps, so a difference e in each of T gradients is worth at most T lr e / (1 - m).
    AdamW moves them by lr times a gradient over its own running size. That ratio changes by the
    relative difference, 2 (N - 1) u times the cancellation C of the sum: T lr 2 (N - 1) u C.

    Weights that differ give gradients that differ; A says how much that adds in all steps.
    An entry of NOISE differs by whole steps: 2 T lr. Nothing else depends on it.

    A loss differs by the weights' differences, which have random signs, times gradients that are
    small, and by its own rounding: LOSS_ULPS units in the last place of a number in [2, 4).
    """
    if name == "losses":
        return LOSS_ULPS * 2.0 ** -22
    relative = 2 * (world - 1) * UNIT
    if case.optimizer == "sgd":
        return AMPLIFICATION * oracle.STEPS * 0.05 / (1 - 0.9) * relative * GRADIENT
    if name.endswith(NOISE.get(case.model, ())):
        return 2 * oracle.STEPS * 1e-3
    return AMPLIFICATION * oracle.STEPS * 1e-3 * relative * CANCELLATION


# ---------------------------------------------------------------- comparing

def bits(tensor):
    return tensor.contiguous().numpy().tobytes()


def difference(a, b):
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def compare(ours, theirs, limit):
    """(largest difference, all bits equal, largest share of the limit) over tensors by name."""
    if ours.keys() != theirs.keys():
        raise SystemExit(f"names differ: {sorted(ours.keys() ^ theirs.keys())}")
    largest, equal, share = 0.0, True, 0.0
    for name, tensor in ours.items():
        other = theirs[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise SystemExit(f"{name}: {tensor.shape} {tensor.dtype}, {other.shape} {other.dtype}")
        equal &= bits(tensor) == bits(other)
        apart = difference(tensor, other)
        largest = max(largest, apart)
        share = max(share, apart / limit(name)) if apart == apart else float("inf")
    return largest, equal, share


def check_compare():
    """A comparison that cannot fail proves nothing: one bit of one tensor must be noticed."""
    good = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)}
    bad = {**good, "a": good["a"].clone()}
    bad["a"].view(torch.int32)[2] ^= 1
    assert compare(good, good, lambda _: 1e-9) == (0.0, True, 0.0)
    assert compare(good, bad, lambda _: 1e-9)[1:] != (True, 0.0)
    assert compare({"a": torch.full((1,), float("nan"))}, {"a": torch.ones(1)},
                   lambda _: 1e9)[2] == float("inf")


def row(*cells):
    print(f"{cells[0]:34} {cells[1]:>5} {cells[2]:>14} {cells[3]:>14} {cells[4]:>6}  {cells[5]}",
          flush=True)


def is_compared(case, name):
    """While ranks run out, the statistics of batch normalisation come from the highest rank that
    still trains. PyTorch copies them before forward, Lockstep after backward; when that rank runs
    out, the last batch counted is PyTorch's rank 0's and Lockstep's highest rank's."""
    return not (case.join == "last" and ".running_" in name)


def judge(case, world, ours_in, theirs_in, initial):
    """Prints a line for one case and says whether it passed."""
    weights = [0.0, True, 0.0]
    losses = [0.0, True, 0.0]
    moved = peak = 0.0
    for rank in range(world):
        ours = oracle.read_tensors(ours_in / case.name / f"rank{rank}")
        theirs = oracle.read_tensors(theirs_in / case.name / f"rank{rank}")
        found = compare({"losses": ours.pop("losses")}, {"losses": theirs.pop("losses")},
                        lambda name: tolerance(case, name, world))
        losses = [max(losses[0], found[0]), losses[1] and found[1], max(losses[2], found[2])]
        if rank == 0:
            peak = theirs.pop("peak_gradient").item()
            weights = compare(*({k: v for k, v in side.items() if is_compared(case, k)}
                                for side in (ours, theirs)),
                              lambda name: tolerance(case, name, world))
            moved = max(difference(ours[name], initial[f"{case.model}-{name}"]) for name in ours)
    equal = weights[1] and losses[1]
    share = max(weights[2], losses[2])
    wrong = []
    if not equal if world == 2 else share > 1:
        wrong.append("FAILED")
    if moved < 1e-3:
        wrong.append("FAILED: nothing was trained")
    if peak > GRADIENT:
        wrong.append(f"FAILED: a gradient of {peak:.1f} is more than the tolerance assumes")
    row(case.name, world, f"{losses[0]:.2e}", f"{weights[0]:.2e}", "yes" if equal else "no",
        f"{share:.3f} of tolerance  {' '.join(wrong)}".rstrip())
    return not wrong


# ---------------------------------------------------------------- running

def settle(with_gpu):
    """One thread, the loopback interface, and a GPU only where it is meant: for both sides."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    if not with_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def run_cpp(world, *args, backend="shm"):
    command = [BIN / "tests" / "parity", *args]
    environment = dict(os.environ)
    if world > 1:
        command = [BIN / "lockstep", "run", "--standalone", f"--nproc-per-node={world}", *command]
        environment["LOCKSTEP_BACKEND"] = backend
    outcome = subprocess.run(command, env=environment, timeout=TIMEOUT_S, check=False)
    if outcome.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {outcome.returncode}")


def write_cases(path, cases):
    path.write_text("".join(case.line() + "\n" for case in cases), encoding="ascii")
    return path


def judge_single(directory, names):
    row("in one process", "", "", "difference", "bits", "")
    passed = True
    for name in names:
        largest, equal, _ = compare(oracle.read_tensors(directory / "cpp" / name),
                                    oracle.read_tensors(directory / "python" / name), lambda _: 1)
        row(name, "", "", f"{largest:.2e}", "yes" if equal else "no", "" if equal else "FAILED")
        passed &= equal
    return passed


def single(directory):
    oracle.make_inputs(directory / "training")
    oracle.make_optimizer_inputs(directory / "optimizers")
    run_cpp(1, "single", directory, directory / "cpp")
    oracle.run_optimizers(directory / "optimizers", directory / "python", "cpu")
    oracle.run_gpt(directory / "training", directory / "python")
    return judge_single(directory, [*oracle.OPTIMIZERS, "gpt"])


def gpu(directory):
    oracle.make_optimizer_inputs(directory / "optimizers")
    run_cpp(1, "optimizers", directory, directory / "cpp")
    oracle.run_optimizers(directory / "optimizers", directory / "python", "cuda")
    return judge_single(directory, oracle.OPTIMIZERS)


def training(directory, world):
    """Every case; directory/inputs is what both sides start from."""
    out = directory / f"world{world}"
    out.mkdir()
    initial = oracle.read_tensors(directory / "inputs")
    cases = write_cases(directory / "cases.txt", CASES)
    if oracle.run_world(world, CASES, directory / "inputs", out / "python") != 0:
        raise SystemExit("the oracle failed")
    passed = True
    for backend in BACKENDS.get(world, ("shm",)):
        run_cpp(world, "train", directory / "inputs", cases, out / backend, backend=backend)
        row(f"case, {backend}", "ranks", "loss differs", "weight differs", "bits", "")
        passed &= all([judge(case, world, out / backend, out / "python", initial)
                       for case in CASES])
    return passed


def merged(directory):
    """The mean of N gradients of means over B samples is the gradient of the mean over N*B."""
    together = write_cases(directory / "merged.txt", [
        Case(f"{case.name}-{world}", case.model, case.optimizer, merge=world)
        for case in MERGED for world in MERGED_WORLDS])
    run_cpp(1, "train", directory / "inputs", together, directory / "one")
    row("case, merged", "ranks", "loss differs", "weight differs", "bits", "")
    passed = True
    for world in MERGED_WORLDS:
        ranks = directory / f"world{world}" / "shm"
        if not ranks.exists():  # training() was not asked for
            apart = write_cases(directory / "apart.txt", MERGED)
            run_cpp(world, "train", directory / "inputs", apart, ranks)
        for case in MERGED:
            parts = [oracle.read_tensors(ranks / case.name / f"rank{rank}")
                     for rank in range(world)]
            parts[0]["losses"] = torch.stack([part["losses"] for part in parts]).mean(0)
            one = oracle.read_tensors(directory / "one" / f"{case.name}-{world}" / "rank0")
            # Sums over samples are ordered differently too: N B terms, and the time of a sequence.
            terms = world * oracle.BATCH * (oracle.GPT["n_positions"] if case.model == "gpt" else 1)
            largest, equal, share = compare(parts[0], one,
                                            lambda name: tolerance(case, name, terms))
            row(case.name, world, f"{difference(parts[0]['losses'], one['losses']):.2e}",
                f"{largest:.2e}", "yes" if equal else "no",
                f"{share:.3f} of tolerance" + ("" if share <= 1 else "   FAILED"))
            passed &= share <= 1
    return passed


def everything(directory):
    passed = [training(directory, world) for world in (2, 3, 4)]
    # The last: what is forked must not have used autograd.
    return all([*passed, merged(directory), single(directory / "single")])


def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else "everything"
    settle(with_gpu=mode == "gpu")
    check_compare()
    if mode == "gpu" and not torch.cuda.is_available():
        print("SKIP 1: no GPU")
        return 77
    with tempfile.TemporaryDirectory(prefix="lockstep-parity-") as name:
        directory = pathlib.Path(name)
        if mode in ("everything", "world", "merged"):
            oracle.make_inputs(directory / "inputs")
        if mode == "world":
            passed = training(directory, int(sys.argv[2]))
        else:
            passed = {"everything": everything, "single": single, "gpu": gpu,
                      "merged": merged}[mode](directory)
    print("parity:", "passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
