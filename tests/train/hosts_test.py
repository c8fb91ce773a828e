"""Two hosts without a shared file system: save_on_each_node.

The hosts are two launchers on this machine; each has a folder of its own, which is its working
directory, so that the same output_dir is another place.
"""

import json
import re
import shutil
import socket
import subprocess
import time
import unittest

from train_case import BOUND_S, LOCKSTEP, TrainCase, checkpoints, environment


class Hosts(TrainCase):
    def setUp(self):
        super().setUp()
        self.hosts = [self.place / "host0", self.place / "host1"]
        for host in self.hosts:
            host.mkdir()

    def train_both(self, *flags, code=0):
        port, processes = self.held_port(), []
        for rank, host in enumerate(self.hosts):
            command = [LOCKSTEP, "run", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1",
                       "--master-addr=127.0.0.1", f"--master-port={port}", LOCKSTEP, "train",
                       self.config, "--output_dir", "out", "--save_on_each_node", *flags]
            log = open(self.place / f"log{rank}", "w+", encoding="utf-8")  # pylint: disable=R1732
            self.addCleanup(log.close)
            processes.append((log, subprocess.Popen(
                [str(arg) for arg in command], cwd=host, env=environment(), stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)))
        texts = []
        for log, process in processes:
            self.assertEqual(process.wait(BOUND_S) == 0, code == 0, self.read(log))
            texts.append(self.read(log))
        return texts

    @staticmethod
    def read(log):
        log.flush()
        log.seek(0)
        return log.read()

    def test_resumes_from_the_newest_checkpoint_of_all_hosts(self):
        first, second = [host / "out" for host in self.hosts]
        stale = second / "checkpoint-3.tmp-1-0123456789abcdef"
        stale.mkdir(parents=True)
        self.train_both("--max_steps", 15)
        self.assertEqual(checkpoints(first), [5, 10, 15])
        self.assertEqual(checkpoints(second), [5, 10, 15])
        self.assertFalse(stale.exists(), "what a dead writer left on the second host")
        for folder in (first, second):
            shutil.copytree(folder, folder.with_name("whole"))
        # The one host has lost its newest, the other one has a damaged folder.
        shutil.rmtree(second / "checkpoint-15")
        model = first / "checkpoint-10" / "model.safetensors"
        model.write_bytes(model.read_bytes()[:-1])
        one, other = self.train_both("--max_steps", 15, "--resume", "auto")
        self.assertRegex(one, r"checkpoint-15 is passed over: another host has no whole one")
        self.assertRegex(one, r"checkpoint-10 is passed over: .*model\.safetensors")
        self.assertIn("resumed from out/checkpoint-5 at step 5", one)
        self.assertRegex(other, r"checkpoint-10 is passed over: another host has no whole one")
        for folder in (first, second):
            self.assert_same(folder / "checkpoint-15", folder.with_name("whole") / "checkpoint-15")

    def test_a_folder_that_one_host_does_not_have_is_refused_by_both(self):
        self.train_both("--max_steps", 5)
        shutil.rmtree(self.hosts[1] / "out" / "checkpoint-5")
        one, other = self.train_both("--max_steps", 8, "--resume", "out/checkpoint-5", code=2)
        for text in (one, other):  # both launchers name the rank where it began
            self.assertRegex(text, r"rank 1 on \S+ failed: exited with code 2")
            self.assertIn("UsageError: [checkpoint] out/checkpoint-5 cannot be used: ", text)

    def test_no_common_checkpoint_starts_a_new_run(self):
        self.train_both("--max_steps", 5)
        shutil.rmtree(self.hosts[0] / "out" / "checkpoint-5")
        flags = ("--max_steps", 5, "--resume", "auto")
        for text in self.train_both(*flags, code=2):
            self.assertIn("out has a checkpoint of another run", text)
        text = self.train_both(*flags, "--overwrite_output_dir")[0]
        self.assertIn("out has no checkpoint that is whole on every host: a new run", text)


# Below the 300 s that ranks wait for one that does not come, and far above the few that a loaded
# machine takes to start three of them.
SOON_S = 200

INSTRUCTIONS = """
model: {name: gpt, n_layer: 1, n_head: 1, n_embd: 8}
data: {name: instructions, path: train.jsonl}
max_seq_len: 64
max_steps: 2
disable_tqdm: true
use_cpu: true
"""


class ByHand(TrainCase):
    """Ranks without a launcher that would end the others: each host has files of its own."""

    def setUp(self):
        super().setUp()
        self.hosts = [self.place / f"host{rank}" for rank in range(3)]
        for host in self.hosts:
            host.mkdir()
            (host / "train.yaml").write_text(INSTRUCTIONS)
            (host / "train.jsonl").write_text(
                "".join(json.dumps({"instruction": "say", "output": "yes"}) + "\n"
                        for _ in range(12)))

    def ended(self, *flags):
        """What each rank has written, and its exit code."""
        port, processes = self.held_port(), []
        began = time.monotonic()
        for rank, host in enumerate(self.hosts):
            log = open(self.place / f"log{rank}", "w+", encoding="utf-8")  # pylint: disable=R1732
            self.addCleanup(log.close)
            process = subprocess.Popen(  # pylint: disable=R1732
                [LOCKSTEP, "train", "train.yaml", "--output_dir", self.place / "out", *flags],
                cwd=host, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment(RANK=str(rank), WORLD_SIZE=str(len(self.hosts)),
                                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)))
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
            processes.append((log, process))
        ends = []
        for log, process in processes:
            try:
                process.wait(max(0.1, SOON_S - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                self.fail("a rank waits: " + Hosts.read(log))
            ends.append((process.returncode, Hosts.read(log)))
        return ends

    def refused(self, rank, message, *flags):
        for code, text in self.ended(*flags):
            self.assertEqual(code, 2, text)
            self.assertRegex(text, rf"rank {rank} on {re.escape(socket.gethostname())}[ :]")
            self.assertRegex(text, message)
        self.assertFalse((self.place / "out").exists())

    def test_a_file_that_one_rank_does_not_have_ends_all_of_them(self):
        for rank in (0, 2):
            with self.subTest(rank):
                self.hosts[rank].joinpath("train.jsonl").rename(self.place / "away")
                self.refused(rank, "there is no file train.jsonl. Relative paths begin at "
                             + re.escape(str(self.hosts[rank])))
                (self.place / "away").rename(self.hosts[rank] / "train.jsonl")

    def test_a_file_that_is_torn_on_one_rank_ends_all_of_them(self):
        """It is found after the rendezvous."""
        self.hosts.pop()
        self.hosts[1].joinpath("train.jsonl").write_text('{"instruction": "say", "outp')
        self.refused(1, r"train\.jsonl:1:\d+: .*The file must be a JSON list of objects")

    def test_a_configuration_that_one_rank_cannot_read_ends_all_of_them(self):
        self.hosts.pop()
        self.hosts[1].joinpath("train.yaml").unlink()
        self.refused(1, r"train\.yaml cannot be read")

    def test_a_mistake_of_all_ranks_is_reported_without_waiting(self):
        self.hosts.pop()
        for code, text in self.ended("--max_seq_len", "1"):
            self.assertEqual(code, 2, text)
            self.assertIn("max_seq_len is 1, and instructions need 2 or more", text)


if __name__ == "__main__":
    unittest.main()
