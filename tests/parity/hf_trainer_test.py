"""`lockstep train` computes what Hugging Face's Trainer computes.

Fifty steps on two ranks over gloo: accumulation 4, clipping at 1, cosine schedule with warm-up,
weight decay on weights alone, two and a half epochs. Both start from the same weights and read the
same tokens; each step's mean loss over all ranks and passes must agree within 1e-5 of itself, and
the norm of every parameter at the end within 1e-4.

The tolerance: both sides add the same float32 numbers, but in other kernels and orders. One loss
sums 96 logits in 768 places, and agrees to about 1e-7; the weights of fifty steps carry those
differences on and enlarge them less than a hundred times while the learning rate is this small.
"""

import functools
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import unittest

MISSING = [name for name in ("torch", "transformers", "accelerate")
           if importlib.util.find_spec(name) is None]
if MISSING:
    print(f"SKIP 1: the interpreter has no {', '.join(MISSING)}; set LOCKSTEP_PYTHON")
    sys.exit(77)

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
import forks  # noqa: E402
import hf_trainer  # noqa: E402: needs what was looked for
from safetensors.torch import load_file  # noqa: E402: transformers brings it

LOCKSTEP = str(pathlib.Path(os.environ["LOCKSTEP_BIN"], "lockstep"))
LIMIT_S = 1200
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4


def run(command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(arg) for arg in command], env=environment, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout[-8000:]}")


def held_port():
    """A socket on a port that nobody else is given while it is open. It never listens, so the store
    can, which allows addresses to be used again."""
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))  # without that permission yet: a port of nobody else's
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def in_forks(role, folder, environments):
    """role(folder) once per environment, at the same time."""
    def rank(variables):
        os.environ.update(variables)
        role(folder)

    codes = forks.run([functools.partial(rank, variables) for variables in environments])
    if any(codes):
        raise AssertionError(f"{role.__name__} ended with {codes}")


def hugging_face(folder):
    """Each rank has the variables that torchrun gives it."""
    in_forks(hf_trainer.make, folder, [{}])
    with held_port() as holder:
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(holder.getsockname()[1])}
        in_forks(hf_trainer.train, folder,
                 [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)])
    return json.loads((folder / "losses.json").read_text())


def ours(folder):
    # Windows in the order of PyTorch's DistributedSampler; the log has every digit.
    keys = {**hf_trainer.ARGUMENTS,
            "model": {"name": "gpt", **hf_trainer.MODEL, "weights": str(folder / "init")},
            "data": {"name": "tokens", "order": "windows"}, "dataset_dir": str(folder / "data"),
            "max_seq_len": hf_trainer.SEQ_LEN, "output_dir": str(folder / "ours"), "use_cpu": True,
            "ddp_backend": "gloo", "logging_steps": 1,
            "save_steps": hf_trainer.ARGUMENTS["max_steps"], "disable_tqdm": True}
    config = folder / "ours.yaml"
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    run([LOCKSTEP, "run", "--standalone", "--nproc-per-node=2", LOCKSTEP, "train", config])
    lines = (folder / "ours" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    last = folder / "ours" / f"checkpoint-{hf_trainer.ARGUMENTS['max_steps']}"
    weights = load_file(last / "model.safetensors")
    return {"losses": losses, "norms": {k: v.double().norm().item() for k, v in weights.items()}}


def relative(a, b):
    return abs(a - b) / max(abs(a), abs(b))


class Parity(unittest.TestCase):
    def test_fifty_steps(self):
        with tempfile.TemporaryDirectory(prefix="lockstep-hf-") as name:
            folder = pathlib.Path(name)
            theirs = hugging_face(folder)
            mine = ours(folder)
        steps = hf_trainer.ARGUMENTS["max_steps"]
        self.assertEqual(len(theirs["losses"]), steps)
        self.assertEqual(len(mine["losses"]), steps)
        # Something was learned: otherwise any two runs would agree.
        self.assertLess(theirs["losses"][-1], .9 * theirs["losses"][0])
        apart = [relative(a, b) for a, b in zip(theirs["losses"], mine["losses"])]
        print(f"losses {theirs['losses'][0]:.6f} to {theirs['losses'][-1]:.6f}; "
              f"largest relative difference {max(apart):.2e} at step {apart.index(max(apart)) + 1}")
        self.assertLessEqual(max(apart), LOSS_TOLERANCE, apart)
        self.assertEqual(sorted(mine["norms"]), sorted(theirs["norms"]))
        for key, norm in theirs["norms"].items():
            # The bias of the attention keys shifts all scores of a query by the same amount: its
            # gradient is rounding noise, which AdamW turns into full steps.
            if key.endswith("attn.c_attn.bias"):
                continue
            self.assertLessEqual(relative(norm, mine["norms"][key]), NORM_TOLERANCE, key)


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401: the ranks would each import it, for seconds
    unittest.main()
