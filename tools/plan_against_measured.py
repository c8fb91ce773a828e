#!/usr/bin/env python3
"""Plans ten small trainings, runs every way of each for three steps, and prints both side by side.

    LOCKSTEP_BIN=build/bin python3 tools/plan_against_measured.py [--ranks 2] [--repeat 2]

Memory: the plan's bytes over the tensors that the ranks held at their peak. Ranking: the way that
the estimates put first is right when it takes at most 5 % more than the fastest that was measured;
`order` is the share of pairs of ways, more than 5 % apart when measured, that the estimates put in
the measured order. Every way is run --repeat times, and its fastest step counts. The link between
the ranks is what `lockstep doctor` measures at the start.
"""
import argparse
import itertools
import json
import os
import pathlib
import subprocess
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


def plan(place, cache, case, ranks):
    """The ways of one training, each with what it took."""
    _, model, length, batch, total = case
    if model == "llama":
        (place / "config.json").write_text(json.dumps(LLAMA))
        model = f"{{config: {place / 'config.json'}}}"
    (place / "text.txt").write_text("Predictions are held against measurements. " * 700)
    data = f"data: {{name: bytes, path: {place / 'text.txt'}}}"
    file = place / "train.yaml"
    file.write_text(f"model: {model}\n{data}\nmax_seq_len: {length}\nuse_cpu: true\n"
                    f"per_device_train_batch_size: {batch}\nglobal_batch_size: {total}\n")
    done = subprocess.run(
        [LOCKSTEP, "plan", file, "--gpus", f"{ranks}xcpu", "--probe", "--json",
         "--probe-ways", "20"], capture_output=True, text=True, check=False,
        env={**os.environ, "LOCKSTEP_CACHE": cache})
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return [way for way in json.loads(done.stdout)["ways"] if way["measured"]]


def name_of(way):
    return (way["gpus"], way["strategy"], way["per_device_train_batch_size"],
            way["gradient_checkpointing"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    right, errors = 0, []
    cache = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
    subprocess.run([LOCKSTEP, "doctor", "--nproc-per-node", str(args.ranks)], check=True,
                   stdout=subprocess.DEVNULL, env={**os.environ, "LOCKSTEP_CACHE": cache.name})
    print("| training | tokens x global | ways | memory, largest error | estimated first | over "
          "the fastest | order |\n|---|---|---|---|---|---|---|")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            ways = {}
            for _ in range(args.repeat):
                for way in plan(pathlib.Path(folder), cache.name, case, args.ranks):
                    old = ways.setdefault(name_of(way), way)
                    old["step_s"] = min(old["step_s"], way["step_s"])
        ways = list(ways.values())
        memory = [way["planned_memory_bytes"] / way["memory_bytes"] - 1 for way in ways]
        errors += memory
        first = min(ways, key=lambda way: way["estimated_step_s"])
        ratio = first["step_s"] / min(way["step_s"] for way in ways)
        right += ratio <= NEAR
        pairs = [(a, b) for a, b in itertools.permutations(ways, 2)
                 if b["step_s"] > NEAR * a["step_s"]]
        order = sum(a["estimated_step_s"] <= b["estimated_step_s"] for a, b in pairs)
        print(f"| {case[0]} | {case[2]} x {case[4]} | {len(ways)} | "
              f"{100 * max(memory, key=abs):+.1f} % | {first['gpus']} x {first['strategy']}, "
              f"{first['per_device_train_batch_size']} | {100 * (ratio - 1):+.0f} % | "
              f"{order} of {len(pairs)} |", flush=True)
    within = sum(abs(error) <= 0.1 for error in errors)
    print(f"\nmemory within 10 %: {within} of {len(errors)} ways, largest error "
          f"{100 * max(errors, key=abs):+.1f} %; first place right: {right} of {len(CASES)}")


if __name__ == "__main__":
    main()
