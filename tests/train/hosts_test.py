"""Two hosts without a shared file system: save_on_each_node.

The hosts are two launchers on this machine; each has a folder of its own, which is its working
directory, so that the same output_dir is another place.
"""

import shutil
import subprocess
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
                [str(word) for word in command], cwd=host, env=environment(), stdout=log,
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

    def test_the_newest_that_all_hosts_have(self):
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
        for text in self.train_both("--max_steps", 8, "--resume", "out/checkpoint-5", code=2):
            self.assertIn("rank 1: [checkpoint] out/checkpoint-5 cannot be used: ", text)

    def test_nothing_in_common_is_a_new_run(self):
        self.train_both("--max_steps", 5)
        shutil.rmtree(self.hosts[0] / "out" / "checkpoint-5")
        text = self.train_both("--max_steps", 5, "--resume", "auto")[0]
        self.assertIn("out holds none that is whole on every host: a new run", text)


if __name__ == "__main__":
    unittest.main()
