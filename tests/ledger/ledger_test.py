"""Ranks that stop taking part: the launcher says who is behind, where and why, in time."""
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["LOCKSTEP_SOURCE"], "tests", "launch"))
# pylint: disable-next=wrong-import-position
from launch_case import BOUND_S, LAUNCHER, SOAK, Case, free_port, marked  # noqa: E402

BIN = os.environ["LOCKSTEP_BIN"]
PEER = os.path.join(BIN, "tests", "stall_peer")
PACKAGE = os.path.join(os.path.dirname(BIN), "python")
STALL_S = 2
REPEAT = 20 if SOAK else 2
TITLE = "[launch] stall: "


def stacks(text):
    """{rank: its stack} of a table; ranks in the same place share one."""
    found = {}
    for ranks, stack in re.findall(r"stack of ranks? ([\d, ]+):(.*(?:\n    .*)*)", text):
        found.update({int(rank): stack for rank in ranks.split(",")})
    return found


def stalls(text):
    """The text from the first stall on, "" without one, and how many there are. A rank that a busy
    machine starts late is reported too, rightly, and is not what is tested."""
    titles = [match.start() for match in re.finditer(rf"{re.escape(TITLE)}.*\n", text)
              if "has not created its world yet" not in match.group()]
    return (text[titles[0]:] if titles else ""), len(titles)


class LedgerCase(Case):
    def start_peer(self, kind, guilty, *flags, backend="shm", ranks=3, **env):
        return self.start("--standalone", f"--nproc-per-node={ranks}", f"--stall-timeout={STALL_S}",
                          "--shutdown-timeout=5", *flags, PEER, kind,
                          str(guilty), env={"LOCKSTEP_BACKEND": backend, **env})

    def table(self, process, ranks=3):
        """The table and its rows by rank."""
        end = time.monotonic() + BOUND_S
        text = stalls(self.heard.setdefault(process.stderr, ""))[0]
        while len(stacks(text)) < ranks:
            left = max(0, end - time.monotonic())
            ready = select.select([process.stderr], [], [], left)[0]
            data = os.read(process.stderr.fileno(), 65536).decode() if ready else ""
            self.assertTrue(data, self.heard[process.stderr])
            self.heard[process.stderr] += data
            text = stalls(self.heard[process.stderr])[0]
        rows = {int(rank): row for rank, row in re.findall(r"^  (\d+)  (.*)$", text, re.MULTILINE)}
        self.assertEqual(sorted(rows), list(range(ranks)), text)
        return text, rows

    def end(self, process):
        process.terminate()
        _, out, err = self.finish(process)
        self.assertEqual(stalls(err)[1], 1, err)
        return out, err


class Stalls(LedgerCase):
    def setUp(self):
        super().setUp()
        self.quiet = []  # seconds until each table

    def stall(self, kind, guilty, **options):
        """Starts it and checks what is the same for all kinds."""
        process = self.start_peer(kind, guilty, **options)
        self.wait_line(process.stdout, f"{kind} at ")
        _, rows = self.table(process)
        _, err = self.end(process)
        text = stalls(err)[0]
        quiet = float(re.search(r"has moved for ([\d.]+) s \(stall time 2\.0 s\)", text).group(1))
        self.assertGreaterEqual(quiet, STALL_S, text)
        # One of some is in time: other work on the machine slows them down, never speeds one up.
        self.quiet.append(quiet)
        self.assertTrue(len(self.quiet) < REPEAT or min(self.quiet) <= STALL_S + 1, self.quiet)
        self.assertRegex(text, rf"Rank {guilty} is behind: ")
        self.assertEqual(len(re.findall("is behind", text)), 1, text)
        others = [row for rank, row in rows.items() if rank != guilty]
        for row in others:
            self.assertRegex(row, r"waits for [\d.]+ s at ", text)
        return text, rows[guilty], others, err

    def test_sigstop(self):
        for i in range(REPEAT):
            guilty = i % 3
            text, row, others, _ = self.stall("sigstop", guilty)
            self.assertIn(f"Rank {guilty} is behind: it is stopped (kill -CONT ", text)
            self.assertIn("T stopped", row)
            self.assertIn("finished", row)
            self.assertRegex(row, r"#5 all_reduce \(Float, 1\.0 KiB\).* at common_step\(")
            for other in others:
                self.assertRegex(other, r"#6 all_reduce \(Float, 1\.0 KiB\).* at common_step\(")
            self.assertIn("stopped and cannot be asked", stacks(text)[guilty])
            self.assertIn("common_step", stacks(text)[(guilty + 1) % 3])

    def test_endless_loop(self):
        for i in range(REPEAT):
            guilty = i % 3
            text, row, others, _ = self.stall("loop", guilty)
            self.assertRegex(text, rf"Rank {guilty} is behind: it is busy: its CPU time grows")
            self.assertIn("R running, busy", row)
            self.assertIn("endless_loop()", stacks(text)[guilty])
            for other in others:
                self.assertRegex(other, r"#6 all_reduce .* at common_step\(")

    def test_blocked_on_a_file(self):
        fifo = os.path.join(self.dir.name, "fifo")
        os.mkfifo(fifo)
        for i in range(REPEAT):
            guilty = i % 3
            text, row, _, _ = self.stall("fifo", guilty, FIFO=fifo)
            self.assertIn(f"Rank {guilty} is behind: it waits in read of {fifo} for ", text)
            self.assertIn(f"S waiting in read of {fifo}", row)
            self.assertIn("read_fifo()", stacks(text)[guilty])

    def test_skipped_collective(self):
        for i in range(REPEAT):
            guilty = 1 + i % 2  # a message of rank 0 is what it waits for instead
            text, row, others, _ = self.stall("skip", guilty)
            self.assertRegex(text, rf"Rank {guilty} is behind: it waits in #1 recv \(Float, 16 B, "
                             r"peer 0\) at message_instead\(")
            self.assertIn("#1 recv", row)
            for other in others:
                self.assertRegex(other, r"#6 all_reduce \(Float, 4\.0 KiB\).* at "
                                 r"call_that_is_skipped\(")
            both = ", ".join(str(rank) for rank in range(3) if rank != guilty)
            self.assertRegex(text, r"first call that is missing: #6\n    ranks " + both +
                             r": #6 all_reduce \(Float, 4\.0 KiB\) at call_that_is_skipped\(")
            self.assertRegex(text, rf"rank {guilty}: has not called it; its last one is #5 "
                             r"all_reduce .* at common_step\(")

    def test_swapped_collectives_of_two_worlds(self):
        for i in range(REPEAT):
            guilty = i % 3
            text, row, others, _ = self.stall("swap_worlds", guilty)
            self.assertRegex(text, rf"Rank {guilty} is behind: it waits in #1 broadcast \(Float, "
                             r"128 B, root 0\) of group split/1/0 at second_of_two\(")
            self.assertIn("second_of_two(", row)
            for other in others:
                self.assertRegex(other, r"#1 all_reduce .* of group split/0/0.* at first_of_two\(")

    def test_swapped_collectives_of_one_world(self):
        # Over gloo, which does not see it. Shared memory refuses such calls at once.
        for i in range(REPEAT):
            guilty = i % 3
            text, row, others, _ = self.stall("swap", guilty, backend="gloo")
            both = ", ".join(str(rank) for rank in range(3) if rank != guilty)
            self.assertRegex(text, rf"first call that differs: #6\n(?:.*\n)*?    ranks {both}: "
                             r"#6 all_reduce \(Float, 256 B\) at first_of_two\(")
            self.assertRegex(text, rf"    rank {guilty}: #6 broadcast \(Float, 128 B, root 0\) at "
                             r"second_of_two\(")
            self.assertIn("second_of_two(", row)
            for other in others:
                self.assertIn("first_of_two(", other)


class Others(LedgerCase):
    def test_shared_memory_refuses_swapped_calls_and_the_report_names_their_places(self):
        code, _, err = self.finish(self.start_peer("swap", 1))
        self.assertEqual(code, 1, err)
        # By the ranks themselves; on a busy machine a slow start may be reported as a stall before.
        self.assertIn("ranks disagree on collective", err)
        self.assertRegex(err, r"first call that differs: #6\n +ranks 0, 2: #6 all_reduce .* at "
                         r"first_of_two\(.*\n +rank 1: #6 broadcast .* at second_of_two\(")

    def test_a_checkpoint_that_one_rank_saves_alone(self):
        folder = os.path.join(self.dir.name, "saved")
        advice = "very rank must call save_checkpoint(), which is collective"
        _, _, err = self.finish(self.start_peer("save", 0, FOLDER=folder))
        self.assertRegex(err, r"rank 0 called all_gather\w*\(.*\) to save a checkpoint, rank 1 "
                         r"called all_reduce\(float32 x 256, sum\)")
        self.assertIn("E" + advice, err)
        process = self.start_peer("save", 0, backend="gloo", FOLDER=folder)
        text, rows = self.table(process)
        self.assertIn("Rank 0 waits for the others to save a checkpoint: e" + advice, text)
        self.assertIn(" saving ", rows[0])
        self.end(process)

    def test_a_rank_that_continues_ends_the_stall(self):
        process = self.start_peer("sigstop", 1)
        text, _ = self.table(process)
        os.kill(int(re.search(r"kill -CONT (\d+)", text).group(1)), signal.SIGCONT)
        code, _, err = self.finish(process)
        self.assertEqual(code, 0, err)
        self.assertEqual(stalls(err)[1], 1, err)

    def test_a_stalled_run_can_be_stopped(self):
        logs = os.path.join(self.dir.name, "logs")
        code, _, err = self.finish(
            self.start_peer("loop", 2, "--stall-action=stop", f"--log-dir={logs}"))
        self.assertEqual(code, 1, err)
        self.assertEqual(stalls(err)[1], 1, err)
        self.assertRegex(err, r"\[launch\] rank 2 on \S+ failed: stalled\. Rank 2 is behind: it is "
                         r"busy")
        (run,) = os.listdir(logs)
        with open(os.path.join(logs, run, "attempt_0", "stall.log"), encoding="utf-8") as f:
            self.assertIn("endless_loop()", f.read())

    def test_ranks_that_compute_are_busy(self):
        code, _, err = self.finish(self.start_peer("busy", 0))
        self.assertEqual(code, 0, err)
        self.assertEqual(stalls(err)[1], 0, err)
        self.assertRegex(err, r"\[launch\] no rank has begun or ended an operation or a step for "
                         r"[\d.]+ s; they are busy")

    def test_ranks_that_compute_after_an_enqueued_operation_are_busy(self):
        code, _, err = self.finish(self.start_peer("enqueued", 0))
        self.assertEqual(code, 0, err)
        self.assertEqual(stalls(err)[1], 0, err)
        self.assertRegex(err, r"they are busy \(CPU time grows\)")

    def test_ranks_that_spin_in_the_driver_after_the_same_operation_are_stuck(self):
        process = self.start_peer("stuck", 0, "--stall-action=stop", CUDA_LIBRARY=os.path.join(
            os.path.dirname(BIN), "lib", "fake_cuda", "libcuda.so.1"))
        text, rows = self.table(process)
        self.assertIn("All ranks wait in the same operation, #6 all_reduce (Float, 64 B): the "
                      "network or a device is stuck", text)
        for rank, row in rows.items():
            self.assertRegex(row, r"R running +#6 all_reduce .*: enqueued [\d.]+ s ago")
            self.assertIn("wait_for_device()", stacks(text)[rank])
        time.sleep(2 * STALL_S)
        self.assertIsNone(process.poll(), "what may be a long computation is not stopped")
        _, err = self.end(process)
        self.assertNotIn("they are busy", err)

    def test_a_host_that_sees_its_own_ranks_alone_stops_no_long_computation(self):
        port = free_port()
        processes = [self.start(
            "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", "--master-addr=127.0.0.1",
            f"--master-port={port}", f"--stall-timeout={STALL_S}", "--stall-action=stop",
            "--shutdown-timeout=5", PEER, "enqueued", "0") for node in (0, 1)]
        for process in processes:
            code, _, err = self.finish(process)
            self.assertEqual(code, 0, err)
            self.assertIn("All ranks of this host have left their last operation to their devices",
                          err)

    def test_a_start_up_has_a_deadline_of_its_own(self):
        """Rank 1 comes long after the stall time, and is waited for."""
        script = f'[ $RANK = 1 ] && sleep {4 * STALL_S}; exec {PEER} none 0'
        code, _, err = self.bash(3, script, flags=(
            f"--stall-timeout={STALL_S}", "--stall-action=stop", "--startup-timeout=120"))
        self.assertEqual(code, 0, err)
        self.assertIn("Rank 1 is behind: it has not created its world yet", err)

    def test_a_healthy_run_says_nothing(self):
        code, _, err = self.finish(self.start_peer("none", 0))
        self.assertEqual(code, 0, err)
        self.assertEqual(stalls(err)[1], 0, err)
        self.assertNotIn("they are busy", err)

    def test_programs_without_a_ledger_are_left_alone(self):
        code, out, err = self.bash(2, "echo ledger=$LOCKSTEP_LEDGER; sleep 1.5",
                                   flags=("--stall-timeout=0.3",))
        self.assertEqual((code, err.count("stall")), (0, 0), err)
        self.assertRegex(out, r"ledger=\d+:\d+\n")
        _, out, _ = self.bash(1, "echo ledger=$LOCKSTEP_LEDGER", flags=("--stall-timeout=0",))
        self.assertEqual(out, "ledger=\n")

    def test_a_crash_leaves_the_ledgers(self):
        logs = os.path.join(self.dir.name, "logs")
        code, _, err = self.finish(self.start_peer("crash", 1, f"--log-dir={logs}"))
        self.assertEqual(code, 137, err)
        report = err[err.index("[launch] rank 1 on"):]
        self.assertRegex(report, r"where it was:\n +operation #5 all_reduce \(Float, 1\.0 KiB\): "
                         r"finished [\d.]+ s ago at common_step\(")
        self.assertRegex(report, r"\n  logs: (\S+) \(lockstep ledger \1\)")
        shown = subprocess.run([LAUNCHER, "ledger", logs], capture_output=True, text=True,
                               timeout=60, check=True).stdout
        self.assertRegex(shown, r"attempt_0: [123] of 3 ranks, attempt 0\n  rank ")
        self.assertRegex(shown, r"\n  1 +\d+ +- +- +#5 all_reduce .*finished")
        self.assertRegex(shown, r"last operations of rank 1:\n(?:    .*\n)*    #5 all_reduce "
                         r"\(Float, 1\.0 KiB\) finished after [\d.]+ ms, at common_step\(")
        missing = subprocess.run([LAUNCHER, "ledger", self.notes], capture_output=True, text=True,
                                 timeout=60, check=False)
        self.assertEqual(missing.returncode, 2)
        self.assertIn("[ledger] there is no ledger below", missing.stderr)

    def test_the_trainer_publishes_step_and_phase(self):
        config = os.path.join(self.dir.name, "train.yaml")
        with open(config, "w", encoding="utf-8") as f:
            f.write("model: {name: mlp, hidden: 32, layers: 2}\n"
                    "data: {name: random, samples: 150, features: 12, classes: 5}\n"
                    "num_train_epochs: 1000000\nlogging_steps: 1\nsave_strategy: no\n"
                    f"disable_tqdm: true\nuse_cpu: true\noutput_dir: {self.dir.name}/out\n")
        process = self.start("--standalone", "--nproc-per-node=2", f"--stall-timeout={STALL_S}",
                             "--shutdown-timeout=5", LAUNCHER, "train", config)
        self.wait_line(process.stdout, "loss")
        time.sleep(1)
        (rank_1,) = [pid for pid in marked(self.marker) if self.is_rank(pid, 1)]
        os.kill(rank_1, signal.SIGSTOP)
        text, rows = self.table(process, ranks=2)
        self.assertIn("Rank 1 is behind: it is stopped", text)
        # Between two phases, as in its log line, a rank has none ("-").
        seen = [re.match(r" *\d+ +(\d+) +(?:[a-z_]+|-) ", rows[rank]) for rank in (0, 1)]
        self.assertNotIn(None, seen, text)
        steps = [int(match.group(1)) for match in seen]
        self.assertGreater(min(steps), 0, text)
        self.assertLessEqual(abs(steps[0] - steps[1]), 1, text)
        os.kill(rank_1, signal.SIGCONT)
        self.end(process)

    @staticmethod
    def is_rank(pid, rank):
        with open(f"/proc/{pid}/environ", "rb") as f:
            return b"RANK=%d" % rank in f.read().split(b"\0")

    @unittest.skipUnless(os.path.exists(os.path.join(PACKAGE, "lockstep_torch")),
                         "needs the Python package")
    def test_python_ranks(self):
        program = os.path.join(self.dir.name, "program.py")
        with open(program, "w", encoding="utf-8") as f:
            f.write("""
import torch, torch.distributed as dist, lockstep_torch
dist.init_process_group("lockstep")
def an_endless_loop():
    while True:
        pass
def a_call_that_waits():
    dist.all_reduce(torch.ones(8))
for _ in range(3):
    dist.broadcast(torch.ones(4), 0)
if dist.get_rank() == 1:
    an_endless_loop()
a_call_that_waits()
""")
        process = self.start("--standalone", "--nproc-per-node=3", f"--stall-timeout={STALL_S}",
                             "--shutdown-timeout=5", program,
                             env={"PYTHON_EXEC": sys.executable, "PYTHONPATH": PACKAGE})
        text, rows = self.table(process)
        self.end(process)
        self.assertIn("Rank 1 is behind: it is busy", text)
        self.assertRegex(rows[0], r"#4 all_reduce \(Float, 32 B\) of group \S+: waits for")
        self.assertRegex(rows[1], r"#3 broadcast \(Float, 16 B, root 0\) of group \S+: finished")
        self.assertIn("in an_endless_loop", text)
        for rank in (0, 2):
            self.assertIn("in a_call_that_waits", stacks(text)[rank])


class Cost(LedgerCase):
    def trainer_ms(self, record):
        """Processor time of a Trainer's steps with a forward of 5 ms, with ledger and record or
        without: whatever else runs on the cores. The forward is added and not computed, for it is
        the same in both. Over gloo, where a rank that waits sleeps."""
        code, out, err = self.run_ranks(2, PEER, "train", "300", self.dir.name, str(record),
                                        flags=(f"--stall-timeout={30 * record}",),
                                        env={"LOCKSTEP_BACKEND": "gloo"})
        self.assertEqual(code, 0, err)
        return 5 + float(re.search(r"mean ([\d.]+) ms", out).group(1))

    def always_share(self):
        """Share of a 5 ms step for what is always noted, and the recorder's own CPU time."""
        code, out, err = self.run_ranks(2, PEER, "calls", self.dir.name)
        self.assertEqual(code, 0, err)
        scope, sums, line = map(float, re.search(
            r"scope ([\d.]+) ms, sums ([\d.]+) ms, line ([\d.]+) ms", out).groups())
        # A step has about a dozen phases and reads its own sums once; a second has one line.
        return (12 * scope + 2 * sums) / 5 + line / 1000, out.strip()

    def test_a_recorded_trainer_is_at_most_one_percent_slower(self):
        """Each pair's runs follow each other, in turns. Runs of one program differ by several
        percent of processor time on cores that are shared with other guests, so this fails only
        where the pairs agree: when the one-sided confidence bound of their median, the second
        smallest of nine, is above the limit. Two pairs below it, or eight above, decide that."""
        always, parts = self.always_share()
        costs = []
        for turn in (1, 0, 1, 0, 1, 0, 1, 0, 1):
            ms = {record: self.trainer_ms(record) for record in (turn, 1 - turn)}
            costs.append(ms[1] / ms[0] - 1 + always)
            print(f"steps of 5 ms, cost of a record: {statistics.median(costs):.4f} of "
                  f"{[round(cost, 4) for cost in costs]}; {100 * always:.3f} % of it always "
                  f"({parts})", flush=True)
            low = sum(cost <= 0.01 for cost in costs)
            if low == 2:
                return
            if len(costs) - low == 8:
                break
        # The second smallest of nine is above the true median in 2.0 % of all cases.
        self.fail(f"with 98 % confidence the instruments cost more than 1 %: {sorted(costs)}")


if __name__ == "__main__":
    unittest.main(verbosity=2)  # a skipped test says why
