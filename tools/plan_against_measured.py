#!/usr/bin/env python3
"""Plans ten small trainings, runs each of their strategies for three steps, and prints both side by
side.

    LOCKSTEP_BIN=build/bin python3 tools/plan_against_measured.py [--ranks 2] [--repeat 2]
    LOCKSTEP_BIN=build/bin python3 tools/plan_against_measured.py --gpu [--repeat 1]

Memory: the plan's bytes over the tensors that the ranks held at their peak. Ranking: the strategy
that the estimates put first is right when it takes at most 5 % more than the fastest that was
measured; `order` is the share of pairs of strategies, more than 5 % apart when measured, that the
estimates put in the measured order. Every strategy is run --repeat times, and its fastest step
counts. The link between the ranks is what `lockstep doctor` measures at the start.

--gpu: five trainings of usual sizes on one GPU. The plan has one micro-batch for each strategy to
compute; here several are planned and run, each in a file of its own, and every one is printed on
stderr. Memory is what was allocated on the GPU, without context and workspace on both sides.
"""
import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

LOCKSTEP = os.path.join(os.environ.get("LOCKSTEP_BIN", "build/bin"), "lockstep")
NEAR = 1.05
LLAMA = {"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 256, "tie_word_embeddings": False}
GPT = "{{name: gpt, n_layer: {}, n_head: 4, n_embd: {}}}"
# name, model, tokens of a sample, samples of a device, global batch
CASES = [
    ("GPT 4 x 256", GPT.format(4, 256), 64, 4, 8), ("GPT 4 x 256", GPT.format(4, 256), 32, 2, 8),
    ("GPT 6 x 192", GPT.format(6, 192), 64, 2, 4), ("GPT 2 x 384", GPT.format(2, 384), 32, 4, 8),
    ("GPT 2 x 512", GPT.format(2, 512), 32, 2, 4), ("GPT 8 x 128", GPT.format(8, 128), 32, 4, 8),
    ("GPT 3 x 256", GPT.format(3, 256), 128, 2, 4), ("GPT 3 x 320", GPT.format(3, 320), 64, 2, 4),
    ("Llama 4 x 256", "llama", 32, 4, 8), ("Llama 4 x 256", "llama", 64, 2, 4)]
TRAIN = os.path.join(os.path.dirname(LOCKSTEP), "..", "libexec", "lockstep-train")
GPU_STEPS = 11  # eight until kernels are loaded and steps are captured, and three that count
LLAMA_1B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
            "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "max_position_embeddings": 2048, "rope_theta": 500000.0,
            "tie_word_embeddings": True}
GPT2 = "{{name: gpt, n_layer: {}, n_head: {}, n_embd: {}, vocab_size: 50257}}"


def computed(few, some, many, *more):
    """Three micro-batches in bf16, two of them checkpointed, one in 8 bits."""
    return [(few, False, "bf16"), (some, False, "bf16"), (many, False, "bf16"),
            (some, True, "bf16"), (many, True, "bf16"), (many, False, "fp8"), *more]


# name, model, tokens of a sample, global batch, (micro-batch, gradient checkpointing, precision)
GPU_CASES = [
    ("GPT-2 124M", GPT2.format(12, 12, 768), 1024, 64, computed(4, 16, 64)),
    ("Llama 1B", LLAMA_1B, 2048, 8, computed(1, 4, 8)),
    ("GPT 355M", GPT2.format(24, 16, 1024), 1024, 32, computed(2, 8, 32)),
    ("GPT-2 124M", GPT2.format(12, 12, 768), 256, 16, computed(1, 4, 16, (16, False, "no"))),
    ("GPT 1.3B", GPT2.format(24, 16, 2048), 2048, 8, computed(1, 4, 8))]


def write_model(place, model):
    """What a training file has under `model`."""
    if not isinstance(model, dict):
        return model
    (place / "config.json").write_text(json.dumps(model))
    return f"{{config: {place / 'config.json'}}}"


def planned(arguments, cache):
    done = subprocess.run([LOCKSTEP, "plan", *arguments, "--json"], capture_output=True, text=True,
                          check=False, env={**os.environ, "LOCKSTEP_CACHE": cache})
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def plan(place, cache, case, ranks):
    """The strategies of one training, each with what it took."""
    _, model, length, batch, total = case
    model = write_model(place, LLAMA if model == "llama" else model)
    (place / "text.txt").write_text("Predictions are held against measurements. " * 700)
    data = f"data: {{name: bytes, path: {place / 'text.txt'}}}"
    file = place / "train.yaml"
    file.write_text(f"model: {model}\n{data}\nmax_seq_len: {length}\nuse_cpu: true\n"
                    f"per_device_train_batch_size: {batch}\nglobal_batch_size: {total}\n")
    arguments = [file, "--gpus", f"{ranks}xcpu", "--probe", "--probe-strategies", "20"]
    return [one for one in planned(arguments, cache)["strategies"] if one["measured"]]


def plan_on_gpu(place, cache, case):
    """The same of one GPU: each strategy is a file of its own, planned and run as it is written."""
    name, model, length, total, strategies = case
    model = write_model(place, model)
    text = "Predictions are held against measurements. "
    (place / "text.txt").write_text(text * (GPU_STEPS * (total + 1) * length // len(text) + 1))
    found = []
    for batch, checkpointing, precision in strategies:
        file, output = place / "train.yaml", tempfile.mkdtemp(dir=place)
        file.write_text(
            f"model: {model}\ndata: {{name: bytes, path: {place / 'text.txt'}}}\n"
            f"max_seq_len: {length}\nper_device_train_batch_size: {batch}\n"
            f"global_batch_size: {total}\nmixed_precision: {precision}\n"
            f"gradient_checkpointing: {str(checkpointing).lower()}\nsave_strategy: no\n"
            f"logging_strategy: no\nreport_to: none\nrecord_run: false\ndisable_tqdm: true\n"
            f"max_steps: {GPU_STEPS}\noutput_dir: {output}/out\n")
        row = planned([file], cache)["rows"][0]
        done = subprocess.run([TRAIN, "plan-probe", output, file], capture_output=True, text=True,
                              check=False)
        what = (f"{name}, {length} x {total}: {batch}, {precision}"
                f"{', checkpointed' if checkpointing else ''}")
        if done.returncode != 0 or not row["as_written"]:
            print(f"{what}: {done.stderr[-1500:] if done.returncode else 'not as written'}",
                  file=sys.stderr, flush=True)
            continue
        seen = json.loads(pathlib.Path(output, "rank_0.json").read_text())
        one = {"gpus": 1, "strategy": precision, "per_device_train_batch_size": batch,
               "gradient_checkpointing": checkpointing, "step_s": min(seen["step_s"][-3:]),
               "estimated_step_s": row["step_s"], "memory_bytes": seen["memory_bytes"],
               "planned_memory_bytes": row["memory_bytes"]["allocated"]}
        found.append(one)
        memory = one["planned_memory_bytes"], one["memory_bytes"]
        print(f"{what}: planned {1e3 * one['estimated_step_s']:.1f} ms, "
              f"{memory[0] / 2**30:.2f} GiB; measured {1e3 * one['step_s']:.1f} ms, "
              f"{memory[1] / 2**30:.2f} GiB ({100 * (memory[0] / memory[1] - 1):+.1f} %)",
              file=sys.stderr, flush=True)
    return found


def name_of(one):
    return (one["gpus"], one["strategy"], one["per_device_train_batch_size"],
            one["gradient_checkpointing"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", help="a file for the estimates and measurements")
    parser.add_argument("--gpu", action="store_true", help="five trainings on one GPU instead")
    args = parser.parse_args()
    right, errors, cases = 0, [], []
    cache = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
    if not args.gpu:
        subprocess.run([LOCKSTEP, "doctor", "--nproc-per-node", str(args.ranks)], check=True,
                       stdout=subprocess.DEVNULL, env={**os.environ, "LOCKSTEP_CACHE": cache.name})
    print("| training | tokens x global | strategies | memory, largest error | estimated first | "
          "over the fastest | order |\n|---|---|---|---|---|---|---|")
    for case in GPU_CASES if args.gpu else CASES:
        with tempfile.TemporaryDirectory() as folder:
            strategies, place = {}, pathlib.Path(folder)
            for _ in range(args.repeat):
                for one in (plan_on_gpu(place, cache.name, case) if args.gpu
                            else plan(place, cache.name, case, args.ranks)):
                    old = strategies.setdefault(name_of(one), one)
                    old["step_s"] = min(old["step_s"], one["step_s"])
        strategies = list(strategies.values())
        cases.append({"case": case, "strategies": strategies})
        memory = [one["planned_memory_bytes"] / one["memory_bytes"] - 1 for one in strategies]
        errors += memory
        first = min(strategies, key=lambda one: one["estimated_step_s"])
        ratio = first["step_s"] / min(one["step_s"] for one in strategies)
        right += ratio <= NEAR
        pairs = [(a, b) for a, b in itertools.permutations(strategies, 2)
                 if b["step_s"] > NEAR * a["step_s"]]
        order = sum(a["estimated_step_s"] <= b["estimated_step_s"] for a, b in pairs)
        print(f"| {case[0]} | {case[2]} x {case[3 if args.gpu else 4]} | {len(strategies)} | "
              f"{100 * max(memory, key=abs):+.1f} % | {first['gpus']} x {first['strategy']}, "
              f"{first['per_device_train_batch_size']} | {100 * (ratio - 1):+.0f} % | "
              f"{order} of {len(pairs)} |", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(cases))
    within = sum(abs(error) <= 0.1 for error in errors)
    print(f"\nmemory within 10 %: {within} of {len(errors)} strategies, largest error "
          f"{100 * max(errors, key=abs):+.1f} %; first place right: {right} of {len(cases)}")


if __name__ == "__main__":
    main()
