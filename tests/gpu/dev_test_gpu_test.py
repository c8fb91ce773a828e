"""`./dev test-gpu` without a GPU: one sentence and 2, before anything is built."""
import os
import pathlib
import subprocess
import sys

SOURCE = pathlib.Path(os.environ["LOCKSTEP_SOURCE"])


def main():
    done = subprocess.run([SOURCE / "dev", "test-gpu"], capture_output=True, text=True, timeout=60,
                          check=False, env=dict(os.environ, CUDA_VISIBLE_DEVICES=""))
    said = done.stderr.strip().splitlines()
    print(done.returncode, said)
    right = (done.returncode == 2 and done.stdout == "" and len(said) == 1
             and "needs an NVIDIA GPU" in said[0])
    return 0 if right else 1


sys.exit(main())
