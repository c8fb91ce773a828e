"""`lockstep train` computes what Hugging Face's Trainer computes.

Fifty steps on two ranks over gloo: accumulation 4, clipping at 1, cosine schedule with warm-up,
weight decay on weights alone, two and a half epochs. Both start from the same weights and read the
same tokens; each step's mean loss over all ranks and passes must agree within 1e-5 of itself, and
the norm of every parameter at the end within 1e-4.

The tolerance: both sides add the same float32 numbers, but in other kernels and orders. One loss
sums 96 logits in 768 places, and agrees to about 1e-7; the weights of fifty steps carry those
differences on and enlarge them less than a hundred times while the learning rate is this small.
"""

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

import hf_trainer  # noqa: E402: needs what was looked for

HERE = pathlib.Path(__file__).resolve().parent
LOCKSTEP = str(pathlib.Path(os.environ["LOCKSTEP_BIN"], "lockstep"))
PYTHON = os.environ["LOCKSTEP_PYTHON"]
LIMIT_S = 240
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4


def run(command, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run([str(word) for word in command], env=environment, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout[-8000:]}")
    return done.stdout


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def hugging_face(folder):
    script = HERE / "hf_trainer.py"
    run([PYTHON, script, "make", folder])
    run([PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
         f"--master-port={free_port()}", script, "train", folder])
    return json.loads((folder / "losses.json").read_text())


if __name__ == "__main__":
    unittest.main()
