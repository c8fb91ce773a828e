"""`lockstep run --dashboard` and `lockstep monitor` with real ranks."""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import threading
import time
import unittest
import unittest.mock

from dashboard_case import BIN, BOUND_S, LOCKSTEP, DashboardCase, Events, Report, Server

TRAIN = BIN.parent / "libexec" / "lockstep-train"
OWN_LOOP = BIN / "examples" / "05_own_loop"
PLAIN_LOOP = BIN / "examples" / "06_checkpoint_resume"  # calls loss.backward()
# A rank in Python: says who it is, works until a file is there.
RANK = r'''
import os, pathlib, sys, time
rank, place = os.environ["RANK"], pathlib.Path(sys.argv[1])
print("line of rank", rank, flush=True)
(place / f"pid.{rank}").write_text(str(os.getpid()))
end = time.monotonic() + 120
while not (place / "stop").exists() and time.monotonic() < end:
    sum(range(20000))
    time.sleep(0.005)
'''
# Draws a progress bar on stderr, beside what the rank does.
BAR = r'''
import pathlib, sys, threading, time
def draw(place=pathlib.Path(sys.argv[1])):
    while True:
        try:
            percent = int((place / "percent").read_text())
        except (OSError, ValueError):
            percent = 0
        sys.stderr.write(f"\r{percent:3d}%|#####")
        sys.stderr.flush()
        time.sleep(0.02)
threading.Thread(target=draw, daemon=True).start()
'''
CONFIG = """
model: {name: mlp, hidden: 32, layers: 2}
data: {name: random, samples: 4000, features: 12, classes: 5}
num_train_epochs: 1000
per_device_train_batch_size: 4
logging_steps: 5
save_strategy: "no"
disable_tqdm: true
use_cpu: true
"""


def held(pid):
    """What the descriptors of a process are."""
    found = set()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(fd))
    return found


class Run(Server):
    """A launcher with a dashboard."""

    def __init__(self, *command, flags=("--dashboard",), ranks=2):
        env = {k: v for k, v in os.environ.items()
               if not re.match(r"RANK|WORLD_SIZE|LOCAL_|MASTER_|PET_|TORCHELASTIC", k)}
        self.process = subprocess.Popen(
            [LOCKSTEP, "run", "--standalone", f"--nproc-per-node={ranks}", "--line-prefix=none",
             *flags, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, text=True, env=env, start_new_session=True)
        self.errors = []
        self.url = None
        while self.url is None:
            line = self.process.stderr.readline()
            if not line:
                raise RuntimeError(f"no dashboard: {self.errors}")
            self.errors.append(line)
            if line.startswith("[dashboard] http://"):
                self.url = line.split()[1]
        self.port = int(re.search(r":(\d+)/", self.url).group(1))
        self.token = self.url.rpartition("=")[2]
        # A full pipe would stop the launcher.
        self.threads = [threading.Thread(target=self.drain, args=(stream,), daemon=True)
                        for stream in (self.process.stdout, self.process.stderr)]
        for thread in self.threads:
            thread.start()

    def drain(self, stream):
        for line in stream:
            self.errors.append(line)

    def state(self):
        return json.loads(self.request("/snapshot")[2])

    def wait(self):
        code = self.process.wait(timeout=BOUND_S)
        for thread in self.threads:
            thread.join(BOUND_S)
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()


def monitor(*args, timeout=BOUND_S):
    return subprocess.run([LOCKSTEP, "monitor", *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, stdin=subprocess.DEVNULL)


class RunCase(DashboardCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory(prefix="lockstep-dashboard-")
        self.addCleanup(place.cleanup)
        self.place = pathlib.Path(place.name)
        self.script = self.place / "rank.py"
        self.script.write_text(RANK)

    def start(self, *flags, ranks=2):
        run = Run(self.script, self.place, flags=("--dashboard", *flags), ranks=ranks)
        self.addCleanup(lambda: run.process.poll() is None and run.kill())
        self.eventually(lambda: all((self.place / f"pid.{r}").exists() and
                                    (self.place / f"pid.{r}").read_text() for r in range(ranks)),
                        "the ranks run")
        return run

    def pid(self, rank):
        return int((self.place / f"pid.{rank}").read_text())

    def stop(self):
        (self.place / "stop").touch()


class Dashboard(RunCase):
    def test_shows_ranks_that_know_nothing_of_it(self):
        run = self.start()
        self.eventually(lambda: [r["pid"] for r in run.state()["ranks"]] ==
                        [self.pid(0), self.pid(1)], "their process ids")
        self.eventually(lambda: run.state()["log"].get("1") == ["line of rank 1"], "their output")
        self.eventually(lambda: all((r["cores"] or 0) > 0.01 and r["resident_bytes"] > 1 << 20
                                    for r in run.state()["ranks"]), "their resources")
        state = run.state()
        self.assertEqual(state["run"]["world_size"], 2)
        self.assertEqual([r["state"] for r in state["ranks"]], ["running"] * 2)
        self.eventually(lambda: run.request("/readyz", token=False)[0] == 200, "ready")
        self.assertEqual(run.request("/snapshot", token=False)[0], 403)
        page = run.request("/metrics")[2].decode()
        self.assertIn('lockstep_rank_up{rank="1"} 1\n', page)
        self.assertIn('lockstep_process_cpu_seconds_total{mode="user",rank="0"}', page)
        if promtool := shutil.which("promtool"):
            checked = subprocess.run([promtool, "check", "metrics"], input=page, text=True,
                                     capture_output=True, timeout=BOUND_S)
            self.assertEqual(checked.returncode, 0, checked.stderr)
        events = Events(run)
        self.stop()
        received = []
        while event := events.next():
            received.append(event)
        self.assertEqual(received[-1][0], "end")
        self.assertEqual(received[-2][1]["run"]["state"], "ended")
        self.assertEqual(run.wait(), 0)
        events.close()
        with self.assertRaises(ConnectionRefusedError):
            run.connect()

    def test_a_killed_rank_shows_before_the_launcher_ends(self):
        run = self.start()
        events = Events(run)
        self.assertEqual(events.next()[0], "message")
        os.kill(self.pid(1), signal.SIGKILL)
        last = None
        while (event := events.next())[0] == "message":
            last = event[1]
        self.assertEqual(last["run"]["state"], "failed")
        self.assertRegex(last["run"]["message"], "^Rank 1 on .* SIGKILL comes from outside: ")
        self.assertEqual(last["ranks"][1]["state"], "failed")
        self.assertIn("SIGKILL", last["ranks"][1]["exit"])
        self.assertNotEqual(last["ranks"][0]["state"], "running")
        self.assertEqual(run.wait(), 137)
        events.close()

    def test_it_outlives_a_restart_of_the_ranks(self):
        self.script.write_text("import os, sys\n"
                               "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
                               "    print('first attempt', flush=True)\n    sys.exit(3)\n" + RANK)
        run = self.start("--max-restarts=1")
        self.eventually(lambda: run.state()["run"]["attempt"] == 1, "the second attempt")
        self.eventually(lambda: [(r["state"], r["pid"]) for r in run.state()["ranks"]] ==
                        [("running", self.pid(0)), ("running", self.pid(1))], "its ranks")
        self.stop()
        self.assertEqual(run.wait(), 0)

    def test_ranks_do_not_inherit_its_sockets(self):
        run = self.start()
        viewer = Events(run)
        viewer.next()
        with open("/proc/net/tcp") as f:
            rows = [line.split() for line in f.readlines()[1:]]
        ours = {row[9] for row in rows if int(row[1].split(":")[1], 16) == run.port}
        self.assertTrue(ours)
        for rank in (0, 1):
            self.assertFalse({f"socket:[{inode}]" for inode in ours} & held(self.pid(rank)))
        viewer.close()
        self.stop()
        self.assertEqual(run.wait(), 0)

    def test_only_the_process_that_serves_holds_the_socket(self):
        run = self.start()
        front = run.process.pid
        self.eventually(lambda: not self.listeners(front, run.port), "the front lets go of it")
        (guard,) = pathlib.Path(f"/proc/{front}/task/{front}/children").read_text().split()
        self.assertEqual(len(self.listeners(guard, run.port)), 1)
        self.assertEqual(run.request("/healthz", token=False)[0], 200)
        # The front still waits for what the ranks left when nobody serves any more.
        os.kill(front, signal.SIGSTOP)
        os.kill(int(guard), signal.SIGKILL)
        try:
            self.eventually(lambda: self.refused(run), "the port is closed")
        finally:
            os.kill(front, signal.SIGCONT)
        self.assertEqual(run.wait(), 137)

    @staticmethod
    def refused(run):
        try:
            run.connect().close()
        except (ConnectionRefusedError, ConnectionResetError):
            return True
        return False

    @staticmethod
    def listeners(pid, port):
        """Sockets of the process that listen on the port."""
        with open("/proc/net/tcp") as f:
            rows = [line.split() for line in f.readlines()[1:]]
        inodes = {f"socket:[{row[9]}]" for row in rows
                  if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
        return inodes & held(pid)

    def test_a_progress_bar_shows_in_the_log_tail(self):
        # As tqdm writes it: the return comes first, the newline never.
        self.script.write_text(BAR + RANK)
        run = self.start()

        def tail(rank):
            return run.state()["log"].get(str(rank))
        for percent in (10, 20, 100):
            (self.place / "percent").write_text(str(percent))
            for rank in (0, 1):
                self.eventually(lambda: tail(rank) == ["line of rank " + str(rank),
                                                       f"{percent:3d}%|#####"], "the bar")
        self.assertIn("100%|#####", monitor("--once", run.url).stdout)
        self.stop()
        self.assertEqual(run.wait(), 0)

    def test_a_port_in_use_is_known_before_ranks_start(self):
        run = self.start()
        done = subprocess.run([LOCKSTEP, "run", "--standalone", f"--dashboard={run.port}", "touch",
                               self.place / "started"], capture_output=True, text=True,
                              timeout=BOUND_S)
        self.assertEqual(done.returncode, 2)
        self.assertIn(f"--dashboard: cannot listen on 127.0.0.1:{run.port}", done.stderr)
        self.assertFalse((self.place / "started").exists())
        self.stop()
        self.assertEqual(run.wait(), 0)

    def test_variables_and_wrong_values(self):
        env = {**os.environ, "PET_DASHBOARD": "1"}
        done = subprocess.run([LOCKSTEP, "run", "true"], capture_output=True, text=True, env=env,
                              timeout=BOUND_S)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr,
                         r"\[dashboard\] http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{32}\n")
        done = subprocess.run([LOCKSTEP, "run", "--dashboard=http", "true"], capture_output=True,
                              text=True, timeout=BOUND_S)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--dashboard='http' is not a port", done.stderr)

    def test_without_steps_nothing_is_judged(self):
        run = self.start()
        self.eventually(lambda: all(r["resident_bytes"] for r in run.state()["ranks"]), "samples")
        without = {"healthy": False,
                   "text": "No step has been seen, and without steps nothing can be judged."}
        self.assertEqual(run.state()["verdict"], without)
        os.kill(self.pid(1), signal.SIGSTOP)
        self.eventually(lambda: run.state()["stall"], "a stopped rank")
        self.assertRegex(run.state()["stall"]["what"], r"^Rank 1 is stopped \(kill -CONT \d+ ")
        os.kill(self.pid(1), signal.SIGCONT)
        self.eventually(lambda: run.state()["stall"] is None, "it continues")
        self.stop()
        self.assertEqual(run.wait(), 0)


class Monitor(RunCase):
    def test_follows_a_run_to_its_end(self):
        run = self.start("--max-restarts=0")
        self.eventually(lambda: all(r["resident_bytes"] for r in run.state()["ranks"]), "samples")
        once = monitor("--once", run.url)
        self.assertEqual(once.returncode, 0, once.stderr)
        self.assertIn("2 of 2 ranks run", once.stdout)
        self.assertIn("cores", once.stdout)
        self.assertNotIn("\033", once.stdout)
        self.assertEqual(json.loads(monitor("--once", "--json", run.url).stdout)["run"]["state"],
                         "running")
        follower = subprocess.Popen([LOCKSTEP, "monitor", run.url], stdout=subprocess.PIPE,
                                    text=True)
        self.assertIn("running", follower.stdout.readline())
        self.stop()
        rest = follower.communicate(timeout=BOUND_S)[0].splitlines()
        self.assertIn("  ended  0 of 2 ranks run", rest[-1])
        self.assertEqual((follower.returncode, run.wait()), (0, 0))

    def test_a_token_of_the_users_own(self):
        token = self.place / "token"
        token.write_text("a-token-of-my-own\n")
        token.chmod(0o600)
        with unittest.mock.patch.dict(os.environ, LOCKSTEP_DASHBOARD_TOKEN_FILE=str(token)):
            run = self.start()
            done = monitor("--once", run.url)
            self.assertEqual(done.returncode, 0, done.stderr)
            token.chmod(0o644)
            self.assertIn("chmod 600", monitor("--once", run.url.split("?")[0]).stderr)
        self.assertEqual(monitor("--once", run.url.split("?")[0]).returncode, 2)
        self.stop()
        self.assertEqual(run.wait(), 0)
        self.assertNotIn("token", "".join(run.errors))

    def test_ends_with_1_after_a_failure_and_after_a_kill(self):
        run = self.start()
        follower = subprocess.Popen([LOCKSTEP, "monitor", "--json", run.url],
                                    stdout=subprocess.PIPE, text=True)
        follower.stdout.readline()
        os.kill(self.pid(0), signal.SIGKILL)
        rest = follower.communicate(timeout=BOUND_S)[0].splitlines()
        self.assertEqual(json.loads(rest[-1])["run"]["state"], "failed")
        self.assertEqual((follower.returncode, run.wait()), (1, 137))

    def test_refusals_say_what_to_do(self):
        run = self.start()
        cases = ((run.url[:-4] + "0000", 2, "refuses the token. Give the whole address"),
                 (run.url.split("?")[0], 2, "refuses the token"),
                 (f"http://127.0.0.1:{run.port}", 2, "refuses the token"),
                 ("https://127.0.0.1:1/", 2, "is not an address of a dashboard"),
                 (self.place / "nothing", 2, "[record]"))
        for where, code, text in cases:
            done = monitor(where)
            self.assertEqual(done.returncode, code, done.stderr)
            if text != "[record]":
                self.assertIn(text, done.stderr)
        self.stop()
        self.assertEqual(run.wait(), 0)
        gone = monitor(run.url)
        self.assertEqual(gone.returncode, 1)
        self.assertIn("cannot connect to http://127.0.0.1:", gone.stderr)
        self.assertIn("The run has ended, or it was started without --dashboard.", gone.stderr)

    def test_draws_one_screen_on_a_terminal(self):
        run = self.start()
        front, back = pty.openpty()
        fcntl.ioctl(back, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 70, 0, 0))
        process = subprocess.Popen([LOCKSTEP, "monitor", run.url], stdin=back, stdout=back,
                                   stderr=back)
        os.close(back)
        seen = b""
        deadline = time.monotonic() + BOUND_S
        while seen.count(b"\033[H") < 3:
            self.assertLess(time.monotonic(), deadline, seen)
            seen += os.read(front, 65536)
        frames = seen.decode().split("\033[H")[1:-1]
        for frame in frames:
            lines = [re.sub(r"\033\[[0-9;]*[A-Za-z]", "", line) for line in frame.split("\r\n")]
            self.assertLessEqual(len(lines), 12)
            self.assertLessEqual(max(map(len, lines)), 70)
            self.assertIn("running", lines[0])
        process.send_signal(signal.SIGINT)
        process.wait(timeout=BOUND_S)
        os.close(front)
        self.stop()
        self.assertEqual(run.wait(), 0)

    @unittest.skipIf("Monitor.test_reads_a_record" in os.environ.get("GTEST_FILTER", ""),
                     "tests/other_arch_skipped.txt")
    def test_reads_a_record(self):
        record = self.place / "record"
        run = self.start(f"--record={record}")
        self.eventually(lambda: (record / "monitor" / "rank_1.jsonl").exists(), "a record")

        def shown():
            state = json.loads(monitor("--once", "--json", record).stdout or "{}")
            return (state.get("run", {}).get("state") == "running" and
                    [bool(rank["resident_bytes"]) for rank in state["ranks"]] == [True, True])
        self.eventually(shown, "a run that lasts")
        self.stop()
        self.assertEqual(run.wait(), 0)
        done = monitor("--once", record)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 ranks run", done.stdout)
        self.assertRegex(done.stdout, r"(?m)^1 +(running|ended) .* MiB")


@unittest.skipUnless(TRAIN.exists(), "lockstep-train is not built")
class Training(RunCase):
    def train(self, *flags):
        config = self.place / "train.yaml"
        config.write_text(CONFIG)
        run = Run(LOCKSTEP, "train", config, "--output_dir", self.place / "out",
                  flags=("--dashboard", *flags))
        self.addCleanup(lambda: run.process.poll() is None and run.kill())
        return run

    def test_its_curves_are_drawn(self):
        run = self.train()
        self.eventually(lambda: len(run.state()["series"].get("loss", [])) > 5, "a curve")
        self.eventually(lambda: {"learning_rate", "grad_norm"} <= run.state()["series"].keys(),
                        "what it logs")
        self.eventually(lambda: run.state()["run"]["left_s"], "the time left")
        self.assertEqual(run.state()["run"]["total_steps"], 500_000)
        last = None
        shown = monitor("--once", run.url).stdout
        self.assertIn("loss", shown)
        self.assertRegex(shown, r"  step \d+ of 500000  \d+:\d\d:\d\d left  ")
        page = run.request("/metrics")[2].decode()
        for line in (r"lockstep_loss \d", "lockstep_total_steps 500000\n",
                     r'lockstep_logged\{name="grad_norm"\} \d'):
            self.assertRegex(page, "\n" + line)
        events = Events(run)
        run.process.send_signal(signal.SIGTERM)
        while event := events.next():
            last = event[1] if event[0] == "message" else last
        events.close()
        self.assertEqual(run.wait(), 143)
        stopped = r"Stopped on request at step \d+ of 500000\. lockstep train --resume auto "
        self.assertEqual(last["run"]["state"], "ended")
        self.assertRegex(last["run"]["message"], "^" + stopped)
        done = monitor("--once", self.place / "out")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(" ".join(done.stdout.split()), stopped)

    def test_its_ranks_have_a_budget_and_a_position(self):
        run = self.train()

        def drawn():
            state = run.state()
            return (len(state["series"]["step_ms"]) > 2 and
                    all((r["step"] or 0) > 10 and "backward" in r["budget"] and r["position"]
                        for r in state["ranks"]))
        self.eventually(drawn, "step time, budget and position of every rank")
        state = run.state()
        for rank in state["ranks"]:
            self.assertAlmostEqual(sum(rank["budget"].values()), 1, delta=0.05)
        text = monitor("--once", run.url).stdout
        for part in ("step_ms", "backward", "all_reduce"):
            self.assertIn(part, text)
        page = run.request("/metrics")[2].decode()
        self.assertRegex(page, r'lockstep_phase_ratio\{phase="backward",rank="0"\} 0\.\d+')
        run.process.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(), 143)

    def test_a_stopped_rank_is_a_stall(self):
        run = self.train("--stall-timeout=2")
        self.eventually(lambda: min([r["step"] or 0 for r in run.state()["ranks"]] or [0]) > 50,
                        "some steps")
        self.eventually(lambda: "  running  2 of 2" in monitor("--once", run.url).stdout,
                        "no stall yet")
        stopped = run.state()["ranks"][1]["pid"]
        os.kill(stopped, signal.SIGSTOP)
        self.eventually(lambda: "No step" in (run.state()["stall"] or {}).get("what", ""),
                        "a stall")
        state = run.state()
        self.assertRegex(state["stall"]["what"], r"^No step has ended for \d+ s: rank 1 is stopped "
                         rf"\(kill -CONT {stopped} continues it\)\.$")
        self.assertFalse(state["verdict"]["healthy"])
        screen = monitor("--once", run.url).stdout
        self.assertRegex(screen, r"  stalled  1 of 2 .*  no step for \d+ s")
        self.assertIn("rank 1 is stopped", screen)
        self.eventually(lambda: run.state()["stall_table"], "the launcher's table")
        self.assertIn("Rank 1 is behind: it is stopped", run.state()["stall_table"]["text"])
        self.assertRegex(monitor("--once", run.url).stdout, r"\n +1 .* T stopped ")
        self.assertRegex(run.request("/metrics")[2].decode(), r"\nlockstep_stall_seconds [1-9]")
        run.kill()

    def test_a_stall_that_stops_the_run_is_a_failure(self):
        run = self.train("--stall-timeout=2", "--stall-action=stop", "--shutdown-timeout=5")
        self.eventually(lambda: min([r["step"] or 0 for r in run.state()["ranks"]] or [0]) > 50,
                        "some steps")
        events = Events(run)
        os.kill(run.state()["ranks"][1]["pid"], signal.SIGSTOP)
        last = None
        while event := events.next():
            last = event[1] if event[0] == "message" else last
        events.close()
        self.assertEqual(run.wait(), 1)
        self.assertEqual(last["ranks"][1]["state"], "failed")
        self.assertRegex(last["ranks"][1]["exit"], r"^stalled\. Rank 1 is behind: it is stopped")
        self.assertEqual(last["ranks"][0]["state"], "ended")
        self.assertIn("T stopped", last["stall_table"]["text"], "it stays on the page")


@unittest.skipUnless(PLAIN_LOOP.exists(), "the examples are not built")
class OwnLoop(RunCase):
    """Loops that hand over their figures with RunLog."""

    def loop(self, program, *args, ranks):
        with unittest.mock.patch.dict(os.environ, LOCKSTEP_DEVICE="cpu", OMP_NUM_THREADS="1"):
            run = Run(program, *args, flags=("--dashboard",), ranks=ranks)
        self.addCleanup(lambda: run.process.poll() is None and run.kill())
        return run

    def test_its_figures_are_shown_while_it_lasts(self):
        run = self.loop(OWN_LOOP, self.place / "out", 100_000, ranks=2)
        wanted = {"loss", "learning_rate", "grad_norm", "step_ms"}
        self.eventually(lambda: wanted <= run.state()["series"].keys() and
                        len(run.state()["series"]["loss"]) > 3, "its curves")
        self.eventually(lambda: run.state()["run"]["left_s"], "the time left")
        self.assertEqual(run.state()["run"]["total_steps"], 3_200_000)
        for where in (run.url, self.place / "out"):
            self.eventually(lambda: re.search(  # ranks record once a second
                r"(?s) of 3200000 .*\nloss .*\nlearning_rate .*\ngrad_norm ",
                monitor("--once", where).stdout), where)
        run.process.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(), 143)
        written = (self.place / "out" / "metrics.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line)["step"] for line in written],
                         list(range(10, 10 * len(written) + 1, 10)))
        self.assertTrue(list((self.place / "out" / "runs").glob("events.out.tfevents.*")))
        done = subprocess.run([LOCKSTEP, "report", self.place / "out"], capture_output=True,
                              text=True, timeout=BOUND_S)
        self.assertEqual(done.returncode, 0, done.stderr)
        report = Report(self.place / "out" / "report.html")
        self.assertLessEqual(wanted, report.state["series"].keys())

    def test_its_steps_count_on_one_rank(self):
        run = self.loop(PLAIN_LOOP, self.place / "out", 1_000_000, ranks=1)
        self.eventually(lambda: (run.state()["ranks"] or [{}])[0].get("step_ms"), "a step time")
        state = run.state()
        self.assertGreaterEqual(state["ranks"][0]["step"], 10)
        self.assertEqual(state["run"]["total_steps"], 1_000_000)
        self.assertRegex(monitor("--once", run.url).stdout, r"  step \d+0 of 1000000  ")
        run.kill()

    def test_a_failed_run_can_be_opened_afterwards(self):
        run = self.loop(OWN_LOOP, self.place / "out", 100_000, ranks=2)
        self.eventually(lambda: len(run.state()["series"].get("loss", [])) > 1, "a curve")
        os.kill(run.state()["ranks"][1]["pid"], signal.SIGKILL)
        self.assertEqual(run.wait(), 137)
        once = monitor("--once", self.place / "out")
        self.assertIn("  failed  ", once.stdout)
        self.assertEqual(once.returncode, 1, once.stderr)
        served = subprocess.Popen([LOCKSTEP, "dashboard", self.place / "out"], text=True,
                                  stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self.addCleanup(lambda: served.poll() is None and served.kill())
        self.addCleanup(served.stdout.close)
        server = Server.__new__(Server)
        server.url = served.stdout.readline().split()[1]
        server.port = int(re.search(r":(\d+)/", server.url).group(1))
        server.token = server.url.rpartition("=")[2]
        state = json.loads(server.request("/snapshot")[2])
        self.assertEqual((state["run"]["state"], state["run"]["recorded"]), ("failed", True))
        self.assertIn("SIGKILL comes from outside: ", state["run"]["message"])
        self.assertEqual([(r["state"], r["exit"]) for r in state["ranks"]],
                         [("ended", ""), ("failed", "killed by SIGKILL")])
        self.assertGreater(len(state["series"]["loss"]), 1)
        self.assertTrue(all("backward" in r["budget"] for r in state["ranks"] if r["step"]))
        self.assertIsNone(state["run"]["left_s"])
        tables = {table["title"]: table for table in state["tables"]}
        self.assertIn("The run failed", str(tables["Events"]["rows"]))
        self.assertIn(b"<html", server.request("/")[2])
        self.assertEqual(server.request("/snapshot", token=False)[0], 403)
        events = Events(server)
        self.assertEqual(events.next()[1]["run"]["state"], "failed")
        served.send_signal(signal.SIGINT)
        while event := events.next():
            last = event[0]
        self.assertEqual((last, served.wait(timeout=BOUND_S)), ("end", 0))
        events.close()

    def test_the_dashboard_of_a_record_says_what_it_needs(self):
        for args, text in ((["nowhere"], "nowhere"), (["--listen"], "--listen needs"),
                           (["--list"], "there is no flag --list"),
                           (["a", "b", "c"], "'c' is a third one")):
            done = subprocess.run([LOCKSTEP, "dashboard", *args], capture_output=True, text=True,
                                  timeout=BOUND_S, cwd=self.place)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(text, done.stderr)


if __name__ == "__main__":
    unittest.main()
