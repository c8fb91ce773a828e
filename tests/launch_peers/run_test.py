"""How run() and spawn() handle failures: reports, exit codes, and no rank left waiting."""

import glob
import json
import os
import pathlib
import shutil
import signal
import tempfile
import time
import unittest
import uuid

from peer import HAVE_TORCH, LOCKSTEP, RUN_PEER, TORCHRUN, Started, run

def ranks(count, *args):
    return [LOCKSTEP, "run", "--standalone", f"--nproc-per-node={count}", *args]


def left_over(mark):
    """Processes whose environment carries the mark."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in pathlib.Path("/proc", pid, "environ").read_bytes():
                found.append(int(pid))
        except OSError:  # it has ended, or is not ours
            pass
    return found


class Case(unittest.TestCase):
    def check_soon(self, done):
        """A missed failure takes the 30 minutes of a collective's timeout, which run() does not
        wait for, or the 30 s between SIGTERM and SIGKILL. How long the start takes says nothing."""
        self.assertNotIn("sending SIGKILL", done.err, done.text())


class Run(Case):
    def test_an_exception_is_reported_with_its_stack(self):
        for who in (0, 1):
            done = run(ranks(2, RUN_PEER, "throw", str(who)))
            self.assertEqual(done.code, 1, done.text())
            self.check_soon(done)
            self.assertIn("std::runtime_error: the reason", done.err)
            self.assertIn("fail_deep_inside(std::string const&)", done.err, done.text())
            self.assertIn(f"rank {who}", done.err)
            # The survivor falls with it in one line, without a stack.
            ends = [line for line in done.err.split("\n") if line.startswith(f"[{1 - who}] ")]
            ends = [line for line in ends if " info " not in line]
            self.assertLessEqual(len(ends), 1, done.text())
            for line in ends:  # SIGTERM may have come first
                self.assertIn(f"ends because rank {who} on ", line)
            self.assertNotIn("not reached", done.out)

    def test_a_rank_that_computes_is_stopped_at_once(self):
        done = run(ranks(2, RUN_PEER, "throw", "1"), PEER_COMPUTES=1)
        self.assertEqual(done.code, 1, done.text())
        self.check_soon(done)
        self.assertNotIn("saving", done.out, done.text())

    def test_other_ways_to_fail(self):
        for how, code, message in [("usage", 2, "lockstep::UsageError: [peer] wrong use."),
                                 ("torch", 1, "c10::Error: a torch error"),
                                 ("number", 1, "not a std::exception"),
                                 ("segv", 139, "SIGSEGV"),
                                 ("kill", 137, "SIGKILL"),
                                 ("exit", 3, "3")]:
            done = run(ranks(2, RUN_PEER, how, "1"))
            self.assertEqual(done.code, code, done.text())
            self.check_soon(done)
            self.assertIn(message, done.err, done.text())

    def test_the_error_file(self):
        with tempfile.TemporaryDirectory() as folder:
            done = run(ranks(2, RUN_PEER, "throw", "1")[:-3]
                       + ["--log-dir", folder, RUN_PEER, "throw", "1"])
            self.assertEqual(done.code, 1, done.text())
            files = glob.glob(os.path.join(folder, "**", "error.json"), recursive=True)
            found = {path.split(os.sep)[-2]: json.loads(pathlib.Path(path).read_text())
                     for path in files}
        cause = found["1"]["message"]
        self.assertEqual(cause["message"], "std::runtime_error: the reason")
        self.assertIn("fail_deep_inside", cause["extraInfo"]["cpp_stack"][0])
        self.assertRegex(cause["extraInfo"]["timestamp"], r"^\d+$")
        if "0" in found:  # the survivor may have been stopped before it wrote one
            fallen = found["0"]["message"]["extraInfo"]
            self.assertTrue(fallen["consequence"])
            self.assertGreater(int(fallen["timestamp"]), int(cause["extraInfo"]["timestamp"]))

    def test_exit_does_not_wait(self):
        done = run(ranks(2, RUN_PEER, "hang"))
        self.assertEqual(done.code, 1, done.text())
        self.check_soon(done)

    def test_a_dead_peer_raises_an_error_instead_of_sigpipe(self):
        done = run(ranks(2, RUN_PEER, "pipe"), LOCKSTEP_BACKEND="gloo")
        self.assertEqual(done.code, 0, done.text())
        self.assertEqual(done.out.count("got EPIPE true, its child ends true"), 2, done.text())

    def test_alone_the_code_is_returned(self):
        done = run([RUN_PEER, "throw", "0"])
        self.assertEqual(done.code, 1, done.text())
        self.assertIn("std::runtime_error: the reason\n", done.err)
        self.assertNotIn("\n    at ", done.err)  # throws are traced where a launcher reads them
        traced = run([RUN_PEER, "throw", "0"], LOCKSTEP_TRACE_THROWS=1)
        self.assertIn("std::runtime_error: the reason\n    at ", traced.err)
        self.assertEqual(run([RUN_PEER, "usage", "0"]).code, 2)

    def test_a_system_error_in_an_agreement_is_the_failure_of_its_rank(self):
        for who in (0, 1):
            done = run(ranks(2, "--max-restarts=1", RUN_PEER, "agree", str(who)))
            self.assertEqual(done.code, 1, done.text())
            self.assertRegex(done.err, rf"rank {who} .*failed", done.text())
            self.assertNotIn("UsageError", done.err, done.text())
            self.assertIn("lockstep::SystemError: [peer] cannot write: No space left on device",
                          done.err, done.text())
            # The first attempt was restarted, and in neither did the peer count as the cause.
            self.assertIn("restart", done.err, done.text())
            self.assertNotRegex(done.err, rf"\[launch\] rank {1 - who} ", done.text())

    def test_all_ranks_catch_the_same_kind_of_error(self):
        done = run(ranks(3, RUN_PEER, "caught", "1"))
        self.assertEqual(done.code, 0, done.text())
        self.assertIn("rank 1 caught 28: [peer] cannot write: No space left on device", done.out)
        for rank in (0, 2):
            self.assertIn(f"rank {rank} caught 28: [world] rank 1: [peer] cannot write: No space "
                          "left on device\n", done.out, done.text())
        self.assertEqual(done.out.count("of 3: sum 3"), 3, done.text())

    def test_a_failed_preparation_has_the_same_code_alone_and_among_others(self):
        for command in ([RUN_PEER, "prepare", "0"], ranks(2, RUN_PEER, "prepare", "0")):
            done = run(command)
            self.assertEqual(done.code, 2, done.text())
            self.assertIn("lockstep::UsageError: [peer] the file is missing.", done.err)

    def test_a_body_that_returns_early_is_named(self):
        done = run(ranks(2, RUN_PEER, "leave", "0"))
        self.assertEqual(done.code, 1, done.text())
        self.assertRegex(done.err, "ranks disagree on collective #3: rank ", done.text())
        self.assertIn("rank 0 has returned from its body", done.err)
        self.assertIn("rank 1 called all_reduce(float32 x 4, sum)", done.err)
        self.assertNotIn("uint8", done.err, done.text())

    def test_ranks_that_train_models_of_their_own_are_told(self):
        text = "2 ranks never exchanged a gradient, and rank 0 ran 5 backward passes: every rank"
        done = run(ranks(2, RUN_PEER, "separate", "5"))
        self.assertEqual(done.code, 0, done.text())
        self.assertEqual(done.err.count(text), 1, done.text())
        done = run(ranks(2, RUN_PEER, "separate", "5"), PEER_EXCHANGES=1)  # as a mean loss
        self.assertEqual(done.err.count(text), 1, done.text())
        for passes, variables in (("5", {"PEER_EXCHANGES": 4}), ("0", {})):
            done = run(ranks(2, RUN_PEER, "separate", passes), **variables)
            self.assertEqual(done.code, 0, done.text())
            self.assertNotIn("never exchanged", done.err, done.text())
        self.assertNotIn("never exchanged", run([RUN_PEER, "separate", "5"]).err)
        record = tempfile.mkdtemp(prefix="lockstep-run-test-")
        self.addCleanup(shutil.rmtree, record)
        done = run(ranks(2, "--record", record, RUN_PEER, "separate", "5"))
        self.assertEqual(done.code, 0, done.text())
        doctor = run([LOCKSTEP, "doctor", "--run", record])
        self.assertIn("never-exchanged: 2 ranks trained and never exchanged a gradient",
                      doctor.out, doctor.text())

    def test_the_code_that_a_body_returns(self):
        for code in (0, 7):
            done = run([RUN_PEER, "code", str(code)])
            self.assertEqual(done.code, code, done.text())
        done = run(ranks(2, RUN_PEER, "code", "0"))
        self.assertEqual(done.code, 0, done.text())
        done = run(ranks(2, RUN_PEER, "code", "7"))
        self.assertEqual(done.out.count("of 2: sum 2"), 2, done.text())
        self.assertEqual(done.code, 7, done.text())

    def test_a_code_that_one_rank_returns_is_the_failure_of_that_rank(self):
        for backend, who in (("shm", 1), ("shm", 0), ("gloo", 1)):
            done = run(ranks(3, RUN_PEER, "three", str(who)), LOCKSTEP_BACKEND=backend)
            self.assertEqual(done.code, 3, done.text())
            self.assertRegex(done.err, rf"(?m)^\[launch\] rank {who} on \S+ failed: exited with "
                                       r"code 3: the body of run\(\) returned 3$", done.text())
            self.assertNotIn("ranks disagree", done.err, done.text())
            self.check_soon(done)

    def test_the_cached_memory_is_mentioned_to_who_asks(self):
        said = "memory of CPU tensors of 1 MiB and more is cached"
        self.assertNotIn(said, run([RUN_PEER, "code", "0"]).err)
        self.assertIn(said, run([RUN_PEER, "code", "0"], LOCKSTEP_LOG="debug").err)

    @unittest.skipUnless(HAVE_TORCH, "needs torch in LOCKSTEP_PYTHON")
    def test_under_torchrun_the_cause_is_distinguished(self):
        done = run([*TORCHRUN, "--standalone", "--nproc-per-node=2", "--no-python", RUN_PEER,
                    "throw", "1"])
        self.assertEqual(done.code, 1, done.text())
        root = done.err[done.err.index("Root Cause"):]
        self.assertIn("rank      : 1", root, done.text())
        self.assertIn("the reason", root, done.text())


class Spawn(Case):
    def test_two_calls(self):
        done = run([RUN_PEER, "spawn", "3"])
        self.assertEqual(done.code, 0, done.text())
        for rank in range(3):
            self.assertIn(f"rank {rank} of 3: sum 3", done.out)
        # Each rank of the second call has seen the first return, without running it again.
        self.assertEqual(done.out.count("sum 3"), 3, done.text())
        self.assertEqual(done.out.count("first spawn returned 0"), 3, done.text())
        for rank in range(2):
            self.assertIn(f"second, rank {rank}, knows 0", done.out)
        self.assertEqual(done.out.count("second spawn returned 0"), 1, done.text())

    def test_a_failing_rank(self):
        done = run([RUN_PEER, "spawn", "2"], PEER_FAILS=1)
        self.assertIn("first spawn returned 3", done.out, done.text())
        self.assertIn("second, rank 1, knows 3", done.out, done.text())
        self.assertEqual(done.code, 0, done.text())

    def test_as_many_as_cores(self):
        done = run([RUN_PEER, "spawn", "0"], CUDA_VISIBLE_DEVICES="")
        cores = len(os.sched_getaffinity(0))
        self.assertEqual(done.code, 0, done.text())
        self.assertLessEqual(done.out.count(": sum "), cores)
        self.assertGreaterEqual(done.out.count(": sum "), 1)

    def test_a_rank_of_another_launcher_does_not_spawn(self):
        done = run(ranks(2, RUN_PEER, "spawn", "5"))
        self.assertEqual(done.code, 0, done.text())
        self.assertEqual(done.out.count("of 2: sum 2"), 2, done.text())

    def test_mistakes(self):
        done = run([RUN_PEER, "spawn-inside"])
        self.assertEqual(done.code, 2, done.text())
        self.assertIn("called from inside a body", done.err)
        done = run([RUN_PEER, "spawn", "-1"])
        self.assertIn("nprocs=-1 ranks cannot be started", done.err)
        self.assertNotEqual(done.code, 0)

    def test_a_process_with_threads_is_refused(self):
        done = run([RUN_PEER, "spawn-threads"])
        self.assertEqual(done.code, 3, done.text())
        self.assertIn("[spawn] this process has 1 other thread (run_peer), and a process with "
                      "threads cannot be copied safely.", done.out)
        self.assertIn("lockstep run --nproc-per-node=N", done.out)
        self.assertNotIn("sum", done.out)
        # One that has ended does no harm.
        done = run([RUN_PEER, "spawn-joined"])
        self.assertEqual(done.code, 0, done.text())
        self.assertEqual(done.out.count("of 2: sum 2"), 2, done.text())

    def test_a_program_that_was_removed_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            program = shutil.copy(RUN_PEER, folder)
            done = run([program, "spawn-gone"])
        self.assertEqual(done.code, 3, done.text())
        self.assertRegex(done.out, r"\[spawn\] \S+/run_peer( \(deleted\))? is no longer there to "
                                   r"be started again .* Start the program again\.")

    def test_a_signal_ends_the_ranks(self):
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
            mark = f"PEER_MARK_{uuid.uuid4().hex}"
            started = Started([RUN_PEER, "spawn-sleep"], **{mark: 1})
            lines = [started.process.stdout.readline() for _ in range(2)]
            self.assertTrue(all("sleeps" in line for line in lines), lines)
            os.kill(started.process.pid, number)
            done = started.finish()
            self.assertEqual(done.code, code, done.text())
            self.check_soon(done)
            if code > 0:
                self.assertIn(f"spawn returned {code}", done.out, done.text())
            # What was killed leaves /proc a moment later.
            until = time.monotonic() + 60
            while left_over(mark) and time.monotonic() < until:
                time.sleep(0.05)
            self.assertEqual(left_over(mark), [], done.text())


if __name__ == "__main__":
    unittest.main(verbosity=2)
