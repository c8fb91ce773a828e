"""Example 03 prints what it should, and the loss falls: on one rank, two, and three, over which ten
thousand samples do not divide evenly."""

import math
import os
import pathlib
import re
import subprocess

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
SOURCE = pathlib.Path(os.environ["LOCKSTEP_SOURCE"])
LIMIT_S = 100
LEAST_FALL = 0.02


def run(ranks, *flags):
    command = [BIN / "examples" / "03_mlp", *flags]
    if ranks > 1:
        command = [BIN / "lockstep", "run", "--standalone", f"--nproc-per-node={ranks}", *command]
    done = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL, env={**os.environ, "LOCKSTEP_DEVICE": "cpu"})
    if done.returncode != 0:
        raise SystemExit(f"{ranks} ranks: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]


def check(ranks, epochs, batch_size):
    lines = run(ranks, "--epochs", str(epochs), "--batch-size", str(batch_size))
    batches = math.ceil(math.ceil(10_000 / ranks) / batch_size)
    wanted = {f"Running on rank {rank} of {ranks} (cpu)" for rank in range(ranks)}
    assert wanted <= set(lines), lines[:9]
    means = []
    for epoch in range(epochs):
        for at in range(0, batches, 10):
            pattern = rf"Epoch {epoch} \[{at}/{batches}\] Loss: \d\.\d{{4}}"
            found = [line for line in lines if re.fullmatch(pattern, line)]
            assert len(found) == 1, f"{pattern}: {found}"
        found = [m for line in lines
                 if (m := re.fullmatch(rf"Epoch {epoch} completed, Average Loss: (\d\.\d{{4}})",
                                       line))]
        assert len(found) == 1, f"epoch {epoch}: {len(found)} averages"
        means.append(float(found[0].group(1)))
    assert "replicas identical" in lines, lines[-3:]
    assert len(lines) == ranks + epochs * (len(range(0, batches, 10)) + 1) + 1, len(lines)
    fall = means[0] - means[-1]
    print(f"{ranks} ranks, batch {batch_size}: {means[0]:.4f} to {means[-1]:.4f}, fell {fall:.4f}")
    if epochs == 10:
        assert fall >= LEAST_FALL, f"fell by less than {LEAST_FALL}"


def check_flags():
    program = BIN / "examples" / "03_mlp"
    for flags in (["--epochs", "0"], ["--epoch", "3"], ["--batch-size"], ["elephant"]):
        done = subprocess.run([program, *flags], timeout=LIMIT_S, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL)
        assert (done.returncode, done.stdout) == (2, ""), (flags, done)
        assert done.stderr.startswith("03_mlp: ") and done.stderr.count("\n") == 1, done.stderr
        assert flags[0] in done.stderr, done.stderr
    done = subprocess.run([program, "--help"], timeout=LIMIT_S, capture_output=True, text=True)
    assert done.returncode == 0, done
    for default in ("10", "32"):
        assert re.search(rf"[=\[]{default}\b", done.stdout), done.stdout


def check_loader():
    """Two workers and pinned memory, as the README says."""
    program = (SOURCE / "examples" / "03_mlp" / "main.cpp").read_text(encoding="utf-8")
    for option in (".num_workers = 2", ".pin_memory = true", ".shuffle = true"):
        assert option in program, option


def main():
    check_flags()
    check_loader()
    check(ranks=1, epochs=1, batch_size=32)
    check(ranks=2, epochs=10, batch_size=32)
    check(ranks=3, epochs=2, batch_size=64)


if __name__ == "__main__":
    main()
