"""`lockstep run --doctor` and `--record` with real processes: what a user sees, live and later."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["LOCKSTEP_SOURCE"], "tests", "launch"))
# pylint: disable-next=wrong-import-position
from launch_case import BOUND_S, LAUNCHER, Case, free_port  # noqa: E402

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
PEER = BIN / "tests" / "live_peer"
FAKE = BIN.parent / "lib" / "fake_nvml_new" / "libnvidia-ml.so.1"
PACKAGE = BIN.parent / "python"

# Plain Python: no torch, nothing of ours. It ends after some seconds, or when a file is there.
BUSY = """
import os, sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and not os.path.exists(sys.argv[0] + ".stop"):
    sum(range(1000))
print("rank", os.environ["RANK"], "is done", flush=True)
"""

# With the Python package: a loop of the user's own, in which one rank sleeps before each batch.
SLEEPER = """
import sys, time
import torch, torch.distributed as dist, lockstep_torch
dist.init_process_group("lockstep")
end = time.monotonic() + float(sys.argv[1])
gradient = torch.ones(1000)
while True:
    if dist.get_rank() == int(sys.argv[2]):
        time.sleep(0.03)
    more = torch.tensor([1.0 if time.monotonic() < end else 0.0])
    dist.all_reduce(more, dist.ReduceOp.MIN)
    dist.all_reduce(gradient)
    if not more.item():
        break
dist.destroy_process_group()
"""


def table(err):
    """{rank: {column: text}} of the summary."""
    found = re.search(r"^\[doctor\] \d+ of \d+ ranks, .*:\n(( +.*\n)+)", err, re.MULTILINE)
    header, *rows = found.group(1).rstrip("\n").split("\n")
    titles = re.split(r"  +", header.strip())
    return {int(cells[0]): dict(zip(titles, cells))
            for cells in (re.split(r"  +", row.strip()) for row in rows)}


def doctor(folder):
    done = subprocess.run([LAUNCHER, "doctor", "--run", folder], timeout=BOUND_S,
                          capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def command(*words):
    """(exit code, stdout and stderr) of a command of ours."""
    done = subprocess.run([LAUNCHER, *words], timeout=BOUND_S, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


class ScriptCase(Case):
    def script(self, text=BUSY):
        path = os.path.join(self.dir.name, "train.py")
        with open(path, "w") as f:
            f.write(text)
        return path

    def until_recorded(self, folder, lines):
        """Until both ranks have as many in the record."""
        files = [pathlib.Path(folder) / "monitor" / f"rank_{rank}.jsonl" for rank in (0, 1)]
        end = time.monotonic() + BOUND_S
        while any(not file.exists() or file.read_bytes().count(b"\n") < lines for file in files):
            self.assertLess(time.monotonic(), end, "there is no record of a running program")
            time.sleep(0.05)


class Foreign(ScriptCase):
    """A Python script that has never heard of Lockstep."""

    def test_is_seen_from_outside(self):
        code, out, err = self.run_ranks(2, self.script(), "4", flags=["--doctor"])
        self.assertEqual(code, 0, err)
        self.assertIn("rank 1 is done", out)
        rows = table(err)
        self.assertEqual(sorted(rows), [0, 1])
        for row in rows.values():
            self.assertGreater(float(row["cores"]), 0.02, err)
            self.assertGreater(float(row["memory"].split()[0]), 0, err)
            self.assertEqual(row["threads"], "1", err)
        self.assertIn("only CPU, memory and GPUs are known", err)
        self.assertIn("[doctor] nothing found, and no step was seen", err)
        self.assertNotIn("healthy", err)

    def test_an_exit_code_and_a_failure_are_as_without(self):
        script = self.script("import os, sys, time\n"
                             "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)\n")
        code, _, err = self.run_ranks(2, script, flags=["--doctor"])
        self.assertEqual(code, 7, err)
        self.assertLess(err.index("[doctor]"), err.index("exited with code 7"))
        self.assertNotIn("healthy", err)

    def test_a_stop_request_ends_it_and_the_summary_comes(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            folder = os.path.join(self.dir.name, number.name)
            process = self.start("--standalone", "--nproc-per-node=2", "--doctor", "--record",
                                 folder, self.script(), "300")
            self.until_recorded(folder, 1)
            process.send_signal(number)
            code, _, err = self.finish(process)
            self.assertEqual(code, 128 + number, err)
            self.assertIn("[doctor] 2 of 2 ranks", err)
            code, text = command("monitor", folder)
            self.assertEqual(code, 0, text)
            self.assertIn("  ended  0 of 2 ranks run", text)

    def test_each_launcher_of_several_sees_its_own_ranks(self):
        flags = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1",
                 f"--master-port={free_port()}", "--doctor"]
        nodes = [self.start(*flags, f"--node-rank={n}", self.script(), "3") for n in (0, 1)]
        for rank, process in enumerate(nodes):
            code, _, err = self.finish(process)
            self.assertEqual(code, 0, err)
            self.assertIn("[doctor] 1 of 2 ranks", err)
            self.assertEqual(list(table(err)), [rank], err)

    def test_records_for_later(self):
        folder = os.path.join(self.dir.name, "recorded")
        script = self.script()
        process = self.start("--standalone", "--nproc-per-node=2", "--record", folder, script,
                             "300")
        self.until_recorded(folder, 3)
        pathlib.Path(script + ".stop").touch()
        code, _, err = self.finish(process)
        self.assertEqual(code, 0, err)
        self.assertNotIn("[doctor]", err)
        monitor = pathlib.Path(folder) / "monitor"
        facts = json.loads((monitor / "run.json").read_text())
        self.assertEqual(facts["world_size"], 2)
        self.assertIn("train.py", facts["program"])
        for rank in (0, 1):
            lines = (monitor / f"rank_{rank}.jsonl").read_text().splitlines()
            # On a busy machine an interval may pass without a core, or be too short to have any.
            cores = [json.loads(line).get("process", {}).get("cores", 0) for line in lines[2:]]
            self.assertGreater(max(cores), 0)
        self.assertEqual(doctor(folder)[0], 0)

    def test_what_is_read_of_the_record_is_what_is_known(self):
        folder = os.path.join(self.dir.name, "recorded")
        code, _, err = self.run_ranks(2, self.script(), "3", flags=["--record", folder])
        self.assertEqual(code, 0, err)
        code, text = doctor(folder)
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"rank +steps +cores +memory.*\n +0 +0 +[0-9.]*[1-9]")
        self.assertNotIn("cores  0.00", text)
        for unknown in ("ms/step", "forward", "0.0 %", "too few steps"):
            self.assertNotIn(unknown, text)
        self.assertIn("only CPU, memory and GPUs are known", text)
        ranks = json.loads(command("doctor", "--run", folder, "--json")[1])["ranks"]
        self.assertGreater(ranks[0]["cores"], 0.02)
        self.assertNotIn("step_s", ranks[0])
        self.assertNotIn("shares", ranks[0])
        code, text = command("monitor", "--once", folder)
        self.assertEqual(code, 0, text)
        self.assertRegex(text, r"(?m)^0 +ended +- +- +- +[0-9.]+ cores +[1-9][0-9]* MiB")
        ranks = json.loads(command("monitor", "--once", "--json", folder)[1])["ranks"]
        self.assertEqual((ranks[0]["step"], ranks[0]["step_ms"], ranks[0]["budget"]),
                         (None, None, {}))
        code, text = command("report", folder)
        self.assertEqual(code, 0, text)
        page = (pathlib.Path(folder) / "report.html").read_text()
        self.assertIn("train.py 3", page)
        self.assertIn("The run ended", page)
        for unknown in ("where its time went", "0 bytes", "<td>not recorded</td><td>0</td>"):
            self.assertNotIn(unknown, page)

    def test_a_killed_run_is_shown_as_killed_at_once_and_a_running_one_is_not(self):
        folder = os.path.join(self.dir.name, "recorded")
        process = self.start("--standalone", "--nproc-per-node=2", "--record", folder,
                             self.script(), "300")
        self.until_recorded(folder, 1)
        end = time.monotonic() + BOUND_S
        while "  running  2 of 2" not in command("monitor", "--once", folder)[1]:
            self.assertLess(time.monotonic(), end)
        self.assertEqual(doctor(folder)[0], 0)
        process.kill()
        self.finish(process)
        self.assertEqual(self.wait_gone(), [])
        code, text = command("monitor", folder)
        self.assertEqual(code, 1, text)
        self.assertIn("  killed  0 of 2 ranks run", text)
        code, text = command("monitor", "--once", folder)
        self.assertEqual(code, 1, text)
        self.assertIn("it was killed", text)

    def test_gloo_that_nothing_replaces_is_said(self):
        script = self.script("print('trains')\n")
        code, out, err = self.run_ranks(1, script, flags=["--replace-gloo"],
                                        env={"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"})
        self.assertEqual(code, 0, err)
        self.assertIn("trains", out)
        self.assertEqual(err.count("--replace-gloo has no effect: lockstep_torch is not installed"),
                         1, err)
        self.assertIn("pip install", err)
        package = pathlib.Path(self.dir.name) / "site" / "lockstep_torch-1.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-torch\n"
                                          "Version: 1\n")
        (package / "entry_points.txt").write_text("[torch.backends]\n"
                                                  "lockstep = lockstep_torch:autoload\n")
        code, _, err = self.run_ranks(1, script, flags=["--replace-gloo"],
                                      env={"PYTHONPATH": str(package.parent)})
        self.assertEqual(code, 0, err)
        self.assertNotIn("has no effect", err)


@unittest.skipUnless((PACKAGE / "lockstep_torch").exists(), "needs the Python package")
class PythonRanks(ScriptCase):
    """A script whose collectives are ours, and whose steps nobody counts."""

    def sleeper(self, seconds, who, *flags):
        return self.run_ranks(2, self.script(SLEEPER), str(seconds), str(who), flags=flags,
                              env={"PYTHONPATH": f"{PACKAGE}:{os.environ.get('PYTHONPATH', '')}",
                                   "PYTHON_EXEC": sys.executable})

    def test_the_rank_that_the_others_wait_for_is_named(self):
        folder = os.path.join(self.dir.name, "recorded")
        code, _, err = self.sleeper(14, 1, "--doctor", "--record", folder)
        self.assertEqual(code, 0, err)
        self.assertNotIn("without Lockstep's backend", err)
        self.assertIn("its collectives are known, its steps are not", err)
        found = re.findall(r"^\[doctor\] straggler \((.*?)\): .*", err, re.MULTILINE)
        self.assertEqual(set(found), {"rank 1"}, err)  # no cause: that cannot be known
        self.assertEqual(len(found), 2, err)  # while it ran, and at the end
        rows = table(err)
        self.assertLess(float(rows[1]["in collectives"].split()[0]), 40, err)
        self.assertGreater(float(rows[0]["in collectives"].split()[0]), 60, err)
        code, text = doctor(folder)
        self.assertEqual(code, 1, text)
        self.assertIn("1. straggler (rank 1): ", text)
        self.assertIn("in collectives", text)

    def test_equal_ranks_have_no_straggler(self):
        code, _, err = self.sleeper(8, -1, "--doctor")
        self.assertEqual(code, 0, err)
        self.assertNotIn("straggler", err)
        self.assertIn("nothing found, and no step was seen", err)


class Gpus(Case):
    """A driver that says what its script says; the program is one process that uses no GPU."""

    def gpus(self, first, second, seconds):
        script = os.path.join(self.dir.name, "nvml.txt")
        with open(script, "w") as f:
            f.write("devices 2\n"
                    f"0 name Fake H200\n0 uuid GPU-a\n0 utilisation {first}\n0 power 300000\n"
                    f"1 name Fake H200\n1 uuid GPU-b\n1 utilisation {second}\n1 power 300000\n")
        env = {"LOCKSTEP_NVML": FAKE, "FAKE_NVML_SCRIPT": script, "LOCKSTEP_DEVICE": "",
               "CUDA_VISIBLE_DEVICES": "0,1"}
        ranks = 1 if "0" in first.split() else 2
        return self.start("--standalone", f"--nproc-per-node={ranks}", "--doctor", "--no-python",
                          "sleep", str(seconds), env=env)

    def test_alternating_utilisation_is_named_with_the_launch_line(self):
        process = self.gpus("100 0", "0 100", 300)
        self.wait_line(process.stderr, "[doctor] ")
        process.terminate()
        _, _, err = self.finish(process)
        finding = next(line for line in err.splitlines() if line.startswith("[doctor] "))
        self.assertIn("not-launched", finding)
        self.assertRegex(finding, "altern")
        self.assertRegex(finding, r"--nproc-per-node[= ](2|gpu|auto)")

    def test_of_ninety_two_and_ninety_one_nothing_is_found(self):
        process = self.gpus("92", "91", 12)
        code, _, err = self.finish(process)
        self.assertEqual(code, 0, err)
        self.assertIn("[doctor] nothing found", err)


class Ranks(Case):
    """Ranks with a ledger that load, compute and wait for each other, without torch."""

    def peer(self, *args, flags=(), **options):
        barrier = os.path.join(self.dir.name, "barrier")
        return self.start("--standalone", "--nproc-per-node=2", "--doctor", "--stall-timeout=0",
                          *flags, PEER, *args, barrier, **options)

    def straggler(self, err):
        """The step at which it was printed: before any other straggler, and once."""
        found = re.findall(r"^\[doctor\] step (\d+): straggler \((.*?)\)", err, re.MULTILINE)
        self.assertEqual(found[:1], [(found[0][0], "rank 1, data")] if found else None, err)
        # On a busy machine the rank that sleeps may also be slow to get its core back.
        self.assertEqual([place for _, place in found].count("rank 1, data"), 1, err)
        return int(found[0][0])

    def test_the_rank_whose_loader_sleeps_is_named_in_time(self):
        code, _, err = self.finish(self.peer("120", "1", "20"))
        self.assertEqual(code, 0, err)
        step = self.straggler(err)
        print(f"named at step {step}")
        # Ten steps are what any rule asks for, then twenty may pass; ten more on a busy machine.
        self.assertLessEqual(step, 10 + 20 + 10, err)
        rows = table(err)
        self.assertGreater(float(rows[1]["data"].split()[0]), 15, err)
        self.assertGreater(float(rows[0]["communication"].split()[0]), 15, err)
        # On a busy machine their first intervals begin at different steps.
        self.assertAlmostEqual(int(rows[0]["steps"]), int(rows[1]["steps"]), delta=15, msg=err)

    def test_equal_ranks_have_no_straggler(self):
        code, _, err = self.finish(self.peer("600", "-1", "0"))
        self.assertEqual(code, 0, err)
        self.assertNotIn("straggler", err)
        self.assertNotIn("loader", err)
        self.assertGreater(int(table(err)[0]["steps"]), 400, err)

    def test_a_recorded_run_gives_the_same_findings_later(self):
        folder = os.path.join(self.dir.name, "recorded")
        code, _, err = self.finish(self.peer("100", "1", "20", flags=["--record", folder]))
        self.assertEqual(code, 0, err)
        lines = (pathlib.Path(folder) / "monitor" / "rank_1.jsonl").read_text().splitlines()
        self.assertGreater(sum(json.loads(line).get("steps", 0) for line in lines), 60)
        code, found = doctor(folder)
        self.assertEqual(code, 1, found)
        self.assertRegex(found, r"straggler \(rank 1")
        self.assertIn("data", found)

    def test_a_killed_launcher_leaves_nothing(self):
        process = self.peer("100000", "-1", "0")
        time.sleep(2)
        process.kill()
        self.finish(process)
        self.assertEqual(self.wait_gone(), [])


class Trainer(Case):
    """`lockstep::Trainer` (planted_peer.cpp), whose own record is left to it."""

    def one_rank(self, steps, output, record):
        keys = {"per_device_train_batch_size": 4, "logging_steps": 20, "save_strategy": "no",
                "disable_tqdm": "true", "use_cpu": "true", "max_steps": steps, "output_dir": output}
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        code, _, err = self.run_ranks(1, BIN / "tests" / "planted_peer", "train", *words,
                                      flags=["--record", record, "--stall-timeout=0.2"],
                                      env={"PLANT_SLEEP": "0:5", "PLANT_LOG": 700,
                                           "PLANT_HIDDEN": 16})
        self.assertEqual(code, 0, err)
        self.assertNotIn("[launch]", err)  # a rank alone is not stalled while it does nothing
        lines = (pathlib.Path(record) / "monitor" / "rank_0.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def test_a_rank_alone_has_steps_and_phases_in_the_launchers_record(self):
        for record in ("beside", "out"):
            output = os.path.join(self.dir.name, "out")
            folder = os.path.join(self.dir.name, record)
            intervals = self.one_rank(40, output, folder)
            self.assertEqual(intervals[-1]["step"], 40, intervals)
            self.assertLessEqual(sum(i["steps"] for i in intervals), 40, "each of them once")
            self.assertGreater(sum(i.get("host_s", {}).get("data", 0) for i in intervals),
                               0.1, intervals)
            code, text = doctor(folder)
            self.assertIn(code, (0, 1), text)
            self.assertRegex(text, r"(?m)^ +0 +[1-9][0-9]* ")
            self.assertNotIn("no step was seen", text)
            # What only the Trainer knows is in the record of the launcher, too.
            facts = json.loads((pathlib.Path(folder) / "monitor" / "run.json").read_text())
            self.assertEqual((facts["per_device_batch"], facts["program"]), (4, "trainer"))
            self.assertEqual(facts["arguments"]["output_dir"], output)

    def test_the_rank_whose_loader_sleeps_is_named(self):
        output = os.path.join(self.dir.name, "out")
        keys = {"per_device_train_batch_size": 64, "logging_steps": 10, "save_strategy": "no",
                "disable_tqdm": "true", "use_cpu": "true", "dataloader_num_workers": 0,
                "max_steps": 150, "output_dir": output}
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        code, _, err = self.run_ranks(
            2, BIN / "tests" / "planted_peer", "train", *words,
            flags=["--doctor", "--record", output],
            env={"PLANT_SLEEP": "1:20", "PLANT_HIDDEN": 320})
        self.assertEqual(code, 0, err)
        found = re.findall(r"^\[doctor\] step (\d+): (straggler \(rank 1.*)$", err, re.MULTILINE)
        self.assertEqual(len(found), 1, err)
        print(f"named at step {found[0][0]}: {found[0][1]}")
        self.assertIn("data", found[0][1])
        rows = table(err)
        self.assertGreater(float(rows[1]["data"].split()[0]), 15, err)
        self.assertGreater(float(rows[0]["communication"].split()[0]), 15, err)
        # Steps are in the record once.
        lines = (pathlib.Path(output) / "monitor" / "rank_1.jsonl").read_text().splitlines()
        self.assertLessEqual(sum(json.loads(line).get("steps", 0) for line in lines), 150)


if __name__ == "__main__":
    unittest.main()
