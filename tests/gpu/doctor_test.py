"""What `lockstep doctor` and `lockstep run --doctor` say of runs on one GPU with planted faults:
the fault and no other, no gain that the device cannot give, and a budget that adds up to 100 %.

    doctor_test.py          on cuda:0; skipped (77) without a GPU
    doctor_test.py -v       with the doctor's report of every run
    doctor_test.py NAME...  some of the cases

One line per case; about ten seconds of training each.
"""
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "train"))
import train_case  # noqa: E402: stands in the folder beside
from gpu_case import attempt, end_without_gpu, expect  # noqa: E402

LIMIT_S = 120
FIRST = 3  # seconds of a record that hold the start
# What the driver and the device's clock may differ from what a rule has looked at.
NEAR = 0.05

GPT = """
model: {name: gpt, n_layer: 12, n_head: 12, n_embd: 768}
data: {name: bytes, path: torch-headers}
bf16: true
learning_rate: 1.0e-4
save_strategy: no
report_to: none
disable_tqdm: true
dataloader_num_workers: 2
dataloader_pin_memory: true
"""
LARGE = GPT + "max_seq_len: 1024\nper_device_train_batch_size: 32\nmax_steps: 240\n"
SMALL = GPT + "max_seq_len: 128\nper_device_train_batch_size: 1\n"
IMAGES = """
model: resnet50
data: {name: images, samples: 50000, image_size: 224, classes: 1000}
bf16: true
optim: adamw
save_strategy: no
report_to: none
disable_tqdm: true
per_device_train_batch_size: 128
dataloader_num_workers: 1
dataloader_pin_memory: true
"""


class Case:
    """A run that has ended, as the doctor sees it, beside what its record says of the device."""

    def __init__(self, place):
        self.place = place
        self.output = place / "out"
        self.said = ""
        self.report = {}

    def run(self, *command):
        env = train_case.environment(LOCKSTEP_DEVICE="cuda:0", CUDA_VISIBLE_DEVICES="0")
        done = subprocess.run(list(map(str, command)), env=env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=LIMIT_S, check=False)
        self.said = done.stdout
        expect(done.returncode == 0, f"exit code {done.returncode}")
        asked = subprocess.run([train_case.LOCKSTEP, "doctor", "--run", str(self.output), "--json"],
                               env=env, capture_output=True, text=True, timeout=LIMIT_S,
                               check=False)
        expect(asked.returncode in (0, 1), f"the doctor: {asked.returncode} {asked.stderr}")
        self.report = json.loads(asked.stdout)
        self.check_budget()
        return self

    def train(self, config, *flags, launcher=()):
        file = self.place / "train.yaml"
        file.write_text(config)
        return self.run(*launcher, train_case.LOCKSTEP, "train", file, "--output_dir", self.output,
                        *flags)

    def lines(self, name):
        path = self.output / "monitor" / name
        return [json.loads(line) for line in path.read_text().splitlines()]

    def idle(self):
        """Share of the steps' time without device work: by the device's clock and the driver's."""
        seconds, busy, passed = 0.0, 0.0, 0.0
        for line in self.lines("rank_0.jsonl"):
            passed += line["seconds"]
            if passed < FIRST or line.get("steps", 0) == 0:
                continue
            seconds += line["seconds"]
            busy += sum(value for phase, value in line.get("device_s", {}).items()
                        if phase != "other")
        expect(seconds > 3, f"only {seconds:.1f} s of steps were recorded")
        expect(busy > 0, "the record has no device's times")
        read = [sample["gpus"][0].get("utilisation_percent")
                for sample in self.lines("gpus_0.jsonl")[FIRST:]]
        driver = statistics.median([value for value in read if value is not None] or [100])
        return max(0.0, 1 - busy / seconds), 1 - driver / 100

    def check_budget(self):
        for rank in self.report["ranks"]:
            total = sum(rank["shares"].values())
            expect(abs(total - 1) < 1e-6, f"the budget is {100 * total:.1f} %")

    def findings(self):
        """No more than the device was idle."""
        by_clock, by_driver = self.idle()
        for finding in self.report["findings"]:
            expect(finding["gain"] <= max(by_clock, by_driver) + NEAR,
                   f"{finding['rule']} promises {100 * finding['gain']:.0f} % of a device that is "
                   f"idle for {100 * by_clock:.0f} % by its clock, {100 * by_driver:.0f} % by its "
                   "driver")
        return {finding["rule"]: finding for finding in self.report["findings"]}

    def expect_silence(self):
        found = self.findings()
        expect(not found, f"found {sorted(found)}")
        expect(self.report["healthy"], "it is not called healthy")
        return self.text()

    def expect_only(self, rule):
        found = self.findings()
        expect(list(found) == [rule], f"found {sorted(found)}, not {rule} alone")
        return found[rule]

    def text(self):
        by_clock, by_driver = self.idle()
        rank = self.report["ranks"][0]
        shares = ", ".join(f"{part} {100 * share:.1f} %" for part, share in rank["shares"].items()
                           if share >= 0.0005)
        return (f"{rank['steps']} steps of {1e3 * rank['step_s']:.1f} ms; {shares}; idle "
                f"{100 * by_clock:.1f} % by the device's clock, {100 * by_driver:.0f} % by its "
                "driver")


def healthy(case):
    case.train(LARGE, "--compile_model", "true", "--logging_steps", "20")
    return case.expect_silence()


def logs_every_step(case):
    """The host waits for the device in every step, and the device waits for nobody."""
    case.train(LARGE, "--compile_model", "true", "--logging_steps", "1")
    return case.expect_silence()


def reads_every_step(case):
    case.run(train_case.BIN / "tests" / "doctor_peer", case.output, "500")
    return case.expect_silence()


def slow_loader(case):
    """Under the launcher, whose own doctor says the same."""
    case.train(IMAGES, "--max_steps", "60", "--logging_steps", "10",
               launcher=(train_case.LOCKSTEP, "run", "--standalone", "--nproc-per-node=1",
                         "--doctor"))
    finding = case.expect_only("loader-bound")
    expect(finding["gain"] > 0.1, f"gain {finding['gain']:.2f}")
    expect("dataloader_num_workers" in finding["remedy"], finding["remedy"])
    expect("loader-bound" in case.said, "lockstep run --doctor did not say so")
    return case.text()


def plain_step(case):
    """Kernels are launched one by one where a captured step would do."""
    case.train(SMALL, "--compile_model", "false", "--logging_steps", "50", "--max_steps", "800")
    finding = case.expect_only("micro-batch-too-small")
    expect(finding["cause"] == "launch", finding["cause"])
    expect("compile_model: true" in finding["remedy"], finding["remedy"])
    return case.text()


def small_batches(case):
    case.train(SMALL, "--compile_model", "false", "--logging_steps", "10", "--max_steps", "110",
               "--gradient_accumulation_steps", "8")
    finding = case.expect_only("accumulation-too-high")
    expect("per_device_train_batch_size" in finding["remedy"], finding["remedy"])
    return case.text()


CASES = [healthy, logs_every_step, reads_every_step, slow_loader, plain_step, small_batches]


def judge(check, place):
    case = Case(place)

    def show():
        print(f"--- the doctor\n{json.dumps(case.report, indent=1)}\n--- the run\n"
              f"{case.said[-4000:]}", flush=True)
        for name in ("rank_0.jsonl", "gpus_0.jsonl"):
            path = case.output / "monitor" / name
            if path.exists():
                print(f"--- {name}\n{path.read_text()[-6000:]}", flush=True)

    return attempt(check.__name__, lambda: check(case), place, show)


def main():
    end_without_gpu()
    names = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
    chosen = [check for check in CASES if not names or check.__name__ in names]
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        results = [judge(check, pathlib.Path(folder) / check.__name__) for check in chosen]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
