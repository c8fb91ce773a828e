"""The files that examples/ offers to copy work: training files are checked and trained for two
steps, Accelerate's file, the launch scripts and the job of Azure ML start ranks."""

import json
import os
import pathlib
import re
import socket
import subprocess
import tempfile

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
SOURCE = pathlib.Path(os.environ["LOCKSTEP_SOURCE"])
EXAMPLES = SOURCE / "examples"
LOCKSTEP = str(BIN / "lockstep")
HELLO = str(BIN / "examples" / "01_hello_world")
LIMIT_S = 200


def environment(**more):
    ours = r"RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC|LOCKSTEP_(?!BIN|SOURCE|PYTHON)"
    others = {k: v for k, v in os.environ.items() if not re.match(ours, k)}
    return {**others, "LOCKSTEP_DEVICE": "cpu", "LOCKSTEP": LOCKSTEP, **more}


def run(*command, code=0, **more):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False,
                          timeout=LIMIT_S, cwd=SOURCE, env=environment(**more),
                          stdin=subprocess.DEVNULL)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


SMALL = ["fast.yaml", "llm_tokens.yaml", "mlp.yaml", "standard.yaml", "tiny_gpt.yaml"]
WORKLOADS = ["gpt2_124m.yaml", "gpt_1.3b.yaml", "phi3_lora_170k.yaml", "resnet50_synthetic.yaml"]


def check_configs(place):
    tokens = place / "tokens"
    run(LOCKSTEP, "data", "tokenize", "--output", tokens, "--suffix", ".md", "--val-tokens", 5000,
        SOURCE / "docs")
    found = sorted(p.name for p in (EXAMPLES / "configs").glob("*.yaml"))
    assert found == sorted(SMALL + WORKLOADS), found
    for name in SMALL:
        config = EXAMPLES / "configs" / name
        flags = ["--output_dir", place / name, "--use_cpu"]
        if name == "llm_tokens.yaml":
            flags += ["--dataset_dir", tokens, "--max_seq_len", 64, "--tokens_per_update", 512]
        run(LOCKSTEP, "config", "check", config, *flags)
        run(LOCKSTEP, "run", "--standalone", "--nproc-per-node=2", LOCKSTEP, "train", config,
            *flags, "--max_steps", 2, "--warmup_steps", 1, "--save_steps", 2,
            "--eval_strategy", "no", "--report_to", "none", "--no_bf16")
        run(LOCKSTEP, "checkpoint", "verify", place / name)
    shown = run(LOCKSTEP, "config", "show", EXAMPLES / "configs" / "mlp.yaml")
    for key, value in (("num_train_epochs", "10"), ("dataloader_num_workers", "2"),
                       ("dataloader_pin_memory", "true")):
        assert re.search(rf"^{key} +{re.escape(value)} ", shown, re.MULTILINE), shown
    for name in ("standard", "fast"):  # they differ in speed, not in what is learned
        shown = run(LOCKSTEP, "config", "show", EXAMPLES / "configs" / f"{name}.yaml",
                    "--world-size", 2)
        assert re.search(r"effective batch.*\b16\b", shown), shown


def write_instructions(path):
    """In the form of commonsense_170k.json."""
    path.write_text(json.dumps([
        {"instruction": f"Please answer the following question with true or false, question: is "
                        f"{i} an even number?\n\nAnswer format: true/false", "input": "",
         "output": f"the correct answer is {str(i % 2 == 0).lower()}",
         "answer": str(i % 2 == 0).lower()} for i in range(40)]))


def check_workloads(place):
    """The shapes and keys as they are, without a step; then two steps of something small."""
    tokens, instructions = place / "tokens", place / "commonsense_170k.json"
    write_instructions(instructions)
    phi = json.loads((EXAMPLES / "configs" / "phi3_mini" / "config.json").read_text())
    tiny_phi = place / "phi3.json"
    tiny_phi.write_text(json.dumps(phi | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4}))
    tiny_gpt = "{name: gpt, n_layer: 2, n_head: 2, n_embd: 32, vocab_size: 257}"
    of_tokens = ["--dataset_dir", tokens]
    small_tokens = ["--model", tiny_gpt, "--max_seq_len", 32, "--per_device_train_batch_size", 2,
                    "--tokens_per_update", 256]
    of_phi = ["--data", f"{{name: instructions, path: {instructions}}}"]
    small = {
        "gpt2_124m.yaml": (of_tokens, small_tokens),
        "gpt_1.3b.yaml": (of_tokens, small_tokens),
        "phi3_lora_170k.yaml": (of_phi, ["--model", f"{{config: {tiny_phi}}}",
                                         "--per_device_train_batch_size", 2]),
        "resnet50_synthetic.yaml": ([], [
            "--data", "{name: images, samples: 32, image_size: 32, classes: 4}",
            "--per_device_train_batch_size", 2, "--dataloader_num_workers", 1]),
    }
    assert sorted(small) == sorted(WORKLOADS)
    for name, (data, tiny) in small.items():
        config = EXAMPLES / "configs" / name
        run(LOCKSTEP, "config", "check", config, *data, "--save_strategy", "no",
            "--output_dir", place / "unused", "--eval_strategy", "no")
        flags = [*data, *tiny, "--output_dir", place / name, "--use_cpu", "--no_bf16",
                 "--max_steps", 2, "--warmup_steps", 0, "--eval_strategy", "no",
                 "--save_strategy", "steps", "--save_steps", 2, "--report_to", "none"]
        script, ranks = ("one_gpu.sh", 1) if name == "gpt2_124m.yaml" else ("many_gpus.sh", 2)
        said = run(EXAMPLES / "launch" / script, config, *flags, NPROC_PER_NODE=str(ranks))
        assert "trained 2 steps" in said, said
        run(LOCKSTEP, "checkpoint", "verify", place / name)
    # 2^19 tokens in batches of 4 x 2048: 64 forward passes, over 4 ranks 16.
    for ranks, passes in ((1, 64), (4, 16), (8, 8)):
        shown = run(LOCKSTEP, "config", "show", EXAMPLES / "configs" / "gpt_1.3b.yaml",
                    "--world-size", ranks)
        assert f"256 = 4 per device x {passes} accumulation x {ranks} rank" in shown, shown
    # Two GPUs of 24 GB hold Phi-3-mini as its file is written; one of 48 GB holds the larger batch.
    config = EXAMPLES / "configs" / "phi3_lora_170k.yaml"
    for gpus, flags in (("2xRTX4090", []),
                        ("L40S", ["--per_device_train_batch_size", 16,
                                  "--gradient_accumulation_steps", 1])):
        plan = json.loads(run(LOCKSTEP, "plan", config, "--gpus", gpus, "--json", *flags))
        assert plan["fits"] and plan["rows"][-1]["as_written"], plan
    # Without its data a file says what is missing and where it comes from.
    (place / "examples").symlink_to(EXAMPLES)
    for name, missing, where in (("gpt2_124m.yaml", "data/tokens", "lockstep data tokenize"),
                                 ("phi3_lora_170k.yaml", "data/commonsense_170k.json",
                                  "docs/data.md")):
        done = subprocess.run([LOCKSTEP, "train", f"examples/configs/{name}"], cwd=place,
                              capture_output=True, text=True, check=False, timeout=LIMIT_S,
                              env=environment(), stdin=subprocess.DEVNULL)
        assert done.returncode == 2 and missing in done.stderr and where in done.stderr, done


def hellos(text):
    return sorted(re.findall(r"hello from rank (\d) of (\d)", text))


def check_launches():
    for script in sorted((EXAMPLES / "launch").glob("*.sh")):
        run("bash", "-n", script)
    accelerate = EXAMPLES / "accelerate" / "ddp_config.yaml"
    run(LOCKSTEP, "config", "check", "--launcher", accelerate)
    assert hellos(run(LOCKSTEP, "run", "--config-file", accelerate, HELLO)) == [
        ("0", "2"), ("1", "2")]
    script = EXAMPLES / "launch" / "one_host.sh"
    assert len(hellos(run(script, HELLO, NPROC_PER_NODE="3"))) == 3
    run(script, code=2)

    script = EXAMPLES / "launch" / "several_hosts.sh"
    run(script, HELLO, code=1)  # bash: a variable without a value
    texts = two_nodes([str(script), HELLO], NNODES="2", NPROC_PER_NODE="1")
    assert hellos("".join(texts)) == [("0", "2"), ("1", "2")], texts


def two_nodes(command, **more):
    """What it prints on each of two nodes, which are this host."""
    with socket.socket() as holder:  # bound and never listening: the launcher may still listen
        holder.bind(("127.0.0.1", 0))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = str(holder.getsockname()[1])
        nodes = [subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, cwd=SOURCE,
            env=environment(NODE_RANK=str(node), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                            **more)) for node in range(2)]
        try:
            texts = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
    assert [node.returncode for node in nodes] == [0, 0], texts
    return texts


def check_azureml(place):
    """The job's command, with the variables that Azure ML sets on two nodes."""
    try:
        import yaml
    except ImportError:
        print("SKIP: no PyYAML to read examples/launch/azureml.yml")
        return
    job = yaml.safe_load((EXAMPLES / "launch" / "azureml.yml").read_text())
    assert job["type"] == "command" and job["resources"]["instance_count"] == 2, job
    assert job["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}, job
    assert (EXAMPLES / "launch" / job["code"]).resolve() == SOURCE.resolve(), job
    values = {f"inputs.{name}": value for name, value in job["inputs"].items()}
    values |= {f"outputs.{name}": str(place / name) for name in job["outputs"]}
    command = re.sub(r"\$\{\{([^}]*)\}\}", lambda m: values[m.group(1)], job["command"])
    small = {"LOCKSTEP_MAX_STEPS": "2", "LOCKSTEP_WARMUP_STEPS": "1", "LOCKSTEP_SAVE_STEPS": "2",
             "LOCKSTEP_EVAL_STRATEGY": "no", "LOCKSTEP_BF16": "false"}
    # Azure's own RANK and LOCAL_RANK, of the launcher, must not reach the ranks.
    texts = two_nodes(["bash", "-c", command], PATH=f"{BIN}:{os.environ['PATH']}", WORLD_SIZE="2",
                      RANK="0", LOCAL_RANK="0", **small)
    assert "trained 2 steps" in "".join(texts), texts
    run(LOCKSTEP, "checkpoint", "verify", place / "run")


def main():
    with tempfile.TemporaryDirectory(prefix="lockstep-ready-") as name:
        check_configs(pathlib.Path(name))
        check_workloads(pathlib.Path(name))
        check_azureml(pathlib.Path(name))
    check_launches()
    print("configurations are checked and train; launch files start ranks")


if __name__ == "__main__":
    main()
