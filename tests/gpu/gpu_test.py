"""What needs a GPU: nccl with one rank, and with two ranks that share one. Skipped without one."""
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec

from gpu_case import end_without_gpu

BIN = os.environ["LOCKSTEP_BIN"]
SOURCE = os.environ["LOCKSTEP_SOURCE"]
RECIPES = {
    "gpt": "model: {name: gpt, n_layer: 2, n_head: 4, n_embd: 32, vocab_size: 257}\n"
           "max_seq_len: 32\n",
    "lora": "model: {name: gpt, n_layer: 2, n_head: 4, n_embd: 32, vocab_size: 257}\n"
            "data: {name: instructions, path: none.json}\nmax_seq_len: 256\n"
            "lora: {r: 4, lora_alpha: 8, target_modules: [c_attn, c_proj]}\n",
    "resnet": "model: resnet18\n"
              "data: {name: images, samples: 64, image_size: 32, classes: 10}\n"}


def run(label, ranks, program, expect, env=None, timeout=300):
    # NCCL refuses two ranks on one device of one host; it believes them to be on two.
    command = [f"{BIN}/lockstep", "run", "--standalone", f"--nproc-per-node={ranks}",
               "bash", "-c", 'NCCL_HOSTID=host$RANK exec "$0" "$@"', *program]
    shared = {"LOCKSTEP_DEVICE": "cuda:0", "LOCKSTEP_BACKEND": "nccl"}
    if ranks > 1:
        shared.update({"LOCKSTEP_SHARE_DEVICE": "1", "NCCL_SOCKET_IFNAME": "lo"})
    return check(label, command, expect, {**shared, **(env or {})}, timeout)


def suites(program, source):
    """The tests of one source of a program that has several."""
    with open(f"{SOURCE}/{source}", encoding="utf-8") as file:
        names = sorted(set(re.findall(r"^TEST(?:_F|_P)?\((\w+)", file.read(), re.MULTILINE)))
    return [f"{BIN}/tests/{program}",
            "--gtest_filter=" + ":".join(f"{name}.*:*/{name}.*" for name in names)]


def recipe(name, *options):
    """A small training file through `lockstep train` and beside PyTorch's."""
    with tempfile.TemporaryDirectory(prefix="lockstep-recipe-") as folder:
        file = f"{folder}/{name}.yaml"
        with open(file, "w", encoding="utf-8") as text:
            text.write(RECIPES[name] + "per_device_train_batch_size: 4\nbf16: true\n")
        command = [f"{BIN}/lockstep", "bench", "recipes", file, "--updates", "8", "--rounds", "1",
                   "--peer-modes", "eager", *options]
        return check(f"bench recipes, {name}", command, ["the same in fp32", "ours / this"],
                     {"LOCKSTEP_DEVICE": "cuda:0"}, 300)


def check(label, command, expect, env, timeout):
    start = time.monotonic()
    done = subprocess.run(command, env=dict(os.environ, **env), capture_output=True, text=True,
                          timeout=timeout)
    seconds = time.monotonic() - start
    output = done.stdout + done.stderr
    ok = done.returncode == 0 and all(text in output for text in expect)
    outcome = "ok    " if ok else "FAILED"
    print(f"{outcome} {label} ({seconds:.1f} s, exit code {done.returncode})", flush=True)
    if not ok or "-v" in sys.argv:
        print(output, flush=True)
    return ok


def main():
    end_without_gpu()
    results = [
        run("kernels beside double precision, attention with a soft cap, grouped and fp8 products",
            1, [f"{BIN}/tests/nn_test"], ["PASSED"], timeout=600),
        run("models on a GPU and the CPU", 1,
            suites("gpt_test", "lockstep/models/device_map_test.cpp"), ["PASSED"]),
        run("AdamW in one pass", 1,
            suites("optim_test", "lockstep/optim/adamw_pass_test.cpp"), ["PASSED"]),
        run("fused models beside plain ones", 1,
            suites("gpt_test", "lockstep/models/fused_test.cpp"), ["PASSED"]),
        run("mixtures of experts", 1,
            suites("gpt_test", "lockstep/models/experts_test.cpp"), ["PASSED"],
            env={"LOCKSTEP_BACKEND": "gloo"}),  # ranks are on the CPU
        run("captured steps", 1,
            suites("trainer_test", "lockstep/train/captured_step_test.cpp"), ["PASSED"],
            env={"LOCKSTEP_BACKEND": "gloo"}),  # one case has ranks on the CPU
        run("example 03, one rank", 1, [f"{BIN}/examples/03_mlp"], ["replicas identical", "nccl"]),
        # The line of log_gpu_memory() is that of the allocator, with a tensor of 1 GiB.
        run("DDP on CUDA, one rank", 1, [f"{BIN}/tests/gpu_ddp"],
            ["all checks passed", "of this process: allocated 1.", ", reserved ", ", peak "]),
        run("DDP on CUDA, two ranks on one GPU", 2, [f"{BIN}/tests/gpu_ddp"],
            ["all checks passed"]),
        run("fully sharded training, two ranks on one GPU", 2,
            [f"{BIN}/lockstep", "train", f"{SOURCE}/examples/configs/tiny_gpt.yaml", "--max_steps",
             "20", "--fsdp", "full_shard", "--save_strategy", "no", "--report_to", "none",
             "--output_dir", tempfile.mkdtemp(prefix="lockstep-fsdp-")],
            ["fully sharded over 2 ranks", "trained 20 steps"]),
        run("a rank that is stuck in a graph", 2, [f"{BIN}/tests/gpu_ddp", "stuck"],
            ["left a graph"], {"LOCKSTEP_TIMEOUT_S": "5"}),
        run("conformance, two nccl ranks", 2, [f"{BIN}/tests/conformance", "--world-from-env"], [],
            {"LOCKSTEP_CONFORMANCE_BACKEND": "nccl"}),
        run("desync ends in TimeoutError", 2, [f"{BIN}/tests/desync"], ["TimeoutError"],
            {"LOCKSTEP_TIMEOUT_S": "5"}),
        run("desync with the host in the stream", 2, [f"{BIN}/tests/desync", "stream"],
            ["TimeoutError"], {"LOCKSTEP_TIMEOUT_S": "5"}),
        recipe("gpt", "--step"), recipe("resnet"),
        find_spec("peft") is None or recipe("lora"),
        check("bench dp-vs-ddp, two replicas and two ranks on one GPU",
              [f"{BIN}/lockstep", "bench", "dp-vs-ddp", "--device", "cuda", "--model", "resnet18",
               "--image_size", "32", "--steps", "10"], ["verified: after 2 steps", "DP / this"],
              {"LOCKSTEP_DEVICE": "cuda", "LOCKSTEP_SHARE_DEVICE": "1"}, 300),
    ]
    return 0 if all(results) else 1


sys.exit(main())
