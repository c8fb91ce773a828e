"""What a Trainer of real ranks leaves in output_dir/monitor."""
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

LAUNCHER = os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep")
CONFIG = """
model: {name: mlp, hidden: 64, layers: 2}
data: {name: random, samples: 4000, features: 32, classes: 5}
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
logging_steps: 10
disable_tqdm: true
use_cpu: true
"""


class Record(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory()
        self.addCleanup(self.dir.cleanup)
        self.out = Path(self.dir.name, "out")
        self.config = Path(self.dir.name, "train.yaml")
        self.config.write_text(CONFIG + f"output_dir: {self.out}\n", encoding="utf-8")

    def command(self, *keys, ranks=2):
        return [LAUNCHER, "run", "--standalone", f"--nproc-per-node={ranks}", LAUNCHER, "train",
                str(self.config), *keys]

    def train(self, *keys, ranks=2):
        done = subprocess.run(self.command(*keys, ranks=ranks), capture_output=True, text=True,
                              timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout + done.stderr

    def facts(self):
        return json.loads((self.out / "monitor/run.json").read_text(encoding="utf-8"))

    def intervals(self, rank):
        lines = (self.out / f"monitor/rank_{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def newest_checkpoint(self):
        """Its step, or 0. A checkpoint that is being written has a longer name."""
        found = [re.fullmatch(r"checkpoint-(\d+)", p.name) for p in self.out.glob("checkpoint-*")]
        return max((int(match.group(1)) for match in found if match), default=0)

    @staticmethod
    def processes_of(session):
        """Those that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def eventually(self, condition, what):
        end = time.monotonic() + 120
        while not condition():
            self.assertLess(time.monotonic(), end, what)
            time.sleep(0.05)

    @staticmethod
    def count(intervals, name):
        return sum(i.get("counts", {}).get(name, 0) for i in intervals)

    def test_two_ranks(self):
        self.train("--max_steps", "40", "--save_strategy", "no", "--shard_optimizer", "false")
        facts = self.facts()
        self.assertEqual((facts["world_size"], facts["hosts"], facts["ranks_on_host"]), (2, 1, 2))
        self.assertEqual((facts["device"], facts["backend"]), ("cpu", "shm"))
        self.assertEqual(facts["accumulation"], 2)
        self.assertEqual(facts["optimizer"], "replicated fused adamw")
        self.assertEqual(facts["arguments"]["max_steps"], 40)
        for rank in (0, 1):
            intervals = self.intervals(rank)
            for interval in intervals:
                self.assertAlmostEqual(sum(interval["host_s"].values()), interval["seconds"], 5)
            self.assertEqual(sum(i["steps"] for i in intervals), 40)
            self.assertEqual(intervals[-1]["step"], 40)
            self.assertEqual(self.count(intervals, "micro_batches"), 80)
            self.assertEqual(self.count(intervals, "synchronised_passes"), 40)
            self.assertEqual(self.count(intervals, "logs"), 4)
            self.assertGreaterEqual(self.count(intervals, "batches"), 80)
            self.assertGreaterEqual(self.count(intervals, "reduced_bytes"),
                                    40 * 4 * facts["parameters"])
            self.assertGreater(self.count(intervals, "reduce_ns"), 0)
            for phase in ("data", "forward", "backward", "communication", "optimizer"):
                self.assertGreater(sum(i["host_s"].get(phase, 0) for i in intervals), 0, phase)
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text(
            encoding="utf-8").splitlines()]
        for line in lines[:4]:
            self.assertGreaterEqual(line["data_wait_percent"], 0)
            self.assertLessEqual(line["data_wait_percent"] + line["communication_percent"], 200)

    def test_a_sharded_step_waits_for_others_in_communication(self):
        self.train("--max_steps", "40", "--save_strategy", "no", "--shard_optimizer", "true")
        self.assertEqual(self.facts()["optimizer"], "sharded fused adamw")
        for rank in (0, 1):
            intervals = self.intervals(rank)
            self.assertEqual(self.count(intervals, "synchronised_passes"), 40)
            self.assertGreater(sum(i["host_s"].get("communication", 0) for i in intervals), 0)

    def test_a_killed_run_can_be_read_and_its_successor_appends(self):
        with subprocess.Popen(self.command("--max_steps", "1000000", "--save_steps", "20"),
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              start_new_session=True) as process:
            file = self.out / "monitor/rank_1.jsonl"
            self.eventually(lambda: file.exists() and file.read_bytes().count(b"\n") >= 2
                            and self.newest_checkpoint(), "a record and a checkpoint")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # The ranks die with their launcher.
        self.eventually(lambda: not self.processes_of(process.pid), "the end of the ranks")
        before = len(self.intervals(1))
        with open(file, "ab") as torn:
            torn.write(b'{"unix_time_s":17')
        last = self.newest_checkpoint()
        self.train("--max_steps", str(last + 20), "--resume", "auto")
        intervals = self.intervals(1)  # every line is whole
        self.assertGreater(len(intervals), before)
        self.assertEqual(intervals[-1]["step"], last + 20)

    def state(self):
        """What `lockstep monitor` says at the end of the run, and its exit code."""
        done = subprocess.run([LAUNCHER, "monitor", str(self.out)], capture_output=True, text=True,
                              timeout=120, check=False)
        return done.returncode, done.stdout.split("  ")[1]

    def stopped(self, number):
        """A single Trainer, without a launcher, that gets a signal while it trains."""
        command = [LAUNCHER, "train", str(self.config), "--max_steps", "1000000"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              start_new_session=True) as process:
            file = self.out / "monitor/rank_0.jsonl"
            self.eventually(lambda: file.exists() and file.read_bytes().count(b"\n") >= 2,
                            "a record")
            os.kill(process.pid, number)
            process.wait()

    def test_monitor_says_how_a_run_ended(self):
        self.stopped(signal.SIGKILL)
        self.assertEqual(self.state(), (1, "killed"))
        # One that was asked to stop has saved and ended; so has one that is complete.
        shutil.rmtree(self.out)
        self.stopped(signal.SIGTERM)
        self.assertEqual(self.state(), (0, "ended"))
        shutil.rmtree(self.out)
        self.train("--max_steps", "20", "--save_strategy", "no")
        self.assertEqual(self.state(), (0, "ended"))
        self.assertGreater(self.facts()["ended_unix_s"], self.facts()["started_unix_s"])

    def test_it_can_be_switched_off(self):
        self.train("--max_steps", "5", "--save_strategy", "no", "--record_run", "false")
        self.assertFalse((self.out / "monitor").exists())


if __name__ == "__main__":
    unittest.main(verbosity=2)
