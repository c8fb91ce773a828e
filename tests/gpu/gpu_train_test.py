"""`lockstep train` and the Trainer's parts on a GPU: precision, resuming, stopping, ranks, memory.

    gpu_train_test.py                  on cuda:0; skipped (77) without a GPU
    gpu_train_test.py --device cpu     the same for what a CPU can do, in a smaller run
    gpu_train_test.py -v               with the output of every check
    gpu_train_test.py --only captured  the checks whose name has this word

One line per check. Everything under full_determinism, so that a run that was killed or stopped must
end with the bits of one that never was.
"""
import json
import math
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "train"))
import train_case  # noqa: E402: stands in the folder beside
from gpu_case import Failed, attempt, end_without_gpu, expect  # noqa: E402
from train_case import checkpoints, copy_until, losses, wait_for_step  # noqa: E402

DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cuda:0"
ON_GPU = DEVICE != "cpu"
LIMIT_S = 400
TRIES = 6

# On a GPU the file that the README shows. Its steps take milliseconds, so there are many of them: a
# kill must find the run under way.
SMALL_GPT = """
model: {name: gpt, n_layer: 1, n_head: 2, n_embd: 32}
data: {name: bytes, path: torch-headers, max_bytes: 60000}
max_seq_len: 32
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
learning_rate: 1.0e-2
lr_scheduler_type: cosine
warmup_steps: 5
weight_decay: 0.1
"""
TINY_GPT = train_case.SOURCE / "examples" / "configs" / "tiny_gpt.yaml"
GPT = TINY_GPT.read_text() if ON_GPU else SMALL_GPT
STEPS, EVERY = (400, 50) if ON_GPU else (60, 10)
LEAST = 1.0 if ON_GPU else .5  # by how much the loss falls
GPT_FLAGS = ["--full_determinism", "true", "--logging_steps", "1", "--report_to", "none",
             "--save_total_limit", "3", "--disable_tqdm", "true", "--dataloader_num_workers", "1",
             "--max_steps", str(STEPS), "--save_steps", str(EVERY)]
# The second save waits for the first, so one is durable there.
BREAK_AT = 2 * EVERY + EVERY // 2
# Without a weight that two stages share: their terms are added up in each stage first.
LLAMA = {"model_type": "llama", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64, "tie_word_embeddings": False}
MLP_STEPS = 520
# Dropout draws from the device's generator, batch norm has buffers; 13 steps an epoch.
MLP = train_case.CONFIG.replace("use_cpu: true", "full_determinism: true")


class Run:
    """One configuration in a folder of its own, started, ended and looked at."""

    def __init__(self, place, config, flags=(), ranks=0, device=DEVICE):
        self.place, self.flags, self.ranks = pathlib.Path(place), list(flags), ranks
        self.device = device
        self.place.mkdir(parents=True)
        self.config = self.place / "train.yaml"
        self.config.write_text(config)
        self.output = self.place / "out"

    def command(self, args):
        train = [train_case.LOCKSTEP, "train", str(self.config), "--output_dir", str(self.output),
                 *self.flags, *args]
        return ranked(self.ranks, train) if self.ranks else train

    def environment(self):
        env = train_case.environment(LOCKSTEP_DEVICE=self.device, LOCKSTEP_HALF_ON_CPU="1")
        if self.ranks and ON_GPU:
            env.update({"LOCKSTEP_SHARE_DEVICE": "1", "NCCL_SOCKET_IFNAME": "lo",
                        "LOCKSTEP_BACKEND": "nccl"})
        return env

    def start(self, *args):
        log = open(self.place / "log", "a", encoding="utf-8")  # pylint: disable=consider-using-with
        with log:
            return subprocess.Popen(self.command(args), env=self.environment(), stdout=log,
                                    stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                    start_new_session=True)

    def log(self):
        return (self.place / "log").read_text(encoding="utf-8", errors="replace")

    def train(self, *args):
        process = self.start(*args)
        code = self.wait(process)
        expect(code == 0, f"exit code {code}")
        return self

    def wait(self, process):
        try:
            return process.wait(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def broken(self, number, step, *args):
        """Runs until `step` is logged, then sends the signal; the exit code. The steps that are
        left take less than a second: on a busy machine the run may have come to its end before the
        signal comes, and begins once more from where it began."""
        before = self.place / "before"
        if self.output.exists():
            shutil.copytree(self.output, before)
        for _ in range(TRIES):
            process = self.start(*args)
            try:
                wait_for_step(process, self.output, step)
                process.send_signal(number)  # nothing to one that has ended
            finally:
                code = self.wait(process)
            # Whoever trains no more has the default action for the signal to stop.
            if code not in (0, -signal.SIGTERM):
                break
            shutil.rmtree(self.output)
            if before.exists():
                shutil.copytree(before, self.output)
        else:
            raise Failed(f"ended before the signal, {TRIES} times, with {code}")
        shutil.rmtree(before, ignore_errors=True)
        return code

    def newest(self):
        found = checkpoints(self.output)
        expect(found, "there is no checkpoint")
        return self.output / f"checkpoint-{found[-1]}"

    def verify(self, folder):
        done = subprocess.run([train_case.LOCKSTEP, "checkpoint", "verify", str(folder)],
                              capture_output=True, text=True, timeout=LIMIT_S, check=False)
        expect(done.returncode == 0, done.stdout + done.stderr)


def ranked(ranks, program):
    command = [train_case.LOCKSTEP, "run", "--standalone", f"--nproc-per-node={ranks}"]
    if not ON_GPU:
        return command + program
    # NCCL refuses two ranks on one device of one host; it believes them to be on two.
    return command + ["bash", "-c", 'NCCL_HOSTID=host$RANK exec "$0" "$@"', *program]


def expect_same(one, other):
    """Weights, buffers, optimizer and generators of the newest checkpoints, and every loss."""
    done = subprocess.run([train_case.LOCKSTEP, "checkpoint", "diff", str(one.newest()),
                           str(other.newest())], capture_output=True, text=True, timeout=LIMIT_S,
                          check=False)
    expect(done.returncode == 0, done.stdout + done.stderr)
    expect(losses(one.output) == losses(other.output), "losses differ")


def expect_same_weights(one, other):
    """Weights, optimizer and losses; ranks that hold other parts have other generators."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        expect((one.newest() / name).read_bytes() == (other.newest() / name).read_bytes(),
               f"{other.place.name}: {name} differs")
    expect(losses(one.output) == losses(other.output), f"{other.place.name}: losses differ")


def expect_learned(run, least):
    by_step = losses(run.output)
    expect(all(math.isfinite(loss) for loss in by_step.values()), "a loss is not finite")
    expect(sorted(by_step) == list(range(1, STEPS + 1)), "each step is logged once")
    values = [by_step[step] for step in sorted(by_step)]
    first, last = sum(values[:5]) / 5, sum(values[-5:]) / 5
    expect(last < first - least, f"loss {first:.3f} to {last:.3f}")
    return f"loss {first:.2f} to {last:.2f}"


def names_in(file):
    """Tensors of a safetensors file."""
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return sorted(name for name in json.loads(content[8:8 + size]) if name != "__metadata__")


def expect_scaler(run):
    """From 65536, halved by each step that was skipped; too few steps to be doubled."""
    state = json.loads((run.newest() / "scaler.json").read_text())
    lines = (run.output / "metrics.jsonl").read_text().splitlines()
    skipped = [e["step"] for e in map(json.loads, lines) if e.get("skipped_steps")]
    expect(state["scale"] == 65536 * .5 ** len(skipped), f"{state}, skipped {skipped}")
    expect(state["growth_tracker"] == STEPS - max(skipped, default=0), f"{state}, {skipped}")
    expect((state["growth_factor"], state["backoff_factor"], state["growth_interval"])
           == (2, .5, 2000), str(state))
    return f"scale {state['scale']:.0f}"


def fp32(place):
    return expect_learned(Run(place / "whole", GPT, GPT_FLAGS).train(), LEAST)


def bf16(place, precision="bf16"):
    flags = GPT_FLAGS + ["--mixed_precision", precision]
    whole = Run(place / "whole", GPT, flags).train()
    learned = expect_learned(whole, LEAST)
    expect(not (whole.newest() / "scaler.json").exists(), "bf16 needs no scaler")
    killed = Run(place / "killed", GPT, flags)
    code = killed.broken(signal.SIGKILL, BREAK_AT)
    expect(code == -signal.SIGKILL, f"exit code {code}")
    expect(checkpoints(killed.output), "nothing was saved before the kill")
    killed.train("--resume", "auto")
    expect_same(whole, killed)
    return learned + ", killed and resumed: the same bits"


def fp8(place):
    return bf16(place, "fp8")


def fp16(place):
    flags = GPT_FLAGS + ["--fp16", "true"]
    whole = Run(place / "whole", GPT, flags).train()
    learned = expect_learned(whole, LEAST)
    scale = expect_scaler(whole)
    stopped = Run(place / "stopped", GPT, flags)
    code = stopped.broken(signal.SIGTERM, BREAK_AT)
    expect(code == 143, f"exit code {code}")
    stopped.verify(stopped.newest())
    stopped.train("--resume", "auto")
    expect_same(whole, stopped)
    return f"{learned}, {scale}, stopped and resumed: the same bits"


def captured(place):
    """compile_model: steps as one CUDA graph, with evaluations between them, killed and resumed."""
    shape = ["--gradient_accumulation_steps", "1", "--eval_strategy", "steps", "--eval_steps",
             str(EVERY), "--per_device_eval_batch_size", "3"]
    said = []
    for half in ("bf16", "fp16", "fp8"):
        flags = GPT_FLAGS + shape + ["--mixed_precision", half]
        eager = Run(place / f"eager-{half}", GPT, flags + ["--compile_model", "false"]).train()
        learned = expect_learned(eager, LEAST)
        graph = Run(place / f"graph-{half}", GPT, flags)  # auto
        code = graph.broken(signal.SIGKILL, BREAK_AT)
        expect(code == -signal.SIGKILL, f"exit code {code}")
        graph.train("--resume", "auto")
        expect("replayed as one CUDA graph" in graph.log(), "steps were not captured")
        expect_same(eager, graph)
        said.append(f"{half} {learned}")
    return ", ".join(said) + ": the bits of steps without a graph"


def captured_windows(place):
    """compile_model with accumulation, and with two ranks, whose collectives are in the graph."""
    said = []
    for ranks, passes in ((0, 6), (2, 1), (2, 8)):
        flags = GPT_FLAGS + ["--bf16", "true", "--max_steps", str(STEPS // 8),
                             "--gradient_accumulation_steps", str(passes)]
        name = f"{max(ranks, 1)} x {passes}"
        eager = Run(place / f"eager {name}", GPT, flags + ["--compile_model", "false"],
                    ranks).train()
        graph = Run(place / f"graph {name}", GPT, flags + ["--compile_model", "true"], ranks)
        graph.train()
        expect("without a CUDA graph" not in graph.log(), f"{name}: steps were not captured")
        expect_same(eager, graph)
        said.append(name)
    return "ranks x passes " + ", ".join(said) + ": the bits of steps without a graph"


def split(place):
    """A block on the CPU, the rest on the GPU."""
    device_map = "device_map: {'': 0, transformer.h.1: cpu}"
    model = f"{{name: gpt, n_layer: 2, n_head: 4, n_embd: 64, {device_map}}}"
    flags = GPT_FLAGS + ["--bf16", "true", "--model", model]
    whole = Run(place / "whole", GPT, flags).train()
    learned = expect_learned(whole, LEAST)
    expect("the model is split over cuda:0, cpu" in whole.log(), "it is not split")
    again = Run(place / "again", GPT, flags)
    copy_until(whole.output, again.output, STEPS // 2)
    again.train("--resume", "auto")
    expect_same(whole, again)
    return learned + ", resumed: the same bits"


def dropout(place):
    flags = ["--num_train_epochs", str(MLP_STEPS // 13), "--save_steps", "20",
             "--save_total_limit", "3"]
    whole = Run(place / "whole", MLP, flags).train()
    names = names_in(whole.newest() / "rng_state.safetensors")
    expect(names == (["0.cpu", "0.cuda"] if ON_GPU else ["0.cpu"]), str(names))
    broken = Run(place / "broken", MLP, flags)
    code = broken.broken(signal.SIGTERM, 50)
    expect(code == 143, f"exit code {code}")
    stopped_at = checkpoints(broken.output)[-1]
    expect(stopped_at >= 50, f"checkpoint-{stopped_at}")
    broken.verify(broken.newest())
    code = broken.broken(signal.SIGKILL, stopped_at + 45, "--resume", "auto")
    expect(code == -signal.SIGKILL, f"exit code {code}")
    expect(checkpoints(broken.output)[-1] > stopped_at, "nothing was saved before the kill")
    broken.train("--resume", "auto")
    expect_same(whole, broken)
    return f"stopped at step {stopped_at} (143), killed, resumed: the same bits"


def two_ranks(place):
    flags = ["--max_steps", "20", "--save_steps", "10"]
    whole = Run(place / "whole", MLP, flags, ranks=2).train()
    names = names_in(whole.newest() / "rng_state.safetensors")
    expect(len(names) == (4 if ON_GPU else 2), str(names))
    again = Run(place / "again", MLP, flags, ranks=2)
    copy_until(whole.output, again.output, 10)
    again.train("--resume", "auto")
    expect_same(whole, again)
    stopped = Run(place / "stopped", MLP, ["--num_train_epochs", str(MLP_STEPS // 7)], ranks=2)
    code = stopped.broken(signal.SIGTERM, 10)
    expect(code == 143, f"exit code {code}")
    stopped.verify(stopped.newest())
    return "resumed: the same bits; a stop signal is 143 and a checkpoint"


def divided(place):
    """Two ranks that hold half of the model each: stages of a pipeline, whose sums have the order
    of one process, and rows of every parameter, whose averages NCCL rounds in another place than
    those of two data parallel ranks: 3e-5 after 50 steps."""
    model = place / "config.json"
    model.write_text(json.dumps(LLAMA))
    flags = GPT_FLAGS + ["--model", f"{{config: {model}}}", "--max_steps", str(STEPS // 8),
                         "--gradient_accumulation_steps", "4", "--max_grad_norm", "0",
                         "--compile_model", "false"]
    one = Run(place / "one", GPT, flags).train()
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
        stages = ["--pipeline_parallel_degree", "2", "--pipeline_parallel_schedule", schedule]
        run = Run(place / schedule, GPT, flags + stages, ranks=2).train()
        expect(f"pipeline stages ({schedule})" in run.log(), "there are no stages")
        expect_same_weights(one, run)
    ddp = Run(place / "ddp", GPT, flags + ["--shard_optimizer", "false"], ranks=2).train()
    rows = Run(place / "fsdp", GPT, flags + ["--fsdp", "full_shard"], ranks=2).train()
    expect("fully sharded over 2 ranks" in rows.log(), "it is not sharded")
    expected, got = losses(ddp.output), losses(rows.output)
    apart = max(abs(got[step] - loss) / loss for step, loss in expected.items())
    expect(apart < 1e-3, f"fsdp: losses are {apart:.1e} apart")
    flags += ["--fsdp", "full_shard offload", "--save_steps", str(STEPS // 16)]
    host = Run(place / "offload", GPT, flags, ranks=2).train()
    expect("offloaded to the CPU" in host.log() or not ON_GPU, "it is not offloaded")
    stepped = max(abs(losses(host.output)[step] - loss) / loss for step, loss in got.items())
    expect(stepped < 1e-3, f"offload: losses are {stepped:.1e} apart")
    again = Run(place / "again", GPT, flags, ranks=2)
    copy_until(host.output, again.output, checkpoints(host.output)[0])
    again.train("--resume", "auto")
    expect_same(host, again)
    return (f"pipelines have the bits of one process; fsdp is {apart:.0e} from data parallel "
            f"ranks, and {stepped:.0e} with steps on the host")


def other_device(place):
    """A checkpoint of the GPU is resumed on the CPU, and one of the CPU on the GPU."""
    flags = ["--max_steps", "20", "--save_steps", "10"]
    for there, here in ((DEVICE, "cpu"), ("cpu", DEVICE)):
        name = f"{there} to {here}".replace(":", "")
        whole = Run(place / f"{name} whole", MLP, flags, device=there).train()
        expect("0.cuda" in names_in(whole.newest() / "rng_state.safetensors") or there == "cpu",
               "the first part is not of a GPU")
        moved = Run(place / f"{name} moved", MLP, flags, device=here)
        copy_until(whole.output, moved.output, 10)
        moved.train("--resume", "auto")
        expect(checkpoints(moved.output)[-1] == 20, str(checkpoints(moved.output)))
        on_gpu = "0.cuda" in names_in(moved.newest() / "rng_state.safetensors")
        expect(on_gpu == (here != "cpu"), f"{name}: resumed on the wrong device")
        by_step = losses(moved.output)
        expect(sorted(by_step) == list(range(1, 21)), f"{name}: a step is not logged")
        expect(all(math.isfinite(loss) for loss in by_step.values()), "a loss is not finite")
        # Dropout draws from another generator from there on.
        expect(by_step != losses(whole.output), f"{name}: the losses of one device")
    return "resumed on the CPU, and one of the CPU on the GPU"


def program(ranks):
    def check(place):
        args = [str(train_case.BIN / "tests" / "gpu_train"), str(place / "folder")]
        run = Run(place / "run", "", ranks=ranks)
        done = subprocess.run(ranked(ranks, args) if ranks else args, env=run.environment(),
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False)
        (run.place / "log").write_text(done.stdout)
        expect(done.returncode == 0, f"exit code {done.returncode}")
        expect("all checks passed" in done.stdout, "not all checks passed")
        parts = [line for line in done.stdout.splitlines() if "gpu_train: " in line]
        for line in parts[:-1]:
            print("       " + line.split("gpu_train: ", 1)[1], flush=True)
        return f"{len(parts) - 1} checks"
    return check


def logs_of(place):
    for log in sorted(place.rglob("log")):
        print(f"--- {log.relative_to(place)}\n"
              f"{log.read_text(encoding='utf-8', errors='replace')[-6000:]}", flush=True)


def judge(label, check, place):
    return attempt(f"{label} on {DEVICE}", lambda: check(place), place, lambda: logs_of(place))


def main():
    if ON_GPU:
        end_without_gpu()
    checks = [("Trainer's parts, one rank", program(0)), ("tiny GPT in bf16", bf16),
              ("tiny GPT in fp16", fp16)]
    if ON_GPU or "--all" in sys.argv:  # tests/train has these on the CPU, where fp8 is slow
        checks += [("tiny GPT in fp32", fp32), ("tiny GPT in fp8", fp8),
                   ("MLP with dropout", dropout), ("two ranks of lockstep train", two_ranks),
                   ("Llama in stages and in rows", divided)]
    if ON_GPU:
        checks += [("resumed on another device", other_device),
                   ("tiny GPT on a GPU and the CPU", split), ("tiny GPT, captured", captured),
                   ("tiny GPT, captured with accumulation and ranks", captured_windows)]
    checks += [("Trainer's parts, two ranks", program(2))]
    if "--only" in sys.argv:
        word = sys.argv[sys.argv.index("--only") + 1]
        checks = [one for one in checks if word in one[0]]
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        results = [judge(label, check, pathlib.Path(folder) / str(i))
                   for i, (label, check) in enumerate(checks)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
