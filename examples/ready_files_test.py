"""The files that examples/ offers to copy work: training files are checked and trained for two
steps, Accelerate's file and the launch scripts start ranks."""

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


def check_configs(place):
    tokens = place / "tokens"
    run(LOCKSTEP, "data", "tokenize", "--output", tokens, "--suffix", ".md", "--val-tokens", 5000,
        SOURCE / "docs")
    found = sorted(p.name for p in (EXAMPLES / "configs").glob("*.yaml"))
    assert found == ["fast.yaml", "llm_tokens.yaml", "mlp.yaml", "standard.yaml",
                     "tiny_gpt.yaml"], found
    for name in found:
        config = EXAMPLES / "configs" / name
        flags = ["--output_dir", place / name, "--use_cpu"]
        if name == "llm_tokens.yaml":
            flags += ["--dataset_dir", tokens, "--max_seq_len", 64, "--tokens_per_update", 512]
        run(LOCKSTEP, "config", "check", config, *flags)
        run(LOCKSTEP, "run", "--standalone", "--nproc-per-node=2", LOCKSTEP, "train", config,
            *flags, "--max_steps", 2, "--warmup_steps", 1, "--save_steps", 2,
            "--eval_strategy", "no", "--report_to", "none", "--no_bf16")
        run(LOCKSTEP, "checkpoint", "verify", place / name)
    for name in ("standard", "fast"):  # they differ in speed, not in what is learned
        shown = run(LOCKSTEP, "config", "show", EXAMPLES / "configs" / f"{name}.yaml",
                    "--world-size", 2)
        assert re.search(r"effective batch.*\b16\b", shown), shown


def hellos(text):
    return sorted(re.findall(r"hello from rank (\d) of (\d)", text))


def check_launches():
    accelerate = EXAMPLES / "accelerate" / "ddp_config.yaml"
    run(LOCKSTEP, "config", "check", "--launcher", accelerate)
    assert hellos(run(LOCKSTEP, "run", "--config-file", accelerate, HELLO)) == [
        ("0", "2"), ("1", "2")]
    script = EXAMPLES / "launch" / "one_host.sh"
    assert len(hellos(run(script, HELLO, NPROC_PER_NODE="3"))) == 3
    run(script, code=2)

    script = EXAMPLES / "launch" / "several_hosts.sh"
    run(script, HELLO, code=1)  # bash: a variable without a value
    with socket.socket() as holder:  # bound and never listening: the launcher may still listen
        holder.bind(("127.0.0.1", 0))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = str(holder.getsockname()[1])
        nodes = [subprocess.Popen(
            [str(script), HELLO], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
            env=environment(NNODES="2", NODE_RANK=str(node), MASTER_ADDR="127.0.0.1",
                            MASTER_PORT=port, NPROC_PER_NODE="1")) for node in range(2)]
        try:
            texts = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert hellos("".join(texts)) == [("0", "2"), ("1", "2")], texts


def main():
    with tempfile.TemporaryDirectory(prefix="lockstep-ready-") as name:
        check_configs(pathlib.Path(name))
    check_launches()
    print("configurations are checked and train; launch files start ranks")


if __name__ == "__main__":
    main()
