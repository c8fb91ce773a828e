"""`lockstep train` on two hosts, which are two network namespaces joined by a cable, one gloo rank
each. Whatever fails, the run ends with the bits of one that nothing disturbed on one host: the sum
of two numbers is the same in either order."""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

for folder in ("launch", "train"):
    sys.path.insert(0, os.path.join(os.environ["LOCKSTEP_SOURCE"], "tests", folder))
# pylint: disable=wrong-import-position
from cable import Cable  # noqa: E402
from train_case import (BOUND_S, LOCKSTEP, TrainCase, checkpoints, end, environment,  # noqa: E402
                        ranks_of, steps_done, wait_for_step)

# Long enough for a fault to come in time, however late a busy machine shows the steps.
LONG = ("--num_train_epochs", "30", "--save_steps", "5")


class TwoHosts(TrainCase):
    @classmethod
    def setUpClass(cls):
        try:
            cls.cable = Cable("10.99.9")
        except (OSError, subprocess.CalledProcessError) as problem:
            raise unittest.SkipTest("needs root and ip netns") from problem
        cls.addClassCleanup(cls.cable.remove)
        # pylint: disable-next=consider-using-with
        cls.whole = tempfile.TemporaryDirectory(prefix="lockstep-train-")
        cls.addClassCleanup(cls.whole.cleanup)

    def setUp(self):
        super().setUp()
        self.output = self.place / "out"

    def launch(self, node, *flags):
        command = [*self.cable.inside(node), LOCKSTEP, "run", "--nnodes=2",
                   f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=10.99.9.1",
                   "--master-port=29557", "--max-restarts=1", LOCKSTEP, "train", self.config,
                   "--output_dir", self.output, *LONG, *flags]
        with open(self.place / f"log{node}", "a", encoding="utf-8") as log:
            process = subprocess.Popen([str(arg) for arg in command], env=environment(),
                                       stdout=log, stderr=subprocess.STDOUT,
                                       stdin=subprocess.DEVNULL, start_new_session=True)
        self.addCleanup(end, process)
        return process

    def both(self, *flags):
        return [self.launch(node, *flags) for node in (0, 1)]

    def disturbed(self):
        """Both launchers, after some checkpoints."""
        processes = self.both()
        wait_for_step(processes[0], self.output, 12)
        self.assertEqual([process.poll() for process in processes], [None, None], self.logs())
        return processes

    def logs(self):
        return "\n".join((self.place / f"log{node}").read_text(encoding="utf-8", errors="replace")
                         for node in (0, 1))

    def wait_log(self, node, text):
        path, bound = self.place / f"log{node}", time.monotonic() + BOUND_S
        while text not in path.read_text(encoding="utf-8", errors="replace"):
            self.assertLess(time.monotonic(), bound, self.logs())
            time.sleep(0.02)

    def ends(self, processes, code=0):
        for process in processes:
            self.assertEqual(process.wait(timeout=BOUND_S), code, self.logs())

    def same_bits(self):
        """As those of a run that nothing disturbs, on one host."""
        whole = pathlib.Path(self.whole.name)
        if not checkpoints(whole):
            self.train(2, whole, *LONG)
        # A request to stop saves at whatever step it comes.
        self.assertLessEqual(set(checkpoints(whole)), set(checkpoints(self.output)))
        last = f"checkpoint-{checkpoints(whole)[-1]}"
        self.assert_same(whole / last, self.output / last)

    def continues(self, processes, fault, since):
        """To the end, after a restart; says how long the first step after the fault took."""
        self.wait_log(0, "resumed from")
        reached = steps_done(self.output)
        bound = time.monotonic() + BOUND_S
        while steps_done(self.output) == reached and processes[0].poll() is None:
            self.assertLess(time.monotonic(), bound, self.logs())
            time.sleep(0.01)
        print(f"{fault}: trains again after {time.monotonic() - since:.1f} s", flush=True)
        self.ends(processes)
        self.assertIn("restarting all ranks (1 of 1)", self.logs())
        self.assertRegex(self.logs(), rf"resumed from {re.escape(str(self.output))}/checkpoint-\d+")
        self.same_bits()

    def test_the_bits_of_one_host(self):
        self.ends(self.both())
        self.assertRegex(self.logs(), r"backend=gloo .*; not shm, because rank 1 has another "
                                      "network namespace")
        self.same_bits()

    def test_a_killed_rank(self):
        for node in (0, 1):
            with self.subTest(node=node):
                self.doCleanups()  # what a failure before left would join
                self.setUp()
                processes = self.disturbed()
                (victim,) = ranks_of(processes[node])
                since = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                self.continues(processes, f"a killed rank of node {node}", since)

    def test_a_killed_launcher(self):
        for node in (0, 1):
            with self.subTest(node=node):
                self.doCleanups()  # what a failure before left would join
                self.setUp()
                processes = self.disturbed()
                since = time.monotonic()
                processes[node].kill()
                processes[node].wait()
                processes[node] = self.launch(node)
                self.continues(processes, f"a killed launcher of node {node}, started again", since)

    def test_a_cable_that_is_cut_and_mended(self):
        processes = self.disturbed()
        since = time.monotonic()
        self.cable.set_link(1, "down")
        try:
            for node in (0, 1):
                self.wait_log(node, "restarting all ranks (1 of 1) as soon as")
            print(f"a cut cable: noticed after {time.monotonic() - since:.1f} s", flush=True)
        finally:
            self.cable.set_link(1, "up")
        self.continues(processes, "a cable that is mended then", since)

    def test_a_stopped_run_resumes(self):
        processes = self.disturbed()
        since = time.monotonic()
        processes[1].terminate()
        self.ends(processes, 143)
        print(f"a request to stop: saved and ended after {time.monotonic() - since:.1f} s")
        self.ends(self.both("--resume", "auto"))
        self.same_bits()


if __name__ == "__main__":
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("SKIPPED: needs root and ip netns")
        sys.exit(77)
    unittest.main(verbosity=2)  # a skipped test says why
